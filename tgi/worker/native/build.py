"""Compiles the kernels with the compiler that is there, once for each source and processor."""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tgi.kernel.rundir import exposure
from tgi.worker.processor import processor

log = logging.getLogger(__name__)

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-w")
# What the kernels cannot do without; AMX is used where it is there, too.
NEEDED = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni", "avx512vbmi"))
LONGEST_BUILD = 300.0  # seconds; more than 120 were seen on a busy machine


class Unavailable(Exception):
    """The kernels cannot be had here; the text says why."""


def library(*further: str) -> Path:
    """The compiled kernels; `further` flags are for the compiler. Raises Unavailable."""
    need_processor()
    compiler = _compiler()
    sources = sorted(Path(__file__).parent.glob("*.cpp"))
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(Path(__file__).parent.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    digest.update(" ".join([*compiler, *FLAGS, *further, *sorted(processor())]).encode())
    path = _cache() / f"kernels-{digest.hexdigest()}.so"
    if not path.exists():
        _compile([*compiler, *FLAGS, *further, *map(str, sources)], path)
    return path


def need_processor() -> None:
    """Raises Unavailable if the processor, or what it is held to, lacks instructions that the kernels need."""
    if missing := NEEDED - processor():
        raise Unavailable(f"this processor has no {', '.join(sorted(missing))}")


def _compiler() -> list[str]:
    """The command that compiles: CXX, which may be several words, or what is there."""
    if named := os.environ.get("CXX", "").split():
        return named
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise Unavailable("there is no C++ compiler")


def _cache() -> Path:
    """The directory of compiled kernels: only this user may write there, since what lies in it is run."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # of a user without a home
        raise Unavailable(f"there is no place to keep them: {error} Set XDG_CACHE_HOME") from error
    path = base / "tgi"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise Unavailable(f"{path} cannot be made: {error}") from error
    if reason := exposure(status):
        raise Unavailable(f"{path} {reason}, so what lies there is not run")
    return path


def _compile(command: list[str], path: Path) -> None:
    log.info("compiling kernels for this processor")
    try:
        handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError as error:
        raise Unavailable(f"nothing can be written to {path.parent}: {error.strerror}") from error
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True, timeout=LONGEST_BUILD)
        if done.returncode:
            raise Unavailable(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['without a word'])[0]}")
        os.replace(unfinished, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} cannot be run: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)
