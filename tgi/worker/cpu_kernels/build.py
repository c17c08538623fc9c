"""The compiled library for an instruction set and an element type: from the installed package, from the user's cache,
or compiled now with the compiler of this machine and kept in that cache.

A wheel contains libraries (setup.py makes them with `compile_library`). The name of a library ends with a digest of the
sources and flags that it was made of, so a library of other sources is not found, and an edited checkout compiles its
own.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tgi.microkernel.host.rundir import exposure
from tgi.worker.host_cpu import kernel_set, usable_cores
from tgi.worker.instruction_sets import ELEMENTS, INSTRUCTION_SETS, InstructionSet

log = logging.getLogger(__name__)

Progress = Callable[[str, int], None]  # stage, percent

SOURCES = Path(__file__).parent
PACKAGED = SOURCES / "lib"  # the libraries of an installed wheel
# Clang would turn a * b + c into a fused multiply-add where both stand in one expression.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread", "-w")
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT = 600.0  # seconds for one call of the compiler; the longest takes 6 on an idle core
# Source files that take the compiler seconds each. The others take it less than their headers do, so one call compiles
# all of them: together they take as long as one of these.
ALONE = (
    "attention.cpp", "linear_floats4.cpp", "linear_groups4.cpp", "linear_groups8.cpp", "linear_integers.cpp",
    "linear_mxfp4.cpp", "linear_numbers.cpp",
)  # fmt: skip
ABANDONED = 3600.0  # seconds after which an unfinished build has no owner


class KernelsUnavailable(Exception):
    """The CPU kernels cannot be used; the text says why."""


def build_library(
    element: str,
    *extra_flags: str,
    instruction_set: InstructionSet | None = None,
    progress: Progress | None = None,
    jobs: int | None = None,
) -> Path:
    """The library for an element type (one of ELEMENTS) and an instruction set, by default the one in use.

    `extra_flags` are appended to the compiler's. `progress` is called with a stage and a percentage if the library has
    to be compiled; up to `jobs` source files are compiled at once, by default as many as there are cores. Raises
    KernelsUnavailable.
    """
    chosen = require_instruction_set(instruction_set)
    packaged = PACKAGED / library_name(chosen, element)
    if not extra_flags and packaged.exists():
        return packaged
    compiler = compiler_command()
    path = cache_directory() / library_name(chosen, element, *compiler, *extra_flags)
    if not path.exists():
        with _compile_lock(path):
            if not path.exists():
                stage = f"compiling the CPU kernels for {chosen.name} and {element}"
                log.debug("%s", stage)
                report = (lambda percent: progress(stage, percent)) if progress else None
                compile_library(
                    compiler, [*_flags(chosen, element), *extra_flags], path, jobs or usable_cores(), report
                )
    return path


def require_instruction_set(instruction_set: InstructionSet | None = None) -> InstructionSet:
    """The instruction set, by default the one in use. Raises KernelsUnavailable if there are no kernels for it."""
    chosen = instruction_set or kernel_set()
    if chosen is None:
        names = ", ".join(one.name for one in INSTRUCTION_SETS)
        raise KernelsUnavailable(f"this processor has none of the instruction sets {names}")
    return chosen


def library_name(chosen: InstructionSet, element: str, *further: str) -> str:
    """The file name of a library, which contains a digest of the sources, the flags and `further` words."""
    words = (*_flags(chosen, element), *further)
    digest = hashlib.blake2b("\0".join(words).encode(), digest_size=10)
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    return f"kernels-{chosen.name}-{element}-{digest.hexdigest()}.so"


def compiler_command() -> list[str]:
    """The words of the environment variable CXX, or the first compiler that is installed."""
    if named := os.environ.get("CXX", "").split():
        return named
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise KernelsUnavailable(
        "there is no C++ compiler: install one (such as g++), or a wheel of this package, which contains the kernels"
    )


def compile_library(
    compiler: list[str], flags: list[str], path: Path, jobs: int, progress: Callable[[int], None] | None = None
) -> None:
    """Compiles the source files, up to `jobs` calls of the compiler at once, and links them. The library is moved to
    `path` when it is complete, so that no other process loads a part of it. `progress` is called with a percentage, on
    the calling thread. Raises KernelsUnavailable."""
    with _scratch_directory(path.parent) as scratch, ThreadPoolExecutor(jobs) as pool:
        units = translation_units(scratch)
        objects = [scratch / f"{unit.stem}.o" for unit in units]
        running = [
            pool.submit(_run, [*compiler, *flags, "-c", str(unit), "-o", str(to)])
            for unit, to in zip(units, objects, strict=True)
        ]
        report = progress or (lambda percent: None)
        report(0)
        try:
            for done, job in enumerate(as_completed(running), start=1):
                job.result()
                report(100 * done // len(running))
        finally:
            pool.shutdown(cancel_futures=True)
        unfinished = scratch / path.name
        _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(unfinished)])
        os.replace(unfinished, path)


def translation_units(scratch: Path) -> list[Path]:
    """The files to compile: those of ALONE, and one that includes all others, which is written to `scratch`."""
    others = scratch / "others.cpp"
    names = sorted(source.name for source in SOURCES.glob("*.cpp") if source.name not in ALONE)
    others.write_text("".join(f'#include "{SOURCES / name}"\n' for name in names))
    return [*(SOURCES / name for name in ALONE), others]


def _flags(chosen: InstructionSet, element: str) -> list[str]:
    return [*FLAGS, *chosen.flags, f"-D{ELEMENTS[element]}"]


def cache_directory() -> Path:
    """The directory of compiled libraries. Only this user may write to it, since the worker trusts what is there."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a home directory
        raise KernelsUnavailable(f"there is no cache directory: {error} Set XDG_CACHE_HOME") from error
    path = base / "tgi"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise KernelsUnavailable(
            f"{path} cannot be made: {error}. Set XDG_CACHE_HOME to a directory that can"
        ) from error
    if reason := exposure(status):
        raise KernelsUnavailable(f"{path} {reason}, so libraries in it are not loaded")
    return path


def packed_weights_directory() -> Path:
    """The directory of weights in the layout of the kernels. Raises KernelsUnavailable as `cache_directory`."""
    return cache_directory() / "weights"


@contextlib.contextmanager
def _compile_lock(path: Path) -> Iterator[None]:
    """Lets one process compile a library while others wait for it. The kernel releases the lock when a process dies."""
    try:
        lock = path.with_suffix(".lock").open("ab")
    except OSError as error:
        raise KernelsUnavailable(
            f"nothing can be written to {path.parent}: {error.strerror}. Set XDG_CACHE_HOME"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch_directory(parent: Path) -> Iterator[Path]:
    """A directory for an unfinished build, which is removed afterwards. Those of builds that were killed are removed,
    too."""
    for left in parent.glob("*.part"):
        with contextlib.suppress(OSError):  # removed by another process
            if time.time() - left.stat().st_mtime > ABANDONED:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    try:
        scratch = tempfile.mkdtemp(dir=parent, suffix=".part")
    except OSError as error:
        raise KernelsUnavailable(f"nothing can be written to {parent}: {error.strerror}. Set XDG_CACHE_HOME") from error
    try:
        yield Path(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: list[str]) -> None:
    """Runs the compiler."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        output = done.stderr.strip().splitlines() or ["no message"]
        raise KernelsUnavailable(
            f"{command[0]} failed: {next((line for line in output if 'error' in line), output[0])}"
        )
