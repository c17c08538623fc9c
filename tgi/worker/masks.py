"""Which tokens rows may not draw: those that their grammar forbids, and the end while they are too short."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.params import Draws
from tgi.worker.rows import put, take
from tgi.worker.staging import sent

BITS = 32  # of a word


class Masks(NamedTuple):
    """The masks of those of a step's D drawing rows that have a grammar, for the places in which they draw."""

    rows: NDArray[np.int64]  # [n] which of the E places, ascending
    words: NDArray[np.int32]  # [n, W]: token t is allowed if bit t % 32 of word t // 32 is set
    faults: list[str]  # [D] why a row cannot draw, "" if it can
    reach: NDArray[np.int64] | None = None  # [D] in how many of its places a row can draw; None: in its only one


def allows(words: NDArray[np.int32], token: int) -> bool:
    """Whether a mask [W] lets this token be drawn."""
    return bool(words[token // BITS] >> (token % BITS) & 1)


def forbid(scores: Tensor, draws: Draws) -> None:
    """-inf for every token with which a row's text could not go on in its grammar."""
    masks = draws.masks
    if masks is None:
        return
    forbidden = unset(masks.words, scores.device)[:, : scores.shape[1]]
    put(scores, masks.rows, take(scores, masks.rows).masked_fill_(forbidden, -torch.inf))


def hold_back_ends(scores: Tensor, draws: Draws) -> None:
    """-inf for the tokens that end a text, while fewer than `min_new_tokens` are generated.

    A row that would be left with nothing may draw them all the same: where a grammar's text is complete, it ends.
    """
    params = draws.params
    early = np.flatnonzero(draws.position - params.prompt_tokens < params.min_new_tokens)
    rows = np.array([row for row in early if params.end_ids[row] is not None], np.int64)
    if not len(rows):
        return
    chosen, ends = take(scores, rows), params.end_ids[rows]
    at = sent(np.repeat(np.arange(len(rows)), [len(ids) for ids in ends]), scores.device)
    ids = sent(np.concatenate(ends), scores.device)
    before = chosen[at, ids]
    chosen[at, ids] = -torch.inf
    nothing = chosen.amax(-1) == -torch.inf
    chosen[at, ids] = before.where(nothing[at], -torch.inf)
    put(scores, rows, chosen)


def unset(words: NDArray[np.int32], device: torch.device) -> Tensor:
    """Where the bits are not set, bool [n, W * 32]."""
    if device.type == "cpu":  # numpy's is ten times as fast there
        bits = np.unpackbits((~words).view(np.uint8), axis=-1, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    there = sent(words, device)[:, :, None]
    bits_there = there >> torch.arange(BITS, dtype=torch.int32, device=device)
    return (bits_there & 1).view(len(words), -1) == 0
