"""Front ends that die or hang: their requests are cancelled. With --resume-window: test_resumption.py."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import Server
from tests.live.test_tree import token_ids
from tgi.microkernel.observability import metrics

pytestmark = pytest.mark.live

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000", "--api-workers", "2")


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("front-ends") / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        yield server.start().wait_until_ready()


def at_scheduler(server: Server) -> int:
    """Requests that run or wait in the scheduler, read without a front end."""
    names = ("tgi_batch_current_size ", "tgi_queue_size ")
    lines = metrics.render(server.run_directory / "metrics").splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names)))


def test_a_stopped_front_end_that_continues_submits_its_requests_again(server: Server) -> None:
    """They are cancelled before it would be replaced, and its clients get each token once."""
    expected = token_ids(list(server.stream("Hello", max_new_tokens=300)))
    streams = [server.stream("Hello", max_new_tokens=300) for _ in range(10)]
    events = [[next(stream)] for stream in streams]
    front_ends = {name: process for name, process in server.processes().items() if name.startswith("api")}
    assert at_scheduler(server) == 10
    began = time.monotonic()
    for process in front_ends.values():
        process.suspend()
    server.wait_until(lambda: at_scheduler(server) == 0, "the requests are cancelled")
    assert "does not respond: what it asked for is cancelled" in server.output_text()
    print(f"cancelled after {time.monotonic() - began:.1f} s")
    for process in front_ends.values():
        process.resume()
    for received, stream in zip(events, streams, strict=True):
        received += stream
    assert [token_ids(received) for received in events] == [expected] * 10
    assert {name: server.processes()[name].pid for name in front_ends} == {
        name: process.pid for name, process in front_ends.items()
    }
    server.wait_until(lambda: at_scheduler(server) == 0, "no request is left behind")


def test_requests_of_a_killed_front_end_are_cancelled(server: Server) -> None:
    streams = [server.stream("Hello", max_new_tokens=1500) for _ in range(10)]
    for stream in streams:
        next(stream)
    front_ends = [process for name, process in server.processes().items() if name.startswith("api")]
    assert at_scheduler(server) == 10
    for process in front_ends:
        process.send_signal(signal.SIGKILL)
    server.wait_until(lambda: at_scheduler(server) == 0, "the requests are cancelled")
    server.wait_until_ready()
