"""Front ends that die or hang: their requests are cancelled. With --resume-window: test_resumption.py."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import Server
from tgi.microkernel import metrics

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "20000", "--api-workers", "2")


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *SCRIPTED) as server:
        yield server


def running(server: Server) -> int:
    """Requests that the scheduler has in its batch, read without a front end."""
    lines = metrics.render(server.run_directory / "metrics").splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tgi_batch_current_size ")))


@pytest.mark.parametrize("fatal", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fatal: fatal.name)
def test_requests_of_a_lost_front_end_are_cancelled(server: Server, fatal: signal.Signals) -> None:
    server.start().wait_until_ready()
    streams = [server.stream("Hello", max_new_tokens=1500) for _ in range(10)]
    for stream in streams:
        next(stream)
    front_ends = [process for name, process in server.processes().items() if name.startswith("api")]
    assert running(server) == 10
    for process in front_ends:
        process.send_signal(fatal)
    server.wait_until(lambda: running(server) == 0, "the requests are cancelled")
    server.wait_until_ready()
