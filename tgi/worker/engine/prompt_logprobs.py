"""Prompt logprobs: log_softmax of the model's unprocessed logits at prompt positions, for the requests that ask.

The logits of a whole chunk would be thousands of rows as wide as the vocabulary. So the model computes the logits of a
few positions at a time, and of each block only the requested logprobs are kept.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from tgi.worker.device_copies import copy_to_device, copy_to_host
from tgi.worker.engine.input_batch import Slots, StepRows
from tgi.worker.models.interface import LogitsReader
from tgi.worker.sampling.top_logprobs import BLOCK_ROWS, rank_token_ids

Ints = NDArray[np.int64]


class PromptPositions(NamedTuple):
    """The N positions of a step whose logits give the logprob of the next prompt token, as host columns."""

    logits_indices: Ints  # [N] index among the step's T tokens
    next_indices: Ints  # [N] index of the next token in the flat ids of all slots
    top_n: Ints  # [N] the number of alternatives


class PromptLogprobTensors(NamedTuple):
    """The logprobs at N positions. M of them have alternatives and use the first top_n[m] of W columns."""

    logprobs: Tensor  # float32 [N]
    top_n: Ints  # [M], each > 0
    top_ids: Tensor  # int32 [M, W]
    top_logprobs: Tensor  # float32 [M, W]

    def to_host(self) -> "PromptLogprobTensors":
        """Starts the copies to the host."""
        return PromptLogprobTensors(
            copy_to_host(self.logprobs), self.top_n, copy_to_host(self.top_ids), copy_to_host(self.top_logprobs)
        )


def find_prompt_positions(slots: Slots, rows: StepRows) -> PromptPositions | None:
    """The positions of these rows whose prompt logprobs are requested; None if there are none."""
    first = slots.prompt_logprobs_from[rows.slots]
    if not np.count_nonzero(first):
        return None
    begins = np.maximum(rows.starts, first - 1)
    counts = np.where(first > 0, np.minimum(rows.ends, slots.params.prompt_tokens[rows.slots] - 1) - begins, 0)
    counts = np.maximum(counts, 0)
    if not counts.any():
        return None
    tokens_before = np.cumsum(rows.ends - rows.starts) - (rows.ends - rows.starts)  # of the earlier rows
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return PromptPositions(
        np.repeat(tokens_before + begins - rows.starts, counts) + offsets,
        np.repeat(slots.id_indices(rows.slots, begins + 1), counts) + offsets,
        np.repeat(slots.prompt_top_n[rows.slots], counts),
    )


class PromptLogprobReader(LogitsReader):
    """A LogitsReader that turns logits into prompt logprobs. `logits_indices` and `next_ids`, int64 [N], are on the
    device, as are the logits. The ids from `scored` on have no logprob (NaN)."""

    def __init__(self, positions: PromptPositions, logits_indices: Tensor, next_ids: Tensor, scored: int) -> None:
        self.blocks = logits_indices.split(BLOCK_ROWS)
        self._scored = scored
        self._next_ids = list(next_ids.split(BLOCK_ROWS))
        self._top_n = np.split(positions.top_n, range(BLOCK_ROWS, len(positions.top_n), BLOCK_ROWS))
        self._width = int(positions.top_n.max())
        self._logprobs: list[Tensor] = []
        self._top_ids: list[Tensor] = []
        self._top_logprobs: list[Tensor] = []

    @override
    def read_logits(self, logits: Tensor) -> None:
        block = len(self._logprobs)
        logprobs = torch.log_softmax(logits, -1)
        ids = self._next_ids[block]
        self._logprobs.append(logprobs.gather(1, ids[:, None])[:, 0].masked_fill(ids >= self._scored, math.nan))
        asking = np.flatnonzero(self._top_n[block])
        if len(asking):
            if len(asking) < len(logprobs):
                logprobs = logprobs[copy_to_device(asking, logprobs.device)]
            ids = rank_token_ids(logprobs, self._width)
            self._top_ids.append(ids.int())
            self._top_logprobs.append(logprobs.gather(1, ids))

    def finish(self) -> PromptLogprobTensors:
        """The prompt logprobs of the step, after the last block."""
        top_n = np.concatenate(self._top_n)
        empty = torch.empty(0, 0)
        return PromptLogprobTensors(
            torch.cat(self._logprobs),
            top_n[top_n > 0],
            torch.cat(self._top_ids or [empty.int()]),
            torch.cat(self._top_logprobs or [empty]),
        )


def prompt_logprobs_columns(found: PromptLogprobTensors | None) -> tuple[bytes, bytes, bytes]:
    """The columns prompt_logprobs, prompt_top_ids and prompt_top_logprobs of a StepResult. The tensors are on the
    host. Empty without prompt logprobs."""
    if found is None:
        return b"", b"", b""
    used = np.arange(found.top_ids.shape[1]) < found.top_n[:, None]
    return (
        found.logprobs.numpy().tobytes(),
        found.top_ids.numpy()[used].tobytes(),
        found.top_logprobs.numpy()[used].tobytes(),
    )
