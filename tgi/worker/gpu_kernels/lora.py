"""LoRA adapters: y += x @ A @ B for a group of projections, for all tokens of a step and all their adapters, in one
launch.

The work consists of items in one queue, whose programs take the next item each time. First come those of x @ A: of a
tile of tokens, a projection, up to 64 ranks and a slice of the inputs. They write sums to memory and count themselves.
Then come those of (x @ A) @ B: of a tile and OUTPUTS columns of a projection. They load B and y, wait until the sums
that they need are complete, and add them up in the order of the slices. Items are taken in order and the first kind
waits for nothing, so the second always ends, however few programs run at a time.

The address of each matrix stands in a table on the device, and tiles in the plan of the step (lora_arguments.py). So
neither the launch nor its grid depends on which adapters a step has, and a captured launch takes as long as the tiles
that there are. The number of tokens, which a captured step fixes, chooses the size of tiles and the number of slices.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.lora_arguments import (
    FEW_TOKENS,
    AdapterTiles,
    PlanShape,
    padded_rank,
    write_plan,
)
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

RANKS = 64  # of an item at most
# Columns of an item, and numbers of a tile of A and of x at most, by the bytes of a number: products in 32 bits take
# registers for each element of their operands.
OUTPUTS, NUMBERS = {2: 128, 4: 64}, {2: 8192, 4: 2048}
PROGRAMS = 512  # at most: as many as a GPU runs at a time
BUSY = 256  # items that keep a GPU busy: the inputs are divided into slices while there are fewer
MOST_SLICES, INVARIANT_SLICES = 16, 4
SLICED = tl.constexpr(256)  # inputs of a slice: a multiple


def slices_for(tiles: int, projections: int, inputs: int) -> int:
    """The number of slices of the inputs, a power of two, in a step of at least this number of tiles."""
    wanted = BUSY // (tiles * projections)
    return min(
        MOST_SLICES, 1 << max(0, wanted.bit_length() - 1), triton.next_power_of_2(triton.cdiv(inputs, SLICED.value))
    )


def add_lora(
    x: Tensor,
    y: Tensor,
    tiles: AdapterTiles,
    layer: int,
    projections: Sequence[tuple[int, int, int]],
    batch_invariant: bool = False,
) -> None:
    """Adds x @ A @ B to columns of y [T, columns] for x [T, inputs], whose rows are contiguous. `projections`, up to
    three: index into the table, first column, and number of columns. No two calls of a layer and a step begin with the
    same projection. `batch_invariant`: the order of a token's sums does not depend on the number of tokens, nor on the
    ranks of other adapters; see PlanShape too."""
    inputs, count = x.shape[1], len(projections)
    ranks, shape = RANKS if batch_invariant else min(tiles.rank, RANKS), tiles.shape
    whole = max(tiles.rank, ranks)
    slices = INVARIANT_SLICES if batch_invariant else slices_for(triton.cdiv(shape.tokens, shape.size), count, inputs)
    sums = torch.empty(shape.tokens * count * slices * whole, dtype=torch.float32, device=x.device)
    numbers, starts, widths = zip(*projections, strict=True)
    more = (0,) * (3 - count)
    numbers, starts, widths = (*numbers, *more), (*starts, *more), (*widths, *more)
    shares = whole // ranks * count * slices
    size = tiles.dtype.itemsize
    outputs = OUTPUTS[size]
    items = shape.most * (shares + sum(triton.cdiv(width, outputs) for width in widths))
    _add_lora[min(PROGRAMS, items),](
        *(x, y, sums, tiles.table, tiles.plan, tiles.counters),
        *(layer, tiles.table.stride(0), tiles.table.stride(1), *numbers, *starts, *widths),
        *(inputs, x.stride(0), y.stride(0), whole, shape.most),
        DTYPE=_POINTERS[tiles.dtype],
        NUMBERED=tiles.table.shape[2],
        PROJECTIONS=count,
        RANKS=ranks,
        SLICES=slices,
        TOKENS=shape.size,
        INPUTS=min(SLICED.value, NUMBERS[size] // max(ranks, shape.size)),
        OUTPUTS=outputs,
        PRECISION="ieee" if size == 4 else "tf32",
        num_warps=4 if shape.size == FEW_TOKENS else 8,
    )


_POINTERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _chosen(at, first, second, third):
    return tl.where(at == 0, first, tl.where(at == 1, second, third))


@triton.jit
def _tile(plan, most, tile, TOKENS: tl.constexpr):
    """The adapter of a tile, the places of its tokens in the order, which of them there are, and the tokens."""
    entry = plan + 1 + tile * 3
    place = tl.load(entry + 1) + tl.arange(0, TOKENS)
    given = place < tl.load(entry + 2)
    return tl.load(entry), place, given, tl.load(plan + 1 + most * 3 + place, mask=given, other=0)


@triton.jit
def _shrink(
    x, sums, matrix, rank, token, place, given, projection, block, part, inputs, x_row, whole_rank,
    DTYPE: tl.constexpr, PROJECTIONS: tl.constexpr, RANKS: tl.constexpr, SLICES: tl.constexpr, TOKENS: tl.constexpr,
    INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes x @ A of a tile of tokens, for a block of ranks and a slice of the inputs."""
    column = block * RANKS + tl.arange(0, RANKS)
    length = tl.cdiv(tl.cdiv(inputs, SLICES), SLICED) * SLICED
    begin = part * length
    end = tl.minimum(begin + length, inputs)
    found = tl.zeros((TOKENS, RANKS), tl.float32)
    for start in range(begin, end, INPUTS):
        at = start + tl.arange(0, INPUTS)
        inside = at < inputs
        left = tl.load(x + token[:, None] * x_row + at[None, :], mask=given[:, None] & inside[None, :], other=0.0)
        there = inside[:, None] & (column < rank)[None, :]
        right = tl.load(matrix + at[:, None].to(tl.int64) * rank + column[None, :], mask=there, other=0.0)
        found = tl.dot(left.to(DTYPE), right, found, input_precision=PRECISION)
    line = sums + ((place * PROJECTIONS + projection) * SLICES + part) * whole_rank
    tl.store(line[:, None] + column[None, :], found, mask=given[:, None])


@triton.jit
def _expand(
    sums, y, ready, matrix, rank, token, place, given, projection, first_output, first_column, width, y_row, whole_rank,
    DTYPE: tl.constexpr, PROJECTIONS: tl.constexpr, RANKS: tl.constexpr, SLICES: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds some columns of the sums @ B to a tile of tokens, when the sums are complete. They come from other
    multiprocessors, so not from this one's own cache."""
    output = first_output + tl.arange(0, OUTPUTS)
    inside = output < width
    row = tl.arange(0, RANKS)
    blocks = tl.cdiv(rank, RANKS)
    right = tl.load(
        matrix + row[:, None].to(tl.int64) * width + output[None, :],
        mask=(row < rank)[:, None] & inside[None, :],
        other=0.0,
    )
    target = y + token[:, None] * y_row + (first_column + output)[None, :]
    written = given[:, None] & inside[None, :]
    before = tl.load(target, mask=written, other=0.0)
    arrived = tl.atomic_add(ready, 0, sem="acquire", scope="gpu")
    while arrived < blocks * SLICES:
        arrived = tl.atomic_add(ready, 0, sem="acquire", scope="gpu")
    line = sums + (place * PROJECTIONS + projection) * SLICES * whole_rank
    added = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for block in tl.range(0, blocks, num_stages=1):
        left = tl.zeros((TOKENS, RANKS), tl.float32)
        for part in tl.range(0, SLICES, num_stages=1, loop_unroll_factor=4 if SLICES > 4 else 1):
            left += tl.load(
                line[:, None] + (part * whole_rank + block * RANKS + row)[None, :],
                mask=given[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
        added = tl.dot(left.to(DTYPE), right, added, input_precision=PRECISION)
        row_after = (block + 1) * RANKS + row
        right = tl.load(
            matrix + row_after[:, None].to(tl.int64) * width + output[None, :],
            mask=(row_after < rank)[:, None] & inside[None, :],
            other=0.0,
        )
    tl.store(target, (before.to(tl.float32) + added).to(y.dtype.element_ty), mask=written)


# Where a step puts its plan compiles no other kernel.
@triton.jit(
    do_not_specialize=["layer", "number0", "number1", "number2", "most"], do_not_specialize_on_alignment=["plan"]
)
def _add_lora(
    x, y, sums, table, plan, counters, layer, adapter_step, layer_step, number0, number1, number2,
    start0, start1, start2, width0, width1, width2, inputs, x_row, y_row, whole_rank, most,
    DTYPE: tl.constexpr, NUMBERED: tl.constexpr, PROJECTIONS: tl.constexpr, RANKS: tl.constexpr, SLICES: tl.constexpr,
    TOKENS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program takes items until there are no more."""
    tiles = tl.load(plan).to(tl.int32)
    counted = counters + layer * NUMBERED * (1 + most)
    queue = counted + number0 * (1 + most)
    across0, across1 = tl.cdiv(width0, OUTPUTS), tl.cdiv(width1, OUTPUTS)
    across = across0 + across1 + tl.cdiv(width2, OUTPUTS)
    shares = whole_rank // RANKS * PROJECTIONS * SLICES
    items = tiles * (shares + across)
    item = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")
    while item < items:
        if item < tiles * shares:
            tile, share = item // shares, item % shares
            projection, part, block = share % PROJECTIONS, share // PROJECTIONS % SLICES, share // PROJECTIONS // SLICES
            number = _chosen(projection, number0, number1, number2)
            adapter, place, given, token = _tile(plan, most, tile, TOKENS)
            entry = table + adapter * adapter_step + layer * layer_step + number * 3
            rank = tl.multiple_of(tl.load(entry + 2).to(tl.int32), 8)
            if block * RANKS < rank:
                matrix = tl.multiple_of(tl.load(entry).to(tl.pointer_type(DTYPE)), 16)
                _shrink(
                    x, sums, matrix, rank, token, place, given, projection, block, part, inputs, x_row, whole_rank,
                    DTYPE, PROJECTIONS, RANKS, SLICES, TOKENS, INPUTS, PRECISION,
                )  # fmt: skip
                tl.debug_barrier()  # all threads have written before one of them counts
                tl.atomic_add(counted + number * (1 + most) + 1 + tile, 1, sem="release", scope="gpu")
        else:
            tile, share = (item - tiles * shares) // across, (item - tiles * shares) % across
            projection = (share >= across0).to(tl.int32) + (share >= across0 + across1).to(tl.int32)
            number = _chosen(projection, number0, number1, number2)
            adapter, place, given, token = _tile(plan, most, tile, TOKENS)
            entry = table + adapter * adapter_step + layer * layer_step + number * 3
            rank = tl.load(entry + 2).to(tl.int32)
            if rank > 0:
                matrix = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(DTYPE)), 16)
                _expand(
                    sums, y, counted + number * (1 + most) + 1 + tile, matrix, rank, token, place, given, projection,
                    (share - _chosen(projection, 0, across0, across0 + across1)) * OUTPUTS,
                    _chosen(projection, start0, start1, start2), _chosen(projection, width0, width1, width2),
                    y_row, whole_rank, DTYPE, PROJECTIONS, RANKS, SLICES, TOKENS, OUTPUTS, PRECISION,
                )  # fmt: skip
        item = tl.atomic_add(queue, 1, sem="relaxed", scope="gpu")


def self_test(device: torch.device) -> None:
    """Tokens of two adapters and of none in any order; one adapter has other ranks for its two projections, one changes
    one projection alone. Raises SelfTestFailed if the result differs from torch's."""
    for dtype, tolerance, tokens in (
        (torch.bfloat16, 0.02, 43),
        (torch.bfloat16, 0.02, 300),
        (torch.float32, 1e-5, 43),
    ):
        sizes = {0: (8, 72), 1: (24, None)}  # ranks of the projections
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
        owners = np.random.default_rng(1).integers(-1, 3, tokens)
        owners[:30] = 1
        shape = PlanShape.of(tokens, tokens, dtype, False)
        plan = np.zeros(shape.length, np.int64)
        write_plan(plan, owners, shape)
        tiles = AdapterTiles.of(table.to(device), torch.from_numpy(plan).to(device), shape, padded_rank(72), dtype)
        x, y = random_tensor(device, tokens, 300, dtype=dtype), random_tensor(device, tokens, 280, dtype=dtype, seed=3)
        expected = y.float()
        for adapter in sizes:
            own = torch.from_numpy(np.flatnonzero(owners == adapter)).to(device)
            for projection, columns in enumerate((slice(0, 70), slice(80, 280))):
                if (adapter, projection) in pairs:
                    a, b = pairs[adapter, projection]
                    expected[own, columns] += x[own].float() @ a.float() @ b.float()
        add_lora(x, y, tiles, 1, ((0, 0, 70), (1, 80, 200)))
        check_close("deltas of adapters", y, expected.to(dtype), tolerance)
