"""What the kernel of LoRA adapters takes besides tensors of tokens, as data; without Triton.

The tokens of a step are sorted by their adapter, and those of one adapter are divided into tiles. A plan is one column
of integers, so a captured step reads it from fixed memory: the number of tiles; for each tile its adapter, the index of
its first token in the sorted order, and of the one after its last; and the sorted tokens. Tokens without an adapter
are in no tile.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Tokens of a tile: the smallest side of a matrix of tl.dot, and where each adapter of a step may have many.
FEW_TOKENS, MANY_TOKENS = 16, 64
MANY = 256  # tokens of a step


class PlanShape(NamedTuple):
    """The shape of a plan, which a captured step fixes."""

    tokens: int  # of the step at most
    most: int  # tiles at most
    size: int  # tokens of a tile

    @staticmethod
    def of(tokens: int, rows: int, dtype: torch.dtype, batch_invariant: bool) -> "PlanShape":
        """For a step of this many tokens, where those of a row have one adapter, with matrices of this type."""
        few = batch_invariant or tokens <= MANY or dtype is torch.float32
        size, adapters = FEW_TOKENS if few else MANY_TOKENS, min(tokens, rows)
        return PlanShape(tokens, adapters + (tokens - adapters) // size, size)

    @property
    def length(self) -> int:
        """Of the column."""
        return 1 + 3 * self.most + self.tokens


class AdapterTiles(NamedTuple):
    """The adapters of a step's tokens. Tensors are on the device."""

    # int64 [adapters, layers, projections, 3]: the addresses of A [inputs, rank] and B [rank, outputs], and the rank, a
    # multiple of lora.projections.RANK_MULTIPLE, which is 0 where the adapter does not change the projection.
    table: Tensor
    plan: Tensor  # int64 [shape.length]
    counters: Tensor  # int32 [layers, projections, 1 + shape.most]: zeros, of this step alone
    shape: PlanShape
    rank: int  # the highest, or more: see padded_rank
    dtype: torch.dtype  # of the matrices
    groups: frozenset[str] = frozenset()  # of PROJECTION_GROUPS, which some adapter changes

    @staticmethod
    def of(
        table: Tensor, plan: Tensor, shape: PlanShape, rank: int, dtype: torch.dtype, groups: Iterable[str] = ()
    ) -> "AdapterTiles":
        """With new counters."""
        _, layers, projections, _ = table.shape
        counters = torch.zeros(layers, projections, 1 + shape.most, dtype=torch.int32, device=table.device)
        return AdapterTiles(table, plan, counters, shape, rank, dtype, frozenset(groups))


def write_plan(plan: NDArray[np.int64], adapters: NDArray[Any], shape: PlanShape) -> None:
    """Writes the plan of tokens with these adapters [tokens]; -1: none."""
    _, most, size = shape
    order = np.argsort(adapters, kind="stable")
    order = order[np.searchsorted(adapters, 0, sorter=order) :]
    plan[0] = 0
    if not len(order):
        return
    owners = adapters[order]
    bounds = np.concatenate(((0,), np.flatnonzero(owners[1:] != owners[:-1]) + 1, (len(order),)))
    starts, counts = bounds[:-1], np.diff(bounds)
    tiles = -(-counts // size)
    count = int(tiles.sum())
    number = np.arange(count) - np.repeat(tiles.cumsum() - tiles, tiles)  # of a tile among those of its adapter
    first = np.repeat(starts, tiles) + number * size
    plan[0] = count
    columns = plan[1 : 1 + 3 * count].reshape(count, 3)
    columns[:, 0], columns[:, 1] = np.repeat(owners[starts], tiles), first
    columns[:, 2] = np.minimum(first + size, np.repeat(starts + counts, tiles))
    plan[1 + 3 * most :][: len(order)] = order


def padded_rank(rank: int) -> int:
    """AdapterTiles.rank for adapters of at most this rank: 16, 32, or a multiple of 64."""
    return -(-rank // 64) * 64 if rank > 32 else 16 if rank <= 16 else 32
