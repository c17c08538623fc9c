"""Weights of 4-bit floats (e2m1): MXFP4 (OCP Microscaling Formats (MX) Specification 1.0, 2023) and NVFP4.

For the layer NAME, compressed-tensors has uint8 NAME.weight_packed [outputs, inputs / 2] and modelopt has the same in
NAME.weight: the codes of consecutive inputs, the first one in the lower half of a byte. NAME.weight_scale is

- of MXFP4 uint8 [outputs, inputs / 32]: exponents e of factors 2^(e - 127),
- of NVFP4 float8_e4m3fn [outputs, inputs / 16]: factors, to be multiplied by the float32 NAME.weight_scale_2 of
  modelopt or divided by the float32 NAME.weight_global_scale of compressed-tensors, one number for all.

Twice the number of a code is an integer, so that a weight is one of 8 bits in groups, exactly: an exponent is a
scale of float16, and the product of the two factors of NVFP4 one of float32.
"""

import torch
from torch import Tensor

from tgi.worker.quantization.affine import AffineWeight, unpack_bits
from tgi.worker.quantization.layer_tensors import LayerTensors

MX_GROUP, NV_GROUP = 32, 16  # inputs that share a scale
DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # twice the numbers of the codes
ZERO = 128  # of the codes of AffineWeight
HALVED_POWERS = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)])
ACTIVATIONS_REMARK = (
    "activations are not quantized to 4 bits, though the checkpoint may provide for it: they keep the model's type"
)


def read_float4(tensors: LayerTensors, codes: str, factor: str) -> AffineWeight:
    """The weight with codes in this column. The type of its scales shows whether it is MXFP4 or NVFP4, whose scales are
    multiplied by the number in the column `factor`: "weight_scale_2", or "weight_global_scale", which divides them.
    Raises UserError if a column is missing or unfit."""
    packed = tensors.read_checked(codes, (torch.uint8,), tensors.outputs, (tensors.inputs + 1) // 2)
    if tensors.stored("weight_scale").dtype is torch.uint8:
        shape = tensors.outputs, tensors.group_count(MX_GROUP)
        return mx_weight(packed, tensors.read_checked("weight_scale", (torch.uint8,), *shape))
    shape = tensors.outputs, tensors.group_count(NV_GROUP)
    scales = tensors.read_checked("weight_scale", (torch.float8_e4m3fn,), *shape).float()
    whole = tensors.read_checked(factor, (torch.float32,), *(1,) * tensors.stored(factor).dim()).reshape(())
    scales = scales / whole if factor == "weight_global_scale" else scales * whole
    if not scales.isfinite().all():
        raise tensors.unfit("weight_scale", f"has, with {factor}, numbers that are not finite")
    return _affine(packed, scales / 2, wide=True)


def mx_weight(packed: Tensor, exponents: Tensor) -> AffineWeight:
    """MXFP4 of codes uint8 [outputs, inputs / 2] and exponents uint8 [outputs, inputs / 32]."""
    return _affine(packed, HALVED_POWERS[exponents.int()])


def _affine(packed: Tensor, scales: Tensor, wide: bool = False) -> AffineWeight:
    codes = (DOUBLED + ZERO).to(torch.uint8)[unpack_bits(packed, 4).int()]
    zeros = torch.full(scales.shape, ZERO, dtype=torch.uint8)
    return AffineWeight(8, codes.shape[1], codes, zeros, scales, wide=wide)
