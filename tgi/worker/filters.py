"""What shapes the distribution that tokens are drawn from: temperature, and the limits top-k, top-p, min-p and
typical-p."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.params import LARGEST_SCORE, Draws
from tgi.worker.rows import column, put, take

# top_p and typical_p look at so many of the first tokens at first; a row whose mass lies wider at more, at last at all.
NUCLEUS = (256, 8192)
# Absurd settings must not overflow float32, or a logprob would be no number.
SMALLEST_TEMPERATURE = 1e-30

# Scores and probabilities [n, vocab] -> a number for each token: the highest come first.
Rank = Callable[[Tensor, Tensor], Tensor]


def apply_temperature(scores: Tensor, draws: Draws) -> None:
    """s / t."""
    rows = np.flatnonzero(draws.params.temperature != 1.0)
    if len(rows):
        temperature = np.maximum(draws.params.temperature[rows], np.float32(SMALLEST_TEMPERATURE))
        put(scores, rows, take(scores, rows).div_(column(temperature, scores)))


def keep_top_k(scores: Tensor, draws: Draws) -> None:
    """Scores below the k-th highest become -inf; those equal to it stay."""
    vocab = scores.shape[1]
    rows = np.flatnonzero((draws.params.top_k > 0) & (draws.params.top_k < vocab))
    if not len(rows):
        return
    chosen = take(scores, rows)
    k = draws.params.top_k[rows]
    highest = chosen.topk(int(k.max()), -1).values
    put(scores, rows, chosen.masked_fill_(chosen < highest.gather(1, column(k - 1, scores)), -torch.inf))


def keep_top_p(scores: Tensor, draws: Draws) -> None:
    """Ascending, with c the running sum of probabilities: c <= 1 - p becomes -inf. The likeliest always stays.

    Read from the likely end this keeps a token while the sum of those before it is below p. Which of equally likely
    tokens stay at the border is not specified.
    """
    rows = np.flatnonzero(draws.params.top_p < 1.0)
    if len(rows):
        chosen = take(scores, rows)
        put(scores, rows, _keep_mass(chosen, draws.params.top_p[rows], _likely))


def keep_min_p(scores: Tensor, draws: Draws) -> None:
    """Tokens whose probability is below p times the largest become -inf (Nguyen et al. 2024, "Turning Up the Heat").

    A ratio of two probabilities is a difference of their scores, so what other limits have filtered out before does not
    matter. The order counts only for top_p, which sums the probabilities that are left.
    """
    rows = np.flatnonzero(draws.params.min_p)
    if len(rows):
        chosen = take(scores, rows)
        share = column(np.log(draws.params.min_p[rows]).astype(np.float32), scores)
        put(scores, rows, chosen.masked_fill_(chosen < chosen.amax(-1, keepdim=True) + share, -torch.inf))


def keep_typical_p(scores: Tensor, draws: Draws) -> None:
    """Those whose surprise -log p is nearest to the row's entropy, until the sum of their probabilities reaches m; the
    one that reaches it stays. Which of equally near tokens stay at the border is not specified."""
    rows = np.flatnonzero(draws.params.typical_p < 1.0)
    if len(rows):
        chosen = take(scores, rows)
        put(scores, rows, _keep_mass(chosen, draws.params.typical_p[rows], _typical))


def _likely(scores: Tensor, probabilities: Tensor) -> Tensor:
    """The rank of tokens for top_p, the highest first."""
    return probabilities


def _typical(scores: Tensor, probabilities: Tensor) -> Tensor:
    """The rank of tokens for typical_p: minus the distance between surprise and entropy."""
    surprise = -scores.log_softmax(-1).clamp_(min=-LARGEST_SCORE)  # finite, to be multiplied with a probability of 0
    return (surprise - _sums(probabilities * surprise)).abs_().neg_()


def _sums(values: Tensor) -> Tensor:
    """The sum of each row [n, 1]. numpy's, since torch splits a lone row among threads, and rounds otherwise then."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().sum(-1, keepdims=True))
    return values.sum(-1, keepdim=True)


def _keep_mass(scores: Tensor, mass: NDArray[np.float64], rank: Rank) -> Tensor:
    """Scores [n, vocab] with -inf for all tokens but the first in rank whose probabilities add up to mass [n].

    Only the top of a row need be ordered.
    """
    vocab = scores.shape[1]
    limit = column(mass, scores)
    if scores.device.type != "cpu":  # a GPU sorts quickly, and to ask which rows are wide would stall it
        return _first(scores, limit, rank, vocab)[0]
    first, *wider = [width for width in NUCLEUS if width < vocab] + [vocab]
    kept, wide = _first(scores, limit, rank, first)
    for width in wider:
        left = wide.nonzero()[:, 0]
        if not len(left):
            break
        kept[left], wide[left] = _first(scores[left], limit[left], rank, width)
    return kept


def _first(scores: Tensor, mass: Tensor, rank: Rank, width: int) -> tuple[Tensor, Tensor]:
    """The same, looking at the first `width` tokens; and whether [n] more may belong to them."""
    probabilities = scores.softmax(-1)
    ranks = rank(scores, probabilities)
    if width < scores.shape[1]:
        ids = ranks.topk(width, -1).indices
    else:
        ids = ranks.argsort(dim=-1, descending=True, stable=True)
    values = probabilities.gather(1, ids).double()
    keep = values.cumsum(-1) - values < mass
    keep[:, 0] = True
    top = scores.gather(1, ids).masked_fill_(~keep, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_(1, ids, top), keep[:, -1]
