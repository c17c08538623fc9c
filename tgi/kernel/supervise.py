"""Keeps a set of processes alive: starts them, replaces those that die or hang, and drains them floor by floor."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

import zmq

from tgi.kernel import metrics, rundir
from tgi.kernel.errors import FATAL, UserError
from tgi.kernel.settings import Settings
from tgi.kernel.spawn import Child, Spec, last_words

log = logging.getLogger(__name__)

# From the top of the house to the bottom: the order in which requests drain.
FLOORS = ("api", "tokenizer", "scheduler", "worker")
# A process that dies within this time of its start is restarted with growing patience.
SETTLED_SECONDS = 10.0
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.1, 10.0
# How often a supervisor looks while its processes start, and later. A process that ends wakes it at once.
STARTING_TICK_SECONDS, TICK_SECONDS = 0.1, 1.0
# After draining was asked for: what a floor other than the api gets before it is killed.
FLOOR_SECONDS = 5.0


class Supervisor:
    """Runs in the main thread of `tgi up`, and of a role command for that role alone. Closes the sockets in `specs`."""

    def __init__(self, settings: Settings, specs: list[Spec], on_tick: Callable[[], None] = lambda: None) -> None:
        self.settings = settings
        self._specs = specs
        self._on_tick = on_tick
        self._children: dict[str, Child] = {}
        self._due: dict[str, float] = {}  # when to start a process that is down
        self._backoff: dict[str, float] = {}
        self._ended: set[int] = set()  # pids of children whose files of metrics are still to be folded
        self._latest = 0.0  # when a process was last started
        self._signals = 0
        self._failure = ""  # why the tree must end, for the user

    def run(self) -> None:
        """Starts everything and stays until a signal. Raises UserError, when all have ended, if one cannot run."""
        wake = self._listen_to_signals()
        try:
            for spec in self._specs:
                self._start(spec)
            poller = zmq.Poller()
            poller.register(wake.fileno(), zmq.POLLIN)
            while not self._failure:
                poller.poll(int(1000 * self._tick_seconds()))
                _drain(wake)
                if self._signals:  # before looking who has ended: the same Ctrl-C may have ended who has just started
                    break
                if not (self.settings.run_dir / "state").is_dir():
                    self._failure = (
                        f"The run directory {self.settings.run_dir} was removed while the server ran. Start it again; "
                        "set TGI_RUN to a directory that nothing cleans up."
                    )
                    break
                self._reap(FLOORS)
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
        settled = not self._due and time.monotonic() - self._latest > SETTLED_SECONDS
        return TICK_SECONDS if settled else STARTING_TICK_SECONDS

    def _listen_to_signals(self) -> socket.socket:
        read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        self._wake_write = write
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._count_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the poll
        return read

    def _count_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _start(self, spec: Spec) -> None:
        self._latest = time.monotonic()
        child = self._children[spec.name] = Child(spec, self.settings)
        self._ended.discard(child.pid)  # a reused pid: the child goes on counting in the file that is there
        log.debug("started %s", spec.name, extra={"pid": child.pid})

    def _reap(self, restart: Sequence[str]) -> None:
        """Buries who has ended; those of the roles in `restart` are to live again."""
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is None:
                continue
            child.close()
            del self._children[name]
            rundir.remove_state(self.settings.run_dir, name)
            self._ended.add(child.pid)
            if child.spec.role not in restart:
                continue
            if code == FATAL:
                self._failure = self._failure or self._why(name)
            else:
                self._schedule(child, code)
        if self._ended and metrics.forget(self.settings.run_dir / "metrics", self._ended):
            self._ended.clear()

    def _why(self, name: str) -> str:
        try:
            words = last_words(self.settings.run_dir, name)
            text = words.read_text()
            words.unlink()
            return text
        except OSError as error:
            return f"{name} cannot run; its last message says why ({error})"

    def _schedule(self, child: Child, code: int) -> None:
        """Restarts at once a process that had settled, and with growing patience one that keeps dying."""
        name = child.spec.name
        settled = time.monotonic() - child.started > SETTLED_SECONDS
        wait = 0.0 if settled else self._backoff.get(name, 0.0)
        self._backoff[name] = 0.0 if settled else min(max(2 * wait, FIRST_BACKOFF_SECONDS), LONGEST_BACKOFF_SECONDS)
        self._due[name] = time.monotonic() + wait
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        log.warning("%s (pid %d) %s; starting it again", name, child.pid, cause)
        metrics.tgi_process_restarts.labels(role=child.spec.role).inc()

    def _replace_hung(self) -> None:
        for name, child in self._children.items():
            if child.overdue() and child.poll() is None:
                log.error("%s (pid %d) gives no sign of life; killing it", name, child.pid)
                child.signal(signal.SIGKILL)

    def _restart_due(self) -> None:
        now = time.monotonic()
        for spec in self._specs:
            if self._due.get(spec.name, now + 1) <= now:
                del self._due[spec.name]
                self._start(spec)

    def _stop(self) -> None:
        """Drains the floors from the top, so that whatever is in flight finds the floors below still standing: one of
        them that dies meanwhile is replaced.

        The api gets the grace of the settings to finish its streams; a second signal ends the patience.
        """
        asked, failure = self._signals, self._failure
        for fd in {spec.listen_fd for spec in self._specs if spec.listen_fd is not None}:
            os.close(fd)  # who comes now is refused, not left waiting in the port's queue
        for height, floor in enumerate(FLOORS, 1):
            self._due = {name: due for name, due in self._due.items() if not name.startswith(floor)}
            patient = floor == "api" and not self._failure
            grace = self.settings.graceful_termination_timeout if patient else FLOOR_SECONDS
            deadline = time.monotonic() + grace
            if patient and self._on(floor):
                log.info("draining: requests in flight may take up to %g s; a second signal ends them at once", grace)
            for child in self._on(floor):
                child.signal(signal.SIGTERM)
            while (
                self._on(floor) and time.monotonic() < deadline and (self._signals, self._failure) == (asked, failure)
            ):
                time.sleep(0.02)
                self._reap(restart=FLOORS[height:])
                self._restart_due()
            cause = "did not end in time" if self._signals == asked else "has not ended, and is to end at once"
            for child in self._on(floor):
                log.warning("%s %s; killing it", child.spec.name, cause)
                child.signal(signal.SIGKILL)

    def _on(self, floor: str) -> list[Child]:
        return [child for child in self._children.values() if child.spec.role == floor]


def _drain(wake: socket.socket) -> None:
    try:
        while wake.recv(64):
            pass
    except BlockingIOError:
        pass


def listening_socket(hostname: str, port: int, share: bool = False) -> socket.socket:
    """The port that the front ends share, taken with a plain bind so that a port in use is always seen.

    `share` sets SO_REUSEPORT, for front ends that are started alone. Raises OSError if the port is in use.
    """
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((hostname, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    os.set_inheritable(listener.fileno(), True)
    return listener
