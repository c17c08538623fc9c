"""The likeliest token of each row of scores, and what makes logprobs of scores."""

from typing import NamedTuple

import torch
from torch import Tensor


class Best(NamedTuple):
    """Of n rows of scores. Another token's logprob is its score - highest + logprob."""

    ids: Tensor  # int64 [n] the lowest among those of the highest score
    highest: Tensor  # float32 [n]
    logprobs: Tensor  # float32 [n] -log(sum over all tokens of e^(score - highest)); NaN if `highest` is infinite

    @classmethod
    def empty(cls, rows: int) -> "Best":
        """Room for so many rows on the host."""
        return cls(torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows))


def find_best(scores: Tensor) -> Best:
    """By torch, of scores float32 [n, vocab]. Kernels.best is our own."""
    ids = argmax(scores)
    highest = scores.gather(1, ids[:, None])
    return Best(ids, highest[:, 0], torch.log_softmax(scores, -1).gather(1, ids[:, None])[:, 0])


def argmax(scores: Tensor) -> Tensor:
    """The lowest id among the highest scores of each row, int64 [n]."""
    if scores.device.type == "cpu":  # numpy's is vectorised, torch's is ten times slower
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)
