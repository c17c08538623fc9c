"""Reads a GGUF file's header: metadata and the location of every tensor. Every count, size and offset is checked.

Layout (GGUF version 2 and 3, little-endian): magic, version, counts, key-value pairs, tensor infos, padding, tensor
data. See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package has a reader too, but it trusts
the counts and sizes in the file.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tgi.hub.gguf_import import gguf_parts
from tgi.microkernel.errors import UserError

MAGIC = b"GGUF"
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 22  # of one array: more than any vocabulary
MAX_STRING = 1 << 24  # bytes
MAX_NAME = 1 << 10  # bytes of a key or a tensor's name
MAX_DIMENSIONS = 4

STRING, ARRAY = 8, 9
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
U32, U64 = SCALARS[4], SCALARS[10]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in the file. `shape` is in torch's order (rows first); `data` is a view of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file with a valid header: every tensor lies inside the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Broken(Exception):
    """The defect of the file, as the end of a sentence."""


def read_gguf(path: Path) -> GGUFFile:
    """Maps the file, and with any part of a split file all its parts, into memory and reads the headers. The first part
    has the metadata. Raises UserError if it is not a valid GGUF file, or a part is missing."""
    first, *others = gguf_parts(path)
    file = _read_part(first)
    count = file.metadata.get("split.count") or 1
    if type(count) is not int:
        raise UserError(f"{first} is one of {str(count)[:80]!r} parts, where a number was expected. Fetch it again.")
    if count != len(others) + 1:
        raise UserError(
            f"{first} is one of {count} parts, but its name says {len(others) + 1}. Parts have names such as "
            f"NAME-00001-of-{count:05}.gguf: name them so, or join them with llama-gguf-split --merge."
        )
    tensors = dict(file.tensors)
    for number, other in enumerate(others, 1):
        part = _read_part(other)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise UserError(f"{other} is not part {number + 1} of {count} of the same file. Fetch or convert it again.")
        if twice := tensors.keys() & part.tensors.keys():
            raise UserError(f"{other} has the tensor {min(twice)!r} of another part. Fetch or convert it again.")
        tensors |= part.tensors
    return GGUFFile(path, file.metadata, tensors)


def _read_part(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Name a GGUF file.") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise UserError(f"{path} cannot be read as a GGUF file: {error}.") from error
    try:
        metadata, tensors = _Header(memoryview(mapped)).read()
    except _Broken as error:
        raise UserError(f"{path} is not a sound GGUF file: {error}. Fetch or convert it again.") from None
    return GGUFFile(path, metadata, tensors)


class _Header:
    """A cursor over the file. Every method raises _Broken at the first inconsistency."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if bytes(self.take(4, "the magic bytes")) != MAGIC:
            raise _Broken("it does not begin with the letters GGUF")
        version = self.scalar(U32, "the version")
        if version not in (2, 3):
            raise _Broken(f"version {version} was found where 2 or 3 (little-endian) was expected")
        tensor_count = self.count(MAX_TENSORS, "tensors")
        key_count = self.count(MAX_KEYS, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string("a metadata key", MAX_NAME)
            if key in metadata:
                raise _Broken(f"the key {key!r} appears twice")
            metadata[key] = self.value(self.scalar(U32, f"the type of {key!r}"), key)
        infos = [self.tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise _Broken(f"the alignment is {alignment!r} where a power of two was expected")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_number, offset in infos:
            if name in tensors:
                raise _Broken(f"the tensor {name!r} appears twice")
            tensors[name] = self.tensor(name, shape, type_number, start + offset)
        # Otherwise an import could write any multiple of the file.
        if sum(len(tensor.data) for tensor in tensors.values()) > len(self.view):
            raise _Broken("its tensors overlap")
        return metadata, tensors

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self.view) - self.at:
            raise _Broken(f"it ends inside {what} (byte {len(self.view)})")
        self.at += size
        return self.view[self.at - size : self.at]

    def scalar(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack(self.take(kind.size, what))[0]

    def count(self, limit: int, what: str) -> int:
        number = int(self.scalar(U64, f"the number of {what}"))
        if number > limit:
            raise _Broken(f"it claims {number} {what}, more than {limit}")
        return number

    def string(self, what: str, limit: int = MAX_STRING) -> str:
        size = int(self.scalar(U64, what))
        if size > limit:
            raise _Broken(f"{what} claims a length of {size} bytes")
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError:
            raise _Broken(f"{what} is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.string(f"the value of {key!r}")
        if kind in SCALARS:
            return self.scalar(SCALARS[kind], f"the value of {key!r}")
        if kind != ARRAY:
            raise _Broken(f"the value of {key!r} has the unknown type {kind}")
        item = self.scalar(U32, f"the array {key!r}")
        count = self.count(MAX_ITEMS, f"items in the array {key!r}")
        if item == STRING:
            return [self.string(f"the array {key!r}") for _ in range(count)]
        if item not in SCALARS:
            raise _Broken(f"the array {key!r} has items of the unknown type {item}")
        letter = SCALARS[item].format[1:]
        return list(struct.unpack(f"<{count}{letter}", self.take(count * SCALARS[item].size, f"the array {key!r}")))

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor's name", MAX_NAME)
        dimensions = self.scalar(U32, f"the tensor {name!r}")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise _Broken(f"the tensor {name!r} has {dimensions} dimensions")
        sizes = [int(self.scalar(U64, f"the tensor {name!r}")) for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self.scalar(U32, f"the tensor {name!r}"), self.scalar(U64, f"{name!r}")

    def tensor(self, name: str, shape: tuple[int, ...], type_number: int, start: int) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(type_number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise _Broken(f"the tensor {name!r} has the unknown block type {type_number}") from None
        elements = math.prod(shape)
        if elements == 0 or shape[-1] % block:
            raise _Broken(f"the tensor {name!r} of shape {shape} does not divide into {kind.name} blocks of {block}")
        size = elements // block * block_bytes
        if start + size > len(self.view):
            raise _Broken(
                f"the tensor {name!r} ends at byte {start + size}, but the file has {len(self.view)} bytes (truncated?)"
            )
        return GGUFTensor(name, kind, shape, self.view[start : start + size])
