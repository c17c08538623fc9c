"""The run directory of a deployment: its sockets, locks, state files and metrics."""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import time
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple

from tgi.microkernel.errors import UserError

log = logging.getLogger(__name__)

# A sockaddr_un holds 108 bytes on Linux and 104 on macOS, of which libzmq needs a few.
MAX_SOCKET_PATH = 100
LONGEST_SOCKET_NAME = "p99/sched-99.front"
# The number of the pipeline that serves, if `tgi reload` has replaced the first one.
PIPELINE_FILE = "pipeline"
# Roles of which one supervisor has all processes; of the others each process has its own lock.
SINGLE_ROLES = ("scheduler", "worker")
# Where Linux keeps files in memory.
SHARED_MEMORY = Path("/dev/shm")
MEDIA_HASH_DIGITS = 16  # of a media directory's name there
# The pid of a lock holder that has not written it yet, or has erased it.
UNKNOWN_PID = 0
_SITE_ID = re.compile(r"[0-9a-f]{16}")
# How long to retry a lock: lock_holders() takes shared locks for a moment.
LOCK_RETRY_SECONDS = 0.5


def user_base_dir() -> Path:
    """The directory that contains this user's run directories. An XDG_RUNTIME_DIR of another user (inherited through su
    or sudo) is not used."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK) and os.stat(runtime).st_uid == os.getuid():
        return Path(runtime) / "tgi"
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"tgi-{os.getuid()}"


def default_run_dir(port: int) -> Path:
    """The run directory of the deployment on `port`: TGI_RUN, or one per user and port."""
    return Path(os.environ["TGI_RUN"]).absolute() if os.environ.get("TGI_RUN") else user_base_dir() / str(port)


def user_run_dirs() -> list[Path]:
    """All run directories of this user. Raises UserError if another user can write to one of them."""
    found = []
    if os.path.lexists(user_base_dir()):
        _reject_exposed(user_base_dir())
        found = sorted(user_base_dir().iterdir())
    if os.environ.get("TGI_RUN"):
        found.append(default_run_dir(0))
    runs = [path for path in dict.fromkeys(found) if path.is_dir()]
    for run in runs:
        check_run_dir(run)
    return runs


def exposure(status: os.stat_result) -> str:
    """Why files in a directory may come from another user, or "" if only this user (or root) can write there.

    `status` is the directory's, from `lstat` if a symbolic link is to be reported, too.
    """
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}, and this is user {os.getuid()}"
    if status.st_mode & 0o022:
        return f"can be written by others (its mode is {stat.S_IMODE(status.st_mode):04o})"
    return ""


def check_run_dir(path: Path) -> None:
    """Raises UserError if another user can have written to an existing run directory: a link could redirect sockets
    and overwrite files, a lock file could name any pid to be signalled."""
    for directory in _directories(path):
        if os.path.lexists(directory):
            _reject_exposed(directory)


def create_run_dir(path: Path) -> None:
    """Creates the directory, private to this user; an existing one keeps its mode. Raises UserError if it cannot be
    created, or as `check_run_dir`."""
    socket = str(path / LONGEST_SOCKET_NAME)
    if len(socket.encode()) > MAX_SOCKET_PATH:
        raise UserError(
            f"The run directory {path} has too long a name: sockets in it may have {MAX_SOCKET_PATH} bytes, and "
            f"{len(socket.encode())} would be needed. Set TGI_RUN to a shorter one."
        )
    try:
        directories = _directories(path)
        directories[0].parent.mkdir(parents=True, exist_ok=True)
        for directory in directories:  # each is checked before anything is created in it
            directory.mkdir(mode=0o700, exist_ok=True)
            _reject_exposed(directory)
        if not site_id(path):
            (path / "site").write_text(os.urandom(8).hex())
    except OSError as error:
        raise UserError(
            f"Cannot use the run directory {path}: {error.strerror}. Set TGI_RUN to another one."
        ) from error


def site_id(path: Path) -> str:
    """The random id of a run directory, which distinguishes it from those of other hosts; "" if it has none, or a
    damaged one."""
    try:
        text = (path / "site").read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return text if _SITE_ID.fullmatch(text) else ""


def _directories(path: Path) -> list[Path]:
    """The directories that must be private: the run directory, its subdirectories, and user_base_dir() if it is the
    parent."""
    own = [path / name for name in ("", "state", "metrics", "flight")]
    return [*([user_base_dir()] if path.parent == user_base_dir() else []), *own]


def _reject_exposed(directory: Path) -> None:
    reason = exposure(directory.lstat())
    if not reason:
        for path in directory.iterdir():
            if path.is_symlink() or path.is_fifo():  # opening a pipe blocks until its other end is opened
                kind = "symbolic link" if path.is_symlink() else "named pipe"
                reason = f"contains the {kind} {path.name}, which tgi does not make"
    if reason:
        raise UserError(
            f"The run directory {directory} {reason}, so another user could redirect what is written there. Remove it, "
            "or set TGI_RUN to a directory that only you can write to."
        )


def process_name(role: str, replica: int, rank: int = 0) -> str:
    """The name of a process, such as `api-0`, or `worker-0.1` for the second rank of a worker."""
    return f"{role}-{replica}.{rank}" if rank else f"{role}-{replica}"


def role_of(process: str) -> str:
    """The role of a process ("api" of "api-0"), or of a supervisor that has all its processes."""
    return process.rpartition("-")[0] or process


@dataclass(frozen=True)
class ProcessState:
    """The state file of a process, for `tgi ps` and the progress bar. Raises TypeError for values of other types."""

    role: str
    replica: int
    pid: int
    boot: str
    state: str  # starting, ready, draining
    stage: str = ""
    percent: int = 0
    since: float = 0.0  # unix seconds of the last change
    rank: int = 0  # of a worker with several
    facts: dict[str, Any] = field(default_factory=dict)  # of its role, when it is ready: see progress.WorkerFacts

    def __post_init__(self) -> None:
        for name, kind in _STATE_TYPES.items():
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} is {value!r}")

    @property
    def name(self) -> str:
        return process_name(self.role, self.replica, self.rank)


_STATE_TYPES: dict[str, type | tuple[type, ...]] = {
    "role": str, "replica": int, "pid": int, "boot": str, "state": str, "stage": str, "percent": int,
    "since": (int, float), "facts": dict,
}  # fmt: skip


def write_state(run: Path, state: ProcessState) -> None:
    """Replaces the state file of a process atomically. A full disk must not end the process: it logs an error."""
    path = run / "state" / f"{state.name}.json"
    draft = path.with_suffix(f".{state.pid}")
    try:
        draft.write_text(json.dumps(asdict(state) | {"since": time.time()}))
        draft.replace(path)
    except FileNotFoundError:
        return  # the directory was removed; the supervisor ends the server
    except OSError as error:
        log.error("cannot write %s, so `tgi ps` shows an outdated state: %s", path, error.strerror)


def read_states(run: Path) -> list[ProcessState]:
    """The state files of a run directory, by role, replica and rank. Skips, with a warning, those that cannot be
    read."""
    try:
        paths = list((run / "state").glob("*.json"))
    except OSError as error:
        log.warning("cannot read %s: %s", run / "state", error.strerror)
        return []
    found = [read_state(run, path.stem) for path in paths]
    return sorted(
        (state for state in found if state is not None), key=lambda state: (state.role, state.replica, state.rank)
    )


def read_state(run: Path, name: str) -> ProcessState | None:
    """The state file of one process. None if there is none, or, with a warning, if it cannot be read."""
    path = run / "state" / f"{name}.json"
    try:
        return ProcessState(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cannot read %s: %s", path, error.strerror)
        return None
    except (ValueError, TypeError, RecursionError) as error:
        log.warning("skipped %s, which another version of tgi has written, or which is damaged: %s", path, error)
        return None


def remove_state(run: Path, name: str) -> None:
    """Removes the state file of an ended process. One that cannot be removed is known by its pid to be outdated."""
    with contextlib.suppress(OSError):
        (run / "state" / f"{name}.json").unlink()


def tokenizer_socket(replica: int | str) -> str:
    """The name of the socket that a tokenizer binds for the front ends. As long as it is there, they expect the
    tokenizer, or the one that replaces it after a crash."""
    return f"tok-{replica}.front"


def tokenizer_sockets(directory: Path) -> set[str]:
    """The names of the sockets of all tokenizers in the directory of a pipeline."""
    return {path.name for path in directory.glob(tokenizer_socket("*"))}


def scheduler_socket(index: int, side: str) -> str:
    """The name of the socket that the scheduler at a place among the replicas of a pipeline binds: "front" for the
    tokenizers, "back" for its worker."""
    return f"sched-{index}.{side}"


def scheduler_sockets(directory: Path, side: str) -> set[str]:
    """The names of the sockets of this side of all schedulers in the directory of a pipeline."""
    return {path.name for path in directory.glob(f"sched-*.{side}")}


def media_socket(replica: int | str) -> str:
    """The name of the socket that a media process binds for the front ends."""
    return f"media-{replica}.front"


def media_sockets(directory: Path) -> set[str]:
    """The names of the sockets of all media processes in the directory of a pipeline."""
    return {path.name for path in directory.glob(media_socket("*"))}


def media_directory(run: Path) -> Path:
    """The directory in which media processes leave images for the worker: in shared memory where the system has such a
    file system, else in the run directory."""
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        name = sha256(os.fsencode(run.absolute())).hexdigest()[:MEDIA_HASH_DIGITS]
        return SHARED_MEMORY / f"tgi-{os.getuid()}-{name}"
    return run / "media"


def received_images(run: Path, worker: int) -> Path:
    """The directory of the images that this worker has received from other hosts, which it creates."""
    return media_directory(run) / f"worker-{worker}"


class MediaDirectoryLock(NamedTuple):
    """Keeps a media directory from being removed, for a supervisor of media processes or workers."""

    path: Path
    descriptor: int

    def release(self) -> None:
        """Removes the directory with all that is in it, unless another supervisor has a lock."""
        os.close(self.descriptor)
        _remove_unused(self.path)


def create_media_directory(run: Path) -> MediaDirectoryLock:
    """Creates the media directory, private to this user, unless it is in use. Removes those that servers of this user
    have left that were killed: the kernel has released their locks. Raises UserError if it cannot be used."""
    path = media_directory(run)
    for left in path.parent.glob(path.name[:-MEDIA_HASH_DIGITS] + "*") if path.parent == SHARED_MEMORY else [path]:
        _remove_unused(left)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        if fault := exposure(path.lstat()):
            raise UserError(f"The directory of images {path} {fault}. Remove it, or set TGI_RUN to another one.")
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        raise UserError(
            f"Cannot use the directory of images {path}: {error.strerror}. Remove it, or set TGI_RUN to another one."
        ) from error
    return MediaDirectoryLock(path, descriptor)


def _remove_unused(path: Path) -> None:
    """Removes a media directory of this user on which no process has a lock, if it can be."""
    with contextlib.suppress(OSError):  # it is gone
        if exposure(path.lstat()):
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def pipeline_directory(run: Path, pipeline: int) -> Path:
    """The directory of the sockets of a pipeline: the processes that serve one model. The first one uses the run
    directory itself, those that `tgi reload` starts have subdirectories."""
    return run / f"p{pipeline}" if pipeline else run


def read_pipeline(run: Path) -> int:
    """The number of the pipeline that serves."""
    try:
        return max(0, int((run / PIPELINE_FILE).read_text()))
    except (FileNotFoundError, ValueError):
        return 0


def write_pipeline(run: Path, pipeline: int) -> None:
    """Stores the number of the pipeline that serves, for supervisors that join. A full disk logs an error."""
    path = run / PIPELINE_FILE
    try:
        path.write_text(str(pipeline))
    except OSError as error:
        log.error("cannot write %s: a supervisor that joins serves another model (%s)", path, error.strerror)


def control_socket(run: Path, supervisor: int) -> Path:
    """The socket on which the supervisor with this pid accepts commands."""
    return run / f"control-{supervisor}"


def remove_leftovers(run: Path) -> None:
    """Removes what killed supervisors have left: state files and sockets of processes that no other supervisor has.
    Call it with the own locks held, before processes are started."""
    held = {name: pid for name, pid in lock_holders(run).items() if pid != os.getpid()}
    if not held:
        (run / PIPELINE_FILE).unlink(missing_ok=True)
    for path in (run / "state").glob("*.json"):
        if not {path.stem, path.stem.rpartition("-")[0]} & held.keys():
            _remove(path)
    replicas = [name.removeprefix("tokenizer-") for name in held if name.startswith("tokenizer-")]
    used = {tokenizer_socket(replica) for replica in replicas}
    used |= {media_socket(name.removeprefix("media-")) for name in held if name.startswith("media-")}
    used |= {control_socket(run, pid).name for pid in held.values()}
    schedulers = () if "scheduler" in held else run.rglob("sched-*.*")
    sockets = (*run.rglob(tokenizer_socket("*")), *run.rglob(media_socket("*")))
    for path in (*sockets, *schedulers, *run.glob("control-*")):
        if path.name not in used:
            _remove(path)


def successor_path(run: Path, name: str) -> Path:
    """The file in which a scheduler keeps what its successor must know: requests that crash processes, and changes of
    adapters."""
    return run / f"{name}.successor"


def quarantine_path(run: Path) -> Path:
    """The file of requests that the front ends refuse, see quarantine.py."""
    return run / "quarantine.json"


def forget_server(run: Path) -> None:
    """Ends all suspicions, quarantines and changes of adapters, for the first supervisor of a run directory."""
    for path in (*run.glob("*.successor"), quarantine_path(run)):
        _remove(path)


def _remove(path: Path) -> None:
    """Removes a file of an earlier server. Raises UserError if it cannot be removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # it is a directory
        raise UserError(f"Cannot remove {path}: {error.strerror}. Remove it, or set TGI_RUN to another one.") from error


class ProcessLock(NamedTuple):
    """A replica number of a role, which belongs to one supervisor until it releases the lock."""

    role: str
    replica: int
    lock: "RunDirLock"


def claim_process(run: Path, role: str) -> ProcessLock:
    """Claims the lowest replica number of a role that no supervisor has. Raises UserError if another supervisor has the
    role already, and there can be only one."""
    if role in SINGLE_ROLES:
        return ProcessLock(role, 0, RunDirLock(run, role))
    for replica in count():
        with contextlib.suppress(LockHeld):
            return ProcessLock(role, replica, RunDirLock(run, f"{role}-{replica}", retry_seconds=0.0))
    raise AssertionError("unreachable")


class LockHeld(UserError):
    """Another supervisor holds the lock."""


class RunDirLock:
    """A supervisor's exclusive lock on a role or on one process of it. The kernel releases it when the supervisor ends.

    Raises LockHeld if another process holds it, and UserError if it cannot be used.
    """

    def __init__(self, run: Path, name: str, retry_seconds: float = LOCK_RETRY_SECONDS) -> None:
        self.path = run / f"{name}.lock"
        try:
            self._file = self.path.open("a+")
        except OSError as error:
            raise UserError(f"Cannot use {self.path}: {error.strerror}. Set TGI_RUN to another directory.") from error
        end = time.monotonic() + retry_seconds
        while not _locked(self._file, fcntl.LOCK_EX):
            if time.monotonic() < end:
                time.sleep(0.01)
                continue
            holder = self.path.read_text(errors="replace").strip() or "unknown"
            self._file.close()
            raise LockHeld(
                f"Another tgi (pid {holder}) runs `{name}` in {run}. "
                "Stop it with `tgi down`, or choose another --port or TGI_RUN."
            )
        try:
            self._file.truncate(0)
            os.write(self._file.fileno(), str(os.getpid()).encode())
        except OSError as error:
            self._file.close()
            raise UserError(f"Cannot write {self.path}: {error.strerror}. Set TGI_RUN to another directory.") from error

    def release(self) -> None:
        """Releases the lock and empties the file, so that it contains no outdated pid."""
        if self._file.closed:
            return
        self._file.truncate(0)
        self._file.close()


def lock_holders(run: Path) -> dict[str, int]:
    """The running supervisors of a run directory: role, or process of it (`api-0`) -> pid, or UNKNOWN_PID."""
    found = {}
    for path in sorted(run.glob("*.lock")):
        with path.open() as file:
            if not _locked(file, fcntl.LOCK_SH):
                text = path.read_text(errors="replace")
                found[path.stem] = int(text) if text.isdecimal() else UNKNOWN_PID
    return found


def _locked(file: IO[str], kind: int) -> bool:
    """Tries to lock the file without waiting. Returns whether it did."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
