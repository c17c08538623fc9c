"""The whole numbers that 4 bits stand for in weights made at load: a code says which level, a factor how far apart the
levels are.

A kernel can multiply whole numbers of 8 bits exactly, and needs but one scale for each output then. The levels are
those that leave the least squared error, with these factors, where weights are distributed normally: each is the mean
of the weights that are drawn to it (Lloyd, "Least squares quantization in PCM", 1982). They reach further on one side,
so the wider factors come with both signs, and the largest number of a group can be on the side that suits it. The
narrower factors are for outputs of which few weights are much larger than the rest.
"""

from functools import cache

import torch
from torch import Tensor

LEVELS = torch.tensor([-127, -101, -80, -63, -48, -35, -22, -10, 0, 13, 25, 39, 53, 70, 89, 113])
FACTORS = torch.tensor([127, -127, 102, -102, 79, -79, 56, 32])  # of 127
# int8 [factors, codes]. Code 8 is zero with all factors.
TABLE = (FACTORS[:, None] * LEVELS / 127).round().to(torch.int8)


@cache
def table_on(device: torch.device) -> Tensor:
    """TABLE there, where it stays: while a step is recorded on a GPU nothing can be copied to it."""
    return TABLE.to(device)
