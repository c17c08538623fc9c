"""Token bitmasks: a bit for each token of the vocabulary. llguidance writes them, green lists are stored as such."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.device_copies import copy_to_device

BITS_PER_WORD = 32


class GrammarBitmask(NamedTuple):
    """The masks of those of D rows that have a grammar, at the E positions that the rows sample (E > D with drafts)."""

    rows: NDArray[np.int64]  # [n] which of the E positions, ascending
    words: NDArray[np.int32]  # [n, W]: token t is allowed if bit t % 32 of word t // 32 is set
    faults: list[str]  # [D] why a row cannot sample, "" if it can
    reach: NDArray[np.int64] | None = None  # [D] the number of its positions that a row can sample; None: all


def allows_token(words: NDArray[np.int32], token: int) -> bool:
    """Whether the bit of this token is set in a mask [W]."""
    return bool(words[token // BITS_PER_WORD] >> (token % BITS_PER_WORD) & 1)


def forbidden_tokens(words: NDArray[np.int32], device: torch.device) -> Tensor:
    """The bits that are not set in masks [n, W], as bool [n, W * 32] on the device."""
    if device.type == "cpu":  # numpy unpacks ten times as fast as torch on CPU
        bits = np.unpackbits((~words).view(np.uint8), axis=-1, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    device_words = copy_to_device(words, device)[:, :, None]
    bits_at = device_words >> torch.arange(BITS_PER_WORD, dtype=torch.int32, device=device)
    return (bits_at & 1).view(len(words), -1) == 0
