"""Streams and connections that wait cost nothing: no process wakes up for each of them."""

import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.live.server import PATIENCE_SECONDS, Server
from tests.live.test_front_ends import Held

COUNT = 200
INTERVAL_SECONDS = 2.0
# A process beats for its watchdog once a second at most, and the supervisor looks ten times a second while its
# processes are young. Twice that, and a few messages: with a wake-up for each stream or connection it were hundreds.
MOST_WAKE_UPS = 10 * INTERVAL_SECONDS * 2 + 10


def wake_ups(process: psutil.Process) -> int:
    """How often the threads of a process have gone to sleep so far."""
    return sum(psutil.Process(thread.id).num_ctx_switches().voluntary for thread in process.threads())


@pytest.mark.skipif(sys.platform != "linux", reason="counts are read per thread")
def test_what_waits_wakes_nobody_up(tiny_llama: Path, tmp_path: Path) -> None:
    scripted = ("--worker", "scripted", "--scripted-step-us", "20000", "--max-concurrent-requests", str(COUNT))
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *scripted) as server:
        server.start().ready()
        processes = server.processes() | {"supervisor": psutil.Process(server.commands["up"].pid)}
        silent = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_SECONDS) for _ in range(COUNT)]
        for connection in silent:
            connection.sendall(b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        streams = [Held(server) for _ in range(COUNT)]
        assert {stream.status() for stream in streams} == {200}
        processes.pop("worker-0").suspend()  # no step is answered from now on

        def counts() -> dict[str, int]:
            return {name: wake_ups(process) for name, process in processes.items()}

        def quiet() -> bool:
            before = sum(counts().values())
            time.sleep(0.1)
            return sum(counts().values()) - before < len(processes) * MOST_WAKE_UPS / 10

        server.until(quiet, "the last tokens have come")
        before = counts()
        time.sleep(INTERVAL_SECONDS)
        woken = {name: count - before[name] for name, count in counts().items()}
        assert all(count <= MOST_WAKE_UPS for count in woken.values()), woken
        for connection in [*silent, *(stream.socket for stream in streams)]:
            connection.close()
