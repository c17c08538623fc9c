"""A kernel library for another processor, run by an emulator (qemu-user), with the interface of ctypes.CDLL.

`EmulatedLibrary` starts server.cpp in the emulator. That process sees the memory of this one at the same addresses: see
there. So kernels read and write the tensors of the tests, which run unchanged.
"""

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import weakref
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from tgi.worker.cpu_kernels import build, kernels
from tgi.worker.instruction_sets import BY_NAME

COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
PACKAGES = "g++-aarch64-linux-gnu qemu-user"  # of Debian and Ubuntu, with these two programs
# qemu's name of a processor that has the instructions of a set and no more, where there is one.
PROCESSORS = {"neon": "cortex-a53", "neon_bf16": "max"}
INTEGERS, FLOATS = 24, 8  # arguments of a call
REQUEST = struct.Struct(f"48s{INTEGERS}q{FLOATS * 8}s")
MESSAGE = struct.Struct("3q")
READY, READ, WRITE, RETURN = range(4)  # kinds of messages
# Bytes between any mapping of this process and any of the emulator's own. The system puts both at random places in a
# range of a terabyte.
DISTANCE = 16 << 30
STARTS = 50


def missing_tools() -> str:
    """What to install for the emulation, or ""."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"there is no {' and no '.join(missing)}: apt-get install {PACKAGES}" if missing else ""


def emulate(name: str) -> None:
    """Makes this process compile the CPU kernels for this instruction set, and compute with them in the emulator."""
    if reason := missing_tools():
        raise RuntimeError(reason)
    os.environ["CXX"] = COMPILER
    build.kernel_set = lambda: BY_NAME[name]
    kernels.CDLL = partial(EmulatedLibrary, processor=PROCESSORS[name])


class EmulatedLibrary:
    """The functions of a library for another processor, as attributes. Raises OSError if it cannot be loaded."""

    def __init__(self, path: str, processor: str = "max") -> None:
        self.path = path
        self._process = _start([EMULATOR, "-cpu", processor, "-L", LIBRARIES, str(_server()), path])
        weakref.finalize(self, _end, self._process)
        self._memory = os.open("/proc/self/mem", os.O_RDWR)
        weakref.finalize(self, os.close, self._memory)

    def __getattr__(self, name: str) -> "EmulatedFunction":
        if name.startswith("_") or not self.call(f"?{name}", [], b""):
            raise AttributeError(name)
        function = EmulatedFunction(self, name)
        setattr(self, name, function)
        return function

    def call(self, name: str, integers: list[int], floats: bytes) -> int:
        """Calls a function and serves the emulator's reads and writes of memory until it returns."""
        padded = (*integers, *[0] * (INTEGERS - len(integers)))
        self._send(REQUEST.pack(name.encode(), *padded, floats))
        while True:
            kind, value, size = MESSAGE.unpack(self._receive(MESSAGE.size))
            if kind == RETURN:
                return value
            if kind == WRITE:
                ctypes.memmove(value, self._receive(size), size)
                continue
            try:
                contents = os.pread(self._memory, size, value)
            except OSError:
                contents = b""
            self._send(struct.pack("q", len(contents)) + contents)
            if not contents:
                raise MemoryError(f"{name} accesses the page at {value:#x}, where this process has no memory")

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then _receive says what happened
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise RuntimeError(f"the emulator ended with code {self._process.wait()}")
        return data


class EmulatedFunction:
    """A function of an EmulatedLibrary. `argtypes` and `restype` are set as those of a ctypes function."""

    argtypes: tuple[Any, ...] = ()
    restype: Any = ctypes.c_int

    def __init__(self, library: EmulatedLibrary, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *arguments: object) -> int | None:
        assert len(arguments) == len(self.argtypes), self._name
        integers, floats = [], b""
        for value, form in zip(arguments, self.argtypes, strict=True):
            if form is ctypes.c_float:
                floats += struct.pack("fxxxx", value)
            else:
                integers.append(_address(value) if form is ctypes.c_void_p else form(value).value)
        found = self._library.call(self._name, integers, floats)
        if self.restype is None:
            return None
        return self.restype(found).value


def _address(value: Any) -> int:
    """The address that ctypes passes for an argument of type c_void_p."""
    if value is None:
        return 0
    if isinstance(value, int):
        return ctypes.c_int64(value).value
    if isinstance(value, ctypes.c_void_p):
        return value.value or 0
    return ctypes.addressof(getattr(value, "_obj", value))  # of byref(..), an array or a structure


def _start(command: list[str]) -> "subprocess.Popen[bytes]":
    """Starts the emulator, if need be several times, until none of its own memory is near that of this process."""
    for _ in range(STARTS):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        if len(process.stdout.read(MESSAGE.size)) < MESSAGE.size:
            raise OSError(f"{' '.join(command)} ended with code {process.wait()}")
        theirs, ours = _mappings(process.pid), _mappings(os.getpid())
        if all(end + DISTANCE <= first or last + DISTANCE <= begin for begin, end in theirs for first, last in ours):
            return process
        _end(process)
    raise OSError(f"{EMULATOR} has memory near that of Python at each of {STARTS} starts: are addresses not random?")


def _mappings(pid: int) -> list[tuple[int, int]]:
    """First address and end of each memory mapping of a process that may hold data of kernels: all but those of the
    main thread's stack and of the system."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    ranges = (line[0].split("-") for line in lines if not line[-1].startswith(("[stack", "[v")))
    return [(int(first, 16), int(end, 16)) for first, end in ranges]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the emulator: it reads the end of its input."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()


@cache
def _server() -> Path:
    """The compiled server.cpp."""
    source = Path(__file__).with_name("server.cpp")
    digest = hashlib.blake2b(source.read_bytes(), digest_size=10).hexdigest()
    path = build.cache_directory() / f"emulated-server-{digest}"
    if not path.exists():
        with build._scratch_directory(path.parent) as scratch:
            build._run([COMPILER, "-std=c++17", "-O2", "-pthread", str(source), "-ldl", "-o", str(scratch / path.name)])
            os.replace(scratch / path.name, path)
    return path
