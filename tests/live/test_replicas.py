"""Several schedulers with a worker each (`--replicas`), under the same tokenizers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.live.server import Server, SharedServers
from tests.live.test_tree import SCRIPTED, all_streams, token_ids
from tgi.microkernel.host import rundir
from tgi.microkernel.processes.control import carry_out

pytestmark = pytest.mark.live

# With so few slots one replica could not compute all streams of `all_streams` at once.
FEW_SLOTS = (*SCRIPTED, "--max-batch-size", "4")
REPLICAS = (*FEW_SLOTS, "--replicas", "2")
PARTS = {"scheduler-0", "scheduler-1", "worker-0", "worker-1"}


def ready(server: Server) -> set[str]:
    return {*server.processes("ready")}


def state_of(server: Server, name: str) -> str:
    state = rundir.read_state(server.run_directory, name)
    return state.state if state is not None else ""


def operate(server: Server, **command: Any) -> Iterator[str]:
    """The progress and result of an operation of rollout.py. It begins at once, while `tgi` may take seconds to start
    on a busy machine."""
    return carry_out(rundir.control_socket(server.run_directory, server.commands["up"].pid), command)


@pytest.fixture
def standing(tiny_llama: Path, shared_server: SharedServers) -> Server:
    server = shared_server("--model-id", str(tiny_llama), *REPLICAS)
    server.wait_until(lambda: ready(server) >= PARTS, "both replicas are ready")
    return server


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *FEW_SLOTS) as server:
        yield server.start().wait_until_ready()


def test_both_replicas_compute(standing: Server) -> None:
    """Four slots each for eight streams: `all_streams` fails if one of them waits until another has ended."""
    running: list[float] = []
    all_streams(standing, 120, act=lambda: running.append(standing.metric("tgi_batch_current_size")))
    assert running == [8]


@pytest.mark.parametrize("target", ["scheduler-1", "worker-0"])
def test_streams_go_on_after_a_part_of_a_replica_is_killed(standing: Server, target: str) -> None:
    undisturbed = all_streams(standing, 60)
    healthy = []

    def kill() -> None:
        standing.kill(target)
        healthy.extend(standing.is_healthy() for _ in range(20))

    disturbed = all_streams(standing, 60, act=kill)
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert all(healthy)


def test_replicas_come_and_go_under_streams(server: Server) -> None:
    undisturbed = all_streams(server, 150)
    *_, result = operate(server, command="scale", role="replica", count=2)
    assert result == "running: scheduler-0, scheduler-1, worker-0, worker-1"
    assert ready(server) >= PARTS
    recomputed = server.metric("tgi_recomputed_tokens")

    def retire() -> None:
        scaling = operate(server, command="scale", role="replica", count=1)
        assert next(scaling) == "draining: scheduler-1"
        server.wait_until(lambda: state_of(server, "scheduler-1") == "draining", "the replica drains")
        assert server.generate("Hello", max_new_tokens=3)["generated_text"]
        *_, result = scaling
        assert result == "running: scheduler-0, worker-0"

    disturbed = all_streams(server, 150, act=retire)
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert server.metric("tgi_recomputed_tokens") == recomputed  # each stream has ended where it was
    assert not {"scheduler-1", "worker-1"} & server.processes().keys()
    assert not list(server.run_directory.glob("sched-1.*"))
    assert server.is_healthy()


def test_a_new_replica_gets_requests_as_soon_as_scale_has_returned(tiny_llama: Path, tmp_path: Path) -> None:
    one_tokenizer = ("--validation-workers", "1")  # so it knows the whole load
    with (
        Server(tmp_path / "run", "--model-id", str(tiny_llama), *FEW_SLOTS, *one_tokenizer) as server,
        ThreadPoolExecutor(8) as clients,
    ):
        server.start().wait_until_ready()
        [*operate(server, command="scale", role="replica", count=2)]
        answers = [clients.submit(server.generate, f"{number}: Hello", max_new_tokens=200) for number in range(8)]
        running = 0.0
        while not all(answer.done() for answer in answers):
            running = max(running, server.metric("tgi_batch_current_size"))
        assert running == 8  # one replica has four slots


def test_a_scheduler_drains_before_it_is_replaced(standing: Server) -> None:
    undisturbed = all_streams(standing, 100)
    recomputed = standing.metric("tgi_recomputed_tokens")
    disturbed = all_streams(standing, 100, act=lambda: [*operate(standing, command="restart", target="scheduler")])
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert standing.metric("tgi_recomputed_tokens") == recomputed


def test_what_a_replica_has_not_finished_in_time_goes_on_at_another(tiny_llama: Path, tmp_path: Path) -> None:
    arguments = ("--model-id", str(tiny_llama), *REPLICAS, "--graceful-termination-timeout", "0.5")
    with Server(tmp_path / "run", *arguments) as server:
        server.start().wait_until_ready().wait_until(lambda: ready(server) >= PARTS, "both replicas are ready")
        undisturbed = all_streams(server, 100)
        retire = {"command": "scale", "role": "replica", "count": 1}
        disturbed = all_streams(server, 100, act=lambda: [*operate(server, **retire)])
        assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
        assert server.metric("tgi_recomputed_tokens") > 0


def test_a_worker_is_replaced_when_its_replica_has_drained(standing: Server) -> None:
    undisturbed = all_streams(standing, 100)
    recomputed = standing.metric("tgi_recomputed_tokens")
    before = standing.processes()
    shown: list[str] = []

    def restart() -> None:
        shown.extend(operate(standing, command="restart", target="worker-1"))

    disturbed = all_streams(standing, 100, act=restart)
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert standing.metric("tgi_recomputed_tokens") == recomputed
    assert shown[0] == "draining: scheduler-1"
    after = standing.processes("ready")
    assert {name for name in PARTS if before[name] != after[name]} == {"scheduler-1", "worker-1"}
