"""From raw logits to the next token of each row: penalty, temperature, top-k, top-p, then a choice and its logprob,
and the likeliest tokens beside it where a row asks for them.

The order is part of the contract: (watermark), repetition penalty, (frequency penalty), (grammar mask), temperature,
top_k, top_p, (typical_p), choice. Those in brackets are not there yet; each is one more function of `PROCESSORS`.

A row's result has the same bits whatever rows share its batch: every operation here works row by row (a plain `sum`
does not: over a lone row it splits among threads), and noise is keyed by the request.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.noise import Noise, keys
from tgi.worker.tops import Tops, find_tops

# top_p looks at this many of the likeliest tokens first; a row whose mass lies wider at more, and at last at all.
NUCLEUS = (256, 8192)
# Absurd settings must not overflow float32, or a logprob would be no number.
SMALLEST_TEMPERATURE = 1e-30
LARGEST_SCORE = 1e8


class Draws(NamedTuple):
    """How D rows draw, as host columns [D], and where their ids so far can be read."""

    samples: NDArray[np.bool_]  # at random; greedy otherwise
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    repetition_penalty: NDArray[np.float32]
    seed: NDArray[np.uint64]
    choice: NDArray[np.uint64]
    top_n: NDArray[np.int64]
    position: NDArray[np.int64]  # of the token that is drawn = how many are known
    history: Callable[
        [NDArray[np.int64]], Tensor
    ]  # rows -> int64 [n, L]: their ids, short ones filled with their first


class Drawn(NamedTuple):
    """The next tokens of D rows."""

    ids: Tensor  # int64 [D]
    logprobs: Tensor  # float32 [D]
    tops: Tops | None  # None if no row asks for any


def sample(scores: Tensor, draws: Draws, noise: Noise) -> Drawn:
    """Draws from raw logits float32 [D, vocab], which are overwritten.

    Logprobs, also those of the likeliest tokens, are log_softmax of the processed scores.
    """
    for process in PROCESSORS:
        process(scores, draws)
    ids = argmax(scores)
    if draws.samples.any():
        rows = np.flatnonzero(draws.samples)
        row_keys = keys(draws.seed[rows], draws.position[rows], draws.choice[rows])
        _put(ids, rows, race(_take(scores, rows), row_keys, noise))
    logprobs = torch.log_softmax(scores, -1)
    asking = np.flatnonzero(draws.top_n > 0)
    tops = find_tops(_take(logprobs, asking), asking, draws.top_n[asking]) if len(asking) else None
    return Drawn(ids, logprobs.gather(1, ids[:, None])[:, 0], tops)


def argmax(scores: Tensor) -> Tensor:
    """The lowest id among the highest scores of each row, int64 [D]."""
    if scores.device.type == "cpu":  # numpy's is vectorised, torch's is ten times slower
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def race(scores: Tensor, row_keys: NDArray[np.int32], noise: Noise) -> Tensor:
    """Draws from softmax(scores): the winner of argmax(p / q), q exponential, int64 [n].

    In logarithms, argmax(score - log q): the softmax's denominator is the same for a whole row.
    """
    chosen = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    device_keys = torch.from_numpy(row_keys).to(scores.device)
    for begin in range(0, scores.shape[0], noise.rows):
        block = slice(begin, begin + noise.rows)
        q = noise.exponentials(device_keys[block])
        chosen[block] = argmax(torch.sub(scores[block], q.log_(), out=q))
    return chosen


def penalise_repetition(scores: Tensor, draws: Draws) -> None:
    """Every id that the row has seen: s * p where s < 0, else s / p."""
    rows = np.flatnonzero(draws.repetition_penalty != 1.0)
    if not len(rows):
        return
    chosen = _take(scores, rows)
    penalty = _column(draws.repetition_penalty[rows], scores)
    ids = draws.history(rows)  # an id that occurs twice gets the same value twice
    seen = chosen.gather(1, ids)
    seen = torch.where(seen < 0, seen * penalty, seen / penalty).clamp_(-LARGEST_SCORE, LARGEST_SCORE)
    _put(scores, rows, chosen.scatter_(1, ids, seen))


def apply_temperature(scores: Tensor, draws: Draws) -> None:
    """s / t."""
    rows = np.flatnonzero(draws.temperature != 1.0)
    if len(rows):
        temperature = np.maximum(draws.temperature[rows], np.float32(SMALLEST_TEMPERATURE))
        _put(scores, rows, _take(scores, rows).div_(_column(temperature, scores)))


def keep_top_k(scores: Tensor, draws: Draws) -> None:
    """Scores below the k-th highest become -inf; those equal to it stay."""
    vocab = scores.shape[1]
    rows = np.flatnonzero((draws.top_k > 0) & (draws.top_k < vocab))
    if not len(rows):
        return
    chosen = _take(scores, rows)
    k = draws.top_k[rows]
    highest = chosen.topk(int(k.max()), -1).values
    _put(scores, rows, chosen.masked_fill_(chosen < highest.gather(1, _column(k - 1, scores)), -torch.inf))


def keep_top_p(scores: Tensor, draws: Draws) -> None:
    """Ascending, with c the running sum of probabilities: c <= 1 - p becomes -inf. The likeliest always stays.

    Read from the likely end this keeps a token while the sum of those before it is below p. (So only the top of a
    row need be ordered.) Which of equally likely tokens stay at the border is not specified.
    """
    rows = np.flatnonzero(draws.top_p < 1.0)
    if not len(rows):
        return
    chosen = _take(scores, rows)
    p = _column(draws.top_p[rows], scores)
    vocab = scores.shape[1]
    if scores.device.type != "cpu":  # a GPU sorts quickly, and to ask which rows are wide would stall it
        _put(scores, rows, _nucleus(chosen, p, vocab)[0])
        return
    first, *wider = [width for width in NUCLEUS if width < vocab] + [vocab]
    kept, wide = _nucleus(chosen, p, first)
    for width in wider:
        left = wide.nonzero()[:, 0]
        if not len(left):
            break
        kept[left], wide[left] = _nucleus(chosen[left], p[left], width)
    _put(scores, rows, kept)


def _nucleus(scores: Tensor, p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Scores with all but the nucleus at -inf, looking at the `width` likeliest; and whether it may be wider."""
    probabilities = scores.softmax(-1)
    if width < scores.shape[1]:
        values, ids = probabilities.topk(width, -1)
    else:
        values, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    values = values.double()
    keep = values.cumsum(-1) - values < p
    keep[:, 0] = True
    top = scores.gather(1, ids).masked_fill_(~keep, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_(1, ids, top), keep[:, -1]


PROCESSORS = (penalise_repetition, apply_temperature, keep_top_k, keep_top_p)


def _take(matrix: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """These rows; the matrix itself where they are all."""
    return matrix if len(rows) == len(matrix) else matrix[torch.from_numpy(rows).to(matrix.device)]


def _put(matrix: Tensor, rows: NDArray[np.int64], values: Tensor) -> None:
    """Writes rows back that `_take` took."""
    if len(rows) < len(matrix):
        matrix[torch.from_numpy(rows).to(matrix.device)] = values
    elif values is not matrix:
        matrix.copy_(values)


def _column(values: NDArray, like: Tensor) -> Tensor:
    """A host column as [n, 1] beside `like`."""
    return torch.from_numpy(values)[:, None].to(like.device)
