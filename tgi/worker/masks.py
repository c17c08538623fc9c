"""Which tokens rows may not draw: those that their grammar forbids, those that complete a bad word, and the end while
they are too short."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.params import Draws
from tgi.worker.rows import put, take
from tgi.worker.staging import sent, sent_together

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


def forbid_bad_words(scores: Tensor, draws: Draws) -> None:
    """-inf for the last token of each bad word whose other tokens are the latest that the row has generated.

    As in vLLM, a prompt never begins a bad word.
    """
    params = draws.params
    rows = np.flatnonzero(params.bad_words)
    if not len(rows):
        return
    words = params.bad_words[rows]
    owners = np.repeat(rows, [len(one.lasts) for one in words])  # the row of each of S sequences
    lasts, lengths, prefixes = map(np.concatenate, zip(*words, strict=True))
    begun = lengths <= (draws.position - params.prompt_tokens)[owners]  # there are as many generated tokens
    prefixes = prefixes[np.repeat(begun, lengths)]
    owners, lasts, lengths = owners[begun], lasts[begun], lengths[begun]
    differing = torch.zeros(len(owners), dtype=torch.int32, device=scores.device)
    if len(prefixes):
        # All rows are read from where the longest prefix begins in each.
        longest = np.zeros(len(draws.position), np.int64)
        np.maximum.at(longest, owners, lengths)
        readers = np.flatnonzero(longest)
        history = draws.history(readers, draws.position[readers] - longest[readers])
        sequence = np.repeat(np.arange(len(owners)), lengths)
        reader = np.searchsorted(readers, owners[sequence])
        place = np.arange(len(prefixes)) + np.repeat(longest[owners] - np.cumsum(lengths), lengths)
        reader_at, place_at, prefix_ids, sequence_at = sent_together((reader, place, prefixes, sequence), scores.device)
        differing.index_add_(0, sequence_at, (history[reader_at, place_at] != prefix_ids).int())
    rows_at, ids = sent_together((owners, lasts), scores.device)
    # Two sequences of a row may end in the same token: added up, either of them forbids it.
    lowered = torch.zeros(len(owners), device=scores.device).masked_fill_(differing == 0, -torch.inf)
    scores.index_put_((rows_at, ids), lowered, accumulate=True)


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
