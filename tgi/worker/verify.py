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

    def of_rows(self) -> list[list[int]]:
        """The drafts of each row. They are on the host."""
        ids, firsts = self.drafts.tolist(), begins(self.lengths) - np.arange(len(self.lengths))
        return [ids[first : first + length - 1] for first, length in zip(firsts, self.lengths, strict=True)]


def begins(lengths: Ints) -> Ints:
    """[D] the first place of each row."""
    firsts: Ints = np.cumsum(lengths) - lengths
    return firsts


def followed(lengths: Ints) -> NDArray[np.bool_]:
    """[E] which places have a draft behind them: all but the last of each row."""
    behind = np.ones(lengths.sum(), np.bool_)
    behind[np.cumsum(lengths) - 1] = False
    return behind


def count_kept(drafted: Drafted, ids: Tensor, reach: Ints | None) -> Ints:
    """How many of the ids [E] that were drawn each row keeps [D], 1 at least. All tensors are on the host.

    `reach` [D], if not None, is how many of its places a row could draw in.
    """
    firsts, compared = begins(drafted.lengths), followed(drafted.lengths)
    differs = ~compared
    differs[compared] = ids.numpy()[compared] != drafted.drafts.numpy()
    stops = np.flatnonzero(differs)
    kept: Ints = stops[np.searchsorted(stops, firsts)] - firsts + 1
    return kept if reach is None else np.minimum(kept, reach)


def keep(drafted: Drafted, drawn: Drawn, kept: Ints) -> Drawn:
    """The first kept [D] tokens of each row of what was drawn in all places."""
    at = np.arange(kept.sum()) + np.repeat(begins(drafted.lengths) - begins(kept), kept)
    tops = drawn.tops
    if tops is not None:
        _, rows, mine = np.intersect1d(at, tops.rows, return_indices=True)
        tops = Tops(rows, tops.counts[mine], tops.ids[mine], tops.logprobs[mine])
    return Drawn(drawn.ids[at], drawn.logprobs[at], tops)
