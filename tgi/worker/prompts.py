"""Logprobs of the prompts' own tokens, for the requests that ask: log_softmax of the model's logits, nothing else.

The logits of a whole chunk would be thousands of rows as wide as the vocabulary, so the model is asked for a few
positions at a time, and of each block only what travels is kept.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.slots import Rows, Slots
from tgi.worker.staging import sent
from tgi.worker.tops import BLOCK_ROWS, rank

Ints = NDArray[np.int64]


class Wanted(NamedTuple):
    """The N positions of a step that tell the logprob of the token behind them, as host columns."""

    at: Ints  # [N] index among the step's T tokens
    next_at: Ints  # [N] where the token behind it stands among the ids of all slots
    top_n: Ints  # [N] how many of the likeliest are wanted beside it


class Told(NamedTuple):
    """What N positions tell. The M of them that list likeliest tokens use the first top_n[m] of W columns."""

    logprobs: Tensor  # float32 [N]
    top_n: Ints  # [M], each > 0
    top_ids: Tensor  # int32 [M, W]
    top_logprobs: Tensor  # float32 [M, W]


def wanted(slots: Slots, rows: Rows) -> Wanted | None:
    """What these rows are asked to tell of their prompts; None if nothing."""
    first = slots.prompt_from[rows.slots]
    if not first.any():
        return None
    begins = np.maximum(rows.starts, first - 1)
    counts = np.where(first > 0, np.minimum(rows.ends, slots.params.prompt_tokens[rows.slots] - 1) - begins, 0)
    counts = np.maximum(counts, 0)
    if not counts.any():
        return None
    before = np.cumsum(rows.ends - rows.starts) - (rows.ends - rows.starts)  # tokens of the rows before each
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return Wanted(
        np.repeat(before + begins - rows.starts, counts) + steps,
        np.repeat(slots.ids_at(rows.slots, begins + 1), counts) + steps,
        np.repeat(slots.prompt_top_n[rows.slots], counts),
    )


class PromptReader:
    """A Reader of what is wanted. `at` and `tokens` int64 [N] are on the device, as are the logits."""

    def __init__(self, wanted: Wanted, at: Tensor, tokens: Tensor) -> None:
        self.blocks = at.split(BLOCK_ROWS)
        self._tokens = list(tokens.split(BLOCK_ROWS))
        self._top_n = np.split(wanted.top_n, range(BLOCK_ROWS, len(wanted.top_n), BLOCK_ROWS))
        self._width = int(wanted.top_n.max())
        self._logprobs: list[Tensor] = []
        self._top_ids: list[Tensor] = []
        self._top_logprobs: list[Tensor] = []

    def read(self, logits: Tensor) -> None:
        """See Reader."""
        block = len(self._logprobs)
        logprobs = torch.log_softmax(logits, -1)
        self._logprobs.append(logprobs.gather(1, self._tokens[block][:, None])[:, 0])
        asking = np.flatnonzero(self._top_n[block])
        if len(asking):
            if len(asking) < len(logprobs):
                logprobs = logprobs[sent(asking, logprobs.device)]
            ids = rank(logprobs, self._width)
            self._top_ids.append(ids.int())
            self._top_logprobs.append(logprobs.gather(1, ids))

    def told(self) -> Told:
        """All of it, after the last block."""
        top_n = np.concatenate(self._top_n)
        none = torch.empty(0, 0)
        return Told(
            torch.cat(self._logprobs),
            top_n[top_n > 0],
            torch.cat(self._top_ids or [none.int()]),
            torch.cat(self._top_logprobs or [none]),
        )


def prompt_columns(told: Told | None) -> tuple[bytes, bytes, bytes]:
    """The prompt columns of a Result; the tensors are on the host. Empty if nothing was told."""
    if told is None:
        return b"", b"", b""
    listed = np.arange(told.top_ids.shape[1]) < told.top_n[:, None]
    return (
        told.logprobs.numpy().tobytes(),
        told.top_ids.numpy()[listed].tobytes(),
        told.top_logprobs.numpy()[listed].tobytes(),
    )
