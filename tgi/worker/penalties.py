"""What is added to the scores of single tokens: penalties on those that a row has, and the biases that it asks for.

Counts are whole numbers below 2**24, so float32 adds them up exactly, in any order.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.params import LARGEST_SCORE, Draws
from tgi.worker.rows import Rows, column, put, take
from tgi.worker.staging import sent


def penalise_repetition(scores: Tensor, draws: Draws) -> None:
    """Every id that the row has seen: s * p where s < 0, else s / p."""
    rows = np.flatnonzero(draws.params.repetition_penalty != 1.0)
    if not len(rows):
        return
    chosen = take(scores, rows)
    penalty = column(draws.params.repetition_penalty[rows], scores)
    ids = draws.history(rows, np.zeros_like(rows))  # an id that occurs twice gets the same value twice
    seen = chosen.gather(1, ids)
    seen = torch.where(seen < 0, seen * penalty, seen / penalty).clamp_(-LARGEST_SCORE, LARGEST_SCORE)
    put(scores, rows, chosen.scatter_(1, ids, seen))


def penalise_frequency(scores: Tensor, draws: Draws) -> None:
    """TGI's frequency penalty f: s - f * count / L, over the L ids that the row has, prompt and generated."""
    rows = np.flatnonzero(draws.params.frequency_penalty)
    if not len(rows):
        return
    chosen = take(scores, rows)
    ids, counts = _occurrences(chosen, draws, rows, np.zeros_like(rows))
    share = (draws.params.frequency_penalty[rows] / draws.position[rows]).astype(np.float32)
    put(scores, rows, chosen.scatter_(1, ids, chosen.gather(1, ids) - counts * column(share, scores)))


def penalise_counts(scores: Tensor, draws: Draws) -> None:
    """OpenAI's penalties: s - count * frequency - (count > 0) * presence, over the ids that were generated."""
    params = draws.params
    rows = np.flatnonzero(
        ((params.count_penalty != 0) | (params.presence_penalty != 0)) & (params.prompt_tokens < draws.position)
    )
    if not len(rows):
        return
    chosen = take(scores, rows)
    ids, counts = _occurrences(chosen, draws, rows, params.prompt_tokens[rows])
    penalty = counts * column(params.count_penalty[rows], scores)
    penalty += (counts > 0) * column(params.presence_penalty[rows], scores)
    put(scores, rows, chosen.scatter_(1, ids, chosen.gather(1, ids) - penalty))


def add_biases(scores: Tensor, draws: Draws) -> None:
    """s + bias, for the tokens that have one."""
    rows = np.flatnonzero(draws.params.bias)
    if not len(rows):
        return
    biases = draws.params.bias[rows]
    at = sent(np.repeat(rows, [len(bias.ids) for bias in biases]), scores.device)
    ids = sent(np.concatenate([bias.ids for bias in biases]), scores.device)
    scores[at, ids] += sent(np.concatenate([bias.values for bias in biases]), scores.device)


def _occurrences(scores: Tensor, draws: Draws, rows: Rows, begins: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The ids of rows from `begins` on, int64 [n, L], and how often each occurs there, float32 [n, L].

    What fills a short row gets the count of the id that it repeats (0 if that is not there), so wherever an id stands
    in its row, it has one count.
    """
    ids = draws.history(rows, begins)
    real = np.arange(ids.shape[1]) < (draws.position[rows] - begins)[:, None]
    counts = torch.zeros_like(scores).scatter_add_(1, ids, sent(real, scores.device).to(scores.dtype))
    return ids, counts.gather(1, ids)
