"""A burst of requests at a tokenizer, over real links."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.microkernel.tcp import TIMEOUT_SECONDS
from tests.tokenizer.harness import READY, PoolHarness
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.protocol import PROTOCOL, Add, Generate, Hello, decode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer import main
from tgi.tokenizer.resumable_streams import ResumableStreams


def hello(role: str) -> Hello:
    return Hello(PROTOCOL, role, 0, os.urandom(8))


@pytest.fixture
def links(tmp_path: Path) -> Iterator[list[Link]]:
    """The front end's, the tokenizer's to front ends and to the scheduler, the scheduler's."""
    front, back = f"ipc://{tmp_path}/front", f"ipc://{tmp_path}/back"
    made = [
        Link.connect(front, hello("api")),
        Link.bind(front, hello("tokenizer")),
        Link.connect(back, hello("tokenizer")),
        Link.bind(back, hello("scheduler")),
    ]
    yield made
    for link in made:
        link.close()


def test_the_scheduler_gets_the_first_requests_while_the_others_are_encoded(links: list[Link]) -> None:
    api, front, back, scheduler = links
    pool = PoolHarness(scheduler=False).pool
    streams = ResumableStreams(pool.handle)
    executors: Any = SimpleNamespace(completed_jobs=list, idle=True, start_jobs=lambda jobs: None)
    end = time.monotonic() + TIMEOUT_SECONDS

    def turn() -> None:
        assert time.monotonic() < end
        main.run_once(pool, streams, [front], [back], executors)
        for link in (api, scheduler):
            list(link.receive())
        time.sleep(0.002)

    while not all(link.peers for link in links):
        turn()
    scheduler.send(next(iter(scheduler.peers)), READY)
    scheduler.flush()
    while pool._limits is None:
        turn()
    count = 2 * main.MESSAGES_PER_PART + 1
    for rid in range(count):
        api.send(next(iter(api.peers)), Generate(rid, "Hello", SamplingParams(rid)))
    api.flush()
    parts: list[list[Any]] = []
    while sum(map(len, parts)) < count:
        assert time.monotonic() < end
        main.run_once(pool, streams, [front], [back], executors)
        while scheduler.socket.poll(5):
            parts.append([decode(frame) for frame in scheduler.socket.recv_multipart()[1:]])
    assert [len(part) for part in parts] == [main.MESSAGES_PER_PART, main.MESSAGES_PER_PART, 1]
    assert all(isinstance(message, Add) for part in parts for message in part)
