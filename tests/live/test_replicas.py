"""Several schedulers with a worker each (`--replicas`), under the same tokenizers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import Server, SharedServers
from tests.live.test_operating import begin, succeed
from tests.live.test_tree import SCRIPTED, all_streams, token_ids
from tgi.microkernel import rundir

# With so few slots one replica could not compute all streams of `all_streams` at once.
REPLICAS = (*SCRIPTED, "--replicas", "2", "--max-batch-size", "4")
PARTS = {"scheduler-0", "scheduler-1", "worker-0", "worker-1"}


def ready(server: Server) -> set[str]:
    return {state.name for state in rundir.read_states(server.run_directory) if state.state == "ready"}


def state_of(server: Server, name: str) -> str:
    state = rundir.read_state(server.run_directory, name)
    return state.state if state is not None else ""


@pytest.fixture
def standing(tiny_llama: Path, shared_server: SharedServers) -> Server:
    server = shared_server("--model-id", str(tiny_llama), *REPLICAS)
    server.wait_until(lambda: ready(server) >= PARTS, "both replicas are ready")
    return server


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        yield server.start().wait_until_ready()


def test_both_replicas_compute(standing: Server) -> None:
    """Four slots each for eight streams: `all_streams` fails if one of them waits until another has ended."""
    running: list[float] = []
    all_streams(standing, 60, act=lambda: running.append(standing.metric("tgi_batch_current_size")))
    assert running == [8]


@pytest.mark.parametrize("victim", ["scheduler-1", "worker-0"])
def test_streams_go_on_after_a_part_of_a_replica_is_killed(standing: Server, victim: str) -> None:
    undisturbed = all_streams(standing, 60)
    healthy = []

    def kill() -> None:
        standing.kill(victim)
        healthy.extend(standing.is_healthy() for _ in range(20))

    disturbed = all_streams(standing, 60, act=kill)
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert all(healthy)


def test_replicas_come_and_go_under_streams(server: Server) -> None:
    undisturbed = all_streams(server, 60)
    assert succeed(server, "scale", "replica", "2").endswith("running: scheduler-0, scheduler-1, worker-0, worker-1\n")
    assert ready(server) >= PARTS
    recomputed = server.metric("tgi_recomputed_tokens")

    def retire() -> None:
        scaling = begin(server, "scale", "replica", "1")
        server.wait_until(lambda: state_of(server, "scheduler-1") == "draining", "the replica drains")
        assert server.generate("Hello", max_new_tokens=3)["generated_text"]
        assert scaling.wait(60) == 0

    disturbed = all_streams(server, 60, act=retire)
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert server.metric("tgi_recomputed_tokens") == recomputed  # each stream has ended where it was
    assert not {"scheduler-1", "worker-1"} & server.processes().keys()
    assert not list(server.run_directory.glob("sched-1.*"))
    assert server.is_healthy()


def test_a_scheduler_drains_before_it_is_replaced(standing: Server) -> None:
    undisturbed = all_streams(standing, 60)
    recomputed = standing.metric("tgi_recomputed_tokens")
    disturbed = all_streams(standing, 60, act=lambda: succeed(standing, "restart", "scheduler"))
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert standing.metric("tgi_recomputed_tokens") == recomputed


def test_what_a_replica_has_not_finished_in_time_goes_on_at_another(tiny_llama: Path, tmp_path: Path) -> None:
    arguments = ("--model-id", str(tiny_llama), *REPLICAS, "--graceful-termination-timeout", "0.5")
    with Server(tmp_path / "run", *arguments) as server:
        server.start().wait_until_ready().wait_until(lambda: ready(server) >= PARTS, "both replicas are ready")
        # Long ones: the command itself takes seconds on a busy machine.
        undisturbed = all_streams(server, 300)
        disturbed = all_streams(server, 300, act=lambda: succeed(server, "scale", "replica", "1"))
        assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
        assert server.metric("tgi_recomputed_tokens") > 0
