"""Greedy tokens: the argmax of each row of logits, and the two numbers that turn logits into logprobs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
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


# Finds the greedy tokens of logits float32 [n, vocab].
FindGreedyTokens = Callable[[Tensor], GreedyTokens]

BLOCK = 32  # logits that block maxima summarize; ranks divide the vocabulary between blocks (sharding.py)
PARTS = 3  # numbers of a block


def find_greedy_tokens(logits: Tensor) -> GreedyTokens:
    """The greedy tokens of logits float32 [n, vocab], by torch; see also CpuKernels.greedy_tokens."""
    ids = argmax(logits)[:, None]
    logprobs = torch.log_softmax(logits, -1).gather(1, ids)
    return GreedyTokens(ids[:, 0], logits.gather(1, ids)[:, 0], logprobs[:, 0])


def find_greedy_tokens_by_block(logits: Tensor) -> GreedyTokens:
    """`find_greedy_tokens` with the bits of ranks that exchange block maxima. It takes twice the time."""
    return merge_block_maxima(block_maxima(logits))


def block_columns(vocab: int) -> int:
    """Columns of `block_maxima`."""
    return -(-vocab // BLOCK) * PARTS


def block_maxima(logits: Tensor) -> Tensor:
    """Of each BLOCK of logits float32 [n, vocab] the maximum, its place in the block, the lowest one, and the logarithm
    of the sum of e^(logit - maximum): float32 [n, block_columns(vocab)]. Ranks join those of their logits."""
    blocks = F.pad(logits, (0, -logits.shape[1] % BLOCK), value=-torch.inf).view(-1, BLOCK)
    places = argmax(blocks)[:, None]
    # A softmax computes each row alike wherever it stands, which sums of torch's exp() do not.
    sums = -torch.log_softmax(blocks, -1).gather(1, places)
    found = torch.cat((blocks.gather(1, places), places.to(torch.float32), sums), 1)
    return found.view(len(logits), block_columns(logits.shape[1]))


def merge_block_maxima(blocks: Tensor) -> GreedyTokens:
    """The greedy tokens of rows whose `block_maxima` are joined [n, columns]."""
    highest, places, sums = blocks.unflatten(1, (blocks.shape[1] // PARTS, PARTS)).unbind(-1)
    block = argmax(highest.contiguous())[:, None]
    most = highest.gather(1, block)
    logs = torch.where(highest == -torch.inf, highest, highest - most + sums)
    logprobs = torch.log_softmax(logs, -1).gather(1, block) - sums.gather(1, block)
    ids = block * BLOCK + places.gather(1, block).to(torch.int64)
    return GreedyTokens(ids[:, 0], most[:, 0], logprobs[:, 0])


def argmax(logits: Tensor) -> Tensor:
    """The lowest id among the highest logits of each row, int64 [n]."""
    if logits.device.type == "cpu":  # numpy's is vectorized, torch's is ten times slower
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
