"""The links of a tokenizer: to schedulers of other hosts, and a burst of requests from a front end."""

import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.live.server import free_port
from tests.microkernel.tcp import TIMEOUT_SECONDS, Deployment, hello
from tests.tokenizer.harness import READY, PoolHarness
from tgi.microkernel.links.link import REQUESTS_PER_PIECE, Link, ReplicaId
from tgi.microkernel.messages.protocol import Add, Generate, Hello
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer import main
from tgi.tokenizer.resumable_streams import ResumableStreams


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path / "keys", free_port())
    yield made
    made.close()


def test_a_scheduler_that_was_replaced_by_one_elsewhere_is_forgotten_at_once(deployment: Deployment) -> None:
    """Also if it was connected between two beats only: adapter updates would wait for its answer for ever."""
    pool = PoolHarness(scheduler=False).pool
    process: Any = SimpleNamespace(
        settings=SimpleNamespace(connect=(deployment.address,)),
        connect_link=lambda address, hello: Link.connect(address, hello, deployment.host_keys),
        watch_link=deployment.made.append,
    )
    schedulers = main.SchedulerLinks(process, hello("tokenizer", site="here"))
    schedulers.follow(pool)
    (link,) = schedulers.links
    streams = ResumableStreams(pool.handle)
    executors: Any = SimpleNamespace(completed_jobs=list, idle=True, start_jobs=lambda jobs: None)

    def turn() -> None:
        link.detect_disconnects()
        main.run_once(pool, streams, [], [link], executors, partial(schedulers.note_replica, pool))

    for site in ("one", "two"):
        low = Link.bind(deployment.address, hello("scheduler", site=site), deployment.scheduler_keys)
        deployment.made.append(low)
        end = time.monotonic() + TIMEOUT_SECONDS
        while not (link.peers and low.peers):
            assert time.monotonic() < end
            low.detect_disconnects()
            deque(low.receive(), maxlen=0)
            turn()
            time.sleep(0.002)
        turn()
        assert pool._schedulers.replica_ids == {ReplicaId(site, 0)}
        low.close()
        while link.peers:
            assert time.monotonic() < end
            turn()
            time.sleep(0.002)


def test_a_burst_of_requests_passes_in_pieces(tmp_path: Path) -> None:
    """The scheduler has the first requests before the others are encoded, and tokens are handled between the pieces."""
    pool = PoolHarness(scheduler=False).pool
    streams, executors = ResumableStreams(pool.handle), SimpleNamespace(completed_jobs=list, idle=True)
    executors.start_jobs = lambda jobs: None
    addresses = [f"ipc://{tmp_path / name}" for name in ("front", "back")]
    front, low = Link.bind(addresses[0], hello("tokenizer")), Link.bind(addresses[1], hello("scheduler"))
    up, back = Link.connect(addresses[0], hello("api")), Link.connect(addresses[1], hello("tokenizer"))
    adds: list[int] = []  # that the scheduler has after each turn

    def turn() -> int:
        main.run_once(pool, streams, [front], [back], executors)
        received = [message for _, message in low.receive()]
        while low.socket.poll(50):
            received += [message for _, message in low.receive()]
        for peer in low.peers if any(isinstance(one, Hello) for one in received) else ():
            low.send(peer, READY)
            low.flush()
        deque(up.receive(), maxlen=0)
        return sum(isinstance(one, Add) for one in received)

    try:
        end = time.monotonic() + TIMEOUT_SECONDS
        while pool._limits is None or not up.peers:
            assert time.monotonic() < end
            turn()
        (peer,) = up.peers
        for rid in range(3 * REQUESTS_PER_PIECE):
            up.send(peer, Generate(rid, "Hello", SamplingParams(5)))
            up.flush()
        assert front.socket.poll(1000 * TIMEOUT_SECONDS)
        time.sleep(0.2)  # until libzmq has read them all
        while sum(adds) < 3 * REQUESTS_PER_PIECE:
            assert time.monotonic() < end
            adds.append(turn())
        assert max(adds) <= REQUESTS_PER_PIECE
    finally:
        for link in (up, back, front, low):
            link.close()
