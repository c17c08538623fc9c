"""Compiles the C++ sources with the compiler of this machine, once for each version of the sources, compiler command,
instruction set and element type, and caches the libraries."""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tgi.microkernel.rundir import exposure
from tgi.worker.host_cpu import kernel_set
from tgi.worker.instruction_sets import ELEMENTS, INSTRUCTION_SETS, InstructionSet

log = logging.getLogger(__name__)

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-w")
BUILD_TIMEOUT = 300.0  # seconds; builds of more than 120 were seen on a busy machine


class KernelsUnavailable(Exception):
    """The CPU kernels cannot be used; the text says why."""


def build_library(element: str, *extra_flags: str, instruction_set: InstructionSet | None = None) -> Path:
    """The compiled library for an element type (one of ELEMENTS) and an instruction set (by default the one in use),
    from the cache if it is there. Raises KernelsUnavailable."""
    chosen = require_kernels(element, instruction_set)
    command = [*_compiler_command(), *FLAGS, *chosen.flags, f"-D{ELEMENTS[element]}", *extra_flags]
    sources = sorted(Path(__file__).parent.glob("*.cpp"))
    digest = hashlib.blake2b(" ".join(command).encode(), digest_size=10)
    for path in sorted(Path(__file__).parent.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    path = _cache_directory() / f"kernels-{chosen.name}-{element}-{digest.hexdigest()}.so"
    if not path.exists():
        with _compile_lock(path):
            if not path.exists():
                log.info("compiling the CPU kernels for %s and %s", chosen.name, element)
                _compile([*command, *map(str, sources)], path)
    return path


def require_kernels(element: str, instruction_set: InstructionSet | None = None) -> InstructionSet:
    """The instruction set, by default the one in use. Raises KernelsUnavailable if there are no kernels for it and this
    element type."""
    chosen = instruction_set or kernel_set()
    if chosen is None:
        names = ", ".join(one.name for one in INSTRUCTION_SETS)
        raise KernelsUnavailable(f"this processor has none of the instruction sets {names}")
    if element not in chosen.elements:
        raise KernelsUnavailable(f"there are none for {element} with {chosen.name}")
    return chosen


def _compiler_command() -> list[str]:
    """The words of the environment variable CXX, or the first compiler that is installed."""
    if named := os.environ.get("CXX", "").split():
        return named
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise KernelsUnavailable("there is no C++ compiler")


def _cache_directory() -> Path:
    """The directory of compiled libraries. Only this user may write to it, since the worker runs what is there."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a home directory
        raise KernelsUnavailable(f"there is no cache directory: {error} Set XDG_CACHE_HOME") from error
    path = base / "tgi"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be made: {error}") from error
    if reason := exposure(status):
        raise KernelsUnavailable(f"{path} {reason}, so libraries in it are not loaded")
    return path


@contextmanager
def _compile_lock(path: Path) -> Iterator[None]:
    """Lets one process compile a library while others wait for it. The kernel releases the lock when a process dies."""
    try:
        lock = path.with_suffix(".lock").open("ab")
    except OSError as error:
        raise KernelsUnavailable(f"nothing can be written to {path.parent}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], path: Path) -> None:
    """Runs the compiler and moves its output to `path`, so that no other worker loads an incomplete library."""
    try:
        handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError as error:
        raise KernelsUnavailable(f"nothing can be written to {path.parent}: {error.strerror}") from error
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True, timeout=BUILD_TIMEOUT)
        if done.returncode:
            output = done.stderr.strip().splitlines() or ["no message"]
            raise KernelsUnavailable(f"{command[0]} failed: {output[0]}")
        os.replace(unfinished, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]} cannot be run: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)
