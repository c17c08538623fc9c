"""The weights of a decoder as our CPU kernels take them, in files: a start from the second one on reads what the first
one has quantized and packed.

A file has a header, the structure of the weights and their bytes. It is named by a digest of all that these depend on.
It is written by a thread when the worker is ready, and mapped, so workers of a host share the pages of the file cache.
Where these are small, it is read into memory in huge pages, since decoding from small pages is 4 to 8 % slower. A file
that is not as its header and sums say is removed and never used.
"""

import atexit
import fcntl
import hashlib
import io
import json
import logging
import math
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from functools import partial
from importlib import import_module
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgi import __version__
from tgi.worker.cpu_kernels.arena import LARGE_PAGE, map_region
from tgi.worker.cpu_kernels.experts import PackedExperts
from tgi.worker.cpu_kernels.kernels import CpuKernels, PackedHeads, join_heads
from tgi.worker.host_cpu import usable_cores
from tgi.worker.models.decoder_layer import DecoderWeights

log = logging.getLogger(__name__)

MAGIC = b"tgi packed weights 1\n".ljust(32, b"\0")
SUFFIX, UNFINISHED = ".weights", ".part"
LENGTH_BYTES = 8
DIGEST_BYTES = hashlib.sha256().digest_size
START_BYTES = len(MAGIC) + LENGTH_BYTES + DIGEST_BYTES  # before the description
MOST_DESCRIPTION = 1 << 28  # bytes
ALIGNMENT = 64  # bytes
CHUNK = 2 * LARGE_PAGE  # bytes that are written at once, for which the file cache takes huge pages, and have a sum
HUGE_SHARE = 0.9  # of a file in huge pages: with less it is not mapped
MADV_POPULATE_READ = 22  # from <linux/mman.h>
LEAST_BYTES = 32 << 20  # fewer are packed as quickly as they are read
MOST_OF_FREE = 0.5  # of the free space of the disk: a larger file is not written
WRITER_NICENESS = 19


class Damaged(Exception):
    """A file is not as it was written; the text says how."""


class PackedWeightFiles:
    """The files of all models in a directory, at most `most_bytes` of them."""

    def __init__(self, directory: Path, most_bytes: int, least_bytes: int = LEAST_BYTES) -> None:
        self._directory, self._most, self._least = directory, most_bytes, least_bytes
        self._kept: list[tuple[str, DecoderWeights]] = []
        self._writer = threading.Thread(target=self._write_kept, name="packed weights", daemon=True)
        # The writer is in torch. A process that ends meanwhile would abort: Python ends such a thread within C++ code.
        self._in_torch = threading.Lock()
        self.mapped_bytes = 0  # of the file cache, which the system counts as available

    def read(self, identity: dict[str, Any], kernels: CpuKernels) -> DecoderWeights | None:
        """The weights that were written with this identity; None if there are none, or their file is damaged."""
        described = _described(identity, kernels)
        path = self._path(described)
        try:
            with path.open("rb") as file:
                weights, mapped = _read(file, described, kernels)
            self.mapped_bytes += mapped
            os.utime(path)  # which is when it was used
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("packed weights in %s cannot be read, so they are packed again: %s", path, error)
            return None
        except Damaged as damage:
            log.warning("%s is damaged and removed, and the weights are packed again: %s", path, damage)
            path.unlink(missing_ok=True)
            return None
        log.debug("packed weights are %s from %s", "mapped" if mapped else "read", path)
        return weights

    def keep(self, identity: dict[str, Any], weights: DecoderWeights, kernels: CpuKernels) -> None:
        """Has `write_behind` write these weights."""
        self._kept.append((_described(identity, kernels), weights))

    def write_behind(self) -> None:
        """Begins to write in a thread what is kept."""
        if self._kept:
            atexit.register(self._in_torch.acquire)
            self._writer.start()

    def wait(self) -> None:
        """Waits until what `write_behind` has begun is done."""
        self._writer.join()

    def _path(self, described: str) -> Path:
        return self._directory / f"{hashlib.sha256(described.encode()).hexdigest()[:32]}{SUFFIX}"

    def _write_kept(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
        while self._kept:
            described, weights = self._kept.pop()
            path = self._path(described)
            try:
                self._write(path, described, weights)
            except OSError as error:
                log.warning("packed weights cannot be written to %s: %s. The next start packs them again", path, error)

    def _write(self, path: Path, described: str, weights: DecoderWeights) -> None:
        structure = _Structure()
        with self._in_torch:
            structure.add(weights)
        size = sum(_aligned(tensor.nbytes) for tensor in structure.tensors)
        if size < self._least:
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(self._directory).free
        if size > self._most or size > MOST_OF_FREE * free:
            log.info(
                "%.1f GB of packed weights are not kept in %s: the limit is %.1f GB and half of the %.1f GB that are "
                "free there, so the next start packs them again",
                *(size / 1e9, self._directory, self._most / 1e9, free / 1e9),
            )
            return
        self._make_room(size)
        unfinished = path.with_suffix(UNFINISHED)
        with open(os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            if not _lock(file):  # another worker writes it
                return
            try:
                file.truncate(0)
                _write(file, described, structure.nodes, structure.tensors, self._in_torch)
                os.fsync(file.fileno())
                unfinished.replace(path)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
        log.debug("wrote %.2f GB of packed weights to %s", size / 1e9, path)

    def _make_room(self, size: int) -> None:
        """Removes the files that were used least recently, and those whose writer has ended."""
        found: list[tuple[float, int, Path]] = []
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # removed by another worker
                status = path.stat()
                if path.suffix == SUFFIX:
                    found.append((status.st_mtime, status.st_size, path))
                elif path.suffix == UNFINISHED:
                    with path.open("rb") as file:
                        if _lock(file):
                            path.unlink()
        used = sum(each for _, each, _ in found)
        for _, each, path in sorted(found):
            if used + size <= self._most:
                return
            path.unlink(missing_ok=True)
            used -= each


def _lock(file: io.IOBase) -> bool:
    """Whether this process has the file now for itself: until it closes it, or ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _described(identity: dict[str, Any], kernels: CpuKernels) -> str:
    """All that the bytes depend on, as JSON. The name of the kernels' library has a digest of its sources."""
    sources = Path(__file__).parents[1].rglob("*.py")
    code = sorted((path.name, (status := path.stat()).st_size, status.st_mtime_ns) for path in sources)
    digest = hashlib.sha256(repr(code).encode()).hexdigest()
    library = Path(kernels.library._name).name
    return json.dumps(identity | {"version": __version__, "code": digest, "library": library}, sort_keys=True)


# --- the structure of weights, and their tensors ---

# A value without parts is itself; any other one is a list with the number of its node. Nodes come after their parts, so
# what has several owners is one object again.
SIMPLE = (type(None), bool, int, float, str)
COLLECTIONS = {one.__name__: one for one in (list, tuple, set, frozenset)}
CODE = "tgi.worker."  # where the classes of weights are


class _Structure:
    """Weights as nodes for JSON, and their tensors in the order of their places."""

    def __init__(self) -> None:
        self.nodes: list[list[Any]] = []
        self.tensors: list[Tensor] = []
        self._known: dict[int, tuple[int, object]] = {}  # by id: the number, and the object, which keeps its id so
        self._places: dict[tuple[int, int], int] = {}  # of tensors, by address and bytes
        self._end = 0

    def add(self, value: object) -> Any:
        """The value, or the list with the number of its node. Raises TypeError for what cannot be written."""
        if type(value) in SIMPLE:
            return value
        if id(value) not in self._known:
            node = self._node(value)
            self._known[id(value)] = len(self.nodes), value
            self.nodes.append(node)
        return [self._known[id(value)][0]]

    def _node(self, value: object) -> list[Any]:
        if isinstance(value, Tensor):
            return self._tensor(value.contiguous())
        if isinstance(value, CpuKernels):
            return ["kernels"]
        if isinstance(value, torch.dtype):
            return ["dtype", _dtype_name(value)]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        if type(value) in COLLECTIONS.values():
            assert isinstance(value, Iterable)
            return [type(value).__name__, *map(self.add, value)]
        if not type(value).__module__.startswith(CODE):
            raise TypeError(f"weights have a {type(value)}")
        # What has addresses of this process is made again.
        if isinstance(value, PackedHeads):
            return ["call", _name(join_heads), self.add(value.heads)]
        if isinstance(value, PackedExperts):
            return ["call", _name(PackedExperts), *map(self.add, value.made_of)]
        if isinstance(value, Enum):
            return ["call", _name(type(value)), value.value]
        if isinstance(value, tuple):  # with names
            return ["call", _name(type(value)), *map(self.add, value)]
        return ["object", _name(type(value)), {name: self.add(part) for name, part in vars(value).items()}]

    def _tensor(self, tensor: Tensor) -> list[Any]:
        key = tensor.data_ptr(), tensor.nbytes
        if key not in self._places:
            self._places[key] = self._end
            self.tensors.append(tensor)
            self._end += _aligned(tensor.nbytes)
        return ["tensor", self._places[key], _dtype_name(tensor.dtype), *tensor.shape]


def _build(nodes: Sequence[Sequence[Any]], data: Tensor, kernels: CpuKernels) -> object:
    """The object of the last node, with tensors that are views of `data`, uint8 [bytes]."""
    built: list[Any] = []

    def part(value: Any) -> Any:
        return built[value[0]] if isinstance(value, list) else value

    for kind, *rest in nodes:
        if kind == "tensor":
            start, dtype, *shape = rest
            number = getattr(torch, dtype)
            flat = data[start : start + math.prod(shape) * number.itemsize]
            built.append(flat.view(number).view(shape))
        elif kind in COLLECTIONS:
            built.append(COLLECTIONS[kind](map(part, rest)))
        elif kind == "call":
            built.append(_find(rest[0])(*map(part, rest[1:])))
        elif kind == "object":
            made = object.__new__(_find(rest[0]))
            vars(made).update({name: part(value) for name, value in rest[1].items()})
            built.append(made)
        elif kind == "kernels":
            built.append(kernels)
        elif kind == "dtype":
            built.append(getattr(torch, rest[0]))
        else:
            built.append({"device": torch.device, "range": range}[kind](*rest))
    return built[-1]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(code: Callable[..., Any]) -> str:
    return f"{code.__module__.removeprefix(CODE)}:{code.__name__}"


def _find(name: str) -> Any:
    module, _, code = name.partition(":")
    return getattr(import_module(CODE + module), code)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# --- a file: MAGIC, the length and the digest of the description, the description, the tensors ---


def _write(
    file: io.FileIO,
    described: str,
    nodes: Sequence[Sequence[Any]],
    tensors: Sequence[Tensor],
    in_torch: threading.Lock,
) -> None:
    """Writes a file; the description last, since it has the sums. Holds the lock while it is in torch."""
    size = sum(_aligned(tensor.nbytes) for tensor in tensors)
    fields = {"identity": described, "bytes": size, "sums": [-(1 << 63)] * -(-size // CHUNK), "nodes": nodes}
    length = len(json.dumps(fields))  # no sum has more digits
    file.seek(_start_of_data(length))
    sums: list[int] = []
    chunks = _chunks(tensors)
    while True:
        with in_torch:
            chunk = next(chunks, None)
            if chunk is None:
                break
            sums.append(_sum(chunk))
            data = memoryview(chunk.numpy())
        _write_all(file, data)
    description = json.dumps(fields | {"sums": sums}).ljust(length).encode()
    file.seek(0)
    first = MAGIC + length.to_bytes(LENGTH_BYTES, "little") + hashlib.sha256(description).digest()
    _write_all(file, memoryview(first + description))


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _start_of_data(description: int) -> int:
    return -(-(START_BYTES + description) // LARGE_PAGE) * LARGE_PAGE


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes of tensors, aligned, in chunks of CHUNK bytes but for the last: uint8, memory that is reused."""
    chunk, used = torch.zeros(CHUNK, dtype=torch.uint8), 0
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        at = 0
        while at < _aligned(len(flat)):
            count = min(_aligned(len(flat)) - at, CHUNK - used)
            part = flat[at : at + count]
            chunk[used : used + len(part)] = part
            chunk[used + len(part) : used + count] = 0
            at, used = at + count, used + count
            if used == CHUNK:
                yield chunk
                used = 0
    if used:
        yield chunk[:used]


def _sum(chunk: Tensor) -> int:
    """The sum of bytes, taken as int64 numbers, which wraps around."""
    return int(chunk.view(torch.int64).sum())


def _read(file: io.BufferedReader, described: str, kernels: CpuKernels) -> tuple[DecoderWeights, int]:
    """The weights, and how many of their bytes are mapped. Raises Damaged and OSError."""
    fields, start = _read_description(file, described)
    size, sums = fields["bytes"], fields["sums"]
    if (found := os.fstat(file.fileno()).st_size) != start + size:
        raise Damaged(f"it has {found} bytes, not {start + size}")
    with ThreadPoolExecutor(usable_cores()) as pool:
        mapped = _map_in_huge_pages(file, start, size)
        data = torch.frombuffer(map_region(size), dtype=torch.uint8) if mapped is None else mapped
        chunks = data.split(CHUNK)
        if mapped is None:
            list(pool.map(partial(_read_chunk, file.fileno()), chunks, range(start, start + size, CHUNK)))
        if list(pool.map(_sum, chunks)) != sums:
            raise Damaged("a sum of its bytes is another one")
    try:
        weights = _build(fields["nodes"], data, kernels)
    except (AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Damaged(f"its structure cannot be read: {error}") from error
    if not isinstance(weights, DecoderWeights):
        raise Damaged("it has other things than weights")
    return weights, 0 if mapped is None else size


def _map_in_huge_pages(file: io.BufferedReader, start: int, size: int) -> Tensor | None:
    """The bytes of a file, uint8 [size], which nothing writes to; None where the file cache has no huge pages of it.
    Raises OSError."""
    # Private and writable, as torch has its memory; no page is copied before it is written to.
    region = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, offset=start)
    data = torch.frombuffer(region, dtype=torch.uint8)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
        region.madvise(MADV_POPULATE_READ)
    except OSError as error:
        log.debug("packed weights are read, not mapped: %s", error)  # an older kernel
        return None
    huge = _bytes_in_huge_pages(data.data_ptr())
    if huge < HUGE_SHARE * size:
        log.debug("packed weights are read, not mapped: %.2f of %.2f GB would be in huge pages", huge / 1e9, size / 1e9)
        return None
    return data


def _bytes_in_huge_pages(address: int) -> int:
    """How much of the file mapping that begins at this address is in huge pages."""
    with open("/proc/self/smaps") as mappings:
        own = dropwhile(lambda line: not line.startswith(f"{address:x}-"), mappings)
        for line in own:
            name, _, value = line.partition(":")
            if name == "FilePmdMapped":
                return 1024 * int(value.split()[0])
    return 0


def _read_chunk(descriptor: int, chunk: Tensor, at: int) -> None:
    """Fills a chunk with the bytes of a file from `at` on. Raises Damaged and OSError."""
    view = memoryview(chunk.numpy())
    while view:
        if not (count := os.preadv(descriptor, [view], at)):
            raise Damaged("it ends too early")
        view, at = view[count:], at + count


def _read_description(file: io.BufferedReader, described: str) -> tuple[dict[str, Any], int]:
    """The description, and where the tensors start. Raises Damaged and OSError."""
    first = file.read(START_BYTES)
    length = int.from_bytes(first[len(MAGIC) : len(MAGIC) + LENGTH_BYTES], "little")
    if not first.startswith(MAGIC) or length > MOST_DESCRIPTION:
        raise Damaged("it does not begin as such files do")
    description = file.read(length)
    if hashlib.sha256(description).digest() != first[-DIGEST_BYTES:]:
        raise Damaged("its description has another digest")
    fields = json.loads(description)
    if fields["identity"] != described:
        raise Damaged("it is of other weights")
    return fields, _start_of_data(length)
