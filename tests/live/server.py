"""Starts whole servers for tests: `tgi up`, or single roles, on a loopback port with a run directory of their own.

`Server` is one process tree, for a test that stops it, counts from zero or needs its own start. `SharedServers` keeps
one running tree per set of flags for all other tests; they get it through the fixture `shared_server`.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from scripts.reliability.network import Host
from tests.live import commands
from tests.live.commands import Command
from tests.network import HostTransport
from tgi.microkernel.host import rundir

# Ends what hangs. A start takes seconds, on a machine with far more to do minutes.
TIMEOUT_SECONDS = 240
# Without settings from the environment, and without certificates, which take 24 ms to read for each client.
CLIENT_OPTIONS: dict[str, Any] = {"timeout": TIMEOUT_SECONDS, "trust_env": False, "verify": False}
# Ports below Linux's range for outgoing connections, so that no connection takes one before the server listens.
PORTS = range(20_000, 32_000)
# Idle servers cost memory: one with the demo model 0.5 GB.
MAX_SHARED_SERVERS = 3
# The time that `Server.stream_all` gives its clients to send: over TLS they cannot before the server answers.
SENT_SECONDS = 1.0
# How often `Server.stream_all` sends its requests if a stream ends before it can act.
MAX_ATTEMPTS = 5


def free_port() -> int:
    """A TCP port on which no process listens now."""
    choice = random.SystemRandom()
    while True:
        port = choice.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def python_path(first: Path) -> dict[str, str]:
    """An environment in which Python searches this directory first, and what it searches here after it: so a server of
    a checkout that is not installed runs that checkout, also with the faults of a test."""
    return {"PYTHONPATH": os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])}


class Server:
    """Starts commands of `tgi` that share one run directory. Leaving its `with` block kills them by pid and fails if a
    process of the tree outlives its supervisor."""

    def __init__(
        self,
        run_directory: Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        host: Host | None = None,
        cwd: Path | None = None,
        forked: bool = True,
    ) -> None:
        """`arguments`: of every command. `env`: changes to the environment of every command. `host`: where commands
        and client run, if not here. `cwd`: the working directory of `start`, if not the present one. `forked`: False
        for tests of what a command costs as a user starts it (see tests/live/commands.py)."""
        longest = run_directory / rundir.LONGEST_SOCKET_NAME
        assert len(os.fsencode(longest)) <= rundir.MAX_SOCKET_PATH, f"shorten the test's name: {longest} is too long"
        self.port = free_port()
        self.run_directory = run_directory
        self.url = f"{'https' if '--ssl-certfile' in arguments else 'http'}://127.0.0.1:{self.port}"
        self.arguments = arguments
        self.cwd = cwd
        self._variables = {"TGI_RUN": str(run_directory), "HF_HUB_OFFLINE": "1"} | (env or {})
        self.environment = os.environ | self._variables
        self.commands: dict[str, Command] = {}
        self.output: dict[str, list[str]] = {}  # per command: the lines of stdout and stderr so far
        self._readers: dict[str, threading.Thread] = {}
        self._awaits_tokenizer = False  # `tgi up` has started, with the usual two
        self.client = httpx.Client(
            base_url=self.url, transport=None if host is None else HostTransport(host), **CLIENT_OPTIONS
        )
        self._host = host
        self._forked = forked and host is None

    def start(self, command: str = "up", *arguments: str) -> "Server":
        """Starts `tgi COMMAND`."""
        address = ("--hostname", "127.0.0.1", "--port", str(self.port))
        full_command = [command, *address, *self.arguments, *arguments]
        self._awaits_tokenizer = command == "up" and "--validation-workers" not in full_command
        if not self._forked:
            return self.launch(command, [sys.executable, "-m", "tgi", *full_command], self.environment, self.cwd)
        return self._follow(command, commands.start(*full_command, cwd=self.cwd, **self._variables))

    def launch(self, name: str, command: list[str], env: dict[str, str], cwd: Path | None = None) -> "Server":
        """Starts any command as the server, or as a part of it, in a new interpreter."""
        popen = subprocess.Popen if self._host is None else partial(self._host.run, subprocess.Popen)
        process: subprocess.Popen[str] = popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self._follow(name, process)

    def _follow(self, name: str, process: Command) -> "Server":
        """Keeps what the process prints."""
        self.commands[name] = process
        lines: list[str] = []
        self.output[name] = lines
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)  # type: ignore[arg-type]
        reader.start()
        self._readers[name] = reader
        return self

    def wait_until_ready(self) -> "Server":
        """Waits until /health is 200, and after a start until the second tokenizer runs, which starts last."""
        self.wait_until(self.is_healthy, "the server is ready", poll_seconds=0.05)
        if self._awaits_tokenizer:
            self.wait_until(lambda: "tokenizer-1" in self.processes(), "the second tokenizer runs")
            self._awaits_tokenizer = False
        return self

    def is_healthy(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait_until(self, condition: Callable[[], object], description: str, poll_seconds: float = 0.02) -> None:
        """Polls until the condition is true, in the end five times less often: most conditions cost the server a
        request. Fails with the server's output after TIMEOUT_SECONDS, and at once if a command has ended."""
        deadline, pause = time.monotonic() + TIMEOUT_SECONDS, poll_seconds
        while not condition():
            ended = [name for name, process in self.commands.items() if process.poll() is not None]
            assert not ended, f"{ended} ended while waiting until {description}\n{self.output_text()}"
            assert time.monotonic() < deadline, f"timed out waiting until {description}\n{self.output_text()}"
            time.sleep(pause)
            pause = min(1.2 * pause, 5 * poll_seconds)

    def output_text(self) -> str:
        """What all commands have printed so far; all of it for commands that have ended."""
        for name, process in self.commands.items():
            if process.poll() is not None:
                self._readers[name].join(TIMEOUT_SECONDS)
        return "".join(line for lines in self.output.values() for line in lines)

    def processes(self, state: str | None = None) -> dict[str, psutil.Process]:
        """The supervised processes that run, by name ("worker-0"): what `tgi ps` reads, without its start-up. `state`:
        only those in this one ("ready")."""
        found = {}
        for one in rundir.read_states(self.run_directory):
            if one.state == (state or one.state):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[one.name] = psutil.Process(one.pid)
        return found

    def kill(self, name: str) -> None:
        """Kills one process of the tree with SIGKILL: waits until it runs, and until it has ended."""
        self.wait_until(lambda: name in self.processes(), f"{name} runs")
        target = self.processes()[name]
        target.kill()
        target.wait(TIMEOUT_SECONDS)

    @contextlib.contextmanager
    def suspended(self, name: str) -> Iterator[None]:
        """Stops one process of the tree with SIGSTOP for the duration of the block, or until it is replaced."""
        process = self.processes()[name]
        process.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Signals every command and waits until all have ended."""
        for process in self.commands.values():
            if process.poll() is None:
                process.send_signal(signal_number)
        for process in self.commands.values():
            process.wait(TIMEOUT_SECONDS)

    def generate(self, inputs: str, **parameters: Any) -> dict[str, Any]:
        """POST /generate with details."""
        answer = self.client.post("/generate", json={"inputs": inputs, "parameters": {"details": True, **parameters}})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def stream(
        self, inputs: str, on_sent: Callable[[], object] | None = None, **parameters: Any
    ) -> Iterator[dict[str, Any]]:
        """The events of POST /generate_stream. `on_sent` is called when the request was written to the connection."""

        def trace(event: str, info: dict[str, Any]) -> None:
            if on_sent is not None and event.endswith(".send_request_body.complete"):
                on_sent()

        body, extensions = {"inputs": inputs, "parameters": {"details": True, **parameters}}, {"trace": trace}
        with self.client.stream("POST", "/generate_stream", json=body, extensions=extensions) as answer:
            assert answer.status_code == 200, answer.read()
            for line in event_lines(answer):
                if line.startswith("data:"):
                    yield json.loads(line[5:])

    def stream_all(
        self, requests: Sequence[tuple[str, dict[str, Any]]], act: Callable[[], object] | None = None, after: int = 1
    ) -> list[list[dict[str, Any]]]:
        """The events of concurrent streams, one list per request, each given as inputs and parameters. `act` is called
        once each stream has had `after` events. So that they begin together, however busy the machine is, the front
        ends read the requests when all are sent. If a stream has ended by then all the same, all are sent again."""
        for _ in range(MAX_ATTEMPTS if act else 1):
            events: list[list[dict[str, Any]]] = [[] for _ in requests]
            reached = threading.Event()
            sent = threading.Semaphore(0)

            def receive(
                index: int,
                events: list[list[dict[str, Any]]] = events,
                reached: threading.Event = reached,
                on_sent: Callable[[], object] = sent.release,
            ) -> None:
                inputs, parameters = requests[index]
                try:
                    for event in self.stream(inputs, on_sent, **parameters):
                        events[index].append(event)
                        if len(events[index]) == after and all(len(others) >= after for others in events):
                            reached.set()
                finally:
                    reached.set()

            with ThreadPoolExecutor(len(requests)) as pool:
                with contextlib.ExitStack() as stack:
                    for name in [one for one in self.processes() if act and one.startswith("api-")]:
                        stack.enter_context(self.suspended(name))
                    streams = [pool.submit(receive, index) for index in range(len(requests))]
                    until = time.monotonic() + SENT_SECONDS
                    for _ in requests if act else ():
                        sent.acquire(timeout=max(0.0, until - time.monotonic()))
                acts = act is not None and reached.wait(TIMEOUT_SECONDS) and not any(one.done() for one in streams)
                if act is not None and acts:
                    act()
                for stream in streams:
                    stream.result(TIMEOUT_SECONDS)
            if acts or act is None:
                return events
        raise AssertionError(f"a stream ended before each had {after} events, in {MAX_ATTEMPTS} attempts")

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
        left = still_running(children)
        self.client.close()
        if kind is not None:
            print(self.output_text())
        assert not left, f"left behind: {left}"


class SharedServers:
    """Running servers of one pytest process, one per set of flags. At most MAX_SHARED_SERVERS run; the least recently
    used one is ended for a new one.

    A test may kill processes of a shared server, but neither stop it, nor change which processes it has (`tgi restart`,
    `tgi scale`), nor rely on metrics that count from zero. Tests of other files may come next.
    """

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], Server] = {}  # the least recently used one first
        self._names: dict[Server, set[str]] = {}  # of the processes that were ready when its first test began

    def __call__(self, *flags: str) -> Server:
        """The ready server of `tgi up FLAGS`. Fails if it has ended since the last test, or lacks one of its first
        processes."""
        server = self._servers.pop(flags, None)
        if server is None:
            while len(self._servers) >= MAX_SHARED_SERVERS:
                self._end(self._servers.pop(next(iter(self._servers))))
            server = Server(Path(tempfile.mkdtemp(prefix="tgi-shared-")) / "run", *flags).start()
        try:
            server.wait_until_ready()
            names = self._names.setdefault(server, {*server.processes("ready")})
            server.wait_until(lambda: server.processes("ready").keys() >= names, f"{sorted(names)} are ready")
        except BaseException:
            self._end(server)
            raise
        self._servers[flags] = server
        return server

    def end_all(self) -> None:
        with contextlib.ExitStack() as stack:
            for server in self._servers.values():
                stack.callback(self._end, server)
            self._servers.clear()

    def _end(self, server: Server) -> None:
        self._names.pop(server, None)
        try:
            with server:
                pass
        finally:
            shutil.rmtree(server.run_directory.parent, ignore_errors=True)


def scheduled_requests(server: Server) -> float:
    """How many requests run or wait in the scheduler."""
    return server.metric("tgi_batch_current_size") + server.metric("tgi_queue_size")


def event_lines(answer: httpx.Response) -> Iterator[str]:
    """The lines of a stream of events. httpx's `iter_lines` also divides them at characters such as U+2028, which a
    random model writes now and then."""
    rest = ""
    for text in answer.iter_text():
        *lines, rest = (rest + text).split("\n")
        yield from lines
    if rest:
        yield rest


def still_running(processes: Iterable[psutil.Process], timeout: float = 30) -> list[psutil.Process]:
    """Which of these still run after `timeout` seconds. A zombie counts as ended: only its parent's `wait` is due."""
    deadline = time.monotonic() + timeout
    running = list(processes)
    while running and time.monotonic() < deadline:
        running = [process for process in running if process.is_running() and not _is_zombie(process)]
        time.sleep(0.005)
    return running


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
