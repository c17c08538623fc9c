"""The run directory: where the processes of one deployment meet. Sockets, locks, state files, metrics."""

import contextlib
import fcntl
import json
import os
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
    """The directory that holds this user's run directories."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "tgi"
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"tgi-{os.getuid()}"


def default(port: int) -> Path:
    """The run directory of the deployment on `port`: TGI_RUN, or one per user and port."""
    return Path(os.environ["TGI_RUN"]).absolute() if os.environ.get("TGI_RUN") else base() / str(port)


def all_of_user() -> list[Path]:
    """Every run directory that `tgi ps` looks into."""
    found = sorted(base().iterdir()) if base().is_dir() else []
    if os.environ.get("TGI_RUN"):
        found.append(Path(os.environ["TGI_RUN"]).absolute())
    return [path for path in dict.fromkeys(found) if path.is_dir()]


def create(path: Path) -> None:
    """Makes the directory, private to this user; one that is there keeps its mode."""
    socket = str(path / LONGEST_NAME)
    if len(socket.encode()) > MAX_SOCKET_PATH:
        raise UserError(
            f"The run directory {path} has too long a name: sockets in it may have {MAX_SOCKET_PATH} bytes, and "
            f"{len(socket.encode())} would be needed. Set TGI_RUN to a shorter one."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        for part in ("state", "metrics"):
            (path / part).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"Cannot use the run directory {path}: {error.strerror}. Set TGI_RUN to another one."
        ) from error


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
