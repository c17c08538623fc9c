"""`tgi up --replicas 2 --num-shard 2`: two replicas of a model on two ranks each, while ranks die and replicas go."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import Server
from tests.live.test_operating import succeed
from tests.live.test_replicas import ready
from tests.live.test_tree import all_streams, token_ids

pytestmark = pytest.mark.live

TOKENS = 100
RANKS = {"worker-0", "worker-0.1", "worker-1", "worker-1.1"}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = tmp_path_factory.mktemp("both") / "run"
    with Server(run, "--model-id", str(tiny_llama), "--replicas", "2", "--num-shard", "2") as started:
        started.start().wait_until_ready().wait_until(lambda: ready(started) >= RANKS, "both replicas are ready")
        yield started


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[list[int]]:
    return [token_ids(events) for events in all_streams(server, TOKENS)]


def test_streams_of_a_lost_rank_go_on_at_the_other_replica(server: Server, undisturbed: list[list[int]]) -> None:
    recomputed = server.metric("tgi_recomputed_tokens")
    killed = {name: process.pid for name, process in server.processes().items() if name in RANKS}
    disturbed = all_streams(server, TOKENS, act=lambda: server.kill("worker-0.1"), after=20)
    assert [token_ids(events) for events in disturbed] == undisturbed
    assert server.metric("tgi_recomputed_tokens") > recomputed
    server.wait_until(lambda: ready(server) >= RANKS, "the group is ready again")
    found = {name: process.pid for name, process in server.processes().items() if name in RANKS}
    assert {name for name, pid in found.items() if pid != killed[name]} == {"worker-0", "worker-0.1"}


def test_a_replica_of_ranks_is_drained_and_added(server: Server, undisturbed: list[list[int]]) -> None:
    recomputed = server.metric("tgi_recomputed_tokens")
    disturbed = all_streams(server, TOKENS, act=lambda: succeed(server, "scale", "replica", "1"), after=20)
    assert [token_ids(events) for events in disturbed] == undisturbed
    assert server.metric("tgi_recomputed_tokens") == recomputed
    assert RANKS & server.processes().keys() == {"worker-0", "worker-0.1"}
    succeed(server, "scale", "replica", "2")
    assert ready(server) >= RANKS
    assert [token_ids(events) for events in all_streams(server, TOKENS)] == undisturbed
