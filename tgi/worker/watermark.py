"""The watermark of Kirchenbauer et al. 2023 ("A Watermark for Large Language Models"), as TGI makes it.

A token's predecessor alone decides which tokens are green in its place: the first int(vocab * gamma) ids of
`torch.randperm(vocab)` from a generator that is seeded with 15485863 * predecessor. Their scores get `delta` more. Who
knows gamma and counts green tokens can tell later that a text was made so (detection.py).

A permutation is drawn on the host's or the GPU's own generator, which give different ones: TGI's watermark on a GPU and
that on a CPU are two. The seed is a number of the host, so on a GPU a step with such rows waits for the step before.
"""

from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.masks import BITS, unset
from tgi.worker.params import LARGEST_SCORE, Draws
from tgi.worker.rows import put, take

PRIME = 15485863
# Lists that are kept, by predecessor: a bit for each token of the vocabulary.
KEPT = 2048
# Rows that are marked at once: on CPU their scores stay in a core's cache.
BLOCK_ROWS = 4


class Watermark:
    """The green lists of one vocabulary (`vocab_size` is the width of the logits) on one kind of device."""

    def __init__(
        self, vocab_size: int, device: torch.device, gamma: float = 0.5, delta: float = 2.0, kept: int = KEPT
    ) -> None:
        self.green_count = int(vocab_size * gamma)
        self.delta = min(max(delta, -LARGEST_SCORE), LARGEST_SCORE)
        self._vocab_size = vocab_size
        self._device = device
        self._generator = torch.Generator(device)
        self._kept = kept
        self._known: OrderedDict[int, NDArray[np.int32]] = OrderedDict()

    def green(self, last: int) -> NDArray[np.int64]:
        """The green ids behind the token `last`, in the permutation's order."""
        self._generator.manual_seed(PRIME * last)
        order = torch.randperm(self._vocab_size, generator=self._generator, device=self._device)
        return order[: self.green_count].cpu().numpy()

    def red_words(self, last: int) -> NDArray[np.int32]:
        """The others as bits, in words as those of a mask (Masks.words)."""
        words = self._known.pop(last, None)
        if words is None:
            red = np.ones(-(-self._vocab_size // BITS) * BITS, np.bool_)
            red[self.green(last)] = False
            words = np.packbits(red, bitorder="little").view(np.int32)
            if len(self._known) >= self._kept:
                self._known.popitem(last=False)
        self._known[last] = words
        return words

    def mark(self, scores: Tensor, last: list[int]) -> Tensor:
        """Adds delta to the green ones of scores [n, vocab], whose rows' latest tokens are `last` [n]."""
        for begin in range(0, len(last), BLOCK_ROWS):
            block = scores[begin : begin + BLOCK_ROWS]
            words = np.stack([self.red_words(one) for one in last[begin : begin + BLOCK_ROWS]])
            block.add_(unset(words, scores.device)[:, : self._vocab_size].float(), alpha=self.delta)
        return scores


def mark_green(scores: Tensor, draws: Draws) -> None:
    """s + delta for the green tokens behind a row's latest one."""
    rows = np.flatnonzero(draws.params.watermark)
    if not len(rows):
        return
    assert draws.mark is not None
    last = draws.history(rows, draws.position[rows] - 1)[:, 0].tolist()
    put(scores, rows, draws.mark.mark(take(scores, rows), last))
