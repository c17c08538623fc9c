"""What the kernels of LoRA adapters take besides tensors of tokens, as data; without Triton."""

from typing import NamedTuple

import torch
from torch import Tensor


class LoraRuns(NamedTuple):
    """Runs of tokens, each with one adapter or none. Tensors are on the device."""

    # int64 [adapters, layers, projections, 3]: the addresses of A [inputs, rank] and B [rank, outputs], and the rank,
    # which is 0 where the adapter does not change the projection.
    table: Tensor
    adapters: Tensor  # int32 [runs]: indices into the table
    bounds: Tensor  # int32 [runs + 1] or, if runs have gaps, [runs, 2]: the first token of a run, and the one after it
    runs: int
    longest: int  # tokens of a run at most
    rank: int  # the highest
    dtype: torch.dtype  # of the matrices
    groups: frozenset[str] = frozenset()  # of PROJECTION_GROUPS, which some adapter changes
