"""The child side of supervision: the entry point of every child process, its poll loop, state file and heartbeat.

A fork server forks a process that calls `run_role`, or the supervisor starts `python -m tgi.microkernel ROLE REPLICA`,
which calls it. That calls `tgi.ROLE.main.main(process)`.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tgi import __version__
from tgi.microkernel.errors import FATAL, UserError
from tgi.microkernel.host import interpreter, rundir
from tgi.microkernel.host.mapped_file import map_file
from tgi.microkernel.links import curve
from tgi.microkernel.links.link import Link, PeerId, send_remaining
from tgi.microkernel.links.liveness import BEAT_SECONDS
from tgi.microkernel.messages.protocol import PROTOCOL, Beat, Hello, LastExit
from tgi.microkernel.observability import log, metrics
from tgi.microkernel.observability.progress import server_url
from tgi.microkernel.recovery.exit_causes import TOO_LITTLE_TO_START, is_lack_of_memory
from tgi.microkernel.recovery.work_register import WorkRegister
from tgi.microkernel.settings.table import QUANTIZED_AT_LOAD, Settings

logger = logging.getLogger(__name__)

# A loop that has not turned for this long hangs, or for `hang_timeout` if that is shorter. Work that may take longer
# extends the deadline before it begins.
LOOP_TURN_SECONDS = 10.0

# Environment variables that the supervisor passes to a child.
SETTINGS, PARENT_PID, PARENT_FD, LISTEN_FD = "TGI_CHILD_SETTINGS", "TGI_PARENT_PID", "TGI_PARENT_FD", "TGI_LISTEN_FD"
FORK_REQUESTS_FD = "TGI_FORK_REQUESTS_FD"
LAST_EXIT = "TGI_LAST_EXIT"

# Tells a process to end while another one takes its place: a front end finishes its requests, the others end at once,
# since their upstream neighbours submit the requests again. (SIGTERM: requests below a front end are finished, too.)
HAND_OVER = signal.SIGUSR1

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>

# Of a Heartbeat: three times, and a text.
WORK_OFFSET, HEARTBEAT_BYTES = 24, 128


class Process:
    """One supervised process. A role gets it as the argument of its `main` and drives its loop with `wait`."""

    def __init__(
        self,
        settings: Settings,
        role: str,
        replica: int,
        *,
        listen_fd: int | None = None,
        parent_fd: int | None = None,
        last_exit: LastExit | None = None,
        rank: int = 0,
        fork_requests: socket.socket | None = None,
    ) -> None:
        """`fork_requests`: for `leave_fork_server`, once this process has loaded what its successors are to share."""
        self.settings = settings
        self.fork_requests = fork_requests
        self.rank = rank
        self.role = role
        self.replica = replica
        self.listen_fd = listen_fd
        self.boot = os.urandom(8)
        self.stopping = False
        self.handing_over = False  # told to end by HAND_OVER; `stopping` is set, too
        self.run_dir = settings.run_dir
        self.facts: dict[str, Any] = {}  # published with the state; those of the summary to be set before "ready"
        self._published: tuple[Any, ...] = ()
        self._stages = StartStages()
        self._has_been_ready = False
        self.last_exit = last_exit  # how its predecessor ended
        self.work_register = WorkRegister.open(work_register_path(self.run_dir, self.name))
        self.work_register.begin_life(self.boot)
        self._heartbeat = Heartbeat(self.run_dir / f"{self.name}.beat")
        self._work_deadline: float | None = None
        self._next_beat_at = 0.0
        self._loop_limit = min(LOOP_TURN_SECONDS, settings.hang_timeout)
        self._parent_fd = parent_fd
        self._links: dict[int, Link] = {}  # by the descriptor of its socket
        self._link_of_event_source: dict[int, Link] = {}  # by descriptor
        self._poller = select.poll()
        self._wake, write = socket.socketpair()
        self._wake.setblocking(False)
        write.setblocking(False)
        self._wake_write = write
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        signal.signal(HAND_OVER, lambda *_: self.hand_over())
        # Ctrl-C reaches the whole process group; the supervisor handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Descriptors that an event loop polls besides the links: signals and the supervisor's exit. When one is
        # readable, call `handle_wakeup`.
        self.wakeup_fds = [self._wake.fileno()] + ([parent_fd] if parent_fd is not None else [])
        for fd in self.wakeup_fds:
            self._poller.register(fd, select.POLLIN)
        self.extend_deadline(settings.start_timeout)

    @property
    def name(self) -> str:
        return rundir.process_name(self.role, self.replica, self.rank)

    def hello(self, model: str = "") -> Hello:
        """The Hello of this process. `model` is the content hash of its model directory, "" while unknown."""
        model = served_model_id(model, self.settings.quantize, self.settings.kv_cache_dtype)
        return Hello(
            protocol=PROTOCOL,
            role=self.role,
            replica=self.replica,
            boot=self.boot,
            model=model,
            site=rundir.site_id(self.run_dir),
            last_exit=self.last_exit,
        )

    def link_address(self, name: str) -> str:
        """The address of a link of this pipeline; `name` is e.g. "tok-0.front"."""
        return f"ipc://{rundir.pipeline_directory(self.run_dir, self.settings.pipeline) / name}"

    def scheduler_sockets(self, side: str) -> set[str]:
        """The names of the links that schedulers of this pipeline have bound: see `rundir.scheduler_socket`."""
        return rundir.scheduler_sockets(rundir.pipeline_directory(self.run_dir, self.settings.pipeline), side)

    def connect_link(self, address: str, hello: Hello) -> Link:
        """A link to a process of the role downstream, in the run directory or on another host."""
        load = curve.load_api_keys if self.role == "api" else curve.load_host_keys
        return Link.connect(address, hello, load(self.settings.keys or "") if address.startswith("tcp:") else None)

    def watch_link(self, link: Link) -> None:
        """Lets `wait` poll this link. The loop calls its `receive` after each `wait`."""
        self._links[link.socket.fileno()] = link
        self._poller.register(link.socket.fileno(), select.POLLIN)
        for source in link.event_sources:
            self._poller.register(source.fileno(), select.POLLIN)
            self._link_of_event_source[source.fileno()] = link
        link.detect_disconnects()  # libzmq signals only what comes after the first look

    def unwatch_link(self, link: Link) -> None:
        """Ends `watch_link`. To be called before the link is closed."""
        del self._links[link.socket.fileno()]
        self._poller.unregister(link.socket.fileno())
        for source in link.event_sources:
            self._poller.unregister(source.fileno())
            del self._link_of_event_source[source.fileno()]

    def wait(self, timeout: float) -> None:
        """Blocks until a watched link has work, a signal arrives, a beat is due, or for `timeout` seconds.

        Polls descriptors: libzmq's own poll asks each socket for its events, by two system calls, before and after it
        waits.
        """
        now = time.monotonic()
        timeout = max(0.0, min(timeout, self._next_beat_at - now))
        for link in self._links.values():
            link.found_quiet = not link.has_pending_work
            if not link.found_quiet:
                timeout = 0.0
        if self._work_deadline is None:
            self._heartbeat.set_deadline(now + timeout + self._loop_limit)
        for descriptor, _ in self._poller.poll(int(timeout * 1000 + 0.999)):
            if descriptor in self._links:
                self._links[descriptor].found_quiet = False
            elif descriptor in self._link_of_event_source:
                self._link_of_event_source[descriptor].detect_disconnects()
            elif descriptor in self.wakeup_fds:
                self.handle_wakeup()

    def handle_wakeup(self) -> None:
        """Handles readable `wakeup_fds`. Exits if the supervisor has ended; a signal has already set `stopping`."""
        try:
            while self._wake.recv(64):
                pass
        except BlockingIOError:
            pass
        if self._parent_fd is not None and _at_eof(self._parent_fd):
            sys.exit(f"tgi {self.role} {self.replica}: the supervisor has ended")

    def wake_loop(self) -> None:
        """Ends a `wait` early. Thread-safe."""
        with contextlib.suppress(BlockingIOError):  # the socket is full of wake-ups already
            self._wake_write.send(b"\0")

    def stop(self) -> None:
        """Asks the loop to drain and return."""
        self.stopping = True

    def hand_over(self) -> None:
        """Asks the loop to return, since another process takes this one's place."""
        self.handing_over = True
        self.stop()

    @property
    def beat_due(self) -> bool:
        """Whether `exchange_beats` must be called."""
        return time.monotonic() >= self._next_beat_at

    def exchange_beats(self, beat: Beat) -> None:
        """Publishes how the work of this process progresses: in shared memory, as a metric, and to the upstream peers
        of watched links. Looks for silent peers on the others."""
        self._next_beat_at = time.monotonic() + BEAT_SECONDS
        self._heartbeat.record_progress(beat)
        age = (beat.progress_age_ms or 0) / 1000
        metrics.tgi_last_progress_timestamp_seconds.labels(process=self.name).set(time.time() - age)
        for link in self._links.values():
            link.exchange_beats(beat)

    def heartbeat(self, seconds: float) -> None:
        """For loops that do not use `wait`: announces the next heartbeat within `seconds`."""
        if self._work_deadline is None:
            self.extend_deadline(seconds + self._loop_limit)

    def extend_deadline(self, seconds: float) -> None:
        """Moves the watchdog's deadline to `seconds` from now, until the next heartbeat (before loading)."""
        self._heartbeat.set_deadline(time.monotonic() + seconds)

    def begin_work(self, seconds: float, work: str, began_at: float | None = None) -> None:
        """Sets a deadline that heartbeats do not move: `work` ends within `seconds`, while the loop may turn or not.
        `began_at`, by time.monotonic: when it began, if not now."""
        now = time.monotonic()
        self._work_deadline = now + seconds
        self._heartbeat.set_deadline(self._work_deadline)
        self._heartbeat.set_work(work, now if began_at is None else began_at)

    def end_work(self) -> None:
        """The work that began last has ended: from now on each turn of the loop moves the deadline."""
        self._work_deadline = None
        self.heartbeat(0.0)

    @property
    def starting(self) -> bool:
        """Whether it has never been ready."""
        return not self._has_been_ready

    def publish_state(self, state: str, stage: str = "", percent: int = 0) -> None:
        """Writes the state file: "starting", "ready" or "draining", stage and percentage of start-up, and the facts,
        among them the model, the version and a front end's address."""
        if (state, stage, percent, self.facts) == self._published:
            return  # loops call this in each turn
        self._published = (state, stage, percent, dict(self.facts))
        if self._stages.enter("" if state == "ready" else stage or state):
            # Of a process that replaces another one, for which clients have waited, it is worth a line.
            level = logging.DEBUG if self.last_exit is None else logging.INFO
            logger.log(level, "%s has started in %s", self.name, self._stages)
        facts = {"model": self.settings.served_name or self.settings.model_id, "version": __version__, **self.facts}
        if self.role == "api":
            facts["url"] = server_url(self.settings)
        self._has_been_ready = self._has_been_ready or state == "ready"
        rundir.write_state(
            self.run_dir,
            rundir.ProcessState(
                role=self.role,
                replica=self.replica,
                pid=os.getpid(),
                boot=self.boot.hex(),
                state=state,
                stage=stage,
                percent=percent,
                facts=facts,
                rank=self.rank,
            ),
        )


class StartStages:
    """The stages of a process's start with their times, from the start of its interpreter on."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._stage = "interpreter"
        self._ended = False
        self._since = time.monotonic() - age_of_process()

    def enter(self, stage: str) -> bool:
        """Ends the current stage; "" means that the process has started. Returns whether it has started just now."""
        if self._ended or stage == self._stage:
            return False
        now = time.monotonic()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since, self._ended = stage, now, not stage
        return self._ended

    def __str__(self) -> str:
        whole = sum(self._seconds.values())
        return f"{whole:.2f} s: " + ", ".join(f"{stage} {spent:.2f}" for stage, spent in self._seconds.items())


def age_of_process() -> float:
    """Seconds since this process was started; on Linux with the resolution of its clock ticks, elsewhere 0."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


class ProgressReport(NamedTuple):
    """How a process progresses, as another one sees it."""

    silent_seconds: float  # since its latest beat
    progress_age: float | None  # seconds since it has finished a part of its work; None: it had no work
    work: str  # what it works on


class Heartbeat:
    """Shared memory of a child and its supervisor. Times are of time.monotonic, the same clock in all processes of a
    host.

    The child moves its deadline before it passes; the supervisor replaces a child whose deadline has passed. For people
    the child records how its work progresses, which `tgi ps` reads.
    """

    def __init__(self, path: Path) -> None:
        view = memoryview(map_file(path, HEARTBEAT_BYTES))
        # One 8-byte store and one load, so a reader never sees half a number (struct.pack_into writes zeros first).
        # Deadline, time of the latest beat, time of the latest progress (0: no work).
        self._times = view[:WORK_OFFSET].cast("d")
        self._work = view[WORK_OFFSET:]

    def begin(self, deadline: float) -> None:
        """Called by the supervisor before it starts the child."""
        self._times[0] = deadline
        self._times[1] = 0.0

    def set_deadline(self, deadline: float) -> None:
        """Called by the child."""
        self._times[0] = deadline

    def read_deadline(self) -> float:
        """Read by the supervisor."""
        return self._times[0]

    def record_progress(self, beat: Beat) -> None:
        """Called by the child."""
        now = time.monotonic()
        self._times[1] = now
        self.set_work(beat.work, 0.0 if beat.progress_age_ms is None else now - beat.progress_age_ms / 1000)

    def set_work(self, work: str, progress_at: float) -> None:
        """Called by the child. `progress_at` is 0 if it has no work. A reader may see parts of two texts."""
        self._times[2] = progress_at
        text = work.encode()[: HEARTBEAT_BYTES - WORK_OFFSET]
        self._work[:] = text.ljust(HEARTBEAT_BYTES - WORK_OFFSET, b"\0")

    def read_progress(self) -> ProgressReport | None:
        """Read by `tgi ps`. None before the first beat."""
        now, _, beat_at, progress_at = time.monotonic(), *self._times
        if not beat_at:
            return None
        work = self._work.tobytes().rstrip(b"\0").decode(errors="replace")
        return ProgressReport(now - beat_at, now - progress_at if progress_at else None, work)


def read_progress(run: Path, name: str) -> ProgressReport | None:
    """How a process of this run directory progresses. None if it has sent no beat."""
    path = run / f"{name}.beat"
    return Heartbeat(path).read_progress() if path.exists() else None


def _at_eof(fd: int) -> bool:
    """Whether the other end of this pipe, to which nothing is written, is closed."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0)) and os.read(fd, 1) == b""


def served_model_id(model: str, quantize: str | None, kv_cache_dtype: str | None = None) -> str:
    """Hello.model of a model directory with this content hash: quantization at load and the type of the KV cache make
    it a different model. "" if the hash is unknown."""
    variants = (QUANTIZED_AT_LOAD.get(quantize or ""), kv_cache_dtype)
    return " in ".join([model, *(name for name in variants if name is not None)]) if model else model


# --- start and end of the process ---


def run_role(arguments: Sequence[str]) -> NoReturn:
    """Runs a role, ROLE REPLICA [RANK], and ends this process: with FATAL for an error that a restart cannot fix."""
    run_and_exit(lambda: _run_role(arguments))


def run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Ends this process after `run`, with the exit code that the interpreter would have.

    The interpreter is not taken apart: that takes 0.06 s of processor time, with torch 0.25 s, since every object that
    goes is first copied from what the process shares with its fork server. So `run` closes what it has opened, and
    nothing that is registered with `atexit` runs.
    """
    code = 0
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = 1 if isinstance(end.code, str) else end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    send_remaining()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _run_role(arguments: Sequence[str]) -> None:
    role, replica, rank = arguments[0], int(arguments[1]), int(arguments[2]) if len(arguments) > 2 else 0
    name = rundir.process_name(role, replica, rank)
    die_with_parent(int(os.environ[PARENT_PID]))
    name_process(f"tgi {name.replace('-', ' ')}")
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # with `stty tostop` a log line of a background group would stop it
    faulthandler.enable()
    settings = Settings.from_json(os.environ.pop(SETTINGS))
    log.configure_logging(name, settings)
    metrics.use_directory(settings.run_dir / "metrics")
    listen, fork_requests = os.environ.pop(LISTEN_FD, ""), os.environ.pop(FORK_REQUESTS_FD, "")
    process = Process(
        settings,
        role,
        replica,
        listen_fd=int(listen) if listen else None,
        parent_fd=int(os.environ.pop(PARENT_FD)),
        last_exit=_last_exit(os.environ.pop(LAST_EXIT, "")),
        rank=rank,
        fork_requests=socket.socket(fileno=int(fork_requests)) if fork_requests else None,
    )
    process.publish_state("starting")
    try:
        importlib.import_module(f"tgi.{role}.main").main(process)
    except UserError as error:
        _exit_fatally(process, str(error))
    except ImportError as error:
        logger.debug("cannot run", exc_info=True)
        _exit_fatally(
            process, f"{process.name} cannot run, since an import fails ({error}): {interpreter.INSTALL_ADVICE}."
        )
    except Exception as error:
        if not (process.starting and is_lack_of_memory(error)):
            raise
        logging.getLogger(__name__).debug("cannot run", exc_info=True)
        _exit_fatally(process, f"{process.name}: {error}. {TOO_LITTLE_TO_START}")


def _exit_fatally(process: Process, message: str) -> None:
    """Exits with FATAL: the supervisor ends the server with this error."""
    try:
        fatal_error_path(process.run_dir, process.name).write_text(message)
    except OSError:
        logger.error("%s", message)
    sys.exit(FATAL)


def fatal_error_path(run: Path, name: str) -> Path:
    """The file with the error of a child that exits with FATAL."""
    return run / "state" / f"{name}.error"


def work_register_path(run: Path, name: str) -> Path:
    """The work register of a process."""
    return run / f"{name}.work"


def work_in_progress(run: Path, peer: PeerId) -> bytes | None:
    """What a process has, or had, in progress, as `WorkRegister.in_progress`; None if it is not known: the process is
    one of another host, or its successor has taken the register."""
    path = work_register_path(run, f"{peer.role}-{peer.replica}")
    if not path.exists():
        return None
    register = WorkRegister.open(path)
    return register.in_progress() if register.boot == peer.boot else None


def last_exit_text(last_exit: LastExit) -> str:
    """The value of LAST_EXIT."""
    boot, in_progress = last_exit.boot.hex(), last_exit.in_progress.hex()
    return json.dumps(last_exit._replace(boot=boot, in_progress=in_progress))  # type: ignore[arg-type]


def _last_exit(text: str) -> LastExit | None:
    if not text:
        return None
    boot, cause, outside, in_progress, lived_ms = json.loads(text)
    return LastExit(bytes.fromhex(boot), cause, outside, bytes.fromhex(in_progress), lived_ms)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends (Linux; elsewhere a child notices the closed pipe)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)


def name_process(title: str) -> None:
    """Sets what a list of processes shows of this one."""
    import setproctitle

    setproctitle.setproctitle(title)
