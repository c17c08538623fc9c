"""Finds the watermark in a text: how many of its tokens are green, and how unlikely that is by chance.

A pair of neighbours that comes back says nothing new, so each is counted once: of T distinct pairs, g end in a token
that is green behind the other. Without a watermark about a share gamma of them does, and
z = (g - gamma * T) / sqrt(gamma * (1 - gamma) * T) is nearly normal (Kirchenbauer et al. 2023, equation 2).
"""

from collections.abc import Sequence
from itertools import pairwise
from math import erfc, sqrt
from pathlib import Path
from typing import NamedTuple

import torch

from tgi.hub.card import read_card
from tgi.hub.tokens import read_tokenizer
from tgi.kernel.errors import UserError
from tgi.worker.watermark import Watermark

# By chance one text of 30,000 has a z above this.
THRESHOLD = 4.0


class Verdict(NamedTuple):
    """What `counted` distinct pairs of tokens say."""

    counted: int  # T
    green: int  # g
    z: float

    @property
    def share(self) -> float:
        """The share of green tokens."""
        return self.green / self.counted

    @property
    def chance(self) -> float:
        """How likely a z as high as this is without a watermark."""
        return erfc(self.z / sqrt(2)) / 2

    @property
    def marked(self) -> bool:
        """Whether the text was made with the watermark, as far as anyone can tell."""
        return self.z > THRESHOLD


def detect(ids: Sequence[int], vocab_size: int, gamma: float = 0.5, device: str = "cpu") -> Verdict:
    """What the tokens of a text say. `vocab_size` (the width of the model's logits), `gamma` and the kind of device
    must be those of the server that made it. Raises UserError for fewer than two tokens."""
    pairs = sorted({pair for pair in pairwise(ids) if max(pair) < vocab_size})
    if not pairs:
        raise UserError("A watermark is looked for in pairs of tokens, and this text has none. Give a longer text.")
    mark = Watermark(vocab_size, torch.device(device), gamma)
    share = mark.green_count / vocab_size  # gamma, in whole tokens
    if not 0 < share < 1:
        raise UserError(f"With gamma {gamma:g} none of {vocab_size} tokens is green, or all are. Give the server's.")
    green, behind, last = 0, frozenset[int](), -1
    for before, token in pairs:
        if before != last:
            behind, last = frozenset(mark.green(before).tolist()), before
        green += token in behind
    z = (green - share * len(pairs)) / sqrt(share * (1 - share) * len(pairs))
    return Verdict(len(pairs), green, z)


def detect_text(text: str, directory: Path, gamma: float, device: str) -> Verdict:
    """The same for a text, read with the tokenizer of a model directory. Raises UserError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("There is no CUDA device here, and a watermark that was made on one can only be read on one.")
    card = read_card(directory)
    ids = read_tokenizer(card).encode(text, add_special_tokens=False).ids
    return detect(ids, card.vocab_size, gamma, device)
