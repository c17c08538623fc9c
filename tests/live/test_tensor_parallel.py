"""`tgi up --num-shard 2`: a model on two rank processes, in a whole process tree, while ranks die and hang."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.live.server import Server
from tests.live.test_tree import all_streams, token_ids
from tests.models import write_adapter
from tgi.microkernel.host import rundir
from tgi.microkernel.settings.table import Settings
from tgi.worker.preload import Preload

pytestmark = pytest.mark.live

TOKENS = 100


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("ranks")
    adapter = write_adapter(directory / "adapter", tiny_llama)
    flags = "--num-shard", "2", "--lora-adapters", f"a={adapter}", "--allow-adapter-updates", "--hang-timeout", "5"
    with Server(directory / "run", "--model-id", str(tiny_llama), *flags) as started:
        yield started.start().wait_until_ready()


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[list[int]]:
    return [token_ids(events) for events in all_streams(server, TOKENS)]


def address_of_torch(process: psutil.Process) -> str:
    """Where a process has mapped torch: Linux chooses a new address for each interpreter."""
    return next(mapped.addr for mapped in process.memory_maps(grouped=False) if "libtorch_cpu" in mapped.path)


@pytest.mark.skipif(Preload.of(Settings(num_shard=2)) is None or sys.platform != "linux", reason="ranks import torch")
def test_ranks_are_forked_with_torch(server: Server) -> None:
    running = server.processes()
    assert address_of_torch(running["worker-0.1"]) == address_of_torch(running["worker-0"])


def test_streams_survive_the_death_of_any_rank(server: Server, undisturbed: list[list[int]]) -> None:
    for name in ("worker-0.1", "worker-0"):
        ranks = {process.pid for rank, process in server.processes().items() if rank.startswith("worker")}
        disturbed = all_streams(server, TOKENS, act=lambda: server.kill(name), after=20)  # noqa: B023
        assert [token_ids(events) for events in disturbed] == undisturbed
        successors = {process.pid for rank, process in server.processes().items() if rank.startswith("worker")}
        assert len(successors) == 2
        assert not ranks & successors  # the group was restarted as one
        server.wait_until(lambda: not any(map(psutil.pid_exists, ranks)), "the ended ranks are reaped")  # noqa: B023


def test_streams_survive_a_rank_that_hangs(server: Server, undisturbed: list[list[int]]) -> None:
    hung = server.processes()["worker-0.1"]

    def hang() -> None:
        hung.suspend()
        server.wait_until(lambda: server.processes().get("worker-0.1", hung).pid != hung.pid, "the group is replaced")

    disturbed = all_streams(server, TOKENS, act=hang, after=20)
    assert [token_ids(events) for events in disturbed] == undisturbed


def test_a_rank_that_is_stopped_while_it_loads_is_replaced(server: Server, undisturbed: list[list[int]]) -> None:
    """The first rank waits for it, with a deadline minutes later."""
    stopped: list[psutil.Process] = []

    def stop() -> bool:
        if (loading := server.processes("starting").get("worker-0.1")) is not None:
            loading.suspend()
            stopped.append(loading)
        return bool(stopped)

    server.kill("worker-0")
    server.wait_until(stop, "the second rank loads", poll_seconds=0.001)
    server.wait_until(lambda: server.processes("ready").get("worker-0.1", *stopped) not in stopped, "it is replaced")
    assert [token_ids(events) for events in all_streams(server, TOKENS)] == undisturbed


def test_streams_survive_a_restart_of_the_scheduler(server: Server, undisturbed: list[list[int]]) -> None:
    ranks = [server.processes()[name].pid for name in ("worker-0", "worker-0.1")]
    disturbed = all_streams(server, TOKENS, act=lambda: server.kill("scheduler-0"), after=20)
    assert [token_ids(events) for events in disturbed] == undisturbed
    assert [server.processes()[name].pid for name in ("worker-0", "worker-0.1")] == ranks


def test_adapters_are_loaded_and_unloaded_on_all_ranks(server: Server, tiny_llama: Path, tmp_path: Path) -> None:
    def ids(adapter: str) -> list[int]:
        answer = server.generate("a story", max_new_tokens=8, adapter_id=adapter)
        return [token["id"] for token in answer["details"]["tokens"]]

    own = ids("a")
    again = write_adapter(tmp_path / "adapter", tiny_llama)
    loaded = {"lora_name": "b", "lora_path": str(again)}
    assert server.client.post("/v1/load_lora_adapter", json=loaded).status_code == 200
    assert ids("b") == own
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 200
    assert ids("a") == own


def test_a_model_that_cannot_be_divided_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), "--num-shard", "3") as server:
        server.start()
        assert server.commands["up"].wait(120) != 0
        assert "cannot be divided among 3 ranks" in server.output_text()
        assert not list(server.run_directory.rglob("worker-0.*.beat")), "further ranks have started"


def test_all_ranks_end_with_the_server(server: Server) -> None:
    """The last test of its server."""
    ranks = [state for state in rundir.read_states(server.run_directory) if state.role == "worker"]
    assert [(state.name, state.rank) for state in ranks] == [("worker-0", 0), ("worker-0.1", 1)]
    running = server.processes()
    server.commands["up"].terminate()
    assert server.commands["up"].wait(60) == 0
    _, left = psutil.wait_procs([running[state.name] for state in ranks], timeout=60)
    assert not left
