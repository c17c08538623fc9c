"""The run directory: where the processes of one deployment meet. Sockets, locks, state files, metrics."""

import contextlib
import fcntl
import json
import os
import stat
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tgi.kernel.errors import UserError

# A sockaddr_un holds 108 bytes on Linux and 104 on macOS; libzmq needs a few for itself.
MAX_SOCKET_PATH = 100
LONGEST_NAME = "sched-0.front"
# The pid of a holder that has not written it yet, or not any more.
NAMELESS = 0
# How long a lock may be in the way: whoever looks for holders takes it for a moment.
GLANCE_SECONDS = 0.5


def base() -> Path:
    """The directory that holds this user's run directories. An XDG_RUNTIME_DIR of another user (inherited through su or
    sudo) is not used."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK) and os.stat(runtime).st_uid == os.getuid():
        return Path(runtime) / "tgi"
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"tgi-{os.getuid()}"


def default(port: int) -> Path:
    """The run directory of the deployment on `port`: TGI_RUN, or one per user and port."""
    return Path(os.environ["TGI_RUN"]).absolute() if os.environ.get("TGI_RUN") else base() / str(port)


def all_of_user() -> list[Path]:
    """Every run directory that `tgi ps` looks into. Raises UserError if others could have put something there."""
    found = []
    if os.path.lexists(base()):
        _refuse_exposed(base())
        found = sorted(base().iterdir())
    if os.environ.get("TGI_RUN"):
        found.append(default(0))
    runs = [path for path in dict.fromkeys(found) if path.is_dir()]
    for run in runs:
        check(run)
    return runs


def exposure(status: os.stat_result) -> str:
    """Why what lies in a directory may come from another user, or "" if only this user (or root) can write there.

    `status` is the directory's: from `lstat` where a symbolic link in its place is to be refused, too.
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


def check(path: Path) -> None:
    """Raises UserError if an existing run directory may contain what another user has put there: a link would redirect
    sockets and have files overwritten, a lock would name a pid to be signalled."""
    for directory in _directories(path):
        if os.path.lexists(directory):
            _refuse_exposed(directory)


def create(path: Path) -> None:
    """Makes the directory, private to this user; one that is there keeps its mode. Raises UserError if it cannot be
    made, and for one that `check` refuses."""
    socket = str(path / LONGEST_NAME)
    if len(socket.encode()) > MAX_SOCKET_PATH:
        raise UserError(
            f"The run directory {path} has too long a name: sockets in it may have {MAX_SOCKET_PATH} bytes, and "
            f"{len(socket.encode())} would be needed. Set TGI_RUN to a shorter one."
        )
    try:
        directories = _directories(path)
        directories[0].parent.mkdir(parents=True, exist_ok=True)
        for directory in directories:  # each is checked before anything is made in it
            directory.mkdir(mode=0o700, exist_ok=True)
            _refuse_exposed(directory)
    except OSError as error:
        raise UserError(
            f"Cannot use the run directory {path}: {error.strerror}. Set TGI_RUN to another one."
        ) from error


def _directories(path: Path) -> list[Path]:
    """Those that must be private for a run directory to be: the one that holds this user's, if it is in there; itself;
    and its parts."""
    return [*([base()] if path.parent == base() else []), path, path / "state", path / "metrics"]


def _refuse_exposed(directory: Path) -> None:
    reason = exposure(directory.lstat())
    if not reason:
        for path in directory.iterdir():
            if path.is_symlink() or path.is_fifo():  # whoever opens a pipe waits for its other end
                kind = "symbolic link" if path.is_symlink() else "named pipe"
                reason = f"contains the {kind} {path.name}, which tgi does not make"
    if reason:
        raise UserError(
            f"The run directory {directory} {reason}, so another user could redirect what is written there. Remove it, "
            "or set TGI_RUN to a directory that only you can write to."
        )


@dataclass(frozen=True)
class ProcessState:
    """What a process says of itself, for `tgi ps` and the progress bar."""

    role: str
    place: int
    pid: int
    boot: str
    state: str  # starting, ready, draining
    stage: str = ""
    percent: int = 0
    since: float = 0.0  # unix seconds of the last change
    facts: dict[str, Any] = field(default_factory=dict)  # what its role says of itself once it is ready (summary.py)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.place}"


def write_state(run: Path, state: ProcessState) -> None:
    """Replaces the state file of one process, never leaving half of it."""
    path = run / "state" / f"{state.name}.json"
    draft = path.with_suffix(f".{state.pid}")
    with contextlib.suppress(FileNotFoundError):  # the directory was removed: the supervisor sees it and ends the tree
        draft.write_text(json.dumps(asdict(state) | {"since": time.time()}))
        draft.replace(path)


def read_states(run: Path) -> list[ProcessState]:
    """The state files of a run directory, by name."""
    states = []
    for path in sorted((run / "state").glob("*.json")):
        try:
            states.append(ProcessState(**json.loads(path.read_text())))
        except FileNotFoundError:
            continue  # its process has just ended
    return states


def remove_state(run: Path, name: str) -> None:
    """Forgets a process that has ended."""
    (run / "state" / f"{name}.json").unlink(missing_ok=True)


def remove_states(run: Path, role: str) -> None:
    """Forgets all processes of a role. For the supervisor that holds its lock, before it starts any: the one before it
    may have been killed."""
    for path in (run / "state").glob(f"{role}-*.json"):
        path.unlink(missing_ok=True)


class Lock:
    """A supervisor's claim on one part of a run directory ("up", or a role), gone with the process that holds it."""

    def __init__(self, run: Path, name: str) -> None:
        self.path = run / f"{name}.lock"
        try:
            self._file = self.path.open("a+")
        except OSError as error:
            raise UserError(f"Cannot use {self.path}: {error.strerror}. Set TGI_RUN to another directory.") from error
        end = time.monotonic() + GLANCE_SECONDS
        while not _locked(self._file, fcntl.LOCK_EX):
            if time.monotonic() < end:
                time.sleep(0.01)
                continue
            holder = self.path.read_text().strip() or "unknown"
            raise UserError(
                f"Another tgi (pid {holder}) runs `{name}` in {run}. "
                "Stop it with `tgi down`, or choose another --port or TGI_RUN."
            )
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Gives the claim back and empties the file, so that nobody reads an old pid."""
        self._file.truncate(0)
        self._file.close()


def holders(run: Path) -> dict[str, int]:
    """The living supervisors of a run directory: name of the claim -> pid, or NAMELESS."""
    found = {}
    for path in sorted(run.glob("*.lock")):
        with path.open() as file:
            if not _locked(file, fcntl.LOCK_SH):
                found[path.stem] = int(path.read_text() or NAMELESS)
    return found


def _locked(file: IO[str], kind: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
