"""LoRA adapters: for each group of projections two launches for all tokens of a step and all their adapters.

`_shrink` multiplies the tokens by A, `_expand` the result by B and adds it to what the projections gave. The address of
each matrix stands in a table on the device, so that a launch does not depend on which adapters a step has. A run of
tokens has one adapter and is computed in tiles of TOKENS; the grid follows from the number of runs and the longest one.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.lora_arguments import LoraRuns
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

TOKENS = 16  # of a tile
OUTPUTS = 128  # of a program
NUMBERS = 8192  # of a tile of A


def add_lora(x: Tensor, y: Tensor, runs: LoraRuns, layer: int, projections: Sequence[tuple[int, int, int]]) -> None:
    """Adds x @ A @ B to columns of y [T, columns] for x [T, inputs], whose rows are contiguous. `projections`, up to
    three: index into the table, first column, and number of columns."""
    inputs = x.shape[1]
    rank = max(16, triton.next_power_of_2(runs.rank))
    tiles = triton.cdiv(runs.longest, TOKENS)
    between = torch.empty(len(x), len(projections), rank, dtype=torch.float32, device=x.device)
    numbers, starts, widths = zip(*projections, strict=True)
    more = (0,) * (3 - len(projections))
    numbers, starts, widths = (*numbers, *more), (*starts, *more), (*widths, *more)
    step = runs.bounds.stride(0)
    places = runs.table, runs.adapters, runs.bounds, step, layer, runs.table.stride(0), runs.table.stride(1)
    options = {"DTYPE": _POINTERS[runs.dtype], "RANK": rank, "TOKENS": TOKENS, "PROJECTIONS": len(projections)}
    precision = "ieee" if runs.dtype is torch.float32 else "tf32"
    _shrink[runs.runs, tiles, len(projections)](
        *(x, between, *places, *numbers, inputs, x.stride(0)),
        INPUTS=max(16, min(256, NUMBERS // rank)),
        PRECISION=precision,
        **options,
    )
    _expand[runs.runs, tiles, sum(triton.cdiv(width, OUTPUTS) for width in widths)](
        *(between, y, *places, *numbers, *starts, *widths, y.stride(0)), OUTPUTS=OUTPUTS, PRECISION=precision, **options
    )


_POINTERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _chosen(at, first, second, third):
    return tl.where(at == 0, first, tl.where(at == 1, second, third))


@triton.jit
def _place_of(table, adapters, bounds, bound_step, layer, adapter_step, layer_step, projection):
    """The entry of the table of a run's projection, and the run's bounds."""
    run = tl.program_id(0)
    adapter = tl.load(adapters + run).to(tl.int64)
    place = table + adapter * adapter_step + layer * layer_step + projection * 3
    return place, tl.load(bounds + run * bound_step), tl.load(bounds + run * bound_step + 1)


@triton.jit(do_not_specialize=["layer", "number0", "number1", "number2"])
def _shrink(
    x, between, table, adapters, bounds, bound_step, layer, adapter_step, layer_step, number0, number1, number2,
    inputs, x_row,
    DTYPE: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, PROJECTIONS: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x @ A of a tile of tokens, for one projection."""
    projection = tl.program_id(2)
    number = _chosen(projection, number0, number1, number2)
    place, first, stop = _place_of(table, adapters, bounds, bound_step, layer, adapter_step, layer_step, number)
    rank = tl.load(place + 2)
    token = first + tl.program_id(1) * TOKENS
    if (rank == 0) | (token >= stop):
        return
    tokens = (token + tl.arange(0, TOKENS)).to(tl.int64)
    given = tokens < stop
    matrix = tl.multiple_of(tl.load(place).to(tl.pointer_type(DTYPE)), 16)
    column = tl.arange(0, RANK)
    sums = tl.zeros((TOKENS, RANK), tl.float32)
    for start in range(0, inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        left = tl.load(
            x + tokens[:, None] * x_row + at[None, :], mask=given[:, None] & (at < inputs)[None, :], other=0.0
        )
        there = (at < inputs)[:, None] & (column < rank)[None, :]
        right = tl.load(matrix + at[:, None].to(tl.int64) * rank + column[None, :], mask=there, other=0.0)
        sums = tl.dot(left.to(DTYPE), right, sums, input_precision=PRECISION)
    line = between + (tokens * PROJECTIONS + projection) * RANK
    tl.store(line[:, None] + column[None, :], sums, mask=given[:, None])


@triton.jit(do_not_specialize=["layer", "number0", "number1", "number2"])
def _expand(
    between, y, table, adapters, bounds, bound_step, layer, adapter_step, layer_step, number0, number1, number2,
    start0, start1, start2, width0, width1, width2, y_row,
    DTYPE: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, PROJECTIONS: tl.constexpr, OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds some columns of `between` @ B to a tile of tokens."""
    tiles0, tiles1 = tl.cdiv(width0, OUTPUTS), tl.cdiv(width1, OUTPUTS)
    tile = tl.program_id(2)
    projection = (tile >= tiles0).to(tl.int32) + (tile >= tiles0 + tiles1).to(tl.int32)
    tile -= _chosen(projection, 0, tiles0, tiles0 + tiles1)
    number = _chosen(projection, number0, number1, number2)
    place, first, stop = _place_of(table, adapters, bounds, bound_step, layer, adapter_step, layer_step, number)
    rank = tl.load(place + 2)
    token = first + tl.program_id(1) * TOKENS
    if (rank == 0) | (token >= stop):
        return
    tokens = (token + tl.arange(0, TOKENS)).to(tl.int64)
    given = tokens < stop
    width = _chosen(projection, width0, width1, width2)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, RANK)
    line = between + (tokens * PROJECTIONS + projection) * RANK
    left = tl.load(line[:, None] + row[None, :], mask=given[:, None], other=0.0).to(DTYPE)
    matrix = tl.multiple_of(tl.load(place + 1).to(tl.pointer_type(DTYPE)), 16)
    there = (row < rank)[:, None] & (output < width)[None, :]
    right = tl.load(matrix + row[:, None] * width.to(tl.int64) + output[None, :], mask=there, other=0.0)
    added = tl.dot(left, right, input_precision=PRECISION)
    inside = given[:, None] & (output < width)[None, :]
    target = y + tokens[:, None] * y_row + (_chosen(projection, start0, start1, start2) + output)[None, :]
    tl.store(
        target, (tl.load(target, mask=inside, other=0.0).to(tl.float32) + added).to(y.dtype.element_ty), mask=inside
    )


def self_test(device: torch.device) -> None:
    """Runs of two adapters of different ranks and of none, one of which changes one projection of two. Raises
    SelfTestFailed if the result differs from torch's."""
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-5)):
        sizes = {0: (3, 5), 1: (20, None)}  # ranks of the projections
        pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        table = torch.zeros(3, 2, 2, 3, dtype=torch.int64)
        for adapter, ranks in sizes.items():
            for projection, (rank, width) in enumerate(zip(ranks, (70, 200), strict=True)):
                if rank is not None:
                    seeds = 10 * adapter + projection
                    a = random_tensor(device, 300, rank, dtype=dtype, seed=seeds) / 16
                    b = random_tensor(device, rank, width, dtype=dtype, seed=seeds + 5)
                    pairs[adapter, projection] = a, b
                    table[adapter, 1, projection] = torch.tensor([a.data_ptr(), b.data_ptr(), rank])
        bounds, adapters = [0, 1, 40, 42, 43], [1, 0, 2, 1]
        runs = LoraRuns(
            table.to(device), torch.tensor(adapters, dtype=torch.int32, device=device),
            torch.tensor(bounds, dtype=torch.int32, device=device), 4, 39, 20, dtype,
        )  # fmt: skip
        x, y = random_tensor(device, 43, 300, dtype=dtype), random_tensor(device, 43, 280, dtype=dtype, seed=3)
        expected = y.float()
        for run, adapter in enumerate(adapters):
            own = slice(bounds[run], bounds[run + 1])
            for projection, columns in enumerate((slice(0, 70), slice(80, 280))):
                if (adapter, projection) in pairs:
                    a, b = pairs[adapter, projection]
                    expected[own, columns] += x[own].float() @ a.float() @ b.float()
        add_lora(x, y, runs, 1, ((0, 0, 70), (1, 80, 200)))
        check_close("deltas of adapters", y, expected.to(dtype), tolerance)
