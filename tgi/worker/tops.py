"""The likeliest tokens beside each drawn one, for the rows that ask: `Sampling.top_n` of the processed distribution.

Sorted by logprob, the lowest id first among equals. All that equal the n-th are listed too, and none that a processor
has filtered out. How many these are is known only to the device, so a block of fixed width is computed there and cut
when it has come to the host: nothing waits.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.kernel.messages import MOST_TOPS
from tgi.worker.staging import sent

# A flat distribution has as many equals as the vocabulary has tokens. So many are listed beyond the n asked for.
TIES = 128
# Rows are ranked in blocks, which bounds the scratch memory (three int64 per token of the vocabulary).
BLOCK_ROWS = 32


class Tops(NamedTuple):
    """The lists of the n rows that asked: in row k of the blocks the first counts[k] entries."""

    rows: NDArray[np.int64]  # [n] which of the drawing rows, ascending
    counts: Tensor  # int64 [n]
    ids: Tensor  # int32 [n, W]
    logprobs: Tensor  # float32 [n, W]


def find_tops(logprobs: Tensor, rows: NDArray[np.int64], top_n: NDArray[np.int64]) -> Tops:
    """The lists of these drawing rows, which ask for top_n [n] > 0 tokens of their logprobs float32 [n, vocab]."""
    most = min(MOST_TOPS, logprobs.shape[1])
    wanted = np.minimum(top_n, most)
    longest = np.minimum(wanted + TIES, most)
    ids = torch.cat([rank(block, int(longest.max())) for block in logprobs.split(BLOCK_ROWS)])
    values = logprobs.gather(1, ids)
    wanted_at, longest_at = sent(np.stack((wanted, longest)), ids.device)[:, :, None]
    listed = values >= values.gather(1, wanted_at - 1)
    listed &= values > -torch.inf
    listed &= torch.arange(ids.shape[1], device=ids.device) < longest_at
    return Tops(rows, listed.sum(-1), ids.int(), values)


def columns(tops: Tops | None, drawn: int) -> tuple[bytes, bytes, bytes]:
    """The lists as the columns of a Result of `drawn` rows; the tensors are on the host. Empty if nobody asked."""
    if tops is None:
        return b"", b"", b""
    counts = np.zeros(drawn, np.uint32)
    counts[tops.rows] = tops.counts.numpy()
    listed = np.arange(tops.ids.shape[1]) < tops.counts.numpy()[:, None]
    return counts.tobytes(), tops.ids.numpy()[listed].tobytes(), tops.logprobs.numpy()[listed].tobytes()


def rank(logprobs: Tensor, width: int) -> Tensor:
    """Ids int64 [n, width] of the likeliest, the lowest first among equals.

    No two of the integers that are compared are equal, so whoever selects them has no choice of its own.
    """
    bits = logprobs.view(torch.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    keys = ascending.long().mul_(1 << 32).sub_(torch.arange(logprobs.shape[1], device=logprobs.device))
    return keys.topk(width, -1).values.neg_().bitwise_and_(0xFFFFFFFF)
