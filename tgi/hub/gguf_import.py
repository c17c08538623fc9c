"""Imports GGUF files into the model cache. A directory in the cache is complete or absent."""

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tgi.microkernel.errors import UserError, reading
from tgi.microkernel.host import interpreter

# Incremented when the import of some file changes, so that cached directories are rebuilt. If that of the default model
# changes, so is its own number (default_model.py).
IMPORTER = 10


class ProgressCallback(Protocol):
    """Receives the stage, the percentage done, and the total number of bytes if the stage transfers bytes
    (microkernel/observability/progress.py displays it)."""

    def __call__(self, stage: str, percent: float, size: int = 0, /) -> None:
        """Reports progress."""


def default_cache() -> Path:
    """$TGI_CACHE, else tgi in the user's cache directory."""
    if os.environ.get("TGI_CACHE"):
        return Path(os.environ["TGI_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tgi"


_PART = re.compile(r"(.*-)\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)


def gguf_parts(file: Path) -> list[Path]:
    """All parts of a split GGUF file in their order, whether they exist or not; the file alone if it is not named as a
    part (NAME-00001-of-00003.gguf)."""
    match = _PART.fullmatch(file.name)
    if match is None or not int(match[2]):
        return [file]
    return [file.with_name(f"{match[1]}{part:05}-of-{match[2]}.gguf") for part in range(1, int(match[2]) + 1)]


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yields a temporary directory that is renamed to `directory` if the block succeeds, and removed otherwise.

    Raises UserError if `directory` exists and is not empty, or cannot be created.
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


def cached_directory(directory: Path, build: Callable[[Path], None], progress: ProgressCallback) -> Path:
    """Returns `directory`, built by `build(temporary)` if absent. Only one of several concurrent processes builds."""
    if directory.is_dir():
        return directory
    with _locked(directory, progress):
        if not directory.is_dir():
            for abandoned in directory.parent.glob(_prefix(directory) + "*"):  # left by a killed process
                shutil.rmtree(abandoned, ignore_errors=True)
            with new_directory(directory) as temporary:
                build(temporary)
    return directory


def _prefix(directory: Path) -> str:
    return f".{directory.name}.building-"


@contextmanager
def _locked(directory: Path, progress: ProgressCallback) -> Iterator[None]:
    """Holds the lock of a cache directory. The kernel releases it when the process ends."""
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


# --- conversion, in a child process: its memory is released when it exits ---

log = logging.getLogger(__name__)

# Packages that the child imports in addition to those of every role.
IMPORT_PACKAGES = ("gguf", "numpy", "transformers")


def import_gguf(file: Path, directory: Path, progress: ProgressCallback) -> None:
    """Converts a GGUF file to an ordinary model directory: bfloat16 safetensors, configuration, tokenizer.

    `directory` must be absent or empty. It appears complete; otherwise UserError is raised and it does not appear.
    """
    with new_directory(Path(directory)) as temporary:
        convert_in_child(Path(file), temporary, progress, packed=False, mmproj=vision_part(Path(file)))


def vision_part(file: Path, mmproj: str | None = None) -> Path | None:
    """The file of the vision part of a model: `mmproj`, or the one next to the model's file, mmproj*.gguf, as
    llama.cpp's converter calls it. Raises UserError if there are several, or `mmproj` is no file."""
    file = file.absolute()
    if mmproj is not None:
        named = Path(mmproj).expanduser().absolute()
        with reading(named):
            if not named.is_file():
                raise UserError(
                    f"--mmproj {named} does not exist, or is no file; name the GGUF file of the vision part."
                )
        return named
    found = [path for path in sorted(file.parent.glob("*.gguf")) if path.name.lower().startswith("mmproj")]
    if file in found or not found:
        return None
    if len(found) > 1:
        raise UserError(
            f"{file.parent} has several vision parts: {', '.join(path.name for path in found)}. Name the one of "
            f"{file.name} with --mmproj, or leave none there to serve text alone."
        )
    return found[0]


def convert_in_child(
    file: Path, directory: Path, progress: ProgressCallback, *, packed: bool, mmproj: Path | None = None
) -> None:
    """Runs the child process that fills `directory`. `mmproj` is the file of the vision part. With `packed` the weights
    keep the file's own bits, which only our workers read. The child ends when this process ends. Raises UserError on
    failure."""
    interpreter.require_packages(IMPORT_PACKAGES, "Importing a GGUF file")
    command = interpreter.python_command("tgi.hub.gguf.convert", str(file.absolute()), str(directory.absolute()))
    command += ["packed" if packed else "plain", *([str(mmproj)] if mmproj is not None else [])]
    with tempfile.TemporaryFile("w+") as complaints:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=interpreter.child_environment(),
            text=True,
        )
        refused = None
        with child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    kind, *words = json.loads(line)
                    if kind == "refused":
                        refused = words[0]
                    elif kind == "note":
                        log.warning("%s: %s", file, words[0])
                    else:
                        progress(*words)
            except BaseException:
                child.kill()
                raise
        complaints.seek(0)
        said = complaints.read().strip()
    if refused is not None:
        raise UserError(refused)
    if child.returncode:
        log.debug("The importing process said: %s", said)
        last = said.rpartition("\n")[2] or f"it ended with status {child.returncode}"
        raise UserError(f"Importing {file} failed: {last}.")
