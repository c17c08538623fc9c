"""Weights of 4-bit floats (e2m1): MXFP4 (OCP Microscaling Formats (MX) Specification 1.0, 2023) and NVFP4.

For the layer NAME, compressed-tensors has uint8 NAME.weight_packed [outputs, inputs / 2] and modelopt has the same in
NAME.weight: the codes of consecutive inputs, the first one in the lower half of a byte. NAME.weight_scale is

- of MXFP4 uint8 [outputs, inputs / 32]: exponents e of factors 2^(e - 127),
- of NVFP4 float8_e4m3fn [outputs, inputs / 16]: factors, to be multiplied by the float32 NAME.weight_scale_2 of
  modelopt or divided by the float32 NAME.weight_global_scale of compressed-tensors, one number for all.

They are kept as they are (QuantizedWeight of 4-bit floats).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.quantization.layer_tensors import LayerTensors
from tgi.worker.quantization.weight import QuantizedWeight
from tgi.worker.quantization.weight_forms import MX_GROUP, NV_GROUP

NO_NUMBER = 255  # of exponents
ACTIVATIONS_REMARK = (
    "activations are not quantized to 4 bits, though the checkpoint may provide for it: they keep the model's type"
)


class Float4Weight(NamedTuple):
    """A weight [outputs, inputs] of 4-bit floats."""

    codes: Tensor  # uint8 [outputs, inputs / 2]
    factors: Tensor  # uint8 [outputs, inputs / 32] of MXFP4 or float8_e4m3fn [outputs, inputs / 16] of NVFP4
    scale: float = 1.0  # of all

    def unsupported_reason(self, exact: bool = False, float8: bool = False) -> str | None:
        """Why `quantized` cannot represent this weight; None: it can."""
        return None

    def quantized(self, exact: bool = False) -> QuantizedWeight:
        scales = torch.full((len(self.codes), 1), self.scale, dtype=torch.float64)
        return QuantizedWeight(self.codes.contiguous(), scales, None, self.factors.contiguous().view(torch.int8))

    def dequantized(self) -> Tensor:
        return self.quantized().dequantized(torch.float32)


def read_float4(tensors: LayerTensors, codes: str, factor: str) -> Float4Weight:
    """The weight with codes in this column. The type of its scales shows whether it is MXFP4 or NVFP4, whose scales are
    multiplied by the number in the column `factor`: "weight_scale_2", or "weight_global_scale", which divides them.
    Raises UserError if a column is missing or unfit."""
    packed = tensors.read_checked(codes, (torch.uint8,), tensors.outputs, (tensors.inputs + 1) // 2)
    if tensors.stored("weight_scale").dtype is torch.uint8:
        return read_exponents(tensors, packed, "weight_scale")
    shape = tensors.outputs, tensors.group_count(NV_GROUP)
    scales = tensors.read_checked("weight_scale", (torch.float8_e4m3fn,), *shape)
    whole = tensors.read_checked(factor, (torch.float32,), *(1,) * tensors.stored(factor).dim()).reshape(()).double()
    number = float(1 / whole if factor == "weight_global_scale" else whole)
    if not (scales.double() * number).float().isfinite().all():
        raise tensors.unfit("weight_scale", f"has, with {factor}, numbers that are not finite")
    return Float4Weight(packed, scales, number)


def read_exponents(tensors: LayerTensors, codes: Tensor, column: str) -> Float4Weight:
    """MXFP4 of codes uint8 [outputs, inputs / 2] and the exponents uint8 [outputs, inputs / 32] in this column. Raises
    UserError if they are missing or unfit."""
    exponents = tensors.read_checked(column, (torch.uint8,), tensors.outputs, tensors.group_count(MX_GROUP))
    if bool((exponents == NO_NUMBER).any()):
        raise tensors.unfit(column, f"has the exponent {NO_NUMBER}, which stands for no number")
    return Float4Weight(codes, exponents)
