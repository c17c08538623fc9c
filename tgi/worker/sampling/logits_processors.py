"""Logits processors: one function for each, in the order in which `apply_logits_processors` calls them.

Each takes logits float32 [D, vocab] and the `SamplingBatch` of the D rows, changes in place the rows whose parameters
ask for it, and leaves the other rows bit for bit as they are. Each operation works row by row: the result of a row does
not depend on the other rows of the batch.

The order is part of the contract. Temperature and the limits have transformers' order, which TGI follows: min-p comes
after top-p (vLLM applies it before top-k). Biases come after the penalties, because a repetition penalty multiplies
logits and would undo a ban or a forced token. Grammar and bad words come after both, so that what they forbid stays
forbidden. `min_new_tokens` comes after the grammar, which may require that the text ends.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi.worker.device_copies import copy_columns_to_device, copy_to_device
from tgi.worker.greedy import MAX_LOGIT
from tgi.worker.sampling.noise import noise_keys
from tgi.worker.sampling.sampling_batch import MIN_TEMPERATURE, Indices, SamplingBatch
from tgi.worker.sampling.token_bitmask import forbidden_tokens

# Top-p and typical-p order this many of a row's first tokens; a row whose mass is spread over more is ordered again at
# the next width, and at last as a whole.
TOP_P_WIDTHS = (256, 8192)
# Ids of a row that penalties look at together: far fewer than a vocabulary has, so that what a step takes is known from
# steps with short contexts.
HISTORY_TOKENS = 4096
# Makes the random numbers of XTC independent of the noise that chooses the token.
XTC_SEED = np.uint64(0x5854432D73656564)

# Logits and probabilities [n, vocab] -> a rank for each token, [n, vocab]; the highest come first.
RankTokens = Callable[[Tensor, Tensor], Tensor]
LogitsProcessor = Callable[[Tensor, SamplingBatch], None]


def apply_watermark(logits: Tensor, batch: SamplingBatch) -> None:
    """Adds delta to the green tokens that follow each row's last token (watermark.py)."""
    rows = np.flatnonzero(batch.params.watermark)
    if not len(rows):
        return
    assert batch.watermark is not None
    ends = batch.positions[rows]
    last_ids = batch.token_history(rows, ends - 1, ends)[:, 0].tolist()
    write_rows(logits, rows, batch.watermark.add_green_bias(select_rows(logits, rows), last_ids))


def apply_repetition_penalty(logits: Tensor, batch: SamplingBatch) -> None:
    """For each id in the row's prompt or generated text: s * p where s < 0, else s / p."""
    rows = np.flatnonzero(batch.params.repetition_penalty != 1.0)
    if not len(rows):
        return
    chosen = select_rows(logits, rows)
    penalty = column_like(batch.params.repetition_penalty[rows], logits)

    def penalize(seen: Tensor, ids: Tensor) -> Tensor:
        return torch.where(seen < 0, seen * penalty, seen / penalty).clamp_(-MAX_LOGIT, MAX_LOGIT)

    write_rows(logits, rows, _change_seen(chosen, _History(batch, rows, batch.params.history_from[rows]), penalize))


def apply_frequency_penalty(logits: Tensor, batch: SamplingBatch) -> None:
    """TGI's frequency penalty f: s - f * count / L, over the L ids of prompt and generated text."""
    rows = np.flatnonzero(batch.params.frequency_penalty)
    if not len(rows):
        return
    chosen = select_rows(logits, rows)
    begins = batch.params.history_from[rows]
    history = _History(batch, rows, begins)
    counts = _count_ids(chosen, history)
    share = (batch.params.frequency_penalty[rows] / (batch.positions[rows] - begins)).astype(np.float32)
    of_rows = column_like(share, logits)
    write_rows(logits, rows, _change_seen(chosen, history, lambda seen, ids: seen - counts.gather(1, ids) * of_rows))


def apply_count_penalties(logits: Tensor, batch: SamplingBatch) -> None:
    """OpenAI's penalties: s - count * frequency - (count > 0) * presence, over the generated ids."""
    params = batch.params
    rows = np.flatnonzero(
        ((params.count_penalty != 0) | (params.presence_penalty != 0)) & (params.prompt_tokens < batch.positions)
    )
    if not len(rows):
        return
    chosen = select_rows(logits, rows)
    history = _History(batch, rows, params.prompt_tokens[rows])
    counts = _count_ids(chosen, history)
    each, presence = (column_like(column[rows], logits) for column in (params.count_penalty, params.presence_penalty))

    def penalize(seen: Tensor, ids: Tensor) -> Tensor:
        found = counts.gather(1, ids)
        return seen - (found * each + (found > 0) * presence)

    write_rows(logits, rows, _change_seen(chosen, history, penalize))


def apply_logit_bias(logits: Tensor, batch: SamplingBatch) -> None:
    """s + bias for the tokens that have one."""
    rows = np.flatnonzero(batch.params.bias)
    if not len(rows):
        return
    biases = batch.params.bias[rows]
    row_at = copy_to_device(np.repeat(rows, [len(bias.ids) for bias in biases]), logits.device)
    ids = copy_to_device(np.concatenate([bias.ids for bias in biases]), logits.device)
    logits[row_at, ids] += copy_to_device(np.concatenate([bias.values for bias in biases]), logits.device)


def apply_grammar_bitmask(logits: Tensor, batch: SamplingBatch) -> None:
    """-inf for each token that the row's grammar does not allow next."""
    bitmask = batch.grammar_bitmask
    if bitmask is None:
        return
    forbidden = forbidden_tokens(bitmask.words, logits.device)[:, : logits.shape[1]]
    write_rows(logits, bitmask.rows, select_rows(logits, bitmask.rows).masked_fill_(forbidden, -torch.inf))


def apply_bad_words(logits: Tensor, batch: SamplingBatch) -> None:
    """-inf for the last token of each bad word whose other tokens are the last ones that the row has generated.

    As in vLLM, a bad word cannot begin in the prompt.
    """
    params = batch.params
    rows = np.flatnonzero(params.bad_words)
    if not len(rows):
        return
    words = params.bad_words[rows]
    owners = np.repeat(rows, [len(one.last_ids) for one in words])  # the row of each of S sequences
    last_ids, lengths, prefixes = map(np.concatenate, zip(*words, strict=True))
    fits = lengths <= (batch.positions - params.prompt_tokens)[owners]  # as many tokens are generated
    prefixes = prefixes[np.repeat(fits, lengths)]
    owners, last_ids, lengths = owners[fits], last_ids[fits], lengths[fits]
    mismatches = torch.zeros(len(owners), dtype=torch.int32, device=logits.device)
    if len(prefixes):
        # One history for each row, from the position at which its longest prefix would begin.
        longest = np.zeros(len(batch.positions), np.int64)
        np.maximum.at(longest, owners, lengths)
        readers = np.flatnonzero(longest)
        ends = batch.positions[readers]
        history = batch.token_history(readers, ends - longest[readers], ends)
        sequence = np.repeat(np.arange(len(owners)), lengths)
        reader = np.searchsorted(readers, owners[sequence])
        offset = np.arange(len(prefixes)) + np.repeat(longest[owners] - np.cumsum(lengths), lengths)
        reader_at, offset_at, prefix_ids, sequence_at = copy_columns_to_device(
            (reader, offset, prefixes, sequence), logits.device
        )
        mismatches.index_add_(0, sequence_at, (history[reader_at, offset_at] != prefix_ids).int())
    row_at, ids = copy_columns_to_device((owners, last_ids), logits.device)
    # Two sequences of a row may end in the same token: added up, either of them forbids it.
    added = torch.zeros(len(owners), device=logits.device).masked_fill_(mismatches == 0, -torch.inf)
    logits.index_put_((row_at, ids), added, accumulate=True)


def apply_min_new_tokens(logits: Tensor, batch: SamplingBatch) -> None:
    """-inf for the end tokens while fewer than `min_new_tokens` are generated.

    A row that would have no token left keeps them: where a grammar's text is complete, it ends.
    """
    params = batch.params
    early = np.flatnonzero(batch.positions - params.prompt_tokens < params.min_new_tokens)
    rows = np.array([row for row in early if params.end_ids[row] is not None], np.int64)
    if not len(rows):
        return
    chosen, ends = select_rows(logits, rows), params.end_ids[rows]
    row_at = copy_to_device(np.repeat(np.arange(len(rows)), [len(ids) for ids in ends]), logits.device)
    ids = copy_to_device(np.concatenate(ends), logits.device)
    before = chosen[row_at, ids]
    chosen[row_at, ids] = -torch.inf
    no_token_left = chosen.amax(-1) == -torch.inf
    chosen[row_at, ids] = before.where(no_token_left[row_at], -torch.inf)
    write_rows(logits, rows, chosen)


def apply_temperature(logits: Tensor, batch: SamplingBatch) -> None:
    """s / t."""
    rows = np.flatnonzero(batch.params.temperature != 1.0)
    if len(rows):
        temperature = np.maximum(batch.params.temperature[rows], np.float32(MIN_TEMPERATURE))
        write_rows(logits, rows, select_rows(logits, rows).div_(column_like(temperature, logits)))


def apply_top_k(logits: Tensor, batch: SamplingBatch) -> None:
    """Logits below the k-th highest become -inf; those equal to it stay."""
    vocab = logits.shape[1]
    rows = np.flatnonzero((batch.params.top_k > 0) & (batch.params.top_k < vocab))
    if not len(rows):
        return
    chosen = select_rows(logits, rows)
    k = batch.params.top_k[rows]
    highest = chosen.topk(int(k.max()), -1).values
    write_rows(logits, rows, chosen.masked_fill_(chosen < highest.gather(1, column_like(k - 1, logits)), -torch.inf))


def apply_top_p(logits: Tensor, batch: SamplingBatch) -> None:
    """In ascending order, with c the running sum of probabilities: c <= 1 - p becomes -inf. The likeliest token stays.

    In descending order, this keeps a token while the sum of those before it is below p. Which of equally likely tokens
    at the border stay is not specified.
    """
    rows = np.flatnonzero(batch.params.top_p < 1.0)
    if len(rows):
        chosen = select_rows(logits, rows)
        write_rows(logits, rows, _keep_probability_mass(chosen, batch.params.top_p[rows], _rank_by_probability))


def apply_min_p(logits: Tensor, batch: SamplingBatch) -> None:
    """Tokens whose probability is below p times the largest become -inf (Nguyen et al. 2024, "Turning Up the Heat").

    A ratio of two probabilities is a difference of their logits, so earlier limits do not change the outcome. The order
    matters only to top-p, which sums the probabilities of the remaining tokens.
    """
    rows = np.flatnonzero(batch.params.min_p)
    if len(rows):
        chosen = select_rows(logits, rows)
        log_p = column_like(np.log(batch.params.min_p[rows]).astype(np.float32), logits)
        write_rows(logits, rows, chosen.masked_fill_(chosen < chosen.amax(-1, keepdim=True) + log_p, -torch.inf))


def apply_typical_p(logits: Tensor, batch: SamplingBatch) -> None:
    """Keeps the tokens whose surprise -log p is nearest to the row's entropy until the sum of their probabilities
    reaches m, including the one that reaches it (Meister et al. 2022, "Locally Typical Sampling"). Which of equally
    near tokens at the border stay is not specified."""
    rows = np.flatnonzero(batch.params.typical_p < 1.0)
    if len(rows):
        chosen = select_rows(logits, rows)
        write_rows(logits, rows, _keep_probability_mass(chosen, batch.params.typical_p[rows], _rank_by_typicality))


def apply_xtc(logits: Tensor, batch: SamplingBatch) -> None:
    """XTC: at a random share `xtc_probability` of positions, -inf for all tokens whose probability is at least
    `xtc_threshold`, except the least likely of them and those that tie with it. Source of the definition:
    github.com/oobabooga/text-generation-webui/pull/6335.

    As for the noise, seed, choice and position alone decide at which positions.
    """
    params = batch.params
    rows = np.flatnonzero(params.xtc_probability)
    if not len(rows):
        return
    row_keys = noise_keys(params.seed[rows] ^ XTC_SEED, batch.positions[rows], params.choice[rows])
    uniform = (row_keys.view(np.uint64)[:, 0] >> np.uint64(11)) * 2.0**-53  # within [0, 1)
    rows = rows[uniform < params.xtc_probability[rows]]
    if not len(rows):
        return
    chosen = select_rows(logits, rows)
    top = (chosen.softmax(-1) >= column_like(params.xtc_threshold[rows], logits)) & (chosen > -torch.inf)
    least = chosen.masked_fill(~top, torch.inf).amin(-1, keepdim=True)
    write_rows(logits, rows, chosen.masked_fill_(top & (chosen > least), -torch.inf))


PENALTIES_AND_MASKS = (
    apply_watermark,
    apply_repetition_penalty,
    apply_frequency_penalty,
    apply_count_penalties,
    apply_logit_bias,
    apply_grammar_bitmask,
    apply_bad_words,
    apply_min_new_tokens,
)
TEMPERATURE_AND_LIMITS = (
    apply_temperature,
    apply_top_k,
    apply_top_p,
    apply_min_p,
    apply_typical_p,
    apply_xtc,
)
LOGITS_PROCESSORS = PENALTIES_AND_MASKS + TEMPERATURE_AND_LIMITS


def apply_logits_processors(
    logits: Tensor, batch: SamplingBatch, processors: Sequence[LogitsProcessor] = LOGITS_PROCESSORS
) -> None:
    """Turns the model's logits, in place, into those that tokens are sampled from."""
    if not batch.params.unprocessed.all():
        for processor in processors:
            processor(logits, batch)


def select_rows(matrix: Tensor, rows: Indices) -> Tensor:
    """These rows of the matrix as a copy; the matrix itself if they are all of its rows."""
    return matrix if len(rows) == len(matrix) else matrix[copy_to_device(rows, matrix.device)]


def write_rows(matrix: Tensor, rows: Indices, values: Tensor) -> None:
    """Writes back rows that `select_rows` returned."""
    if len(rows) < len(matrix):
        matrix[copy_to_device(rows, matrix.device)] = values
    elif values is not matrix:
        matrix.copy_(values)


def column_like(values: NDArray, like: Tensor) -> Tensor:
    """A host column [n] as [n, 1] on the device of `like`."""
    return copy_to_device(values, like.device)[:, None]


class _History:
    """The ids of rows [n] from position `begins` [n] on, in parts of HISTORY_TOKENS: the memory that they take does not
    grow with the context."""

    def __init__(self, batch: SamplingBatch, rows: Indices, begins: Indices) -> None:
        self._batch, self._rows, self._begins = batch, rows, begins
        longest = int((batch.positions[rows] - begins).max())
        self._firsts = range(0, longest, HISTORY_TOKENS)
        self.whole = len(self._firsts) == 1
        self._kept = [self._read(0)] if self.whole else []

    def __iter__(self) -> Iterator[tuple[Tensor, Indices]]:
        """The ids of each part, int64 [n, L], and how many of each row [n] count: further ones repeat one of the row's
        ids."""
        return iter(self._kept) if self.whole else map(self._read, self._firsts)

    def _read(self, first: int) -> tuple[Tensor, Indices]:
        ends, begins = self._batch.positions[self._rows], self._begins + first
        stops = np.minimum(begins + HISTORY_TOKENS, ends)
        return self._batch.token_history(self._rows, np.minimum(begins, ends - 1), stops), stops - begins


def _change_seen(logits: Tensor, history: _History, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Replaces the logits [n, vocab] of the ids of a history in place by change(logits, ids) of each part. An id that
    occurs several times gets the same value each time."""
    source = logits if history.whole else logits.clone()
    for ids, _ in history:
        logits.scatter_(1, ids, change(source.gather(1, ids), ids))
    return logits


def _count_ids(logits: Tensor, history: _History) -> Tensor:
    """How often each id occurs in the history of its row, float32 like the logits [n, vocab]. Counts are whole numbers
    below 2**24, which float32 adds exactly in any order."""
    counts = torch.zeros_like(logits)
    for ids, numbers in history:
        real = np.arange(ids.shape[1]) < numbers[:, None]
        counts.scatter_add_(1, ids, copy_to_device(real, logits.device).to(logits.dtype))
    return counts


def _rank_by_probability(logits: Tensor, probabilities: Tensor) -> Tensor:
    """The rank of tokens for top-p."""
    return probabilities


def _rank_by_typicality(logits: Tensor, probabilities: Tensor) -> Tensor:
    """The rank of tokens for typical-p: minus the distance between surprise and entropy."""
    surprise = -logits.log_softmax(-1).clamp_(min=-MAX_LOGIT)  # finite, because it is multiplied by a probability of 0
    return (surprise - _row_sums(probabilities * surprise)).abs_().neg_()


def _row_sums(values: Tensor) -> Tensor:
    """The sum of each row, [n, 1]. numpy's on CPU: torch divides a single row among threads, which rounds otherwise."""
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().sum(-1, keepdims=True))
    return values.sum(-1, keepdim=True)


def _keep_probability_mass(logits: Tensor, mass: NDArray[np.float64], rank: RankTokens) -> Tensor:
    """Logits [n, vocab] with -inf for all tokens but the first by rank whose probabilities add up to mass [n]."""
    vocab = logits.shape[1]
    limit = column_like(mass, logits)
    if logits.device.type != "cpu":  # a GPU sorts quickly, and would stall if the host asked which rows are wide
        return _keep_mass_of_first(logits, limit, rank, vocab)[0]
    first, *wider = [width for width in TOP_P_WIDTHS if width < vocab] + [vocab]
    kept, wide = _keep_mass_of_first(logits, limit, rank, first)
    for width in wider:
        left = wide.nonzero()[:, 0]
        if not len(left):
            break
        kept[left], wide[left] = _keep_mass_of_first(logits[left], limit[left], rank, width)
    return kept


def _keep_mass_of_first(logits: Tensor, mass: Tensor, rank: RankTokens, width: int) -> tuple[Tensor, Tensor]:
    """The same, among the first `width` tokens; and bool [n], whether later tokens may belong to the mass too."""
    probabilities = logits.softmax(-1)
    ranks = rank(logits, probabilities)
    if width < logits.shape[1]:
        ids = ranks.topk(width, -1).indices
    else:
        ids = ranks.argsort(dim=-1, descending=True, stable=True)
    values = probabilities.gather(1, ids).double()
    keep = values.cumsum(-1) - values < mass
    keep[:, 0] = True
    top = logits.gather(1, ids).masked_fill_(~keep, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, top), keep[:, -1]
