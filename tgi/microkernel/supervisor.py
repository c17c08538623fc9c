"""The supervisor: starts child processes, restarts those that end or hang, and drains them role by role."""

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from tgi.microkernel import interpreter, metrics, rundir
from tgi.microkernel.errors import FATAL, UserError
from tgi.microkernel.process import LISTEN_FD, PARENT_FD, PARENT_PID, SETTINGS, Heartbeat, fatal_error_path
from tgi.microkernel.settings import Settings
from tgi.microkernel.token_bucket import TokenBucket

log = logging.getLogger(__name__)

# In the direction of requests, which is the order of draining.
DRAIN_ORDER = ("api", "tokenizer", "scheduler", "worker")

# A process that runs this long has settled.
SETTLED_SECONDS = 10.0

# A process that had been ready is restarted at once: this many times in a row, in the long run once in a period. One
# that ends before it is ready or has settled is restarted with exponential backoff.
RESTARTS_IN_A_ROW = 10
RESTART_PERIOD_SECONDS = 2.0
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 10.0

# A gap between two looks at the heartbeats that is longer than a tick and this: the supervisor itself did not run, and
# perhaps neither did its children, so they get this long to report again before they are judged.
PAUSE_SECONDS = 5.0

# Poll interval while processes start, and later. SIGCHLD wakes the supervisor at once.
STARTING_TICK_SECONDS, TICK_SECONDS = 0.1, 1.0

# Grace of roles other than the api at shutdown; then they are killed.
ROLE_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep running."""

    role: str
    replica: int
    listen_fd: int | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Role and replica, such as `api-0`."""
        return f"{self.role}-{self.replica}"


class ChildProcess:
    """A running process. Must be started by the main thread: the parent-death signal is sent when that thread ends."""

    def __init__(self, spec: ProcessSpec, settings: Settings) -> None:
        self.spec = spec
        self.started = time.monotonic()
        self.had_been_ready = False  # known when it has ended
        self.heartbeat = Heartbeat(settings.run_dir / f"{spec.name}.beat")
        self.heartbeat.set_deadline(self.started + settings.start_timeout)
        # The child has the reading end: it reads EOF when this process ends for any reason.
        parent_end, self._pipe = os.pipe()
        inherited = [parent_end] if spec.listen_fd is None else [parent_end, spec.listen_fd]
        environment = interpreter.child_environment() | spec.environment
        environment |= {SETTINGS: settings.to_json(), PARENT_PID: str(os.getpid()), PARENT_FD: str(parent_end)}
        if spec.listen_fd is not None:
            environment[LISTEN_FD] = str(spec.listen_fd)
        self._process = subprocess.Popen(
            interpreter.python_command("tgi.microkernel", spec.role, str(spec.replica)),
            env=environment,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            # Its own process group: signals of the terminal (Ctrl-C, hang-up) reach the supervisor only, which drains
            # the roles in order.
            process_group=0,
        )
        os.close(parent_end)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: the signal that ended it), else None."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def overdue(self) -> bool:
        """Whether its heartbeat deadline has passed."""
        return time.monotonic() > self.heartbeat.read_deadline()

    def close(self) -> None:
        """Releases the resources of an ended process."""
        os.close(self._pipe)


class Backoff:
    """How long to wait before one process is started again."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._restarts = TokenBucket(1 / RESTART_PERIOD_SECONDS, RESTARTS_IN_A_ROW)

    def delay(self, had_been_ready: bool, lived_seconds: float, now: float) -> float:
        """Seconds until the next start of a process that has ended after `lived_seconds`."""
        if had_been_ready or lived_seconds > SETTLED_SECONDS:
            self._seconds = 0.0
            wait = self._restarts.seconds_until_next(now)
            self._restarts.take(now + wait)
            return wait
        seconds = self._seconds
        self._seconds = min(max(2 * seconds, FIRST_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)
        return seconds


class Supervisor:
    """Runs in the main thread of `tgi up`, and of a role command for that role alone. Closes the sockets in `specs`."""

    def __init__(
        self, settings: Settings, specs: list[ProcessSpec], on_tick: Callable[[], None] = lambda: None
    ) -> None:
        self.settings = settings
        self._specs = specs
        self._on_tick = on_tick
        self._children: dict[str, ChildProcess] = {}
        self._restart_at: dict[str, float] = {}  # by time.monotonic, of ended processes
        self._backoff: dict[str, Backoff] = {spec.name: Backoff() for spec in specs}
        self._looked_at = time.monotonic()  # at the heartbeats
        self._pause_ends = 0.0
        self._ended: set[int] = set()  # pids whose metric files are still to be folded
        self._last_start = 0.0
        self._signals = 0
        self._failure = ""  # why the server must end, for the user

    def run(self) -> None:
        """Starts all processes and blocks until a signal has ended them. Raises UserError if one cannot run."""
        wake = self._listen_to_signals()
        try:
            for spec in self._specs:
                self._start(spec)
            poller = zmq.Poller()
            poller.register(wake.fileno(), zmq.POLLIN)
            while not self._failure:
                poller.poll(int(1000 * self._tick_seconds()))
                _drain(wake)
                if self._signals:  # before reaping: the same Ctrl-C may have ended a process that has just started
                    break
                if not (self.settings.run_dir / "state").is_dir():
                    self._failure = (
                        f"The run directory {self.settings.run_dir} was removed while the server ran. Start it again; "
                        "set TGI_RUN to a directory that nothing cleans up."
                    )
                    break
                self._reap(DRAIN_ORDER)
                self._replace_hung()
                self._restart_due()
                self._on_tick()
            self._stop()
        finally:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            while self._children:
                self._reap(restart=())
                time.sleep(0.01)
        if self._failure:
            raise UserError(self._failure)

    def _tick_seconds(self) -> float:
        settled = not self._restart_at and time.monotonic() - self._last_start > SETTLED_SECONDS
        return TICK_SECONDS if settled else STARTING_TICK_SECONDS

    def _listen_to_signals(self) -> socket.socket:
        read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        self._wake_write = write
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._count_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the poll
        return read

    def _count_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _start(self, spec: ProcessSpec) -> None:
        self._last_start = time.monotonic()
        child = self._children[spec.name] = ChildProcess(spec, self.settings)
        self._ended.discard(child.pid)  # a reused pid: the child continues to count in the existing file
        log.debug("started %s", spec.name, extra={"pid": child.pid})

    def _reap(self, restart: Sequence[str]) -> None:
        """Handles ended processes, and schedules restarts of those whose role is in `restart`."""
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is None:
                continue
            child.close()
            del self._children[name]
            state = rundir.read_state(self.settings.run_dir, name)
            child.had_been_ready = state is not None and state.pid == child.pid and state.state != "starting"
            rundir.remove_state(self.settings.run_dir, name)
            self._ended.add(child.pid)
            if child.spec.role not in restart:
                continue
            if code == FATAL:
                self._failure = self._failure or self._fatal_error(name)
            else:
                self._schedule_restart(child, code)
        if self._ended and metrics.fold_ended_processes(self.settings.run_dir / "metrics", self._ended):
            self._ended.clear()

    def _fatal_error(self, name: str) -> str:
        try:
            path = fatal_error_path(self.settings.run_dir, name)
            text = path.read_text()
            path.unlink()
            return text
        except OSError as error:
            return f"{name} cannot run; see its last log line ({error})"

    def _schedule_restart(self, child: ChildProcess, code: int) -> None:
        """Schedules the start of a new process after the backoff."""
        name = child.spec.name
        now = time.monotonic()
        self._restart_at[name] = now + self._backoff[name].delay(child.had_been_ready, now - child.started, now)
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        log.warning("%s (pid %d) %s; restarting it", name, child.pid, cause)
        metrics.tgi_process_restarts.labels(role=child.spec.role).inc()

    def _replace_hung(self) -> None:
        """Kills the children whose deadline has passed. Time in which this process did not run does not count."""
        now = time.monotonic()
        if now - self._looked_at > TICK_SECONDS + PAUSE_SECONDS:
            log.warning("the supervisor did not run for %.0f s", now - self._looked_at)
            self._pause_ends = now + PAUSE_SECONDS
        self._looked_at = now
        if now < self._pause_ends:
            return
        for name, child in self._children.items():
            if child.overdue() and child.poll() is None:
                log.error("%s (pid %d) missed its heartbeat deadline; killing it", name, child.pid)
                child.signal(signal.SIGKILL)

    def _restart_due(self) -> None:
        now = time.monotonic()
        for spec in self._specs:
            if self._restart_at.get(spec.name, now + 1) <= now:
                del self._restart_at[spec.name]
                self._start(spec)

    def _stop(self) -> None:
        """Drains the roles in the direction of requests, so that requests in flight can finish: a process of a later
        role that ends meanwhile is restarted.

        The api gets graceful_termination_timeout to finish its streams; a second signal kills it at once.
        """
        asked, failure = self._signals, self._failure
        for fd in {spec.listen_fd for spec in self._specs if spec.listen_fd is not None}:
            os.close(fd)  # new connections are refused instead of waiting in the backlog
        for position, role in enumerate(DRAIN_ORDER, 1):
            self._restart_at = {name: due for name, due in self._restart_at.items() if not name.startswith(role)}
            patient = role == "api" and not self._failure
            grace = self.settings.graceful_termination_timeout if patient else ROLE_GRACE_SECONDS
            deadline = time.monotonic() + grace
            if patient and self._children_of(role):
                log.info("draining: requests in flight may take up to %g s; a second signal ends them at once", grace)
            for child in self._children_of(role):
                child.signal(signal.SIGTERM)
            while (
                self._children_of(role)
                and time.monotonic() < deadline
                and (self._signals, self._failure) == (asked, failure)
            ):
                time.sleep(0.02)
                self._reap(restart=DRAIN_ORDER[position:])
                self._restart_due()
            cause = "did not end in time" if self._signals == asked else "has not ended before a second signal"
            for child in self._children_of(role):
                log.warning("%s %s; killing it", child.spec.name, cause)
                child.signal(signal.SIGKILL)

    def _children_of(self, role: str) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.spec.role == role]


def _drain(wake: socket.socket) -> None:
    try:
        while wake.recv(64):
            pass
    except BlockingIOError:
        pass


def listening_socket(hostname: str, port: int, reuse_port: bool = False) -> socket.socket:
    """The listening socket that the front ends share. Raises OSError if the port is in use.

    `reuse_port` sets SO_REUSEPORT, for front ends that are started alone. By default it is off, since a port in use
    would go unnoticed.
    """
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((hostname, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    os.set_inheritable(listener.fileno(), True)
    return listener
