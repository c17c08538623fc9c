"""Checkpoints of 8-bit floats: those of quant_method "fp8" and "fbgemm_fp8".

For the layer NAME, NAME.weight float8 [outputs, inputs] is to be multiplied by NAME.weight_scale, or by
NAME.weight_scale_inv, which is the same whatever its name says. That is one number, one for each output, or one for
each block of so many outputs and inputs. Scales of activations, for computing in 8 bits, are not used.
"""

import torch
from torch import Tensor

from tgi.worker.quantization.columns import FLOATS, Columns
from tgi.worker.quantization.declared import Declared
from tgi.worker.quantization.levels import by_rows

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("weight_scale", "weight_scale_inv")
REMARK = "the weights are 8-bit floats, which are dequantized at load: they take the memory of plain ones"


class Fp8:
    """Reads the weights of such a checkpoint."""

    stored_as = ("weight",)
    remarks = (REMARK,)

    def __init__(self, declared: Declared) -> None:
        self._block = block(declared, declared.values.get("weight_block_size"))

    def read(self, columns: Columns) -> Tensor:
        """The weight of a layer, float32 if it is in 8-bit floats, else as it is."""
        return dequantized(columns, self._block) if columns.stored("weight").dtype in FLOAT8 else columns.plain()


def block(declared: Declared, size: object) -> tuple[int, int] | None:
    """Outputs and inputs of a block as a config has them, a list; None if it has none."""
    match size:
        case None:
            return None
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise declared.unfit(f"blocks are {size!r}, but two sizes are expected")


def dequantized(columns: Columns, block: tuple[int, int] | None) -> Tensor:
    """The weight of a layer that is in 8-bit floats, float32."""
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
    scales = scales.view(-1, -(-inputs // wide)).repeat_interleave(tall, 0)

    def piece(rows: slice) -> Tensor:
        numbers = _float32(weight[rows])
        return numbers.mul_(scales[rows][: len(numbers)].repeat_interleave(wide, 1)[:, :inputs])

    return by_rows(outputs, inputs, piece)


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
