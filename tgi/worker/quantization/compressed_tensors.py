"""compressed-tensors checkpoints, as llm-compressor writes them.

Groups of layers have schemes. The tensors of the layer NAME, by the format of its scheme:

- "pack-quantized": NAME.weight_packed int32 [outputs, inputs * bits / 32], rounded up, has the numbers of
  consecutive inputs, low bits first, with an offset of half of their range. NAME.weight_zero_point, where the
  scheme is not symmetric, is int32 [outputs * bits / 32, groups], rounded up, packed alike along the outputs.
  NAME.weight_g_idx int32 [inputs], optional, has the group of each input.
- "int-quantized", "naive-quantized": NAME.weight int8 [outputs, inputs], NAME.weight_zero_point int8 like the scales.
- "float-quantized", "naive-quantized": NAME.weight float8; see fp8.py.
- "nvfp4-pack-quantized", "mxfp4-pack-quantized": NAME.weight_packed has 4-bit floats; see float4.py.

Scales of integers, NAME.weight_scale, are [1], [outputs, 1] or [outputs, groups].
"""

import torch
from torch import Tensor

from tgi.worker.quantization import fp8
from tgi.worker.quantization.affine import AffineWeight, unpack_bits
from tgi.worker.quantization.config import QuantizationConfig
from tgi.worker.quantization.float4 import ACTIVATIONS_REMARK, read_float4
from tgi.worker.quantization.layer_tensors import FLOATS, WORDS, LayerTensors, StoredWeight
from tgi.worker.quantization.weight_forms import COMPRESSED_FORMATS, LayerScheme, compressed_rules, scheme_of

MIXED = "mixed-precision"  # each scheme has a format of its own


class CompressedTensorsFormat:
    """Reads compressed-tensors weights; a CheckpointFormat. The tensors of a layer show whether it is quantized, so the
    config's `ignore` list is not needed. Raises UserError for a config that is not supported."""

    stored_as = ("weight_packed", "weight")

    def __init__(self, config: QuantizationConfig) -> None:
        self._config = config
        _require_supported(config)
        self._rules = compressed_rules(config)
        self.remarks = tuple(_remarks(config, [scheme for _, scheme in self._rules if scheme is not None]))

    def read_weight(self, tensors: LayerTensors) -> StoredWeight | Tensor:
        if "weight_packed" in tensors:
            scheme = self._scheme_of(tensors, "weight_packed")
            if scheme.floating:
                return read_float4(tensors, "weight_packed", "weight_global_scale")
            return _read_packed(tensors, scheme)
        dtype = tensors.stored("weight").dtype
        if dtype is torch.int8:
            return _read_integers(tensors, self._scheme_of(tensors, "weight"))
        if dtype in fp8.FLOAT8:
            return fp8.read_floats(tensors, self._scheme_of(tensors, "weight").block)
        return tensors.plain()

    def _scheme_of(self, tensors: LayerTensors, column: str) -> LayerScheme:
        if (scheme := scheme_of(self._rules, tensors.name)) is not None:
            return scheme
        raise tensors.unfit(column, f"is quantized, but nothing under config_groups in {self._config.path} is for it")


def _require_supported(config: QuantizationConfig) -> None:
    """Raises UserError for formats, sparsity and transforms that are not supported."""
    format = config.text("format", "dense")
    if format not in (*COMPRESSED_FORMATS, MIXED):
        raise config.unfit(f"format is {format}, but {', '.join(COMPRESSED_FORMATS)} and {MIXED} are read")
    sparse = config.within("sparsity_config").text("format", "dense")
    if sparse != "dense":
        raise config.unfit(f"its sparsity_config has the format {sparse}, but only dense weights are read")
    if config.within("transform_config").values.get("config_groups"):
        raise config.unfit("it has a transform_config, and transforms of activations are not computed")


def _remarks(config: QuantizationConfig, schemes: list[LayerScheme]) -> list[str]:
    remarks = [f"the weights are in the format {config.text('format', COMPRESSED_FORMATS[0])} of compressed-tensors"]
    if any(scheme.floating and scheme.bits == 8 for scheme in schemes):
        remarks.append(fp8.REMARK)
    if any(scheme.floating and scheme.bits == 4 and scheme.activations for scheme in schemes):
        remarks.append(ACTIVATIONS_REMARK)
    if any(scheme.activations and not scheme.floating for scheme in schemes):
        remarks.append("activations are not quantized, though the checkpoint provides for it: its weights alone are")
    if config.values.get("kv_cache_scheme"):
        remarks.append("kv_cache_scheme is not used: its scales count where --kv-cache-dtype is given")
    return remarks


def _read_packed(tensors: LayerTensors, scheme: LayerScheme) -> AffineWeight:
    bits, groups = scheme.bits, tensors.group_count(scheme.size)
    codes = tensors.read_checked("weight_packed", WORDS, tensors.outputs, _word_count(tensors.inputs, bits))
    scales = _read_scales(tensors, groups)
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    name = "weight_zero_point"
    if not scheme.symmetric and tensors.stored(name).dtype is torch.int32:
        stored = tensors.read_checked(name, WORDS, _word_count(tensors.outputs, bits), scales.shape[1])
        zeros = unpack_bits(stored.t(), bits)[:, : tensors.outputs].t()
    elif not scheme.symmetric:
        zeros = zeros + tensors.read_checked(name, (torch.int8,), *scales.shape).view(torch.uint8)
    order = tensors.group_order("weight_g_idx", groups)
    return AffineWeight(bits, tensors.inputs, codes.view(torch.uint8), zeros, scales, order)


def _read_integers(tensors: LayerTensors, scheme: LayerScheme) -> AffineWeight:
    codes = tensors.read_checked("weight", (torch.int8,), tensors.outputs, tensors.inputs)
    scales = _read_scales(tensors, tensors.group_count(scheme.size))
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
    if not scheme.symmetric:
        stored = tensors.stored("weight_zero_point")
        shape = tuple(stored.shape) if stored.numel() == 1 else tuple(scales.shape)
        found = tensors.read_checked("weight_zero_point", (torch.int8,), *shape).view(torch.uint8)
        zeros = zeros + (found.reshape(()) if found.numel() == 1 else found)
    return AffineWeight(8, tensors.inputs, codes.view(torch.uint8) ^ 128, zeros, scales)


def _read_scales(tensors: LayerTensors, groups: int) -> Tensor:
    """The scales [outputs, groups]; a single scale of the weight is expanded."""
    stored, shape = tensors.stored("weight_scale"), (tensors.outputs, groups)
    if stored.numel() == 1:
        return tensors.read_checked("weight_scale", FLOATS, *stored.shape).reshape(()).expand(shape)
    return tensors.read_checked("weight_scale", FLOATS, *shape)


def _word_count(numbers: int, bits: int) -> int:
    return -(-numbers * bits // 32)
