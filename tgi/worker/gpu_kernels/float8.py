"""Dynamic quantization of activations to 8-bit floats, with one scale per row, in one launch; see
quantization/float8.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.self_test import check_close
from tgi.worker.gpu_kernels.self_test import random_tensor as numbers
from tgi.worker.quantization import float8
from tgi.worker.quantization.quantize import MAX_FLOAT8

MAX_FOUR_WARPS = 2048  # elements of a row for four warps


@triton.jit
def _quantize_rows(
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


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, inputs] and float32 scales [rows, 1] of x [rows, inputs], as of
    quantization.float8.quantize_rows."""
    rows, inputs = x.shape
    codes = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    wide = triton.next_power_of_2(inputs)
    _quantize_rows[(rows,)](
        *(x.contiguous(), codes, scales, inputs),
        MOST=MAX_FLOAT8,
        TINY=float8.MIN_ROW_SCALE,
        INPUTS=wide,
        num_warps=4 if wide <= MAX_FOUR_WARPS else 8,
    )
    return codes, scales


def self_test(device: torch.device) -> None:
    """Raises SelfTestFailed if codes or scales differ from torch's. Skipped on GPUs without 8-bit floats."""
    if device.type == "cuda" and not float8.stays_float8_on(device):
        return
    x = numbers(device, 3, 416)
    if device.type == "cpu":  # the interpreter rounds wrongly (7.9 to 4), so the numbers need no rounding
        x = float8.quantize_rows(x)[0].float() / 8
    (codes, scales), (expected, units) = quantize_rows(x), float8.quantize_rows(x)
    check_close("the scale of a row", scales, units, 1e-6)
    check_close(
        "a row in 8-bit floats", codes.float(), expected.float(), 1 / 14
    )  # one rounding step, as scales may be rounded differently
