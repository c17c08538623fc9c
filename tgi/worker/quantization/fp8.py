"""Checkpoints of 8-bit floats: those of quant_method "fp8" and "fbgemm_fp8".

For the layer NAME, NAME.weight float8 [outputs, inputs] is to be multiplied by NAME.weight_scale, or by
NAME.weight_scale_inv, which is the same whatever its name says. That is one number, one for each output, or one for
each block of so many outputs and inputs. Scales of activations are not used: each row's are found when it is computed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker import float8
from tgi.worker.quantization.columns import FLOATS, Columns
from tgi.worker.quantization.declared import Declared
from tgi.worker.quantization.levels import by_rows
from tgi.worker.quantization.weight import QuantizedWeight

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("weight_scale", "weight_scale_inv")
REMARK = "the weights are 8-bit floats, which a GPU from compute capability 8.9 on multiplies as they are"


class Floats(NamedTuple):
    """A weight [outputs, inputs] of 8-bit floats, which has a scale for each block of outputs and inputs."""

    codes: Tensor  # of FLOAT8 [outputs, inputs]
    scales: Tensor  # float32 [outputs / tall, inputs / wide], rounded up
    tall: int
    wide: int

    def misfit(self) -> str | None:
        """Why this is no QuantizedWeight; None: it is one."""
        if self.codes.dtype is not torch.float8_e4m3fn:
            return "of 8-bit floats, nothing is computed with e5m2"
        if self.scales.shape[1] > 1 or 1 < self.tall < self.codes.shape[0]:
            return "its scales are for blocks"
        if not float8.fits(*self.codes.shape):
            return f"its outputs and inputs are no multiples of {float8.MULTIPLE}"
        return None

    def quantized(self) -> QuantizedWeight:
        """The same weight, unless it is a misfit. Nothing is rounded."""
        scales = self.scales.expand(self.codes.shape[0], 1).contiguous()
        return QuantizedWeight(self.codes.contiguous(), scales, None)

    def dequantized(self) -> Tensor:
        """The weight, float32 [outputs, inputs]."""
        outputs, inputs = self.codes.shape
        scales = self.scales.repeat_interleave(self.tall, 0)

        def piece(rows: slice) -> Tensor:
            numbers = _float32(self.codes[rows])
            return numbers.mul_(scales[rows][: len(numbers)].repeat_interleave(self.wide, 1)[:, :inputs])

        return by_rows(outputs, inputs, piece)


class Fp8:
    """Reads the weights of such a checkpoint."""

    stored_as = ("weight",)
    remarks = (REMARK,)

    def __init__(self, declared: Declared) -> None:
        self._block = block(declared, declared.values.get("weight_block_size"))

    def read(self, columns: Columns) -> Floats | Tensor:
        """The weight of a layer, as it is if it is not in 8-bit floats."""
        return floats(columns, self._block) if columns.stored("weight").dtype in FLOAT8 else columns.plain()


def block(declared: Declared, size: object) -> tuple[int, int] | None:
    """Outputs and inputs of a block as a config has them, a list; None if it has none."""
    match size:
        case None:
            return None
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise declared.unfit(f"blocks are {size!r}, but two sizes are expected")


def floats(columns: Columns, block: tuple[int, int] | None) -> Floats:
    """The weight of a layer that is in 8-bit floats."""
    outputs, inputs = columns.outputs, columns.inputs
    weight = columns.read("weight", FLOAT8, outputs, inputs)
    name = next((name for name in SCALES if name in columns), SCALES[0])
    shape = tuple(columns.stored(name).shape)
    tall, wide = 1, inputs  # outputs and inputs that share a scale
    if shape.count(1) == len(shape):
        tall, expected = outputs, shape
    elif block is None:
        expected = (outputs,) if len(shape) == 1 else (outputs, 1)
    else:
        tall, wide = min(block[0], outputs), min(block[1], inputs)
        expected = -(-outputs // tall), -(-inputs // wide)
    scales = columns.read(name, (*FLOATS, torch.float8_e8m0fnu), *expected).float()
    return Floats(weight, scales.view(-1, -(-inputs // wide)), tall, wide)


def _float32(weight: Tensor) -> Tensor:
    """The numbers of a weight in 8-bit floats.

    e4m3 is read as float16, some of whose bits it has: the sign, the lower four of five for the exponent, which counts
    from 7 instead of 15, and the upper three of ten behind. This takes a quarter of the time that torch's conversion
    takes, and is the same but for NaN, which becomes 480.
    """
    if weight.dtype is not torch.float8_e4m3fn:
        return weight.float()
    signed = weight.view(torch.int8).to(torch.int16)  # the sign fills the upper bits
    return (signed << 7).bitwise_and_(~0x4000).view(torch.float16).float().mul_(2.0**8)
