"""Dequantizes a GGUF file's tensors into one bfloat16 safetensors file, a piece of a tensor at a time."""

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import QuantError, dequantize

from tgi.hub.gguf.architecture import Wanted
from tgi.hub.gguf.reader import GGUF, Tensor
from tgi.kernel.errors import UserError

PIECE = 1 << 22  # elements dequantized at once: some 100 MB with the temporary arrays of the most complicated blocks

PLAIN = {
    GGMLQuantizationType.F64: "<f8",
    GGMLQuantizationType.I8: "<i1",
    GGMLQuantizationType.I16: "<i2",
    GGMLQuantizationType.I32: "<i4",
    GGMLQuantizationType.I64: "<i8",
}


def write(file: GGUF, wanted: list[Wanted], path: Path, progress: Callable[[int], None]) -> None:
    """Writes `wanted` to the safetensors file `path`. `progress` is told percents.

    Raises UserError for a block type that cannot be dequantized and for weights that are not finite. Format:
    https://github.com/huggingface/safetensors#format, a length, a JSON header, then the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in wanted:
        begin, end = end, end + 2 * math.prod(tensor.shape)
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for tensor in wanted:
            for piece in _pieces(file, file.tensors[tensor.source], tensor):
                out.write(bfloat16(piece).tobytes())
            progress(100 * header[tensor.name]["data_offsets"][1] // end)


def bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Finite float32 values rounded to the nearest bfloat16 (ties to even), as their upper 16 bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def row_order(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where row i of a llama q or k projection lies in the file.

    llama.cpp rotates neighbouring pairs, transformers the two halves of a head, so its converter interleaves the
    halves: row 2j + h of a head in the file is row h * head_dim / 2 + j of that head.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def _pieces(file: GGUF, tensor: Tensor, wanted: Wanted) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """The tensor's rows in order as float32, a bounded number of elements at a time."""
    heads = wanted.heads
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    rows = math.prod(tensor.shape) // columns
    if len(tensor.shape) == 1 and not heads:
        rows, columns = 1, rows
    block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    if columns % block:
        raise UserError(f"{file.path}: the tensor {tensor.name!r} cannot be quantized as {tensor.type.name}.")
    stored = np.frombuffer(tensor.data, np.uint8).reshape(rows, columns // block * block_bytes)
    if wanted.part is not None:
        number, count = wanted.part
        rows //= count
        stored = stored[number * rows : (number + 1) * rows]
    order = row_order(rows, heads) if heads else None
    step = max(1, PIECE // columns)
    for first in range(0, rows, step):
        some = stored[first : first + step] if order is None else stored[order[first : first + step]]
        values = _dequantize(file, tensor, some)
        if not np.isfinite(values).all() or np.abs(values).max() > 3.38e38:  # beyond it bfloat16 rounds to infinity
            raise UserError(f"{file.path}: the tensor {tensor.name!r} has numbers that are not finite; it is damaged.")
        yield values - np.float32(wanted.shift) if wanted.shift else values


def _dequantize(
    file: GGUF, tensor: Tensor, stored: np.ndarray[Any, np.dtype[np.uint8]]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    stored = np.ascontiguousarray(stored)
    with np.errstate(all="ignore"):  # damaged scales: the caller looks for what they lead to
        if tensor.type in PLAIN:
            return stored.view(PLAIN[tensor.type]).astype(np.float32)
        try:
            values = dequantize(stored, tensor.type)
        except (NotImplementedError, QuantError) as error:
            raise UserError(
                f"{file.path}: the tensor {tensor.name!r} has blocks of type {tensor.type.name}, which cannot be "
                "dequantized. Use another quantization of the model."
            ) from error
    return np.asarray(values, dtype=np.float32)
