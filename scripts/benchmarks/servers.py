"""A measured server: start, wait for the first token, resource usage, end by its own pid."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from scripts.benchmarks.streams import BadStream, burst
from tgi.microkernel.host import rundir

START_SECONDS = 900  # a server without a token by then has failed
STOP_SECONDS = 30  # before its processes are killed
SETTLED_SECONDS = 0.5


class Failed(Exception):
    """A server cannot be installed or started, or does not behave as required; the message says why."""


def free_port() -> int:
    """A free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of all threads; 0 of a process that has ended. On Linux from the process clock
    (clock_getcpuclockid(3)): accounting in ticks of ten milliseconds is too coarse for processes that wake up for one
    token."""
    with contextlib.suppress(OSError, psutil.NoSuchProcess):
        if sys.platform == "linux":
            return time.clock_gettime((~process.pid << 3) | 2)
        return sum(process.cpu_times()[:2])
    return 0.0


class Server:
    """A server's processes; a context manager that ends them. `first` is the time to the first token in seconds.

    Its output goes to `log`, or to that of this process.
    """

    def __init__(self, command: list[str], environ: dict[str, str], port: int, log: Path | None = None) -> None:
        self.port, self.first, self._log = port, 0.0, log
        self._run = tempfile.TemporaryDirectory(prefix="tgi-")
        self.run_directory = Path(self._run.name) / "run"  # of this server
        self._begun = time.perf_counter()
        with log.open("wb") if log else contextlib.nullcontext() as output:
            self.process = subprocess.Popen(
                command,
                env=os.environ | {"TGI_RUN": str(self.run_directory)} | environ,
                stdin=subprocess.DEVNULL,
                stdout=output or subprocess.DEVNULL,
                stderr=output,
            )
        self._tree: list[psutil.Process] = []

    def wait(self, path: str, body: dict[str, Any]) -> None:
        """Sends requests until a token arrives. Raises Failed if the server ends, rejects the request, or needs more
        than START_SECONDS."""
        complaint = "it does not listen"
        content = json.dumps(body).encode()
        headers = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        request = f"POST {path} HTTP/1.1\r\n{headers}\r\n".encode() + content
        while time.perf_counter() - self._begun < START_SECONDS:
            if self.process.poll() is not None:
                raise Failed(f"it ended with code {self.process.returncode}{self.said()}")
            try:
                if self._accepts(request):
                    events = burst(self.port, path, [body], START_SECONDS)[0].events()
                    if events:
                        self.first = events[0].time - self._begun
                        self._tree = [psutil.Process(self.process.pid), *self._children()]
                        return
                    complaint = "a stream without tokens"
            except OSError:
                pass
            except BadStream as error:
                complaint = str(error)
                if not complaint.startswith(("HTTP/1.1 503", "no answer")):
                    raise Failed(f"{complaint}{self.said()}") from None
            time.sleep(0.01)
        raise Failed(f"no token after {START_SECONDS} s: {complaint}{self.said()}")

    def _accepts(self, request: bytes) -> bool:
        """Whether the answer to a request is not 503, at little cost: the server that starts has the same cores."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(request)
            return connection.recv(12, socket.MSG_WAITALL) != b"HTTP/1.1 503"

    def settle(self) -> None:
        """Waits until all processes of this server have been ready for SETTLED_SECONDS: a second tokenizer starts after
        the first token, and loads what others do not. Only for `tgi`."""
        ready_at, ready = time.perf_counter(), -1
        while time.perf_counter() - ready_at < SETTLED_SECONDS:
            states = rundir.read_states(self.run_directory)
            if ready != len(states) or any(one.state != "ready" for one in states):
                ready_at, ready = time.perf_counter(), len(states)
            time.sleep(0.02)

    def said(self) -> str:
        """The last lines of its log, for messages."""
        if not self._log:
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-4:]
        return f" ({self._log}: {' / '.join(line.strip()[:200] for line in lines)})"

    def _children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Its child processes, by command line. Some may start after the first token."""
        found: dict[str, list[psutil.Process]] = {}
        for process in self._children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.setdefault(" ".join(process.cmdline()).strip(), []).append(process)
        return found

    def cpu(self) -> float:
        """CPU seconds of its processes."""
        return sum(map(cpu_seconds, self._tree))

    def memory(self) -> float:
        """Resident memory of its processes in MB; shared pages count for each process."""
        total = 0
        for process in self._tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 2**20

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._tree += [child for child in self._children() if child not in self._tree]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        for process in [process for process in self._tree if process.is_running()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._run.cleanup()
