"""Top-n logprobs: equal to a simple reference, with ties, and bit for bit the same in any batch."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.parameters import sampling_params
from tests.worker.test_sampling import processed, sampling_batch
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_float32, unpack_int32, unpack_uint32
from tgi.microkernel.messages.protocol import MAX_TOP_TOKENS
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.sampling.noise import Noise
from tgi.worker.sampling.sampler import SampledTokens, sample
from tgi.worker.sampling.top_logprobs import BLOCK_ROWS, MAX_TIES, TopLogprobs, find_top_logprobs, top_logprobs_columns

CPU = torch.device("cpu")
Listed = list[tuple[int, float]]


def lists(tops: TopLogprobs | None, drawn: int) -> list[Listed]:
    """The list of each sampled row, read from the columns of the result."""
    counts, ids, logprobs = top_logprobs_columns(tops, drawn)
    entries = list(zip(unpack_int32(ids), unpack_float32(logprobs), strict=True))
    ends = np.cumsum([0, *unpack_uint32(counts)])
    assert ends[-1] == len(entries)
    return [entries[begin:end] for begin, end in pairwise(ends)]


def find(logprobs: torch.Tensor, top_n: Sequence[int]) -> list[Listed]:
    named = np.full(len(top_n), None)
    return lists(find_top_logprobs(logprobs, np.arange(len(top_n)), np.array(top_n), named), len(top_n))


def reference(logprobs: NDArray[np.floating], n: int) -> list[int]:
    """The reference: ids as documented."""
    order = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))
    n = min(n, len(order))
    last = logprobs[order[n - 1]]
    return [token for token in order if logprobs[token] >= last and logprobs[token] > -np.inf][: n + MAX_TIES]


@pytest.mark.parametrize(
    ("n", "ids"), [(1, [0]), (2, [0, 3]), (3, [0, 3, 1, 4]), (4, [0, 3, 1, 4]), (5, [0, 3, 1, 4, 2])]
)
def test_the_documented_example(n: int, ids: list[int]) -> None:
    logprobs = torch.tensor([[-1.0, -3.0, -4.0, -2.0, -3.0]])
    for asked in (n, n + 5 if n == 5 else n):  # no more than the vocabulary has
        assert find(logprobs, [asked]) == [[(token, float(logprobs[0, token])) for token in ids]]


@settings(max_examples=60)
@given(
    rows=st.lists(st.integers(1, 12), min_size=1, max_size=2 * BLOCK_ROWS + 3),
    vocab=st.integers(1, 300),
    values=st.integers(1, 400),
    filtered=st.sampled_from([0.0, 0.5, 0.99]),
    random=st.integers(0, 2**32 - 1),
)
def test_lists_are_exact(rows: list[int], vocab: int, values: int, filtered: float, random: int) -> None:
    """Few distinct values: many ties, at the n-th rank and before it, with zeros and denormals."""
    generator = np.random.default_rng(random)
    palette = np.concatenate((-generator.exponential(3.0, values), [0.0, -1e-42, -1e30])).astype(np.float32)
    logprobs = generator.choice(palette, (len(rows), vocab))
    logprobs[generator.random(logprobs.shape) < filtered] = -np.inf
    for row, n, got in zip(logprobs, rows, find(torch.from_numpy(logprobs), rows), strict=True):
        assert got == [(token, float(row[token])) for token in reference(row, n)]


# The other parameters are neutral: those that sum probabilities round otherwise than the reference.
SAMPLING = sampling_params(
    do_sample=st.booleans(),
    temperature=st.sampled_from([1.0, 0.5, 2.0]),  # powers of two keep apart what differs, and together what does not
    top_k=st.sampled_from([0, 0, 1, 3, 40, 5000]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5]),
    choice=st.integers(0, 3),
    top_n=st.sampled_from([0, 1, 2, 5, 20]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.7]),
)


@settings(max_examples=60)
@given(
    samplings=st.lists(SAMPLING, min_size=1, max_size=6),
    vocab=st.sampled_from([3, 97, 2003]),
    spread=st.sampled_from([4, 40]),
    random=st.integers(0, 2**32 - 1),
)
def test_lists_are_of_the_processed_distribution(
    samplings: list[SamplingParams], vocab: int, spread: int, random: int
) -> None:
    generator = torch.Generator().manual_seed(random)
    logits = torch.randint(-spread, spread, (len(samplings), vocab), generator=generator) / 8
    histories = [torch.randint(vocab, (1 + row * 3,), generator=generator).tolist() for row in range(len(samplings))]
    drawn = run(logits, samplings, histories)
    got = lists(drawn.top_logprobs, len(samplings)) if drawn.top_logprobs else [[]] * len(samplings)
    assert (drawn.top_logprobs is None) == (not any(sampling.top_n for sampling in samplings))
    for row, sampling in enumerate(samplings):
        scores = processed(logits[row], sampling, histories[row])
        logprobs = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
        want = reference(logprobs, sampling.top_n) if sampling.top_n else []
        assert [token for token, _ in got[row]] == want
        assert [logprob for _, logprob in got[row]] == pytest.approx(logprobs[want].tolist(), abs=1e-4)
        same = [logprob for token, logprob in got[row] if token == drawn.ids[row]]
        assert same in ([], [float(drawn.logprobs[row])])


def run(logits: torch.Tensor, samplings: Sequence[SamplingParams], histories: Sequence[list[int]]) -> SampledTokens:
    return sample(logits.clone(), sampling_batch(samplings, histories), Noise(logits.shape[1], CPU))


def test_tokens_removed_by_top_p_are_not_listed() -> None:
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.15, 0.3]]))
    drawn = run(logits, [SamplingParams(1, top_p=0.7, top_n=4)], [[0]])
    (got,) = lists(drawn.top_logprobs, 1)
    assert [token for token, _ in got] == [1, 3]
    assert np.exp([logprob for _, logprob in got]) == pytest.approx([5 / 8, 3 / 8])


def test_rows_that_name_their_tokens_list_these_alone() -> None:
    logits = torch.randn(4, 97, generator=torch.Generator().manual_seed(1)) * 30
    logits[2, 3] = -torch.inf
    named = {1: [90, 5, 44], 2: [3, 96]}
    samplings = [SamplingParams(row, top_n=row) for row in range(4)]
    for row, ids in named.items():
        samplings[row] = samplings[row]._replace(listed_ids=pack_column(INT32, ids))
    want = torch.log_softmax(logits, -1).tolist()
    got = lists(run(logits, samplings, [[0]] * 4).top_logprobs, 4)
    assert [len(one) for one in got] == [0, 3, 2, 3]
    for row, ids in enumerate([[], *named.values(), reference(np.array(want[3]), 3)]):
        assert got[row] == [(token, pytest.approx(want[row][token], abs=1e-5)) for token in ids]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_list_in_any_batch(threads: int) -> None:
    count, vocab = BLOCK_ROWS + 8, 8191
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(count, vocab, generator=generator) * 24).round() / 8  # with ties
    kinds = [
        SamplingParams(0),
        SamplingParams(1, do_sample=True),
        SamplingParams(2, temperature=0.7, top_p=0.95),
        SamplingParams(3, top_k=9),
    ]
    samplings = [kinds[row % 4]._replace(seed=row, top_n=row % 3 * (row % 7)) for row in range(count)]
    alone = [lists(run(logits[r : r + 1], samplings[r : r + 1], [[r]]).top_logprobs, 1) for r in range(count)]
    torch.set_num_threads(threads)
    for size in (1, 2, 5, count):
        for begin in {0, 6, count - size}:
            at = range(begin, min(begin + size, count))
            drawn = run(logits[at.start : at.stop], samplings[at.start : at.stop], [[r] for r in at])
            got = lists(drawn.top_logprobs, len(at)) if drawn.top_logprobs else [[]] * len(at)
            assert got == [one for r in at for one in (alone[r] or [[]])]
    assert any(len(one[0]) > sampling.top_n for one, sampling in zip(alone, samplings, strict=True) if one)


def test_lists_are_limited() -> None:
    """A flat distribution, and a larger n than a message may hold."""
    flat = torch.full((2, 5000), -8.5)
    short, huge = find(flat, [3, 10**12])
    assert [token for token, _ in short] == list(range(3 + MAX_TIES))
    assert [token for token, _ in huge] == list(range(MAX_TOP_TOKENS))


def test_nan_is_not_listed() -> None:
    assert find(torch.full((1, 9), torch.nan), [2]) == [[]]
