"""compressed-tensors checkpoints, as llm-compressor writes them.

Groups of layers have schemes. For the layer NAME, by the format of its scheme:

- "pack-quantized": NAME.weight_packed int32 [outputs, inputs * bits / 32], rounded up, has the numbers of inputs that
  follow each other, low bits first, each larger than it is by half of the range. NAME.weight_zero_point, where the
  scheme is not symmetric, is int32 [outputs * bits / 32, groups], rounded up, packed alike along the outputs.
  NAME.weight_g_idx int32 [inputs], which may be missing, has the group of each input.
- "int-quantized", "naive-quantized": NAME.weight int8 [outputs, inputs], NAME.weight_zero_point int8 like the scales.
- "float-quantized", "naive-quantized": NAME.weight float8; see fp8.py.

NAME.weight_scale is [1], [outputs, 1] or [outputs, groups].
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.quantization import fp8
from tgi.worker.quantization.columns import FLOATS, WORDS, Columns
from tgi.worker.quantization.declared import Declared
from tgi.worker.quantization.levels import Levels, unpacked

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
MIXED = "mixed-precision"  # each scheme has a format of its own
BITS = (4, 8)


class LayerScheme(NamedTuple):
    """How the weights of some layers are quantized."""

    targets: tuple[str, ...]  # names of layers, "re:" and a regular expression for them, or the class "Linear"
    bits: int
    floating: bool
    symmetric: bool
    size: int  # inputs of a group; -1: all
    block: tuple[int, int] | None  # outputs and inputs of a block, of 8-bit floats
    activations: bool  # are to be quantized too


class Compressed:
    """Reads the weights of such a checkpoint. Which layers are quantized shows in their tensors: `ignore`, the list of
    those that are not, is not needed."""

    stored_as = ("weight_packed", "weight")

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        _check(declared)
        groups = declared.within("config_groups")
        self._schemes = [_scheme(groups.within(name)) for name in groups.values]
        self.remarks = tuple(_remarks(declared, self._schemes))

    def read(self, columns: Columns) -> Levels | fp8.Floats | Tensor:
        """The weight of a layer, as it is if it is not quantized."""
        if "weight_packed" in columns:
            return _packed(columns, self._of(columns, "weight_packed"))
        dtype = columns.stored("weight").dtype
        if dtype is torch.int8:
            return _integers(columns, self._of(columns, "weight"))
        if dtype in fp8.FLOAT8:
            return fp8.floats(columns, self._of(columns, "weight").block)
        return columns.plain()

    def _of(self, columns: Columns, column: str) -> LayerScheme:
        """The scheme of a layer: by its name rather than by an expression, by that rather than by its class."""
        for matches in (_by_name, _by_expression, _by_class):
            for scheme in self._schemes:
                if any(matches(target, columns.name) for target in scheme.targets):
                    return scheme
        raise columns.unfit(column, f"is quantized, but nothing under config_groups in {self._declared.path} is for it")


def _by_name(target: str, name: str) -> bool:
    return target == name


def _by_expression(target: str, name: str) -> bool:
    return target.startswith("re:") and re.match(target.removeprefix("re:"), name) is not None


def _by_class(target: str, name: str) -> bool:
    return target == "Linear"


def _check(declared: Declared) -> None:
    """Refuses what is stored, or to be computed, in another way."""
    format = declared.text("format", "dense")
    if format not in (*FORMATS, MIXED):
        raise declared.unfit(f"format is {format}, but {', '.join(FORMATS)} and {MIXED} are read")
    sparse = declared.within("sparsity_config").text("format", "dense")
    if sparse != "dense":
        raise declared.unfit(f"its sparsity_config has the format {sparse}, but only dense weights are read")
    if declared.within("transform_config").values.get("config_groups"):
        raise declared.unfit("it has a transform_config, and transforms of activations are not computed")


def _scheme(declared: Declared) -> LayerScheme:
    """Of one entry of config_groups."""
    targets, format = declared.values.get("targets"), declared.text("format", FORMATS[0])
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise declared.unfit(f"the targets of a scheme are {targets!r}, but a list of names is expected")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise declared.unfit(f"the target {target!r} is no regular expression: {error}") from error
    if format not in FORMATS:
        raise declared.unfit(f"a scheme has the format {format}, but {', '.join(FORMATS)} are read")
    weights = declared.within("weights")
    bits, floating = weights.integer("num_bits"), weights.text("type", "int") == "float"
    if bits not in BITS or (floating and bits != 8):
        kind = "floats" if floating else "integers"
        raise declared.unfit(
            f"weights are {kind} of {bits} bits, but integers of 4 and 8 bits and floats of 8 are read"
        )
    grouped = weights.values.get("group_size") is not None
    return LayerScheme(
        tuple(targets),
        bits,
        floating,
        bool(weights.values.get("symmetric", True)),
        weights.integer("group_size") if grouped else -1,
        fp8.block(declared, weights.values.get("block_structure")),
        bool(declared.values.get("input_activations")),
    )


def _remarks(declared: Declared, schemes: list[LayerScheme]) -> list[str]:
    remarks = [f"the weights are in the format {declared.text('format', FORMATS[0])} of compressed-tensors"]
    if any(scheme.floating for scheme in schemes):
        remarks.append(fp8.REMARK)
    if any(scheme.activations and not scheme.floating for scheme in schemes):
        remarks.append("activations are not quantized, though the checkpoint provides for it: its weights alone are")
    if declared.values.get("kv_cache_scheme"):
        remarks.append("kv_cache_scheme is not used: its scales count where --kv-cache-dtype is given")
    return remarks


def _packed(columns: Columns, scheme: LayerScheme) -> Levels:
    bits, groups = scheme.bits, columns.groups(scheme.size)
    codes = columns.read("weight_packed", WORDS, columns.outputs, _words(columns.inputs, bits))
    scales = _scales(columns, groups)
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    name = "weight_zero_point"
    if not scheme.symmetric and columns.stored(name).dtype is torch.int32:
        stored = columns.read(name, WORDS, _words(columns.outputs, bits), scales.shape[1])
        zeros = unpacked(stored.t(), bits)[:, : columns.outputs].t()
    elif not scheme.symmetric:
        zeros = zeros + columns.read(name, (torch.int8,), *scales.shape).view(torch.uint8)
    order = columns.order("weight_g_idx", groups)
    return Levels(bits, columns.inputs, codes.view(torch.uint8), zeros, scales, order)


def _integers(columns: Columns, scheme: LayerScheme) -> Levels:
    codes = columns.read("weight", (torch.int8,), columns.outputs, columns.inputs)
    scales = _scales(columns, columns.groups(scheme.size))
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
    if not scheme.symmetric:
        stored = columns.stored("weight_zero_point")
        shape = tuple(stored.shape) if stored.numel() == 1 else tuple(scales.shape)
        found = columns.read("weight_zero_point", (torch.int8,), *shape).view(torch.uint8)
        zeros = zeros + (found.reshape(()) if found.numel() == 1 else found)
    return Levels(8, columns.inputs, codes.view(torch.uint8) ^ 128, zeros, scales)


def _scales(columns: Columns, groups: int) -> Tensor:
    """The scales [outputs, groups]; one scale of the whole weight is that of each output."""
    stored, shape = columns.stored("weight_scale"), (columns.outputs, groups)
    if stored.numel() == 1:
        return columns.read("weight_scale", FLOATS, *stored.shape).reshape(()).expand(shape)
    return columns.read("weight_scale", FLOATS, *shape)


def _words(numbers: int, bits: int) -> int:
    return -(-numbers * bits // 32)
