"""Installs peers, each once into an environment of its own: .peers/NAME."""

import fcntl
import hashlib
import os
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.beside.models import PEERS, run
from scripts.beside.servers import Failed

REQUIREMENTS = Path(__file__).parent / "requirements"
# Packages that come along for images and sound. Where the index has them for CUDA alone, they break torch's CPU build.
UNUSED = ("torchvision", "torchaudio", "torchcodec")
# The source distribution that carries llama.cpp's sources, and what they are built for: this machine's processor.
LLAMA_CPP = "llama-cpp-python==0.3.36"
BUILD = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# Compiled in front of each source: without it, some compilers spoil its AMX kernels.
TILES = Path(__file__).parent / "tiles.h"


def environment(name: str) -> Path:
    """The Python of a peer's environment, made if need be. Failed if it cannot be installed."""
    requirements = REQUIREMENTS / f"{name}.txt"
    directory = PEERS / name
    python, stamp = directory / "bin" / "python", directory / "installed"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    with _alone(name):
        if stamp.exists() and stamp.read_text() == wanted:
            return python
        print(f"Installing {name} into {directory} (once) ...", file=sys.stderr, flush=True)
        run(sys.executable, "-m", "venv", directory)
        run(python, "-m", "pip", "install", "--disable-pip-version-check", "-r", requirements)
        run(python, "-m", "pip", "uninstall", "--yes", *UNUSED)
        stamp.write_text(wanted)
    return python


def llama_cpp() -> Path:
    """The directory of llama.cpp's programs, built if need be. Failed if they cannot be."""
    python = environment("llama.cpp")
    directory = PEERS / "llama.cpp"
    build, stamp = directory / "build", directory / "built"
    wanted = " ".join((LLAMA_CPP, *BUILD, hashlib.sha256(TILES.read_bytes()).hexdigest()))
    with _alone("llama.cpp"):
        if stamp.exists() and stamp.read_text() == wanted:
            return build / "bin"
        print(f"Building {LLAMA_CPP}'s llama.cpp in {directory} (once; many minutes) ...", file=sys.stderr, flush=True)
        source = _source(python, directory / "source")
        cmake = (python, "-m", "cmake")  # its program stops working where the environment is moved
        how = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={python.parent / 'ninja'}")
        tiles = f"-DCMAKE_CXX_FLAGS=-include {shlex.quote(str(TILES))}"
        run(*cmake, "--fresh", *how, "-S", source, "-B", build, *BUILD, tiles)
        targets = ("llama-server", "llama-quantize")
        run(*cmake, "--build", build, "--target", *targets, "--parallel", str(os.cpu_count()))
        stamp.write_text(wanted)
    return build / "bin"


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """No other process installs this peer."""
    PEERS.mkdir(exist_ok=True)
    with (PEERS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _source(python: Path, directory: Path) -> Path:
    """llama.cpp's sources, unpacked."""
    with tempfile.TemporaryDirectory() as place:
        name = LLAMA_CPP.partition("==")[0]
        run(python, "-m", "pip", "download", "--no-deps", "--no-binary", name, LLAMA_CPP, "--dest", place)
        archive = next(Path(place).glob("*.tar.gz"), None)
        if archive is None:
            raise Failed(f"{LLAMA_CPP} has no source distribution")
        with tarfile.open(archive) as packed:
            packed.extractall(directory, filter="data")
    return next(directory.glob("*/vendor/llama.cpp"))
