"""Products with a weight in 16 or 32 bits: y = x @ weight.T + bias, or added to a residual, in one launch.

A program sums all inputs of its outputs in one order. With one tile for all numbers of rows, a row's result has the
same bits in any batch; torch's products choose another order for another number of rows.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.self_test import check_close, random_tensor


class Tile(NamedTuple):
    """What a program computes, and how."""

    rows: int
    outputs: int
    inputs: int  # summed at once
    warps: int
    stages: int  # tiles in flight from memory


# For any number of rows: see Linear's `batch_invariant`. In 32 bits a tile has half as many inputs.
INVARIANT = Tile(64, 128, 64, 4, 4)
SINGLE = Tile(32, 32, 32, 4, 2)
BAND = 8  # blocks of rows that share the weight in the L2 cache


@triton.jit
def place_in_band(rows, outputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BAND: tl.constexpr):
    """The block of rows and the block of outputs of this program. Neighbouring programs compute a band of rows for the
    same outputs."""
    program, across, down = tl.program_id(0), tl.cdiv(outputs, OUTPUTS), tl.cdiv(rows, ROWS)
    band = program // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    place = program - band * BAND * across
    return band * BAND + place % height, place // height


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x, weight, bias, y, rows, outputs, inputs,
    ADDS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    block, across = place_in_band(rows, outputs, ROWS, OUTPUTS, BAND)
    row, output = block * ROWS + tl.arange(0, ROWS), across * OUTPUTS + tl.arange(0, OUTPUTS)
    given, there = row < rows, output < outputs
    left = x + row.to(tl.int64)[:, None] * inputs
    right = weight + output.to(tl.int64)[:, None] * inputs
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        inside = (at < inputs)[None, :]
        one = tl.load(left + at[None, :], mask=given[:, None] & inside, other=0.0)
        other = tl.load(right + at[None, :], mask=there[:, None] & inside, other=0.0)
        sums = tl.dot(one, tl.trans(other), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    where = y + row.to(tl.int64)[:, None] * outputs + output[None, :]
    mask = given[:, None] & there[None, :]
    if ADDS:
        sums += tl.load(where, mask=mask, other=0.0).to(tl.float32)
    tl.store(where, sums.to(y.dtype.element_ty), mask=mask)


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """x @ weight.T + bias [rows, outputs] for x [rows, inputs]; with `into`, which is contiguous, added to it in place.
    All have the same type; `x` and `weight` are contiguous."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    tile = tile or (SINGLE if x.dtype is torch.float32 else INVARIANT)
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if into is None else into
    if rows:
        _matmul[triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),](
            *(x.contiguous(), weight, bias, y, rows, outputs, inputs, into is not None, *tile[:3], BAND),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return y


def self_test(device: torch.device) -> None:
    """Few rows and several blocks of them, sizes that are no multiples. Raises SelfTestFailed if the results differ
    from torch's."""
    for dtype, tolerance in ((torch.bfloat16, 2**-7), (torch.float32, 1e-5)):
        weight, bias = random_tensor(device, 200, 136, dtype=dtype), random_tensor(device, 200, dtype=dtype, seed=1)
        for rows in (3, 150):
            x, residual = (
                random_tensor(device, rows, 136, dtype=dtype, seed=2),
                random_tensor(device, rows, 200, dtype=dtype),
            )
            expected = F.linear(x.float(), weight.float(), bias.float())
            check_close("a product", matmul(x, weight, bias), expected.to(dtype), tolerance)
            expected = F.linear(x.float(), weight.float()) + residual.float()
            check_close("a sum", matmul(x, weight, into=residual.clone()), expected.to(dtype), tolerance)
