"""A real process tree for tests: `tgi up` (or single roles) on a loopback port with a run directory of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from tgi.kernel import rundir

PATIENCE_SECONDS = 120
# How clients ask: nothing of the environment's, and no certificates, which take 24 ms to read for each client.
LOCAL: dict[str, Any] = {"timeout": PATIENCE_SECONDS, "trust_env": False, "verify": False}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """Starts commands of `tgi` that share one run directory, and ends them by pid."""

    def __init__(self, run: Path, *common: str, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.run = run
        self.url = f"http://127.0.0.1:{self.port}"
        self._common = [*common]
        self._env = os.environ | {"TGI_RUN": str(run), "HF_HUB_OFFLINE": "1"} | (env or {})
        self.commands: dict[str, subprocess.Popen[str]] = {}
        self.output: dict[str, list[str]] = {}
        self._readers: dict[str, threading.Thread] = {}
        self.client = httpx.Client(base_url=self.url, **LOCAL)

    def start(self, command: str = "up", *arguments: str) -> "Server":
        """Starts `tgi COMMAND`; what it prints is collected in `output`."""
        here = ("--hostname", "127.0.0.1", "--port", str(self.port))
        return self.launch(command, [sys.executable, "-m", "tgi", command, *here, *self._common, *arguments], self._env)

    def launch(self, name: str, command: list[str], env: dict[str, str], cwd: Path | None = None) -> "Server":
        """Starts any command that is to be the server, or part of it."""
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.commands[name] = process
        lines: list[str] = []
        self.output[name] = lines
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)  # type: ignore[arg-type]
        reader.start()
        self._readers[name] = reader
        return self

    def ready(self) -> "Server":
        """Waits until /health is 200."""
        self.until(self.healthy, "the server is ready")
        return self

    def healthy(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def until(self, holds: Any, what: str) -> None:
        """Waits for a condition; fails with the processes' output."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            dead = [name for name, process in self.commands.items() if process.poll() is not None]
            assert not dead, f"{dead} ended while waiting for: {what}\n{self.said()}"
            assert time.monotonic() < end, f"waited in vain for: {what}\n{self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        """What all have printed: of those that have ended, to the last word."""
        for name, process in self.commands.items():
            if process.poll() is not None:
                self._readers[name].join(PATIENCE_SECONDS)
        return "".join(line for lines in self.output.values() for line in lines)

    def processes(self) -> dict[str, psutil.Process]:
        """The supervised processes that live, by name ("worker-0"): what `tgi ps` reads, without its start-up."""
        found = {}
        for state in rundir.read_states(self.run):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[state.name] = psutil.Process(state.pid)
        return found

    def kill(self, name: str) -> None:
        """kill -9 of one process of the tree, once it is there; back when it is dead."""
        self.until(lambda: name in self.processes(), f"{name} runs")
        victim = self.processes()[name]
        victim.kill()
        victim.wait(PATIENCE_SECONDS)

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """One process of the tree computes nothing meanwhile."""
        process = self.processes()[name]
        process.suspend()
        try:
            yield
        finally:
            process.resume()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signals every command and waits for its end."""
        for process in self.commands.values():
            if process.poll() is None:
                process.send_signal(number)
        for process in self.commands.values():
            process.wait(PATIENCE_SECONDS)

    def generate(self, inputs: str, **parameters: Any) -> dict[str, Any]:
        """POST /generate with details."""
        answer = self.client.post("/generate", json={"inputs": inputs, "parameters": {"details": True, **parameters}})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def stream(self, inputs: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """The events of POST /generate_stream."""
        body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
        with self.client.stream("POST", "/generate_stream", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    yield json.loads(line[5:])

    def metric(self, name: str) -> float:
        """The sum of a series over its labels; 0.0 if it has no sample yet."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split(" ")[0].split("{")[0] == name)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        children = [
            child
            for process in self.commands.values()
            if process.poll() is None
            for child in psutil.Process(process.pid).children(recursive=True)
        ]
        for process in self.commands.values():
            process.kill()
            process.wait()
        left = left_of(children)
        self.client.close()
        if kind is not None:
            print(self.said())
        assert not left, f"left behind: {left}"


def left_of(processes: Iterable[psutil.Process], timeout: float = 30) -> list[psutil.Process]:
    """Which of these still run after `timeout` seconds. A zombie does not run: its new parent has not looked yet."""
    end = time.monotonic() + timeout
    running = list(processes)
    while running and time.monotonic() < end:
        running = [process for process in running if process.is_running() and not _is_zombie(process)]
        time.sleep(0.005)
    return running


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
