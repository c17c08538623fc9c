"""The links of a tokenizer to schedulers of other hosts."""

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
from tests.tokenizer.harness import PoolHarness
from tgi.microkernel.links.link import Link, ReplicaId
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
