"""Writes a GGUF file's tensors into one safetensors file, in chunks: in bfloat16, or without any rounding."""

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import QuantError, dequantize

from tgi.hub.gguf.block_types import FORMS, Array, BlockFormat
from tgi.hub.gguf.conversion_plan import TargetTensor, TiledHeads
from tgi.hub.gguf.reader import GGUFFile, GGUFTensor
from tgi.hub.weight_files import StoredTensor
from tgi.microkernel.errors import UserError

PIECE = 1 << 22  # elements per chunk: about 100 MB with the temporary arrays of the most complicated blocks

PLAIN = {
    GGMLQuantizationType.F64: "<f8",
    GGMLQuantizationType.I8: "<i1",
    GGMLQuantizationType.I16: "<i2",
    GGMLQuantizationType.I32: "<i4",
    GGMLQuantizationType.I64: "<i8",
}
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}
NO_NUMBER = 255  # of e8m0
LARGE = np.float32(2.0**100)  # scales above this may be of weights that float32 cannot hold

StoredForm = BlockFormat | str  # of a tensor; plain numbers are named by their safetensors type


def stored_block_format(file: GGUFFile, wanted: TargetTensor) -> BlockFormat | None:
    """The format in which a tensor keeps its bits; None if it is written as plain numbers, as are norms and biases."""
    kept = FORMS.get(file.tensors[wanted.source].type) if wanted.matrix else None
    if kept is None or wanted.tiled is None or not wanted.tiled.columns:
        return kept
    if wanted.tiled.size % kept.group:
        return None
    # Columns of a head keep their super-scale, which the file has for those of several heads.
    return replace(kept, super_group=kept.super_group and math.gcd(kept.super_group, wanted.tiled.size))


def write_weights(
    file: GGUFFile,
    wanted: list[TargetTensor],
    path: Path,
    progress: Callable[[int, int], None],
    *,
    packed: bool = False,
    plain: bool = False,
) -> None:
    """Writes `wanted` to the safetensors file `path`. `progress` receives the bytes written and the total.

    If `packed`, nothing is rounded. The weights of layers, embedding and head whose block type is in block_types.py
    keep their bits: NAME is then written as NAME.codes, NAME.scales and, where its type has them, NAME.shifts,
    NAME.super_scales and NAME.super_shifts. Other tensors are written in the smallest plain type that holds their
    numbers; with `plain`, all are. Without `packed` all are rounded to bfloat16.

    Raises UserError for a block type that cannot be dequantized and for weights that are not finite. Format:
    https://github.com/huggingface/safetensors#format, a length, a JSON header, then the data.
    """
    forms = [_stored_form(file, tensor, plain) if packed else "BF16" for tensor in wanted]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor, form in zip(wanted, forms, strict=True):
        for name, (dtype, shape) in _columns(tensor, form).items():
            begin, end = end, end + BYTES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        start, done = out.tell(), 0
        progress(done, end)
        for tensor, form in zip(wanted, forms, strict=True):
            places = [start + header[name]["data_offsets"][0] for name in _columns(tensor, form)]
            for piece in _pieces(file, tensor, form):
                for number, column in enumerate(piece):
                    out.seek(places[number])
                    places[number] += out.write(column.tobytes())
                    done += column.nbytes
                progress(done, end)


def packed_tensors(file: GGUFFile, wanted: list[TargetTensor]) -> dict[str, StoredTensor]:
    """The tensors that `write_weights` with `packed` writes, by name."""
    return {name: column for tensor in wanted for name, column in _columns(tensor, _stored_form(file, tensor)).items()}


def _stored_form(file: GGUFFile, wanted: TargetTensor, plain: bool = False) -> StoredForm:
    """The smallest form that holds a tensor exactly, or if `plain` the smallest type. Float32 tensors are read for it:
    those of models that were trained in bfloat16 often hold only such numbers."""
    if wanted.number is not None:
        return "F32"
    kept, block = None if plain else stored_block_format(file, wanted), file.tensors[wanted.source].type
    if kept is not None:
        return kept
    if (
        not wanted.shift
        and not wanted.exponent
        and not wanted.apart
        and wanted.expanded is None
        and block in (GGMLQuantizationType.BF16, GGMLQuantizationType.F16)
    ):
        return str(block.name)
    exact = all(not (values.view(np.uint32) & 0xFFFF).any() for (values,) in _pieces(file, wanted, "F32"))
    return "BF16" if exact else "F32"


def _columns(wanted: TargetTensor, form: StoredForm) -> dict[str, StoredTensor]:
    """The stored tensors by name."""
    if isinstance(form, str):
        return {wanted.name: StoredTensor(form, wanted.shape)}
    rows, inputs = wanted.shape
    return {
        f"{wanted.name}.{name}": StoredTensor(dtype, (rows, inputs // each))
        for name, (dtype, each) in form.columns.items()
    }


def bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Finite float32 values rounded to the nearest bfloat16 (ties to even), as their upper 16 bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


PLAIN_FORMS: dict[str, Callable[[np.ndarray[Any, np.dtype[np.float32]]], Array]] = {
    "BF16": bfloat16,
    "F16": lambda values: values.astype(np.float16),
    "F32": np.ascontiguousarray,
}


def row_order(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The row in the file of row i of a llama q or k projection.

    llama.cpp rotates adjacent pairs, transformers the two halves of a head, so its converter interleaves the
    halves: row 2j + h of a head in the file is row h * head_dim / 2 + j of that head.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def pair_order(rows: int, head: int, turned: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The row in the file of row i, where the first rows of the pairs among the `turned` rows of each head stand before
    the second ones."""
    within = np.arange(head)
    within[:turned] = np.arange(turned).reshape(2, -1).T.reshape(-1)
    return (np.arange(0, rows, head)[:, None] + within).reshape(-1)


def _untiled(values: Array, tiled: TiledHeads, axis: int) -> Array:
    """Rows or columns of value heads in the order of key heads."""
    shape = values.shape
    parts = values.reshape(*shape[:axis], tiled.each, tiled.key_heads, -1, *shape[axis + 1 :])
    return np.ascontiguousarray(parts.swapaxes(axis, axis + 1)).reshape(shape)


def _pieces(file: GGUFFile, wanted: TargetTensor, form: StoredForm) -> Iterator[list[Array]]:
    """Yields the tensor's stored columns in row order, at most PIECE elements at a time, but those that are computed
    whole."""
    if wanted.number is not None:
        assert isinstance(form, str)
        yield [PLAIN_FORMS[form](np.full(wanted.shape, wanted.number, np.float32))]
        return
    if wanted.expanded is not None or wanted.axes or wanted.apart:
        assert isinstance(form, str)
        if wanted.apart:
            first, second = np.split(_whole_sources(file, wanted)[0], 2)
            whole = first - second
        else:
            whole = _turned(file, wanted) if wanted.expanded is None else _expanded(file, wanted, *wanted.expanded)
        yield [PLAIN_FORMS[form](whole)]
        return
    for source in wanted.sources:
        yield from _pieces_of(file, file.tensors[source], wanted, form)


def _pieces_of(file: GGUFFile, tensor: GGUFTensor, wanted: TargetTensor, form: StoredForm) -> Iterator[list[Array]]:
    heads = wanted.heads
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    rows = math.prod(tensor.shape) // columns
    tiled = wanted.tiled
    if len(tensor.shape) == 1 and not heads and tiled is None and wanted.pairs is None and wanted.rows is None:
        rows, columns = 1, rows
    block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    if columns % block:
        raise UserError(f"{file.path}: the tensor {tensor.name!r} cannot be quantized as {tensor.type.name}.")
    stored = np.frombuffer(tensor.data, np.uint8).reshape(rows, columns // block * block_bytes)
    if wanted.part is not None:
        number, count = wanted.part
        rows //= count
        stored = stored[number * rows : (number + 1) * rows]
    if wanted.rows is not None:
        start, rows = wanted.rows[0], wanted.shape[0]
        stored = stored[start : start + rows]
    order = row_order(rows, heads) if heads else None
    if wanted.pairs is not None:
        order = pair_order(rows, *wanted.pairs)
    if wanted.half is not None:
        number, parts = wanted.half
        order = np.arange(rows).reshape(parts, 2, -1)[:, number].reshape(-1)
        rows //= 2
    if tiled is not None and not tiled.columns:
        order = np.arange(rows)
        order[rows - tiled.total :] = _untiled(order[rows - tiled.total :, None], tiled, 0)[:, 0]
    step = max(1, PIECE // columns)
    for first in range(0, rows, step):
        some = stored[first : first + step] if order is None else stored[order[first : first + step]]
        if isinstance(form, str):
            values = _values(file, tensor, some) - np.float32(wanted.shift)
            if tiled is not None and tiled.columns:
                values = _untiled(values, tiled, 1)
            yield [PLAIN_FORMS[form](_logarithms(file, tensor, values) if wanted.exponent else values)]
        else:
            stored_columns = _stored(file, tensor, some, form)
            if tiled is not None and tiled.columns:
                widths = [columns // each for _, each in form.columns.values()]
                pairs = zip((column.reshape(len(some), -1) for column in stored_columns), widths, strict=True)
                stored_columns = [
                    _untiled(np.repeat(column, width // column.shape[1], 1), tiled, 1) for column, width in pairs
                ]
            yield stored_columns


def _expanded(
    file: GGUFFile, wanted: TargetTensor, heads: int, of_keys: int, of_values: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The numbers of a tensor with TargetTensor.expanded."""
    rank = wanted.shape[1]
    keys, values = _whole_sources(file, wanted)
    turned = keys.reshape(heads, rank, of_keys).swapaxes(1, 2)
    both = np.concatenate((turned, values.reshape(heads, of_values, rank)), 1)
    return np.ascontiguousarray(both.reshape(wanted.shape), np.float32)


def _turned(file: GGUFFile, wanted: TargetTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The numbers of a tensor with TargetTensor.axes."""
    both = np.concatenate(_whole_sources(file, wanted)).reshape(wanted.view)
    return np.ascontiguousarray(both.transpose(wanted.axes).reshape(wanted.shape))


def _whole_sources(file: GGUFFile, wanted: TargetTensor) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """All numbers of each source."""
    return [
        np.concatenate([piece[0].reshape(-1) for piece in _pieces_of(file, file.tensors[name], plain, "F32")])
        for name in wanted.sources
        for plain in [TargetTensor(name, wanted.name, file.tensors[name].shape)]
    ]


def _logarithms(
    file: GGUFFile, tensor: GGUFTensor, values: np.ndarray[Any, np.dtype[np.float32]]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The numbers of which the values are -exp."""
    if not (values < 0).all():
        raise UserError(f"{file.path}: the tensor {tensor.name!r} has numbers that are not negative; it is damaged.")
    return np.asarray(np.log(-values.astype(np.float64)), np.float32)


def _stored(file: GGUFFile, tensor: GGUFTensor, rows: Array, kept: BlockFormat) -> list[Array]:
    """The stored columns of some rows, in the tensor's own bits."""
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[tensor.type][1])
    codes, *factors = kept.stored(blocks)
    if kept.float4 and (factors[0] == NO_NUMBER).any():
        raise UserError(
            f"{file.path}: the tensor {tensor.name!r} has a scale that stands for no number; it is damaged."
        )
    if not all((np.abs(column) < LARGE).all() for column in factors if column.dtype.kind == "f"):
        _values(file, tensor, rows)
    return [codes, *factors]


def _values(file: GGUFFile, tensor: GGUFTensor, rows: Array) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Some rows in float32. Raises UserError if they are not finite, also when rounded to bfloat16."""
    values = _dequantize(file, tensor, rows)
    if not np.isfinite(values).all() or np.abs(values).max() > 3.38e38:  # beyond it bfloat16 rounds to infinity
        raise UserError(f"{file.path}: the tensor {tensor.name!r} has numbers that are not finite; it is damaged.")
    return values


def _dequantize(
    file: GGUFFile, tensor: GGUFTensor, stored: np.ndarray[Any, np.dtype[np.uint8]]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    stored = np.ascontiguousarray(stored)
    with np.errstate(all="ignore"):  # damaged scales: the caller checks the values
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
