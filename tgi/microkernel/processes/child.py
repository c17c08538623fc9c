"""A child process that runs a role: its start, its heartbeat, and the report of its end. The supervisor has them, and a
worker its further ranks."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from tgi.microkernel.host import interpreter, rundir
from tgi.microkernel.messages.protocol import LastExit
from tgi.microkernel.processes.fork_server import ForkedProcess, ForkServer, ForkServerLost
from tgi.microkernel.processes.process import (
    FORK_REQUESTS_FD,
    LAST_EXIT,
    LISTEN_FD,
    LOOP_TURN_SECONDS,
    PARENT_FD,
    PARENT_PID,
    SETTINGS,
    Heartbeat,
    last_exit_text,
    work_register_path,
)
from tgi.microkernel.recovery.exit_causes import HUNG, STOPPED, OomKills, cause_of_exit
from tgi.microkernel.recovery.work_register import WorkRegister
from tgi.microkernel.settings.table import Settings

log = logging.getLogger(__name__)

P = TypeVar("P")

# A fork server that has imported answers at once, unless the system is short of everything.
FORK_SECONDS = 60.0

# How often to look whether a signal has stopped a process that need not report soon.
LOOK_SECONDS = 1.0


class StartedChild(NamedTuple, Generic[P]):
    """A process that was started, and the writing end of its pipe. The child reads EOF when this process ends for any
    reason; close it when the child has ended."""

    process: P
    pipe: int


def start_child(
    settings: Settings,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    inherited: Mapping[str, int],
    start: Callable[[Sequence[str], Mapping[str, str], Mapping[str, int]], P],
) -> StartedChild[P]:
    """Starts `run_role(arguments)` in a new process, by `start_interpreter`, a fork server or `fork_role`. Its further
    variables are `environment`, and `inherited` with the numbers of file descriptors. To be called by the main thread:
    the child is killed when the thread that has started it ends. Raises OSError."""
    parent_end, pipe = os.pipe()
    own = {SETTINGS: settings.to_json(), PARENT_PID: str(os.getpid())}
    variables = {**interpreter.child_environment(), **environment, **own}
    try:
        return StartedChild(start(arguments, variables, {**inherited, PARENT_FD: parent_end}), pipe)
    except OSError:
        os.close(pipe)
        raise
    finally:
        os.close(parent_end)


def start_interpreter(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Mapping[str, int],
    process_group: int | None = 0,
) -> "subprocess.Popen[bytes]":
    """Starts `python -m tgi.microkernel ARGUMENTS`, by default in a process group of its own: signals of the terminal
    (Ctrl-C, hang-up) reach the supervisor only, which drains the roles in order. None: in that of this process. Raises
    OSError."""
    return subprocess.Popen(
        interpreter.python_command("tgi.microkernel", *arguments),
        env={**environment, **{name: str(descriptor) for name, descriptor in descriptors.items()}},
        pass_fds=[*descriptors.values()],
        stdin=subprocess.DEVNULL,
        process_group=process_group,
    )


def start_forked(
    server: ForkServer,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Mapping[str, int],
) -> "ForkedProcess | subprocess.Popen[bytes]":
    """Has a fork server that has imported start the process; a new interpreter, if the server is lost. Raises
    OSError."""
    if not server.lost:
        try:
            return server.start(arguments, environment, descriptors, FORK_SECONDS)
        except ForkServerLost as error:
            log.warning("%s. From now on processes start as new interpreters, which takes longer", error)
    return start_interpreter(arguments, environment, descriptors)


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep running."""

    role: str
    replica: int
    listen_fd: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    lock: rundir.RunDirLock | None = None  # of its name; None for the single roles, whose lock the supervisor keeps
    pipeline: int = 0
    index: int = 0  # of a scheduler or worker: its place among the replicas of its pipeline

    @property
    def name(self) -> str:
        """Role and replica, such as `api-0`."""
        return f"{self.role}-{self.replica}"


class ChildProcess:
    """A running process. Must be started by the main thread: the parent-death signal is sent when that thread ends."""

    def __init__(
        self,
        spec: ProcessSpec,
        settings: Settings,
        last_exit: LastExit | None = None,
        fork_server: ForkServer | None = None,
        fork_requests: socket.socket | None = None,
    ) -> None:
        """`last_exit`: how the previous process of this role and replica ended. `fork_requests`: see Process. Raises
        OSError if the system has no process, file or memory left."""
        self.spec = spec
        self.started = time.monotonic()
        self.work_register = WorkRegister.open(work_register_path(settings.run_dir, spec.name))
        self._last_exit = last_exit
        self._oom_kills = OomKills()
        self._hung = ""  # HUNG or STOPPED, once it has been killed for that
        self._stop_limit = min(LOOP_TURN_SECONDS, settings.hang_timeout)
        self._stopped_at: float | None = None  # when it was first seen stopped, if it still is
        self._look_at = self.started
        self.had_been_ready = False  # known when it has ended
        self.heartbeat = Heartbeat(settings.run_dir / f"{spec.name}.beat")
        self.heartbeat.begin(self.started + settings.start_timeout)
        environment = dict(spec.environment)
        if last_exit is not None:
            environment[LAST_EXIT] = last_exit_text(last_exit)
        inherited = {} if spec.listen_fd is None else {LISTEN_FD: spec.listen_fd}
        if fork_requests is not None:
            inherited[FORK_REQUESTS_FD] = fork_requests.fileno()
        arguments = spec.role, str(spec.replica)
        start = start_interpreter if fork_server is None else partial(start_forked, fork_server)
        self._process, self._pipe = start_child(settings, arguments, environment, inherited, start)

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

    def tick(self) -> None:
        """To be called at each tick of the supervisor while it runs."""
        self._oom_kills.tick()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            # One that turns its loop is overdue soon, if it is stopped.
            is_stopped = self.heartbeat.read_deadline() > now + 2 * self._stop_limit and _is_stopped(self.pid)
            self._stopped_at = (self._stopped_at or now) if is_stopped else None

    def overdue(self) -> bool:
        """Whether its heartbeat deadline has passed, or a signal has stopped it for as long as a loop may stand still:
        a process that loads has a deadline minutes later."""
        now = time.monotonic()
        stopped_for = 0.0 if self._stopped_at is None else now - self._stopped_at
        return now > self.heartbeat.read_deadline() or stopped_for > self._stop_limit

    def kill_hung(self) -> None:
        """Kills it because it makes no progress. Called again while it dies, it does nothing."""
        if self._hung:
            return
        self._hung = STOPPED if _is_stopped(self.pid) else HUNG
        why = "missed its heartbeat deadline" if self._stopped_at is None else "is stopped by a signal while it works"
        log.error("%s (pid %d) %s; killing it", self.spec.name, self.pid, why)
        self.signal(signal.SIGKILL)

    def cause_of_exit(self, code: int) -> tuple[str, bool]:
        """Why it ended, in words, and whether the cause is outside of it."""
        if self._hung:
            return self._hung, self._hung == STOPPED
        return cause_of_exit(code, self._oom_kills.has_risen())

    def exit_report(self, code: int) -> LastExit | None:
        """How it ended, for its successor. What it had in progress may be the cause, unless it was a signal from
        outside.

        A process that ended before it took the work register did nothing that its predecessor's report does not say.
        One that was never ready and had nothing in progress may have ended before it could deliver that report, so its
        successor does. Neighbours know the predecessor by its boot id, so a report that they get twice counts once. A
        scheduler needs no neighbour for it.
        """
        boot, in_progress = self.work_register.boot, self.work_register.in_progress()
        if self._last_exit is not None:
            may_be_undelivered = self.spec.role != "scheduler" and not (self.had_been_ready or in_progress)
            if may_be_undelivered or self._last_exit.boot == boot:
                return self._last_exit
        if not any(boot):
            return None
        cause, outside = self.cause_of_exit(code)
        lived_ms = int(1000 * (time.monotonic() - self.started))
        return LastExit(boot, cause, outside, in_progress, lived_ms)

    def close(self) -> None:
        """Releases the resources of an ended process."""
        os.close(self._pipe)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process or a child of it: a rank of a worker waits for the others."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    return True
    return False
