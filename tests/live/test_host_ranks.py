"""A model on two ranks with run directories and supervisors of their own, as on two hosts, while ranks die and hang."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.live import commands
from tests.live.server import Server, SharedServers, free_port
from tests.live.test_tree import all_streams, token_ids
from tests.microkernel.tcp import Cable, cable
from tests.models import write_adapter

pytestmark = pytest.mark.live

TOKENS = 100
# Starts a command in a PID namespace, as in a container of its own.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Ranks(NamedTuple):
    first: Server  # a whole server, with rank 0
    second: Server
    line: Cable  # between the two

    def pids(self) -> list[int]:
        """Of the ranks that run."""
        return [state["worker-0"].pid for one in self[:2] if "worker-0" in (state := one.processes())]


class ServerInContainer(Server):
    """Its commands see their own processes only."""

    def launch(self, name: str, command: list[str], env: dict[str, str], cwd: Path | None = None) -> Server:
        return super().launch(name, [*CONTAINER, *command], env, cwd)


def missing_here() -> str:
    """Why this machine cannot give a process a PID namespace, or ""."""
    if os.geteuid():
        return "it needs root"
    try:
        return subprocess.run([*CONTAINER, "true"], capture_output=True, text=True).stderr.strip()
    except FileNotFoundError:
        return "there is no unshare"


def new_keys(directory: Path) -> str:
    commands.run("keys", "new", str(directory), check=True)
    return str(directory / "host.key")


def flags_of_rank(model: Path, keys: str, rank: int, port: int) -> tuple[str, ...]:
    group = "--num-shard", "2", "--group", f"tcp://127.0.0.1:{port}", "--keys", keys, "--rank", str(rank)
    return "--model-id", str(model), *group, "--hang-timeout", "5"


@pytest.fixture(scope="module")
def ranks(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    directory, port = tmp_path_factory.mktemp("ranks"), free_port()
    keys = new_keys(directory / "keys")
    files = [directory / "files0", directory / "files1"]
    for own in files:
        own.mkdir()
    first_flags = (*flags_of_rank(tiny_llama, keys, 0, port), "--allow-adapter-updates")
    with (
        cable(port) as line,
        Server(directory / "0", *first_flags, cwd=files[0]) as first,
        Server(directory / "1", *flags_of_rank(tiny_llama, keys, 1, line.port), cwd=files[1]) as second,
    ):
        second.start("worker")
        first.start().wait_until_ready()
        yield Ranks(first, second, line)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, shared_server: SharedServers) -> list[list[int]]:
    """The tokens of a worker with one rank."""
    return [token_ids(events) for events in all_streams(shared_server("--model-id", str(tiny_llama)), TOKENS)]


def test_two_hosts_answer_as_one_rank(ranks: Ranks, undisturbed: list[list[int]]) -> None:
    assert "the 2 ranks combine their results in shared memory" in ranks.first.output_text()
    assert [token_ids(events) for events in all_streams(ranks.first, TOKENS)] == undisturbed


def test_ranks_that_cannot_share_memory_give_the_same_bits(ranks: Ranks, tiny_llama: Path, tmp_path: Path) -> None:
    """Over gloo, although they run on one machine."""
    if reason := missing_here():
        pytest.skip(f"cannot start a process in a PID namespace: {reason}")
    port, keys = free_port(), new_keys(tmp_path / "keys")
    with (
        Server(tmp_path / "0", *flags_of_rank(tiny_llama, keys, 0, port)) as first,
        ServerInContainer(tmp_path / "1", *flags_of_rank(tiny_llama, keys, 1, port), forked=False) as second,
    ):
        second.start("worker")
        first.start().wait_until_ready()
        assert "over gloo, since rank 1 cannot open the memory of rank 0 (" in first.output_text()

        def answers(server: Server) -> list[list[dict[str, Any]]]:
            greedy = [(f"prompt {number}", {"max_new_tokens": TOKENS}) for number in range(3)]
            sampled = ("a story", {"max_new_tokens": TOKENS, "do_sample": True, "seed": 1, "top_n_tokens": 3})
            act = (lambda: first.kill("worker-0")) if server is first else None
            events = server.stream_all([*greedy, sampled], act)
            return [[{**event["token"], "top": event.get("top_tokens")} for event in stream] for stream in events]

        assert answers(first) == answers(ranks.first)


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_survive_the_death_of_a_rank(rank: int, ranks: Ranks, undisturbed: list[list[int]]) -> None:
    before = ranks.pids()
    disturbed = all_streams(ranks.first, TOKENS, act=lambda: ranks[rank].kill("worker-0"))
    assert [token_ids(events) for events in disturbed] == undisturbed
    assert len(before) == 2
    assert not {*before} & {*ranks.pids()}  # the group was restarted as one


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_survive_a_rank_that_is_stopped(rank: int, ranks: Ranks, undisturbed: list[list[int]]) -> None:
    before = ranks.pids()

    def stop() -> None:
        psutil.Process(before[rank]).suspend()
        ranks.first.wait_until(lambda: not {*before} & {*ranks.pids()}, "both ranks are replaced")

    disturbed = all_streams(ranks.first, TOKENS, act=stop)
    assert [token_ids(events) for events in disturbed] == undisturbed


def test_an_adapter_of_run_time_is_the_same_on_all_ranks(
    ranks: Ranks, tiny_llama: Path, tmp_path: Path, shared_server: SharedServers
) -> None:
    """Paths below /proc/self/cwd name other files on each rank, as if on hosts of their own."""
    good = write_adapter(tmp_path / "good", tiny_llama)
    assert ranks.first.cwd is not None
    assert ranks.second.cwd is not None
    write_adapter(ranks.first.cwd / "missing", tiny_llama)
    write_adapter(ranks.first.cwd / "different", tiny_llama, seed=1)
    write_adapter(ranks.second.cwd / "different", tiny_llama, seed=2)

    def load(path: str) -> Any:
        return ranks.first.client.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": path})

    reasons = {"missing": "has no adapter_config.json", "different": "differs from that on the host of rank 0"}
    for name, reason in reasons.items():
        refused = load(f"/proc/self/cwd/{name}")
        assert refused.status_code == 422
        assert re.search(f"Rank 1 cannot use the adapter.*{reason}", refused.text)
    assert load(str(good)).status_code == 200
    one_rank = shared_server("--model-id", str(tiny_llama), "--lora-adapters", f"b={good}")
    found, expected = (
        server.generate("a story", max_new_tokens=20, adapter_id="b") for server in (ranks.first, one_rank)
    )
    assert found["generated_text"] == expected["generated_text"]


def test_streams_survive_a_cut_cable(ranks: Ranks, undisturbed: list[list[int]]) -> None:
    """Neither rank gets a FIN, and each waits for the other in a collective operation, or could: both end."""
    before = ranks.pids()

    def cut() -> None:
        ranks.line.is_cut = True
        ranks.first.wait_until(lambda: not {*before} & {*ranks.pids()}, "both ranks are replaced")
        ranks.line.is_cut = False

    disturbed = all_streams(ranks.first, TOKENS, act=cut)
    assert [token_ids(events) for events in disturbed] == undisturbed


def test_a_rank_with_other_settings_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    port, keys = free_port(), new_keys(tmp_path / "keys")
    scripted = "--worker", "scripted"
    with (
        Server(tmp_path / "0", *flags_of_rank(tiny_llama, keys, 0, port), *scripted) as first,
        Server(tmp_path / "1", *flags_of_rank(tiny_llama, keys, 1, port), *scripted, "--max-batch-size", "3") as second,
    ):
        first.start()
        second.start("worker")
        assert second.commands["worker"].wait(60) != 0
        assert "all ranks need the same --max-batch-size" in second.output_text()
        first.wait_until(lambda: "waiting for rank 1" in first.output_text(), "rank 0 waits on")
        assert not first.is_healthy()
