"""Sampling: from the model's logits, as the output head writes them, to the token of each row and its logprob.

The vocabulary is divided into splits of a fixed size, so that one row fills a GPU too, and a row's result does not
depend on its batch. Two launches serve rows without limits, five serve any mixture of rows.

1. `_measure_splits`: the maximum of a split, its token and the sum of exponentials; for rows that sample from the whole
   vocabulary also the highest of the perturbed logits (Gumbel-max, with the noise of sampling.noise).
2. `_measure_pivots`, for rows with top-k or top-p: counts and sums of the tokens above 15 pivots.
3. `_merge_splits`: the results of rows without limits. For the others, two pivots that enclose the last kept token.
4. `_collect_splits`, for rows with limits: the tokens above both pivots are kept and compete; the ids of those between
   the pivots are listed.
5. `_choose`, for rows with limits: finds the last kept token among the listed ones by bisection, exactly; the kept ones
   among them compete with the others. One program for each row.

Tokens are compared by their distance from the row's maximum, before temperature. All tokens that tie with the last kept
one are kept, by top-p too. Multiplications and additions are not fused, so that all launches, and torch, round alike.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.self_test import SelfTestFailed, check_close, random_tensor
from tgi.worker.head_logits import VocabularyShard
from tgi.worker.sampling.noise import FACTORS, Noise

CHUNK = 4096  # tokens of a split
SPLITS = 64  # up to which the vocabulary's size compiles nothing more
CHUNK_WARPS, PIVOT_WARPS = 8, 4  # fewer of `_measure_pivots`, which adds up much over the warps
MERGE_WARPS = 2
BLOCK, BLOCK_WARPS = 2048, 16  # of `_choose`
# Listed ids of a row. If more tokens lie between the pivots, `_choose` reads the whole row instead.
MAX_LISTED = 1 << 15
# If the tokens up to the farther pivot are at most this many, all of them are listed, and no others compete.
FEW = tl.constexpr(2048)
PIVOTS = tl.constexpr(16)  # the last one is infinite
# Rows of SamplingColumns.
TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, KEY, SAMPLES = (tl.constexpr(row) for row in (0, 1, 2, 3, 4, 6))
COLUMNS = 7
# Planes of the statistics of splits, float32: maximum, sum of exponentials relative to it, highest perturbed logit, its
# logit, sum of the exponentials of kept tokens relative to the row's maximum.
PEAK, SUM, SCORE, CHOSEN, KEPT = (tl.constexpr(plane) for plane in range(5))
# Planes of the ids of splits, int32.
PEAK_ID, CHOSEN_ID = tl.constexpr(0), tl.constexpr(1)
# The pivots that enclose the last kept token of a row. Floats: the unit of pivots, the row's maximum, the distances of
# both pivots (below, upto], the sum of exponentials up to `below`, and of all tokens. Numbers: those of the pivots
# (FIRST - 1 is that of `below`), the tokens up to `below`, those between the pivots, and whether the row has limits.
UNIT, TOP, BELOW, UPTO, BASE_MASS, EVERYTHING = (tl.constexpr(plane) for plane in range(6))
FIRST, LAST, BASE_COUNT, BETWEEN, ACTIVE = (tl.constexpr(plane) for plane in range(5))
NO_ID = tl.constexpr(0x7FFFFFFF)
LONGEST = tl.constexpr(3e38)  # a finite distance: that of a masked token is infinite
LOG2_E = tl.constexpr(1.4426950408889634)
HASH_1, HASH_2, HASH_3 = (tl.constexpr(factor & 0xFFFFFFFF) for factor in FACTORS)


def sample(
    logits: Tensor,
    columns: Tensor,
    limited: bool,
    scale: float = 1.0,
    cap: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Samples ids int64 [R] from logits [R, vocab] of any float type, whose rows may have a larger stride. Returns them
    and their logprobs float32 [R] after temperature and limits.

    A logit is cap * tanh(scale * x / cap), or scale * x without a cap. `columns` int32 [7, R], contiguous, has the
    parameters of the rows (sampling_batch.pack_columns). `limited`: some row has top-k, top-p or min-p. The logprob is
    NaN for a row whose highest logit is infinite.

    `shard`: this is one rank of several, without limits, whose logits are those of its tokens. The ranks exchange what
    they have found in their splits. Ids are those of the joined logits; logprobs may differ in the last bits, since
    splits end where a rank's tokens do.
    """
    rows, vocab = logits.shape
    assert shard is None or not limited
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return ids, logprobs
    assert logits.stride(1) == 1
    assert columns.shape == (COLUMNS, rows)
    splits = triton.cdiv(vocab, CHUNK)
    stats = torch.empty(5, rows, splits, dtype=torch.float32, device=logits.device)
    found = torch.empty(2, rows, splits, dtype=torch.int32, device=logits.device)
    row_of = (logits, logits.stride(0), vocab, rows, splits, columns)
    model = {"SCALE": scale, "CAP": cap or 0.0}
    shapes = {"CHUNK": CHUNK, "WIDTH": max(SPLITS, triton.next_power_of_2(splits))}
    options: dict[str, Any] = {"num_warps": CHUNK_WARPS, "enable_fp_fusion": False}
    grid = (splits, rows)
    first = 0 if shard is None else shard.first
    _measure_splits[grid](*row_of, stats, found, first, **model, CHUNK=CHUNK, **options)
    if shard is not None:
        stats, found = _join_splits(stats, found, shard)
        vocab, splits = shard.vocab, stats.shape[2]
        row_of = (logits, logits.stride(0), vocab, rows, splits, columns)
        shapes["WIDTH"] = max(SPLITS, triton.next_power_of_2(splits))
    counts, masses, floats, numbers = found, stats, stats, found  # not used without limits
    if limited:
        counts = torch.empty(rows, splits, PIVOTS.value, dtype=torch.int32, device=logits.device)
        masses = torch.empty(rows, splits, PIVOTS.value, dtype=torch.float32, device=logits.device)
        floats = torch.empty(6, rows, dtype=torch.float32, device=logits.device)
        numbers = torch.empty(5, rows, dtype=torch.int32, device=logits.device)
        few_warps = options | {"num_warps": PIVOT_WARPS}
        _measure_pivots[grid](*row_of, stats, counts, masses, floats, **model, **shapes, **few_warps)
    _merge_splits[(rows,)](
        *row_of[2:], stats, found, counts, masses, floats, numbers, ids, logprobs, WIDTH=shapes["WIDTH"],
        LIMITED=limited, num_warps=MERGE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    if limited:
        listed = torch.empty(rows, MAX_LISTED, dtype=torch.int32, device=logits.device)
        bracket = (stats, found, floats, numbers, listed)
        _collect_splits[grid](*row_of, *bracket, counts, **model, **shapes, MAX_LISTED=MAX_LISTED, **options)
        _choose[(rows,)](
            *row_of, *bracket, ids, logprobs, **model, WIDTH=shapes["WIDTH"], MAX_LISTED=MAX_LISTED, BLOCK=BLOCK,
            num_warps=BLOCK_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, logprobs


def _join_splits(stats: Tensor, found: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """The statistics and ids of all ranks' splits."""
    rows = stats.shape[1]
    own = torch.cat((stats[: KEPT.value].flatten(0, 1), found.view(torch.float32).flatten(0, 1)))
    joined = shard.communicator.all_gather(own, [triton.cdiv(width, CHUNK) for width in shard.widths])
    joined = joined.view(len(own) // rows, rows, -1)
    return joined[: KEPT.value].contiguous(), joined[KEPT.value :].contiguous().view(torch.int32)


@triton.jit
def _load_logits(logits, at, inside, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Logits in float32; -inf where `at` is not inside."""
    y = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    if SCALE != 1.0:
        y = y * SCALE
    if CAP > 0.0:
        y = CAP - 2 * CAP / (tl.exp(y * (2.0 / CAP)) + 1)  # CAP * tanh(y / CAP)
    return tl.where(inside, y, float("-inf"))


@triton.jit
def _load_float(columns, number: tl.constexpr, rows, row):
    return tl.load(columns + number * rows + row).to(tl.float32, bitcast=True)


@triton.jit
def _load_limits(columns, rows, row):
    """top_k (0: off), top_p (1: off), log(min_p) (-inf: off), and whether any is on."""
    top_k = tl.load(columns + TOP_K * rows + row)
    top_p = _load_float(columns, TOP_P, rows, row)
    log_min_p = _load_float(columns, LOG_MIN_P, rows, row)
    return top_k, top_p, log_min_p, (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf"))


@triton.jit
def _noise(columns, rows, row, at):
    """The logarithm of the variates of Noise.exponentials for these ids."""
    x = (at + 1).to(tl.uint32) * HASH_1
    x = ((x ^ (x >> 16)) + 1) * HASH_2
    x = ((x ^ (x >> 15)) + 1) * HASH_3
    x = x ^ (x >> 16)
    x = (x ^ tl.load(columns + KEY * rows + row).to(tl.uint32, bitcast=True)) * HASH_1
    x = ((x ^ (x >> 16)) + tl.load(columns + (KEY + 1) * rows + row).to(tl.uint32, bitcast=True)) * HASH_2
    x = (x ^ (x >> 15)) * HASH_3
    magnitude = tl.abs(x.to(tl.int32, bitcast=True).to(tl.float32))
    uniform = magnitude * 4.656612595521636e-10 + 1.1641532182693481e-10  # 2**-31 * (1 - 2**-24), 2**-33
    # -log1p(-uniform): what the first difference loses to rounding is added to the logarithm's argument to first order.
    rest = 1.0 - uniform
    return tl.log((uniform - (1.0 - rest)) * (2.0 - rest) - tl.log(rest))


@triton.jit
def _inverse(temperature):
    """Its reciprocal; exactly 1 for 1."""
    return tl.div_rn(tl.full([], 1.0, tl.float32), temperature)


@triton.jit
def _highest(score, at):
    """The highest of these scores, and the lowest id among those that have it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, at, NO_ID), 0)


@triton.jit
def _merge_peaks(stats, rows, row, exponent, splits, WIDTH: tl.constexpr):
    """The row's maximum, the mean maximum of its splits, and the sum of exponentials relative to the maximum."""
    part = tl.arange(0, WIDTH)
    at = row * splits + part
    peaks = tl.load(stats + PEAK * rows * splits + at, mask=part < splits, other=float("-inf"))
    sums = tl.load(stats + SUM * rows * splits + at, mask=part < splits, other=0.0)
    peak = tl.max(peaks, 0)
    finite = peaks > float("-inf")
    mean = tl.sum(tl.where(finite, peaks, 0.0), 0) / tl.sum(finite.to(tl.float32), 0)
    return peak, mean, tl.sum(sums * tl.exp2((peaks - peak) * exponent), 0)


@triton.jit
def _pivot_unit(peak, mean, total, temperature, top_k, top_p, vocab):
    """The distance by which pivots are scaled. Top-k: that of the mean of the splits' maxima, which is typically that
    of the 20th token. Top-p: the largest possible one; all tokens beyond it together have at most 1 - top_p."""
    gap = peak - mean
    gap = tl.where((gap > 0.0) & (gap < float("inf")), gap, 1.0)
    return tl.where(top_k > 0, gap, temperature * tl.log(vocab / (tl.maximum(1.0 - top_p, 1e-7) * total)))


@triton.jit
def _pivot(number, unit, top_k):
    """Pivot 0 to 14 as a distance from the maximum: quadratic for top-k, linear for top-p."""
    quarter = (number + 1) * 0.25
    return tl.minimum(unit * tl.where(top_k > 0, quarter * quarter, quarter * 0.25), LONGEST)


@triton.jit
def _find_bracket(counts, masses, row, unit, top_k, top_p, splits, WIDTH: tl.constexpr):
    """Between which distances the last kept tokens of top-k and top-p lie: (below, upto], the numbers of the pivots
    (below is that of the pivot before `first`), count and sum of the tokens up to `below`, and the sum of all."""
    part, number = tl.arange(0, WIDTH)[:, None], tl.arange(0, PIVOTS)
    at = (row * splits + part) * PIVOTS + number[None, :]
    count = tl.sum(tl.load(counts + at, mask=part < splits, other=0), 0)
    mass = tl.sum(tl.load(masses + at, mask=part < splits, other=0.0), 0)
    everything = tl.sum(tl.where(number == PIVOTS - 1, mass, 0.0), 0)
    last = tl.minimum(tl.sum((count < top_k).to(tl.int32), 0), PIVOTS - 1)
    least, most = tl.sum(tl.where(number == last - 1, mass, 0.0), 0), everything
    if top_k <= 0:
        least = everything
        last = tl.minimum(tl.sum((mass < top_p * most).to(tl.int32), 0), PIVOTS - 1)
    first = last
    if top_p < 1.0:
        first = tl.minimum(tl.sum((mass < top_p * least).to(tl.int32), 0), last)
    first = tl.where(tl.sum(tl.where(number == last, count, 0), 0) <= FEW, 0, first)
    below = tl.where(first > 0, _pivot((first - 1).to(tl.float32), unit, top_k), -1.0)
    upto = tl.where(last < PIVOTS - 1, _pivot(last.to(tl.float32), unit, top_k), float("inf"))
    base_count = tl.sum(tl.where(number == first - 1, count, 0), 0)
    base_mass = tl.sum(tl.where(number == first - 1, mass, 0.0), 0)
    size = tl.sum(tl.where(number == last, count, 0), 0) - base_count
    return below, upto, first, last, base_count, base_mass, everything, size


@triton.jit(do_not_specialize=["rows", "splits", "first"])
def _measure_splits(
    logits, row_stride, vocab, rows, splits, columns, stats, found,
    first,  # of the tokens whose logits these are
    SCALE: tl.constexpr, CAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = split * CHUNK + tl.arange(0, CHUNK)
    y = _load_logits(logits + row * row_stride, at, at < vocab, SCALE, CAP)
    at += first
    temperature = _load_float(columns, TEMPERATURE, rows, row)
    _top_k, _top_p, _log_min_p, limited = _load_limits(columns, rows, row)
    peak, peak_id = _highest(y, at)
    weight = tl.exp2((y - peak) * (LOG2_E * _inverse(temperature)))
    total = tl.sum(tl.where(y == float("-inf"), 0.0, weight), 0)
    plane, here = rows * splits, row * splits + split
    tl.store(stats + PEAK * plane + here, peak)
    tl.store(stats + SUM * plane + here, total)
    tl.store(found + PEAK_ID * plane + here, peak_id)
    if (tl.load(columns + SAMPLES * rows + row) != 0) & (limited == 0):
        best, best_id = _highest(y * _inverse(temperature) - _noise(columns, rows, row, at), at)
        tl.store(stats + SCORE * plane + here, best)
        tl.store(stats + CHOSEN * plane + here, tl.max(tl.where(at == best_id, y, float("-inf")), 0))
        tl.store(found + CHOSEN_ID * plane + here, best_id)


@triton.jit(do_not_specialize=["rows", "splits"])
def _measure_pivots(
    logits, row_stride, vocab, rows, splits, columns, stats, counts, masses, floats,
    SCALE: tl.constexpr, CAP: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    top_k, top_p, _log_min_p, _limited = _load_limits(columns, rows, row)
    if (top_k <= 0) & (top_p >= 1.0):
        return
    temperature = _load_float(columns, TEMPERATURE, rows, row)
    exponent = LOG2_E * _inverse(temperature)
    peak, mean, total = _merge_peaks(stats, rows, row, exponent, splits, WIDTH)
    unit = _pivot_unit(peak, mean, total, temperature, top_k, top_p, vocab)
    if split == 0:
        tl.store(floats + UNIT * rows + row, unit)
    at = split * CHUNK + tl.arange(0, CHUNK)
    inside = at < vocab
    distance = peak - _load_logits(logits + row * row_stride, at, inside, SCALE, CAP)
    weight = tl.exp2(-distance * exponent)
    number = tl.arange(0, PIVOTS)
    # The last pivot is infinite.
    count = tl.where(number == PIVOTS - 1, tl.sum((inside & (distance <= float("inf"))).to(tl.int32), 0), 0)
    mass = tl.where(number == PIVOTS - 1, tl.sum(tl.where(inside, weight, 0.0), 0), 0.0)
    for pivot in tl.static_range(PIVOTS - 1):
        near = distance <= _pivot(pivot, unit, top_k)
        count = tl.where(number == pivot, tl.sum(near.to(tl.int32), 0), count)
        mass = tl.where(number == pivot, tl.sum(tl.where(near, weight, 0.0), 0), mass)
    here = (row * splits + split) * PIVOTS + number
    tl.store(counts + here, count)
    tl.store(masses + here, mass)


@triton.jit
def _merge_chosen(
    stats, found, rows, row, splits, SCORES: tl.constexpr, CHOICES: tl.constexpr, IDS: tl.constexpr, WIDTH: tl.constexpr
):
    """The highest score of the splits of a row, its id and its logit, from these planes."""
    part, plane = tl.arange(0, WIDTH), rows * splits
    here, real = row * splits + part, part < splits
    scores = tl.load(stats + SCORES * plane + here, mask=real, other=float("-inf"))
    logits = tl.load(stats + CHOICES * plane + here, mask=real, other=float("-inf"))
    ids = tl.load(found + IDS * plane + here, mask=real, other=NO_ID)
    best, best_id = _highest(scores, ids)
    return best, best_id, tl.max(tl.where((scores == best) & (ids == best_id), logits, float("-inf")), 0)


@triton.jit
def _store_token(ids, logprobs, row, vocab, token, logit, peak, total, temperature):
    """Stores a result. Without any number among the logits there is no highest; the logprob is NaN then."""
    tl.store(ids + row, tl.minimum(tl.where(token == NO_ID, 0, token), vocab - 1).to(tl.int64))
    tl.store(logprobs + row, (logit - peak) * _inverse(temperature) - tl.log(total))


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_splits(
    vocab, rows, splits, columns, stats, found, counts, masses, floats, numbers, ids, logprobs,
    WIDTH: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = _load_float(columns, TEMPERATURE, rows, row)
    peak, _mean, total = _merge_peaks(stats, rows, row, LOG2_E * _inverse(temperature), splits, WIDTH)
    if LIMITED:
        top_k, top_p, _log_min_p, limited = _load_limits(columns, rows, row)
        limited = limited & (total == total)  # a row whose highest logit is infinite, or no number, has no order
        tl.store(numbers + ACTIVE * rows + row, limited.to(tl.int32))
        if limited:
            tl.store(floats + TOP * rows + row, peak)
            below, upto, base_mass, everything = float("inf"), float("inf"), 0.0, 0.0
            first, last, base_count, size = 0, 0, 0, 0
            if (top_k > 0) | (top_p < 1.0):
                unit = tl.load(floats + UNIT * rows + row)
                below, upto, first, last, base_count, base_mass, everything, size = _find_bracket(
                    counts, masses, row, unit, top_k, top_p, splits, WIDTH
                )
            tl.store(floats + BELOW * rows + row, below)
            tl.store(floats + UPTO * rows + row, upto)
            tl.store(floats + BASE_MASS * rows + row, base_mass)
            tl.store(floats + EVERYTHING * rows + row, everything)
            tl.store(numbers + FIRST * rows + row, first)
            tl.store(numbers + LAST * rows + row, last)
            tl.store(numbers + BASE_COUNT * rows + row, base_count)
            tl.store(numbers + BETWEEN * rows + row, size)
            return
    _best, token, logit = _merge_chosen(stats, found, rows, row, splits, PEAK, PEAK, PEAK_ID, WIDTH)
    _, _, _, unlike = _load_limits(columns, rows, row)
    if (tl.load(columns + SAMPLES * rows + row) != 0) & (unlike == 0):
        _best, token, logit = _merge_chosen(stats, found, rows, row, splits, SCORE, CHOSEN, CHOSEN_ID, WIDTH)
    _store_token(ids, logprobs, row, vocab, token, logit, peak, total, temperature)


@triton.jit(do_not_specialize=["rows", "splits"])
def _collect_splits(
    logits, row_stride, vocab, rows, splits, columns, stats, found, floats, numbers, listed, counts,
    SCALE: tl.constexpr, CAP: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, MAX_LISTED: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(numbers + ACTIVE * rows + row) == 0:
        return
    _top_k, _top_p, log_min_p, _limited = _load_limits(columns, rows, row)
    temperature = _load_float(columns, TEMPERATURE, rows, row)
    peak, below = tl.load(floats + TOP * rows + row), tl.load(floats + BELOW * rows + row)
    upto, size = tl.load(floats + UPTO * rows + row), tl.load(numbers + BETWEEN * rows + row)
    plane, here = rows * splits, row * splits + split
    # A split whose maximum is farther away has no token to keep or to list.
    if peak - tl.load(stats + PEAK * plane + here) > upto:
        tl.store(stats + KEPT * plane + here, 0.0)
        tl.store(stats + SCORE * plane + here, float("-inf"))
        tl.store(stats + CHOSEN * plane + here, float("-inf"))
        tl.store(found + CHOSEN_ID * plane + here, NO_ID)
        return
    if (size > 0) & (size <= MAX_LISTED):
        at = split * CHUNK + tl.arange(0, CHUNK)
        distance = peak - _load_logits(logits + row * row_stride, at, at < vocab, SCALE, CAP)
        between = (at < vocab) & (distance > below) & (distance <= upto)
        if tl.max(between.to(tl.int32), 0) > 0:
            first, last = tl.load(numbers + FIRST * rows + row), tl.load(numbers + LAST * rows + row)
            part = tl.arange(0, WIDTH)
            place = (row * splits + part) * PIVOTS
            share = tl.load(counts + place + last, mask=part < split, other=0)
            nearer = tl.load(counts + place + tl.maximum(first - 1, 0), mask=part < split, other=0)
            share -= tl.where(first > 0, nearer, 0)
            entry = tl.sum(share, 0) + tl.cumsum(between.to(tl.int32), 0) - 1
            tl.store(listed + row * MAX_LISTED + entry, at, mask=between & (entry < MAX_LISTED))
    best, best_id, chosen, kept_sum = float("-inf"), NO_ID, float("-inf"), 0.0
    if below >= 0.0:
        at = split * CHUNK + tl.arange(0, CHUNK)
        y = _load_logits(logits + row * row_stride, at, at < vocab, SCALE, CAP)
        distance, s = peak - y, y * _inverse(temperature)
        kept = (distance <= below) & (s >= peak * _inverse(temperature) + log_min_p)
        if tl.max(kept.to(tl.int32), 0) > 0:
            kept_sum = tl.sum(tl.where(kept, tl.exp2(-distance * (LOG2_E * _inverse(temperature))), 0.0), 0)
            if tl.load(columns + SAMPLES * rows + row) != 0:
                best, best_id = _highest(tl.where(kept, s - _noise(columns, rows, row, at), float("-inf")), at)
                chosen = tl.max(tl.where(at == best_id, y, float("-inf")), 0)
    tl.store(stats + KEPT * plane + here, kept_sum)
    tl.store(stats + SCORE * plane + here, best)
    tl.store(stats + CHOSEN * plane + here, chosen)
    tl.store(found + CHOSEN_ID * plane + here, best_id)


@triton.jit
def _load_candidates(
    logits, listed, start, size, is_listed, peak, below, upto,
    SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of the tokens of a row between the pivots: ids, logits, distances, and which are real."""
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    at = tl.where(is_listed, tl.load(listed + at, mask=at < tl.where(is_listed, size, 0), other=0), at)
    y = _load_logits(logits, at, inside, SCALE, CAP)
    distance = peak - y
    return at, y, distance, inside & (distance > below) & (distance <= upto)


@triton.jit
def _compare(distance, real, pivot, exponent, BY_COUNT: tl.constexpr):
    """Of each token its weight if it is not beyond the pivot, and its distance if it is before or beyond it."""
    near = real & (distance <= pivot)
    weight = near.to(tl.float32) if BY_COUNT else tl.where(near, tl.exp2(-distance * exponent), 0.0)
    beyond = real & (distance > pivot)
    return weight, tl.where(near, distance, -1.0), tl.where(beyond, distance, float("inf"))


@triton.jit
def _find_last(
    logits, listed, size, is_listed, peak, below, upto, exponent, base, target,
    BY_COUNT: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least distance up to which the tokens have at least the weight `target`. `base` is the weight up to `below`.

    Bisects the bits of the distance, which has at most 31 steps, and moves each end to the nearest token, which has few
    steps if few distances occur. The first block of tokens stays in registers."""
    low = tl.where(below < 0.0, -1, below.to(tl.int32, bitcast=True))
    high = upto.to(tl.int32, bitcast=True)
    _, _, held, held_real = _load_candidates(logits, listed, 0, size, is_listed, peak, below, upto, SCALE, CAP, BLOCK)
    while low + 1 < high:
        middle = low + (high - low) // 2
        pivot = middle.to(tl.float32, bitcast=True)
        weight, before, after = _compare(held, held_real, pivot, exponent, BY_COUNT)
        for start in range(BLOCK, size, BLOCK):
            _at, _y, distance, real = _load_candidates(
                logits, listed, start, size, is_listed, peak, below, upto, SCALE, CAP, BLOCK
            )
            more, nearer, farther = _compare(distance, real, pivot, exponent, BY_COUNT)
            weight += more
            before, after = tl.maximum(before, nearer), tl.minimum(after, farther)
        if base + tl.sum(weight, 0) >= target:
            high = tl.maximum(tl.max(before, 0).to(tl.int32, bitcast=True), low + 1)
        else:
            low = tl.maximum(tl.minimum(tl.min(after, 0).to(tl.int32, bitcast=True) - 1, high - 1), middle)
    return high.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "splits"])
def _choose(
    logits, row_stride, vocab, rows, splits, columns, stats, found, floats, numbers, listed, ids, logprobs,
    SCALE: tl.constexpr, CAP: tl.constexpr, WIDTH: tl.constexpr, MAX_LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(numbers + ACTIVE * rows + row) == 0:
        return
    top_k, top_p, log_min_p, _limited = _load_limits(columns, rows, row)
    temperature = _load_float(columns, TEMPERATURE, rows, row)
    exponent = LOG2_E * _inverse(temperature)
    samples = tl.load(columns + SAMPLES * rows + row) != 0
    peak, below = tl.load(floats + TOP * rows + row), tl.load(floats + BELOW * rows + row)
    last, size = tl.load(floats + UPTO * rows + row), tl.load(numbers + BETWEEN * rows + row)
    base_mass, mass = tl.load(floats + BASE_MASS * rows + row), tl.load(floats + EVERYTHING * rows + row)
    is_listed = size <= MAX_LISTED
    size = tl.where(is_listed, size, vocab)
    logits += row * row_stride
    listed += row * MAX_LISTED
    if top_k > 0:
        base_count = tl.load(numbers + BASE_COUNT * rows + row)
        last = _find_last(
            logits, listed, size, is_listed, peak, below, last, exponent, base_count.to(tl.float32),
            top_k.to(tl.float32), True, SCALE, CAP, BLOCK,
        )  # fmt: skip
        mass = base_mass
        for start in range(0, size, BLOCK):
            _at, _y, distance, between = _load_candidates(
                logits, listed, start, size, is_listed, peak, below, last, SCALE, CAP, BLOCK
            )
            mass += tl.sum(tl.where(between, tl.exp2(-distance * exponent), 0.0), 0)
    if top_p < 1.0:
        last = _find_last(
            logits, listed, size, is_listed, peak, below, last, exponent, base_mass, top_p * mass, False,
            SCALE, CAP, BLOCK,
        )  # fmt: skip
    part = tl.arange(0, WIDTH)
    total = tl.sum(tl.load(stats + KEPT * rows * splits + row * splits + part, mask=part < splits, other=0.0), 0)
    best, token, logit = _merge_chosen(stats, found, rows, row, splits, PEAK, PEAK, PEAK_ID, WIDTH)
    if samples:
        best, token, logit = _merge_chosen(stats, found, rows, row, splits, SCORE, CHOSEN, CHOSEN_ID, WIDTH)
    for start in range(0, size, BLOCK):
        at, y, distance, between = _load_candidates(
            logits, listed, start, size, is_listed, peak, below, last, SCALE, CAP, BLOCK
        )
        s = y * _inverse(temperature)
        kept = between & (s >= peak * _inverse(temperature) + log_min_p)
        total += tl.sum(tl.where(kept, tl.exp2(-distance * exponent), 0.0), 0)
        if samples & (tl.max(kept.to(tl.int32), 0) > 0):
            score = tl.where(kept, s - _noise(columns, rows, row, at), float("-inf"))
            higher, higher_id = _highest(score, at)
            if (higher > best) | ((higher == best) & (higher_id < token)):
                best, token = higher, higher_id
                logit = tl.max(tl.where(at == higher_id, y, float("-inf")), 0)
    _store_token(ids, logprobs, row, vocab, token, logit, peak, total, temperature)


def self_test(device: torch.device) -> None:
    """Rows without and with limits, in all float types. Raises SelfTestFailed if tokens or logprobs differ from
    torch's."""
    keys = torch.tensor([[5, -7], [3, 99]], dtype=torch.int32).repeat(4, 1)
    for dtype in (torch.bfloat16, torch.float32):
        logits = (2 * random_tensor(device, 8, 5008)).to(dtype)
        logits[3, 7] = -torch.inf
        temperature = torch.tensor([1.0, 0.7, 1.5, 1.0, 1.0, 1.0, 0.5, 1.0])
        top_k, top_p = torch.tensor([0, 0, 0, 1, 50, 0, 300, 0]), torch.tensor([1, 1, 1, 1, 1, 0.9, 0.6, 0.95])
        min_p = torch.tensor([0, 0, 0, 0, 0, 0, 0.01, 0.02])
        is_random = torch.tensor([False, *[True] * 7])
        floats = [column.float().view(torch.int32) for column in (temperature, top_p, min_p.log())]
        columns = torch.stack([floats[0], top_k.int(), *floats[1:], *keys.unbind(1), is_random.int()]).to(device)
        for limited, rows in ((False, slice(0, 3)), (True, slice(0, 8))):
            ids, logprobs = sample(logits[rows], columns[:, rows].contiguous(), limited)
            expected = _reference(logits[rows].cpu().float(), temperature, top_k, top_p, min_p, keys, is_random)
            if ids.tolist() != expected[0].tolist():
                raise SelfTestFailed(f"sampled tokens are {ids.tolist()}, where {expected[0].tolist()} are expected")
            check_close("logprobs of sampled tokens", logprobs.cpu(), expected[1], 1e-4)


def _reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor, is_random: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference: row by row in float64, on CPU, except for the noise."""
    noise = Noise(logits.shape[1], torch.device("cpu"))
    ids, logprobs = [], []
    for row, s in enumerate(logits.double() / temperature[: len(logits), None]):
        if top_k[row]:
            s = s.where(s >= s.topk(int(top_k[row])).values[-1], -torch.inf)
        values, order = s.softmax(-1).sort(descending=True)
        last = int((values.cumsum(-1) < top_p[row]).sum().clamp(max=len(s) - 1))
        s = s.where(s >= s[order[last]], -torch.inf) if top_p[row] < 1 else s
        s = s.where(s >= s.max() + min_p[row].log(), -torch.inf)
        perturbed = s - noise.exponentials(keys[row : row + 1])[0].double().log()
        ids.append(int((perturbed if is_random[row] else s).argmax()))
        logprobs.append(float(s.log_softmax(-1)[ids[-1]]))
    return torch.tensor(ids), torch.tensor(logprobs)
