"""From raw logits to the next token of each row: watermark, penalties, biases, grammar, bad words, temperature, top-k,
top-p, min-p, typical-p, then a choice and its logprob, and the likeliest tokens beside it where a row asks for them.

The order is that of `PROCESSORS`, and part of the contract. That of temperature and limits is transformers', which TGI
follows: min-p comes behind top-p (vLLM applies it before top-k). Biases come behind the penalties: a repetition penalty
multiplies scores, so it would undo a ban or a forced token if it came later. What a grammar or bad words forbid stays
forbidden, so they come behind both, and what keeps a text from ending too early behind the grammar, which may say that
it must end.

A row's result has the same bits whatever rows share its batch: every operation here works row by row (a plain `sum`
does not: over a lone row it splits among threads), and noise is keyed by the request.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.best import argmax, find_best
from tgi.worker.filters import apply_temperature, keep_min_p, keep_top_k, keep_top_p, keep_typical_p
from tgi.worker.masks import forbid, forbid_bad_words, hold_back_ends
from tgi.worker.native.kernels import Kernels
from tgi.worker.noise import Noise, keys
from tgi.worker.params import Draws
from tgi.worker.penalties import add_biases, penalise_counts, penalise_frequency, penalise_repetition
from tgi.worker.rows import put, take
from tgi.worker.staging import sent
from tgi.worker.tops import Tops, find_tops
from tgi.worker.watermark import mark_green

PROCESSORS = (
    mark_green,
    penalise_repetition,
    penalise_frequency,
    penalise_counts,
    add_biases,
    forbid,
    forbid_bad_words,
    hold_back_ends,
    apply_temperature,
    keep_top_k,
    keep_top_p,
    keep_min_p,
    keep_typical_p,
)


class Drawn(NamedTuple):
    """The next tokens of D rows."""

    ids: Tensor  # int64 [D]
    logprobs: Tensor  # float32 [D]
    tops: Tops | None  # None if no row asks for any


def sample(scores: Tensor, draws: Draws, noise: Noise, kernels: Kernels | None = None) -> Drawn:
    """Draws from raw logits float32 [D, vocab], which are overwritten.

    Logprobs, also those of the likeliest tokens, are log_softmax of the processed scores. Our own kernels, where given,
    find the best token and the sums of a row in one go, and subtract only where somebody asks.
    """
    process(scores, draws)
    best = find_best(scores) if kernels is None else kernels.best(scores)
    ids = _raced(best.ids, scores, draws, noise)
    logprobs = scores.gather(1, ids[:, None])[:, 0] - best.highest + best.logprobs
    asking = np.flatnonzero(draws.params.top_n > 0)
    tops = None
    if len(asking):
        asked = take(scores, asking) - take(best.highest[:, None], asking) + take(best.logprobs[:, None], asking)
        tops = find_tops(asked, asking, draws.params.top_n[asking])
    return Drawn(ids, logprobs, tops)


def choose(scores: Tensor, draws: Draws, noise: Noise) -> Tensor:
    """Processes raw logits float32 [D, vocab] in place and draws from them, int64 [D]."""
    process(scores, draws)
    return _raced(argmax(scores), scores, draws, noise)


def process(scores: Tensor, draws: Draws) -> None:
    """Makes of raw logits, in place, the scores that are drawn from."""
    if not draws.params.plain.all():
        for one in PROCESSORS:
            one(scores, draws)


def race(scores: Tensor, row_keys: NDArray[np.int32], noise: Noise) -> Tensor:
    """Draws from softmax(scores): the winner of argmax(p / q), q exponential, int64 [n].

    In logarithms, argmax(score - log q): the softmax's denominator is the same for a whole row.
    """
    chosen = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    device_keys = sent(row_keys, scores.device)
    for begin in range(0, scores.shape[0], noise.rows):
        block = slice(begin, begin + noise.rows)
        q = noise.exponentials(device_keys[block])
        chosen[block] = argmax(torch.sub(scores[block], q.log_(), out=q))
    return chosen


def _raced(best: Tensor, scores: Tensor, draws: Draws, noise: Noise) -> Tensor:
    """What is drawn: the best [D], but for the rows that draw at random."""
    if not draws.params.samples.any():
        return best
    ids, rows = best.clone(), np.flatnonzero(draws.params.samples)
    row_keys = keys(draws.params.seed[rows], draws.position[rows], draws.params.choice[rows])
    put(ids, rows, race(take(scores, rows), row_keys, noise))
    return ids
