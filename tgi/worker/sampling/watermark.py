"""The watermark of Kirchenbauer et al. 2023 ("A Watermark for Large Language Models") as TGI makes it, and its
detection.

The previous token alone decides which tokens are green: the first int(vocab * gamma) ids of `torch.randperm(vocab)`
from a generator seeded with 15485863 * previous id. `delta` is added to the logits of green tokens. Who knows gamma can
count the green tokens of a text to tell whether it was generated with the watermark.

The generators of CPU and GPU give different permutations, so TGI's watermark on a GPU differs from that on a CPU. The
seed is a number on the host, so on a GPU a step with watermarked rows waits for the previous step.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from math import erfc, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.errors import UserError
from tgi.worker.greedy import MAX_LOGIT
from tgi.worker.sampling.token_bitmask import BITS_PER_WORD, forbidden_tokens

SEED_FACTOR = 15485863  # TGI's prime
MAX_CACHED_GREEN_LISTS = 2048  # as bitmasks, by the previous token; least recently used ones go first
# Rows that get their bias at once: on CPU their logits stay in a core's cache.
BLOCK_ROWS = 4
# 1 of 30,000 texts without a watermark has a z above this.
Z_THRESHOLD = 4.0


class Watermark:
    """The green lists of one vocabulary (`vocab_size` is the width of the logits) on one kind of device."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        gamma: float = 0.5,
        delta: float = 2.0,
        max_cached: int = MAX_CACHED_GREEN_LISTS,
    ) -> None:
        self.green_count = int(vocab_size * gamma)
        self.delta = min(max(delta, -MAX_LOGIT), MAX_LOGIT)
        self._vocab_size = vocab_size
        self._device = device
        self._generator = torch.Generator(device)
        self._max_cached = max_cached
        self._red_bitmasks: OrderedDict[int, NDArray[np.int32]] = OrderedDict()

    def green_ids(self, previous_id: int) -> NDArray[np.int64]:
        """The ids that are green after this token, in the permutation's order."""
        self._generator.manual_seed(SEED_FACTOR * previous_id)
        order = torch.randperm(self._vocab_size, generator=self._generator, device=self._device)
        return order[: self.green_count].cpu().numpy()

    def red_bitmask(self, previous_id: int) -> NDArray[np.int32]:
        """The tokens that are not green after this token, as a bitmask (see GrammarBitmask.words)."""
        words = self._red_bitmasks.pop(previous_id, None)
        if words is None:
            red = np.ones(-(-self._vocab_size // BITS_PER_WORD) * BITS_PER_WORD, np.bool_)
            red[self.green_ids(previous_id)] = False
            words = np.packbits(red, bitorder="little").view(np.int32)
            if len(self._red_bitmasks) >= self._max_cached:
                self._red_bitmasks.popitem(last=False)
        self._red_bitmasks[previous_id] = words
        return words

    def add_green_bias(self, logits: Tensor, last_ids: list[int]) -> Tensor:
        """Adds delta, in place, to the green tokens of logits [n, vocab]; `last_ids` [n] are the rows' last tokens."""
        for begin in range(0, len(last_ids), BLOCK_ROWS):
            block = logits[begin : begin + BLOCK_ROWS]
            words = np.stack([self.red_bitmask(one) for one in last_ids[begin : begin + BLOCK_ROWS]])
            block.add_(forbidden_tokens(words, logits.device)[:, : self._vocab_size].float(), alpha=self.delta)
        return logits


class WatermarkEvidence(NamedTuple):
    """The evidence for a watermark in a text.

    Each distinct pair of neighbouring tokens is counted once, because a repeated pair adds no evidence: of T pairs, g
    end in a token that is green after the other. Without a watermark a share gamma of them does on average, and
    z = (g - gamma * T) / sqrt(gamma * (1 - gamma) * T) is nearly normal (Kirchenbauer et al. 2023, equation 2).
    """

    counted: int  # T
    green: int  # g
    z: float

    @property
    def share(self) -> float:
        """The share of green tokens."""
        return self.green / self.counted

    @property
    def chance(self) -> float:
        """The probability of a z at least this high without a watermark."""
        return erfc(self.z / sqrt(2)) / 2

    @property
    def marked(self) -> bool:
        """Whether the text was most likely generated with the watermark."""
        return self.z > Z_THRESHOLD


def detect_watermark(ids: Sequence[int], vocab_size: int, gamma: float = 0.5, device: str = "cpu") -> WatermarkEvidence:
    """Detects the watermark in the token ids of a text. `vocab_size` (the width of the model's logits), `gamma` and the
    kind of device must be those of the server that generated it. Raises UserError for fewer than two tokens."""
    pairs = sorted({pair for pair in pairwise(ids) if max(pair) < vocab_size})
    if not pairs:
        raise UserError("A watermark is looked for in pairs of tokens, and this text has none. Give a longer text.")
    watermark = Watermark(vocab_size, torch.device(device), gamma)
    share = watermark.green_count / vocab_size  # gamma, in whole tokens
    if not 0 < share < 1:
        raise UserError(f"With gamma {gamma:g} none of {vocab_size} tokens is green, or all are. Give the server's.")
    green, green_ids, previous = 0, frozenset[int](), -1
    for before, token in pairs:
        if before != previous:
            green_ids, previous = frozenset(watermark.green_ids(before).tolist()), before
        green += token in green_ids
    z = (green - share * len(pairs)) / sqrt(share * (1 - share) * len(pairs))
    return WatermarkEvidence(len(pairs), green, z)


def detect_watermark_in_text(text: str, directory: Path, gamma: float, device: str) -> WatermarkEvidence:
    """The same for a text, encoded with the tokenizer of a model directory. Raises UserError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device here, and a watermark that was made on one can only be read on one.")
    card = read_model_config(directory)
    ids = read_tokenizer(card).encode(text, add_special_tokens=False).ids
    return detect_watermark(ids, card.vocab_size, gamma, device)
