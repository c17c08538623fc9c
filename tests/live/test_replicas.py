"""Several schedulers with a worker each (`--replicas`), under the same tokenizers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import Server, SharedServers
from tests.live.test_operating import succeed
from tests.live.test_tree import SCRIPTED, all_streams, token_ids
from tgi.microkernel import rundir

# With so few slots one replica could not compute all streams of `all_streams` at once.
REPLICAS = (*SCRIPTED, "--replicas", "2", "--max-batch-size", "4")
PARTS = {"scheduler-0", "scheduler-1", "worker-0", "worker-1"}


def ready(server: Server) -> set[str]:
    return {state.name for state in rundir.read_states(server.run_directory) if state.state == "ready"}


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
    disturbed = all_streams(server, 60, act=lambda: succeed(server, "scale", "replica", "1"))
    assert [token_ids(events) for events in disturbed] == [token_ids(events) for events in undisturbed]
    assert not {"scheduler-1", "worker-1"} & server.processes().keys()
    assert not list(server.run_directory.glob("sched-1.*"))
    assert server.is_healthy()
