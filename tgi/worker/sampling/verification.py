"""Verification of drafts (speculative decoding): which of the sampled tokens count.

A row with drafts samples at each position as if all earlier drafts were accepted: one forward pass samples at all
positions, with the history, the bitmask and the noise of each. The sampled tokens count up to and including the first
one that differs from its draft. Up to there the assumption was true, so these are the tokens that the row would have
sampled one by one, whatever its parameters.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.sampling.sampler import SampledTokens
from tgi.worker.sampling.top_logprobs import TopLogprobs

Ints = NDArray[np.int64]


class DraftBatch(NamedTuple):
    """The drafts of D rows, which sample at E = sum(lengths) positions."""

    slots: Ints  # [D]
    lengths: Ints  # [D] positions of each row: one, and one after each draft
    ids: Tensor  # int64 [E - D], row after row

    def ids_by_row(self) -> list[list[int]]:
        """The drafts of each row. `ids` must be on the host."""
        ids, offsets = self.ids.tolist(), row_offsets(self.lengths) - np.arange(len(self.lengths))
        return [ids[first : first + length - 1] for first, length in zip(offsets, self.lengths, strict=True)]


def row_offsets(lengths: Ints) -> Ints:
    """The index [D] of each row's first position."""
    offsets: Ints = np.cumsum(lengths) - lengths
    return offsets


def draft_positions_mask(lengths: Ints) -> NDArray[np.bool_]:
    """Which of the positions [E] are followed by a draft: all but the last of each row."""
    followed = np.ones(lengths.sum(), np.bool_)
    followed[np.cumsum(lengths) - 1] = False
    return followed


def count_accepted(drafts: DraftBatch, ids: Tensor, reach: Ints | None) -> Ints:
    """How many of the sampled ids [E] each row keeps [D]: its accepted drafts and one more token. All tensors are on
    the host. `reach` [D] limits the positions that a row could sample (GrammarBitmask.reach)."""
    offsets, compared = row_offsets(drafts.lengths), draft_positions_mask(drafts.lengths)
    differs = ~compared
    differs[compared] = ids.numpy()[compared] != drafts.ids.numpy()
    stops = np.flatnonzero(differs)
    kept: Ints = stops[np.searchsorted(stops, offsets)] - offsets + 1
    return kept if reach is None else np.minimum(kept, reach)


def keep_accepted(drafts: DraftBatch, sampled: SampledTokens, kept: Ints) -> SampledTokens:
    """The first kept [D] tokens of each row."""
    indices = np.arange(kept.sum()) + np.repeat(row_offsets(drafts.lengths) - row_offsets(kept), kept)
    top = sampled.top_logprobs
    if top is not None:
        _, rows, chosen = np.intersect1d(indices, top.rows, return_indices=True)
        top = TopLogprobs(rows, top.counts[chosen], top.ids[chosen], top.logprobs[chosen])
    return SampledTokens(sampled.ids[indices], sampled.logprobs[indices], top)
