"""Top-n logprobs: the likeliest tokens at each sampled position, for the rows that ask (`SamplingParams.top_n`).

A row may name the tokens that it lists instead (`SamplingParams.listed_ids`).

Of the processed distribution, sorted by logprob, the lowest id first among equals. All tokens that tie with the n-th
are listed too; filtered tokens (-inf) are not. Only the device knows how long the lists are, so it computes a block of
fixed width, which the host cuts after the copy: nothing waits.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.microkernel.messages.protocol import MAX_TOP_TOKENS
from tgi.worker.device_copies import copy_to_device

# The most tokens listed beyond n because they tie: a flat distribution has as many ties as the vocabulary has tokens.
MAX_TIES = 128
# Rows are ranked in blocks, which bounds the scratch memory (three int64 for each token of the vocabulary).
BLOCK_ROWS = 32


class TopLogprobs(NamedTuple):
    """The lists of n rows: the first counts[k] entries of row k."""

    rows: NDArray[np.int64]  # [n] index among the sampled rows, ascending
    counts: Tensor  # int64 [n]
    ids: Tensor  # int32 [n, W]
    logprobs: Tensor  # float32 [n, W]


def find_top_logprobs(
    logprobs: Tensor, rows: NDArray[np.int64], top_n: NDArray[np.int64], listed_ids: NDArray[np.object_]
) -> TopLogprobs:
    """The lists of these sampled rows, which ask for top_n [n] > 0 tokens of their logprobs float32 [n, vocab].
    `listed_ids` [n] has int64 [top_n] where a row names its tokens, else None."""
    limit = min(MAX_TOP_TOKENS, logprobs.shape[1])
    wanted = np.minimum(top_n, limit)
    longest = np.minimum(wanted + MAX_TIES, limit)
    ids = torch.cat([rank_token_ids(block, int(longest.max())) for block in logprobs.split(BLOCK_ROWS)])
    named = np.array([one is not None for one in listed_ids])
    for row in np.flatnonzero(named):
        ids[row, : wanted[row]] = copy_to_device(listed_ids[row][: wanted[row]], ids.device)
    longest[named] = wanted[named]
    values = logprobs.gather(1, ids)
    device_wanted, device_longest = copy_to_device(np.stack((wanted, longest)), ids.device)[:, :, None]
    listed = values >= values.gather(1, device_wanted - 1)
    listed &= values > -torch.inf
    listed |= copy_to_device(named, ids.device)[:, None]
    listed &= torch.arange(ids.shape[1], device=ids.device) < device_longest
    return TopLogprobs(rows, listed.sum(-1), ids.int(), values)


def top_logprobs_columns(top: TopLogprobs | None, sampled: int) -> tuple[bytes, bytes, bytes]:
    """The columns top_counts, top_ids and top_logprobs of a StepResult with `sampled` tokens. The tensors are on the
    host. Empty if no row asks for alternatives."""
    if top is None:
        return b"", b"", b""
    counts = np.zeros(sampled, np.uint32)
    counts[top.rows] = top.counts.numpy()
    listed = np.arange(top.ids.shape[1]) < top.counts.numpy()[:, None]
    return counts.tobytes(), top.ids.numpy()[listed].tobytes(), top.logprobs.numpy()[listed].tobytes()


def rank_token_ids(logprobs: Tensor, width: int) -> Tensor:
    """Ids int64 [n, width] of the likeliest tokens, the lowest id first among equals.

    The compared integers combine logprob and id, so no two are equal and the outcome does not depend on how topk
    resolves ties.
    """
    bits = logprobs.view(torch.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    keys = ascending.long().mul_(1 << 32).sub_(torch.arange(logprobs.shape[1], device=logprobs.device))
    return keys.topk(width, -1).values.neg_().bitwise_and_(0xFFFFFFFF)
