"""The cache of imported models. A directory in it is either whole or not there."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tgi.kernel.errors import UserError


class Progress(Protocol):
    """Takes what is being done, how much of it is done in percent, and how many bytes are all of it, if it moves bytes
    (kernel/progress.py shows it)."""

    def __call__(self, stage: str, percent: float, size: int = 0, /) -> None: ...


def default_cache() -> Path:
    """$TGI_CACHE, else tgi in the user's cache directory."""
    if os.environ.get("TGI_CACHE"):
        return Path(os.environ["TGI_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tgi"


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """A new directory beside `directory`, which it becomes if the block ends well; otherwise nothing is left.

    Raises UserError if `directory` exists and is not empty, or cannot be made.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists already. Name a directory that does not, or remove it.")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_prefix(directory), dir=directory.parent))
    except OSError as error:
        raise UserError(f"{directory} cannot be made: {error}. Name a directory that you may write.") from error
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(directory)
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def cached(directory: Path, build: Callable[[Path], None], progress: Progress) -> Path:
    """`directory`, made by `build(temporary)` if it is not there. Of several processes at once, one builds."""
    if directory.is_dir():
        return directory
    with _locked(directory, progress):
        if not directory.is_dir():
            for abandoned in directory.parent.glob(_prefix(directory) + "*"):  # by a process that was killed
                shutil.rmtree(abandoned, ignore_errors=True)
            with building(directory) as temporary:
                build(temporary)
    return directory


def _prefix(directory: Path) -> str:
    return f".{directory.name}.building-"


@contextmanager
def _locked(directory: Path, progress: Progress) -> Iterator[None]:
    """Only one process is in here for a directory. The lock goes with the process, however it ends."""
    path = directory.parent / f".{directory.name}.lock"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("ab")
    except OSError as error:
        raise UserError(
            f"The cache directory {directory.parent} cannot be written: {error}. Set TGI_CACHE to one that can."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another import of this model", 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
