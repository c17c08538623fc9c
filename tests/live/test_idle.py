"""Idle streams and connections use no CPU: no process wakes up for each of them."""

import socket
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.live.server import TIMEOUT_SECONDS, Server
from tests.live.test_front_ends import OpenStream

COUNT = 200
INTERVAL_SECONDS = 2.0
# Two threads of each process wake up for the beats of its neighbours, two per second and direction, and the supervisor
# ten times per second after a start: 20 to 45 in all, on a busy machine some more in one interval or another. One
# wake-up per stream or connection would be hundreds in each.
MAX_WAKE_UPS = 10 * INTERVAL_SECONDS * 2 + 10
INTERVALS = 3


def wake_ups(process: psutil.Process) -> int:
    """The voluntary context switches of all threads of a process so far."""
    return sum(psutil.Process(thread.id).num_ctx_switches().voluntary for thread in process.threads())


@pytest.mark.skipif(sys.platform != "linux", reason="counts are read per thread")
def test_idle_streams_and_connections_cause_no_wake_ups(tiny_llama: Path, tmp_path: Path) -> None:
    scripted = ("--worker", "scripted", "--scripted-step-us", "20000", "--max-concurrent-requests", str(COUNT))
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *scripted) as server:
        server.start().wait_until_ready()
        processes = server.processes() | {"supervisor": psutil.Process(server.commands["up"].pid)}
        connections = [socket.create_connection(("127.0.0.1", server.port), TIMEOUT_SECONDS) for _ in range(COUNT)]
        for connection in connections:
            connection.sendall(b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        streams = [OpenStream(server) for _ in range(COUNT)]
        assert {stream.status() for stream in streams} == {200}
        processes.pop("worker-0").suspend()  # so no further step is answered

        def counts() -> dict[str, int]:
            return {name: wake_ups(process) for name, process in processes.items()}

        def quiet() -> bool:
            before = sum(counts().values())
            time.sleep(0.1)
            return sum(counts().values()) - before < len(processes) * MAX_WAKE_UPS / 10

        server.wait_until(quiet, "the last tokens have been sent")
        seen = [counts()]
        for _ in range(INTERVALS):
            time.sleep(INTERVAL_SECONDS)
            seen.append(counts())
        woken = {name: min(after[name] - before[name] for before, after in pairwise(seen)) for name in processes}
        assert all(count <= MAX_WAKE_UPS for count in woken.values()), woken
        for connection in [*connections, *(stream.socket for stream in streams)]:
            connection.close()
