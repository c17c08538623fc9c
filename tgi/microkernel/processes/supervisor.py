"""The supervisor: starts child processes, restarts those that end or hang, adds and retires processes of a role while
the server runs, and drains them role by role at the end."""

import contextlib
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Protocol

import zmq

from tgi.microkernel.admission.token_bucket import TokenBucket
from tgi.microkernel.errors import FATAL, UserError
from tgi.microkernel.host import rundir
from tgi.microkernel.host.terminal import ControllingTerminal
from tgi.microkernel.messages.protocol import ROLES, LastExit
from tgi.microkernel.observability import metrics
from tgi.microkernel.processes.child import ChildProcess, ProcessSpec
from tgi.microkernel.processes.control import ControlServer, StartOperation
from tgi.microkernel.processes.fork_server import ForkServer, adopting_orphans
from tgi.microkernel.processes.process import HAND_OVER, fatal_error_path
from tgi.microkernel.recovery.exit_causes import MORE_MEMORY, OUT_OF_MEMORY, TOO_LITTLE_TO_START
from tgi.microkernel.settings.loading import reread_api_keys
from tgi.microkernel.settings.table import Settings

log = logging.getLogger(__name__)

# In the direction of requests, which is the order of draining.
DRAIN_ORDER = ROLES

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

# Poll interval while a command (`tgi restart`, …) is carried out.
COMMAND_TICK_SECONDS = 0.05

# Grace of roles other than the api at shutdown; then they are killed.
ROLE_GRACE_SECONDS = 5.0

# What ended processes have left behind is waited for at the end, at most so long: memory of many GB takes a while.
DESCENDANT_GRACE_SECONDS = 10.0

# A process that was told to hand over is killed this long after graceful_termination_timeout, which front ends keep by
# themselves. The other roles need no more than the step or the text that they are at.
HAND_OVER_MARGIN_SECONDS = 10.0


class Managed(Protocol):
    """What the supervisor does between its other work: commands, and the models of a server with several."""

    @property
    def busy(self) -> bool:
        """Whether `advance` is to be called from time to time."""

    @property
    def descriptors(self) -> list[int]:
        """Those to poll: `advance` is to be called when one is readable."""

    def advance(self) -> None:
        """Does what can be done now, without blocking."""

    def close(self, reason: str) -> None:
        """Ends, since the server ends."""


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
        self,
        settings: Settings,
        specs: list[ProcessSpec],
        terminal: ControllingTerminal,
        on_tick: Callable[[], None] = lambda: None,
        fork_server: Callable[[str, Settings], ForkServer | None] = lambda role, settings: None,
    ) -> None:
        """`fork_server` chooses the one for a process of this role with these settings."""
        self._pipelines = {settings.pipeline: settings}  # all but one are starting or draining: see `tgi reload`
        self._current = settings.pipeline
        self._specs = specs
        self._listen_fds = {spec.role: spec.listen_fd for spec in specs}
        self._terminal = terminal
        self._on_tick = on_tick
        self._fork_server = fork_server
        self._left_servers: dict[str, ForkServer] = {}  # that workers leave behind, by name; some are still to come
        self._ended_groups: set[int] = set()  # process groups of ended children, in which others may still run
        self._trials: dict[str, str] = {}  # processes that were added and have not been ready: why they ended, or ""
        self._retiring: set[str] = set()  # processes that were told to end for good
        self._replacing: set[str] = set()  # processes that were told to end and are started again at once
        self._kill_at: dict[str, float] = {}  # when these are killed, by time.monotonic
        self._hang_up = False  # a SIGHUP is to be handled
        self._to_reload: set[str] = set()  # front ends that are to reload their files
        self._children: dict[str, ChildProcess] = {}
        self._start_at: dict[str, float] = {}  # by time.monotonic, of processes that do not run
        self._last_exits: dict[str, LastExit | None] = {}  # of the processes that ended last
        self._backoff: dict[str, Backoff] = {}
        self._served: set[str] = set()  # names of processes of which one has been ready and has ended
        self._began = self._looked_at = time.monotonic()  # when it looked at the heartbeats
        self._pause_ends = 0.0
        self._ended: set[int] = set()  # pids whose metric files are still to be folded
        self._last_start = 0.0
        self._signals = 0
        self._failure = ""  # why the server must end, for the user

    def run(self, start_operation: StartOperation, models: Managed | None = None) -> None:
        """Starts all processes and blocks until a signal has ended them. Raises UserError if one cannot run.

        `start_operation` carries out the commands of `tgi restart` and others. `models`: those of a server with
        several.
        """
        with adopting_orphans() if sys.platform == "linux" else contextlib.nullcontext():
            self._run(start_operation, models)

    def _run(self, start_operation: StartOperation, models: Managed | None) -> None:
        wake = self._listen_to_signals()
        control = ControlServer(rundir.control_socket(self.settings.run_dir, os.getpid()), start_operation)
        served: list[Managed] = [control, *([models] if models is not None else [])]
        try:
            for spec in self._specs:
                self._start(spec)
            while not self._failure:
                descriptors = [one for server in served for one in server.descriptors]
                descriptors += self._awaited_fork_servers()
                _wait([wake.fileno(), *descriptors], self._tick_seconds(any(server.busy for server in served)))
                _drain(wake)
                if self._signals:  # before reaping: the same Ctrl-C may have ended a process that has just started
                    break
                if not os.path.isdir(self.settings.run_dir / "state"):  # false for an error, too
                    self._failure = (
                        f"The run directory {self.settings.run_dir} was removed while the server ran, or it cannot be "
                        "read any more. Start it again; set TGI_RUN to a directory that nothing cleans up."
                    )
                    break
                self._reap(DRAIN_ORDER)
                self._replace_hung()
                self._kill_overdue()
                self._start_due()
                if self._hang_up:
                    self._handle_hang_up()
                self._forward_reloads()
                for server in served:
                    server.advance()
                self._on_tick()
            for server in served:
                server.close("The server ends.")
            self._stop()
        finally:
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            for name in list(self._left_servers):
                self._end_left_server(name)
            while self._children:
                self._reap(restart=())
                time.sleep(0.01)
            self._reap_descendants()
            signal.set_wakeup_fd(-1)  # `wake` is closed now
        if self._failure:
            raise UserError(self._failure)

    @property
    def settings(self) -> Settings:
        """The settings of the pipeline that serves."""
        return self._pipelines[self._current]

    # --- for operations (rollout.py), all in the thread of `run` ---

    def processes(self, role: str) -> list[ProcessSpec]:
        """The processes of a role by number, without those that were told to end."""
        specs = [spec for spec in self._specs if spec.role == role and spec.name not in self._retiring]
        return sorted(specs, key=lambda spec: spec.replica)

    def add(self, role: str, pipeline: int | None = None) -> ProcessSpec:
        """Starts another process of a role, by default for the pipeline that serves. If it ends before it is ready, it
        is not restarted: see `start_error`. Raises UserError if it cannot be started."""
        pipeline = self._current if pipeline is None else pipeline
        if role in rundir.SINGLE_ROLES:
            others = [spec for spec in self._specs if spec.role == role]
            replica = _lowest_free(spec.replica for spec in others)
            index = _lowest_free(spec.index for spec in others if spec.pipeline == pipeline)
            spec = ProcessSpec(role, replica, pipeline=pipeline, index=index)
        else:
            claimed = rundir.claim_process(self.settings.run_dir, role)
            spec = ProcessSpec(role, claimed.replica, self._listen_fds.get(role), lock=claimed.lock, pipeline=pipeline)
        self._specs.append(spec)
        try:
            self._start(spec)
        except UserError:
            self._forget(spec)
            raise
        self._trials[spec.name] = ""
        return spec

    def start_error(self, spec: ProcessSpec) -> str:
        """Why a process that was added has ended before it was ready, or ""."""
        return self._trials.get(spec.name, "")

    def state(self, spec: ProcessSpec) -> rundir.ProcessState | None:
        """What a running process has published."""
        child = self._children.get(spec.name)
        state = rundir.read_state(self.settings.run_dir, spec.name)
        return state if child is not None and state is not None and state.pid == child.pid else None

    def confirm(self, spec: ProcessSpec) -> None:
        """From now on a process that was added is restarted like the others."""
        self._trials.pop(spec.name, None)

    def retire(self, spec: ProcessSpec, drain: bool = False) -> None:
        """Tells a process to hand over, and forgets it when it has ended. One that was added and not confirmed, which
        has no requests, is killed. With `drain` it finishes its requests first; a second call ends that."""
        on_trial = self._trials.pop(spec.name, None) is not None
        if spec not in self._specs:
            return  # it has ended by itself
        self._retiring.add(spec.name)
        if self._hand_over(spec, drain) is None:
            self._forget(spec)
        elif on_trial:
            self._children[spec.name].signal(signal.SIGKILL)

    def has_retired(self, spec: ProcessSpec) -> bool:
        """Whether a process that was told to end has ended."""
        return spec.name not in self._retiring

    def replace(self, spec: ProcessSpec, drain: bool = False) -> int | None:
        """Tells a process to hand over to one that is started when it has ended. `drain` as in `retire`. Returns its
        pid, None if it does not run now."""
        pid = self._hand_over(spec, drain)
        if pid is not None:
            self._replacing.add(spec.name)
        return pid

    def create_pipeline(self, settings: Settings, pipeline: int | None = None) -> int:
        """A pipeline with these settings, without processes. Returns its number: by default the lowest free one, so
        that the files of its processes replace those of an earlier pipeline."""
        pipeline = _lowest_free(self._pipelines) if pipeline is None else pipeline
        own = self.settings
        rundir.pipeline_directory(own.run_dir, pipeline).mkdir(mode=0o700, exist_ok=True)
        self._pipelines[pipeline] = replace(settings, run_dir=own.run_dir, port=own.port, pipeline=pipeline)
        return pipeline

    def set_replicas(self, replicas: int) -> None:
        """The number of replicas that processes of the serving pipeline expect from now on, when they start."""
        self._pipelines[self._current] = replace(self.settings, replicas=replicas)

    def switch_to_pipeline(self, pipeline: int) -> None:
        """Makes a pipeline the one that serves."""
        self._current = pipeline
        rundir.write_pipeline(self.settings.run_dir, pipeline)

    def remove_pipeline(self, pipeline: int) -> None:
        """Removes a pipeline without processes."""
        directory = rundir.pipeline_directory(self.settings.run_dir, pipeline)
        if directory != self.settings.run_dir:
            shutil.rmtree(directory, ignore_errors=True)
        del self._pipelines[pipeline]

    def other_supervisors(self) -> set[int]:
        """The pids of other supervisors in the run directory."""
        return set(rundir.lock_holders(self.settings.run_dir).values()) - {os.getpid()}

    # --- internals ---

    def _hand_over(self, spec: ProcessSpec, drain: bool) -> int | None:
        """Tells a process to hand over, or to drain. Returns its pid, None if it does not run now."""
        child = self._children.get(spec.name)
        if child is None:
            return None
        patience = self.settings.graceful_termination_timeout + HAND_OVER_MARGIN_SECONDS
        self._kill_at[spec.name] = time.monotonic() + patience
        child.signal(signal.SIGTERM if drain else HAND_OVER)
        return child.pid

    def _forget(self, spec: ProcessSpec) -> None:
        """Removes a process that has ended from those to keep running."""
        self._specs.remove(spec)
        self._end_left_server(spec.name)
        self._retiring.discard(spec.name)
        self._start_at.pop(spec.name, None)
        self._served.discard(spec.name)
        self._last_exits.pop(spec.name, None)  # a later process of this name does not take over its requests
        self._remove_socket(spec)
        if spec.role == "scheduler":
            rundir.successor_path(self.settings.run_dir, spec.name).unlink(missing_ok=True)
        if spec.lock is not None:
            spec.lock.release()

    def _remove_socket(self, spec: ProcessSpec) -> None:
        """Removes the socket of a process that has ended for good."""
        directory = rundir.pipeline_directory(self.settings.run_dir, spec.pipeline)
        if spec.role == "tokenizer":
            (directory / rundir.tokenizer_socket(spec.replica)).unlink(missing_ok=True)
        elif spec.role == "media":
            (directory / rundir.media_socket(spec.replica)).unlink(missing_ok=True)
        elif spec.role == "scheduler":
            for side in ("front", "back"):
                (directory / rundir.scheduler_socket(spec.index, side)).unlink(missing_ok=True)

    def _kill_overdue(self) -> None:
        for name, deadline in self._kill_at.items():
            child = self._children.get(name)
            if child is not None and time.monotonic() > deadline:
                log.warning("%s did not end in time; killing it", name)
                child.signal(signal.SIGKILL)

    def _handle_hang_up(self) -> None:
        self._hang_up = False
        if self._terminal.has_hung_up():
            self._signals = max(self._signals, 1)  # a shell may repeat it; that is no second signal of the user
            return
        try:
            reread_api_keys(self.settings)  # by the front ends, when they get the signal or start
        except UserError as error:
            log.error("SIGHUP: nothing is reloaded. %s", error)
            return
        self._to_reload = {spec.name for spec in self._specs if spec.role == "api"}

    def _forward_reloads(self) -> None:
        """Has the front ends reload keys and adapters. One that is starting would not survive the signal."""
        for spec in self.processes("api"):
            state = self.state(spec) if spec.name in self._to_reload else None
            if state is not None and state.state == "ready":
                self._children[spec.name].signal(signal.SIGHUP)
                self._to_reload.remove(spec.name)

    def _tick_seconds(self, busy: bool) -> float:
        if busy:
            return COMMAND_TICK_SECONDS
        settled = not self._start_at and time.monotonic() - self._last_start > SETTLED_SECONDS
        return TICK_SECONDS if settled else STARTING_TICK_SECONDS

    def _listen_to_signals(self) -> socket.socket:
        read, write = socket.socketpair()
        read.setblocking(False)
        write.setblocking(False)
        self._wake_write = write
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._count_signal)
        signal.signal(signal.SIGHUP, self._note_hang_up)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the poll
        return read

    def _count_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _note_hang_up(self, number: int, frame: object) -> None:
        self._hang_up = True

    def _start(self, spec: ProcessSpec) -> None:
        """Starts a process. It is put off while its fork server imports, and at a start of the server while the first
        process of its role is not ready. Raises UserError if the system cannot start it."""
        now = time.monotonic()
        fork_server = self._fork_server_of(spec)
        imports = fork_server is not None and fork_server.is_ready() is None
        if (imports or self._first_is_starting(spec)) and now < self._began + self.settings.start_timeout:
            self._start_at[spec.name] = now
            return
        self._last_start = now
        try:
            child = self._start_child(spec, self._settings_of(spec), fork_server)
        except OSError as error:
            raise UserError(
                f"Cannot start {spec.name}: {error.strerror}. Processes, files, memory or disk space of "
                f"{self.settings.run_dir} are used up."
            ) from error
        self._children[spec.name] = child
        self._ended.discard(child.pid)  # a reused pid: the child continues to count in the existing file
        log.debug("started %s", spec.name, extra={"pid": child.pid})

    def _first_is_starting(self, spec: ProcessSpec) -> bool:
        """Whether another process is the first one of this role, and has not been ready yet.

        Until then the processors are for the import of torch, which takes most of a start. Workers and schedulers of
        several replicas start at the same time.
        """
        first = self.processes(spec.role)[0]
        if spec is first or spec.role in rundir.SINGLE_ROLES or spec.name in self._last_exits:
            return False
        state = self.state(first)
        return first.name not in self._last_exits and (state is None or state.state == "starting")

    def _settings_of(self, spec: ProcessSpec) -> Settings:
        return replace(self._pipelines[spec.pipeline], replica_index=spec.index)

    def _fork_server_of(self, spec: ProcessSpec) -> ForkServer | None:
        return self._fork_server(spec.role, self._settings_of(spec))

    def _awaited_fork_servers(self) -> set[int]:
        """The descriptors of the fork servers of processes that are due."""
        servers = map(self._fork_server_of, self._due())
        return {server.fileno() for server in servers if server is not None and not server.lost}

    def _start_child(self, spec: ProcessSpec, settings: Settings, fork_server: ForkServer | None) -> ChildProcess:
        """Starts a process. A worker is forked by what its predecessor has left behind, or is to leave something."""
        last_exit, left = self._last_exits.get(spec.name), self._left_servers.get(spec.name)
        if left is not None and left.is_ready():
            return ChildProcess(spec, settings, last_exit, left)
        if spec.role != "worker" or fork_server is None:
            return ChildProcess(spec, settings, last_exit, fork_server)
        self._end_left_server(spec.name)
        connection, requests = socket.socketpair()
        self._left_servers[spec.name] = ForkServer(None, connection)
        with requests:
            return ChildProcess(spec, settings, last_exit, fork_server, requests)

    def _end_left_server(self, name: str) -> None:
        if (left := self._left_servers.pop(name, None)) is not None:
            left.close()

    def _reap_groups(self) -> None:
        """Reaps what ended children had started themselves, whose parent this process is now."""
        for group in list(self._ended_groups):
            try:
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                self._ended_groups.remove(group)

    def _reap_descendants(self) -> None:
        """Waits for what ended children had started, such as the fork servers of workers, which were told to end: else
        another process would have to reap it."""
        deadline = time.monotonic() + DESCENDANT_GRACE_SECONDS
        while self._ended_groups and time.monotonic() < deadline:
            self._reap_groups()
            time.sleep(0.01)

    def _reap(self, restart: Sequence[str]) -> None:
        """Handles ended processes, and schedules restarts of those whose role is in `restart`."""
        self._reap_groups()
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is None:
                child.tick()
                continue
            child.close()
            state = rundir.read_state(self.settings.run_dir, name)
            child.had_been_ready = state is not None and state.pid == child.pid and state.state != "starting"
            report = child.exit_report(code)
            if report is not None and name in self._replacing:
                report = report._replace(in_progress=b"")  # it was told to end: no request is the cause
            self._last_exits[name] = report
            cause, _ = child.cause_of_exit(code)
            del self._children[name]
            rundir.remove_state(self.settings.run_dir, name)
            if child.had_been_ready:
                self._served.add(name)
            else:  # what its predecessor has left behind may be the cause
                self._end_left_server(name)
            self._ended.add(child.pid)
            self._ended_groups.add(child.pid)
            self._kill_at.pop(name, None)
            if name in self._retiring:
                self._forget(child.spec)
            elif child.spec.role not in restart:
                if self._shares(child.spec.role):
                    self._remove_socket(child.spec)
            elif name in self._trials:
                self._trials[name] = self._fatal_error(name) if code == FATAL else f"{name} {cause}"
                self._forget(child.spec)
            elif name in self._replacing:
                self._replacing.remove(name)
                self._start_at[name] = time.monotonic()
            elif code == FATAL and not child.had_been_ready and name not in self._served:
                self._failure = self._failure or self._fatal_error(name)
            else:
                if code == FATAL:  # a request may have ended it, or the cause may pass: a full disk, memory in use
                    log.error("%s", self._fatal_error(name))
                self._schedule_restart(child, cause)
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

    def _schedule_restart(self, child: ChildProcess, cause: str) -> None:
        """Schedules the start of a new process after the backoff."""
        name = child.spec.name
        now = time.monotonic()
        backoff = self._backoff.setdefault(name, Backoff())
        self._start_at[name] = now + backoff.delay(child.had_been_ready, now - child.started, now)
        log.warning("%s (pid %d) %s; restarting it", name, child.pid, cause)
        if cause == OUT_OF_MEMORY:
            log.error("%s", MORE_MEMORY if child.had_been_ready else TOO_LITTLE_TO_START)
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
        for child in self._children.values():
            if child.overdue() and child.poll() is None:
                child.kill_hung()

    def _due(self) -> list[ProcessSpec]:
        """The processes to start now."""
        now = time.monotonic()
        return [spec for spec in self._specs if self._start_at.get(spec.name, now + 1) <= now]

    def _start_due(self) -> None:
        for spec in self._due():
            del self._start_at[spec.name]
            try:
                self._start(spec)
            except UserError as error:
                if spec.name in self._trials:
                    self._trials[spec.name] = str(error)
                    self._forget(spec)
                else:  # the others may serve on, and later this one may start
                    log.error("%s", error)
                    self._start_at[spec.name] = time.monotonic() + MAX_BACKOFF_SECONDS

    def _stop(self) -> None:
        """Drains the roles in the direction of requests, so that requests in flight can finish: a process of a later
        role that ends or hangs meanwhile is replaced.

        The api gets graceful_termination_timeout to finish its streams; a second signal kills it at once.
        """
        asked, failure = self._signals, self._failure
        killed: dict[str, list[str]] = {}  # cause -> names
        for fd in filter(None, self._listen_fds.values()):
            os.close(fd)  # new connections are refused instead of waiting in the backlog
        for position, role in enumerate(DRAIN_ORDER, 1):
            self._start_at = {name: due for name, due in self._start_at.items() if not name.startswith(role)}
            patient = role == "api" and not self._failure
            grace = self.settings.graceful_termination_timeout if patient else ROLE_GRACE_SECONDS
            deadline = time.monotonic() + grace
            if patient and self._children_of(role):
                log.info("draining: requests in flight may take up to %g s; a second signal ends them at once", grace)
            order = HAND_OVER if role in ("media", "tokenizer") and self._shares(role) else signal.SIGTERM
            for child in self._children_of(role):
                child.signal(order)
            while (
                self._children_of(role)
                and time.monotonic() < deadline
                and (self._signals, self._failure) == (asked, failure)
            ):
                time.sleep(0.02)
                self._reap(restart=DRAIN_ORDER[position:])
                self._replace_hung()
                self._start_due()
            cause = "they did not end in time" if self._signals == asked else "a second signal came"
            for child in self._children_of(role):
                killed.setdefault(cause, []).append(child.spec.name)
                child.signal(signal.SIGKILL)
        for cause, names in killed.items():
            log.warning("killed, since %s: %s", cause, ", ".join(names))

    def _shares(self, role: str) -> bool:
        """Whether another supervisor has processes of this role."""
        holders = rundir.lock_holders(self.settings.run_dir)
        return any(name.startswith(f"{role}-") and pid != os.getpid() for name, pid in holders.items())

    def _children_of(self, role: str) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.spec.role == role]


def _lowest_free(taken: Iterable[int]) -> int:
    """The lowest number from 0 on that is not taken."""
    used = set(taken)
    return next(number for number in count() if number not in used)


def _wait(descriptors: list[int], seconds: float) -> None:
    """Waits until one of the descriptors is readable, at most so long."""
    poller = zmq.Poller()
    for descriptor in descriptors:
        poller.register(descriptor, zmq.POLLIN)
    poller.poll(int(1000 * seconds))


def _drain(wake: socket.socket) -> None:
    try:
        while wake.recv(64):
            pass
    except BlockingIOError:
        pass


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard one; children inherit it. Each connection is an open file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS allows fewer than it reports
        log.debug("the limit of open files stays as it is: %s", error)


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
