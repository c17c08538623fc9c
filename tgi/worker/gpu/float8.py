"""Activations as 8-bit floats, each row with a scale of its own, in one launch; see worker/float8.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker import float8
from tgi.worker.gpu.trial import agree, numbers
from tgi.worker.quantization.quantize import MOST_FLOAT

WIDEST = 2048  # numbers of a row for four warps


@triton.jit
def scale(
    x,  # [rows, inputs]
    codes,  # [rows, inputs]
    scales,  # [rows, 1]
    inputs,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, INPUTS)
    numbers = tl.load(x + row * inputs + at, mask=at < inputs, other=0.0).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(numbers), 0) / MOST, TINY)
    tl.store(scales + row, unit)
    found = tl.clamp(numbers / unit, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes + row * inputs + at, found.to(codes.dtype.element_ty), mask=at < inputs)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, inputs] and float32 scales [rows, 1] of x [rows, inputs], as float8.scaled finds them."""
    rows, inputs = x.shape
    codes = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    wide = triton.next_power_of_2(inputs)
    scale[(rows,)](
        *(x.contiguous(), codes, scales, inputs),
        MOST=MOST_FLOAT,
        TINY=float8.TINY,
        INPUTS=wide,
        num_warps=4 if wide <= WIDEST else 8,
    )
    return codes, scales


def trial(device: torch.device) -> None:
    """Raises Differs unless activations become the numbers that torch makes of them, where a GPU has 8-bit floats."""
    if device.type == "cuda" and not float8.held_on(device):
        return
    x = numbers(device, 3, 416)
    if device.type == "cpu":  # the interpreter rounds 7.9 to 4, so no number is to be rounded
        x = float8.scaled(x)[0].float() / 8
    (codes, scales), (expected, units) = scaled(x), float8.scaled(x)
    agree("the scale of a row", scales, units, 1e-6)
    agree(
        "a row in 8-bit floats", codes.float(), expected.float(), 1 / 14
    )  # a step, as scales may be rounded otherwise
