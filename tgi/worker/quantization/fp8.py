"""Checkpoints of 8-bit floats: those of quant_method "fp8" and "fbgemm_fp8".

For the layer NAME, NAME.weight float8 [outputs, inputs] is multiplied by NAME.weight_scale or NAME.weight_scale_inv,
which is the same despite its name: one number, one for each output, or one for each block of outputs and inputs. Static
scales of activations are not used: activations are quantized dynamically, row by row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.quantization.affine import build_by_rows
from tgi.worker.quantization.config import QuantizationConfig
from tgi.worker.quantization.layer_tensors import FLOATS, LayerTensors
from tgi.worker.quantization.weight import QuantizedWeight
from tgi.worker.quantization.weight_forms import FLOAT8_MULTIPLE, GROUPS, fits_float8, fp8_scheme

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_NAMES = ("weight_scale", "weight_scale_inv")
REMARK = "the weights are 8-bit floats, which a GPU from compute capability 8.9 on multiplies as they are"


class BlockScaledFloats(NamedTuple):
    """A weight [outputs, inputs] of 8-bit floats with a scale for each block of outputs and inputs."""

    codes: Tensor  # of FLOAT8 [outputs, inputs]
    scales: Tensor  # float32 [outputs / block_outputs, inputs / block_inputs], rounded up
    block_outputs: int
    block_inputs: int

    def unsupported_reason(self, exact: bool = False, float8: bool = False) -> str | None:
        """Why QuantizedWeight cannot represent this weight; None: it can. `float8`: the device multiplies 8-bit
        floats."""
        if not float8:
            return "this device does not multiply 8-bit floats"
        if self.codes.dtype is not torch.float8_e4m3fn:
            return "of 8-bit floats, nothing is computed with e5m2"
        inputs = self.codes.shape[1]
        if self.scales.shape[1] > 1 and (self.block_inputs not in GROUPS or inputs % self.block_inputs):
            return f"its blocks of {self.block_inputs} inputs, or their number, are not supported"
        if not fits_float8(*self.codes.shape):
            return f"its outputs and inputs are no multiples of {FLOAT8_MULTIPLE}"
        return None

    def quantized(self, exact: bool = False) -> QuantizedWeight:
        """The same weight, exactly. `unsupported_reason` must be None."""
        return QuantizedWeight(self.codes.contiguous(), self._scales().contiguous(), None)

    def _scales(self) -> Tensor:
        """A scale for each output and block of inputs."""
        outputs, blocks = self.codes.shape[0], self.scales.shape[1]
        if len(self.scales) == 1:
            return self.scales.expand(outputs, blocks)
        return self.scales.repeat_interleave(self.block_outputs, 0)[:outputs]

    def dequantized(self) -> Tensor:
        outputs, inputs = self.codes.shape
        scales = self._scales()

        def piece(rows: slice) -> Tensor:
            numbers = _float32(self.codes[rows])
            return numbers.mul_(scales[rows].repeat_interleave(self.block_inputs, 1)[:, :inputs])

        return build_by_rows(outputs, inputs, piece)


class Fp8Format:
    """Reads FP8 weights; a CheckpointFormat. Raises UserError for a config that is not supported."""

    stored_as = ("weight",)
    remarks = (REMARK,)

    def __init__(self, config: QuantizationConfig) -> None:
        self._block = fp8_scheme(config).block

    def read_weight(self, tensors: LayerTensors) -> BlockScaledFloats | Tensor:
        return read_floats(tensors, self._block) if tensors.stored("weight").dtype in FLOAT8 else tensors.plain()


def read_floats(tensors: LayerTensors, block: tuple[int, int] | None) -> BlockScaledFloats:
    """Reads a weight of 8-bit floats with its scales. Raises UserError if their shapes do not fit."""
    outputs, inputs = tensors.outputs, tensors.inputs
    weight = tensors.read_checked("weight", FLOAT8, outputs, inputs)
    name = next((name for name in SCALE_NAMES if name in tensors), SCALE_NAMES[0])
    shape = tuple(tensors.stored(name).shape)
    block_outputs, block_inputs = 1, inputs  # outputs and inputs that share a scale
    if shape.count(1) == len(shape):
        block_outputs, expected = outputs, shape
    elif block is None:
        expected = (outputs,) if len(shape) == 1 else (outputs, 1)
    else:
        block_outputs, block_inputs = min(block[0], outputs), min(block[1], inputs)
        expected = -(-outputs // block_outputs), -(-inputs // block_inputs)
    scales = tensors.read_checked(name, (*FLOATS, torch.float8_e8m0fnu), *expected).float()
    return BlockScaledFloats(weight, scales.view(-1, -(-inputs // block_inputs)), block_outputs, block_inputs)


def _float32(weight: Tensor) -> Tensor:
    """Converts 8-bit floats to float32.

    The bits of an e4m3 number, shifted, are those of a float16: the sign, the lower four of five exponent bits (with a
    bias of 7 instead of 15) and the upper three of ten fraction bits. This takes a quarter of the time of torch's
    conversion, and has the same results except for NaN, which becomes 480.
    """
    if weight.dtype is not torch.float8_e4m3fn:
        return weight.float()
    signed = weight.view(torch.int8).to(torch.int16)  # sign-extended
    return (signed << 7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(2.0**8)
