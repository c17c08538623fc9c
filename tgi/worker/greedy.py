"""Greedy tokens: the argmax of each row of logits, and the two numbers that turn logits into logprobs."""

from typing import NamedTuple

import torch
from torch import Tensor

# Bound of a logit after penalties and biases: float32 does not overflow, so logprobs do not become NaN.
MAX_LOGIT = 1e8


class GreedyTokens(NamedTuple):
    """The greedy tokens of n rows. The logprob of any other token is its logit - highest + logprob."""

    ids: Tensor  # int64 [n] the lowest id among those with the highest logit
    highest: Tensor  # float32 [n] the highest logit
    logprobs: Tensor  # float32 [n] -log(sum over the vocabulary of e^(logit - highest)); NaN if `highest` is infinite

    @classmethod
    def empty(cls, rows: int) -> "GreedyTokens":
        """Uninitialized host memory for this number of rows."""
        return cls(torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows))


def find_greedy_tokens(logits: Tensor) -> GreedyTokens:
    """The greedy tokens of logits float32 [n, vocab], by torch; see also CpuKernels.greedy_tokens."""
    ids = argmax(logits)
    highest = logits.gather(1, ids[:, None])
    return GreedyTokens(ids, highest[:, 0], torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0])


def argmax(logits: Tensor) -> Tensor:
    """The lowest id among the highest logits of each row, int64 [n]."""
    if logits.device.type == "cpu":  # numpy's is vectorized, torch's is ten times slower
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
