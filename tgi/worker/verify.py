"""Speculation: which of the tokens that were drawn behind drafts count.

A row with drafts draws in each place as if every draft before it had been accepted. So one pass draws everywhere, with
the history, the mask and the noise of each place. What was drawn counts up to the first token that is not its draft:
up to there all of this was true, and the tokens are those that the row would have drawn one by one, whatever its
parameters.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.sampling import Drawn
from tgi.worker.tops import Tops

Ints = NDArray[np.int64]


class Drafted(NamedTuple):
    """The drafts of D drawing rows, which draw in E = sum(lengths) places."""

    slots: Ints  # [D]
    lengths: Ints  # [D] places of each row: one, and one behind each draft
    drafts: Tensor  # int64 [E - D], row after row

    @property
    def begins(self) -> Ints:
        """[D] the first place of each row."""
        begins: Ints = np.cumsum(self.lengths) - self.lengths
        return begins

    @property
    def followed(self) -> NDArray[np.bool_]:
        """[E] which places have a draft behind them: all but the last of each row."""
        followed = np.ones(self.lengths.sum(), np.bool_)
        followed[self.begins + self.lengths - 1] = False
        return followed

    def of_rows(self) -> list[list[int]]:
        """The drafts of each row. They are on the host."""
        ids, begins = self.drafts.tolist(), self.begins - np.arange(len(self.lengths))
        return [ids[begin : begin + length - 1] for begin, length in zip(begins, self.lengths, strict=True)]


def count_kept(drafted: Drafted, ids: Tensor, reach: Ints | None) -> Ints:
    """How many of the ids [E] that were drawn each row keeps [D], 1 at least. All tensors are on the host.

    `reach` [D], if not None, is how many of its places a row could draw in.
    """
    begins = drafted.begins
    drawn, followed = ids.numpy(), drafted.followed
    differs = ~followed
    differs[followed] = drawn[followed] != drafted.drafts.numpy()
    stops = np.flatnonzero(differs)
    kept: Ints = stops[np.searchsorted(stops, begins)] - begins + 1
    return kept if reach is None else np.minimum(kept, reach)


def keep(drafted: Drafted, drawn: Drawn, kept: Ints) -> Drawn:
    """The first kept [D] tokens of each row of what was drawn in all places."""
    counts = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
    at = np.repeat(drafted.begins, kept) + counts
    tops = drawn.tops
    if tops is not None:
        _, rows, mine = np.intersect1d(at, tops.rows, return_indices=True)
        tops = Tops(rows, tops.counts[mine], tops.ids[mine], tops.logprobs[mine])
    return Drawn(drawn.ids[at], drawn.logprobs[at], tops)
