"""Sampling against a reference in float64, statistically, and bit for bit in any batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.parameters import all_sampling_params
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column, unpack_float32, unpack_int32
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.greedy import argmax
from tgi.worker.sampling.logits_processors import TOP_P_WIDTHS, XTC_SEED
from tgi.worker.sampling.noise import Noise, noise_keys
from tgi.worker.sampling.sampler import sample
from tgi.worker.sampling.sampling_batch import SamplingBatch, SamplingColumns
from tgi.worker.sampling.watermark import SEED_FACTOR, Watermark

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
GREEDY = SamplingParams(0)
GAMMA, DELTA = 0.4, 1.7


def sampling_batch(
    samplings: Sequence[SamplingParams], histories: Sequence[list[int]], prompts: Sequence[int] | None = None
) -> SamplingBatch:
    """A SamplingBatch of rows with these ids, the first `prompts` of which are prompt (default: all)."""
    params = SamplingColumns.allocate(len(samplings))
    position = np.array([len(ids) for ids in histories])
    for row, (sampling, prompt) in enumerate(zip(samplings, position if prompts is None else prompts, strict=True)):
        params.assign(row, sampling, int(prompt))

    def history(rows: NDArray[np.int64], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> torch.Tensor:
        parts = [histories[row][begin:end] for row, begin, end in zip(rows, begins, ends, strict=True)]
        longest = max(map(len, parts))
        filled = [ids + ids[:1] * (longest - len(ids)) for ids in parts]
        return torch.tensor(filled, dtype=torch.int64)

    return SamplingBatch(params, position, history)


def run(
    logits: torch.Tensor,
    samplings: Sequence[SamplingParams],
    histories: Sequence[list[int]],
    prompts: Sequence[int] | None = None,
) -> tuple[Any, Any]:
    vocab = logits.shape[1]
    batch = sampling_batch(samplings, histories, prompts)._replace(watermark=Watermark(vocab, CPU, GAMMA, DELTA))
    drawn = sample(logits.clone(), batch, Noise(vocab, CPU))
    return drawn.ids, drawn.logprobs


def bias(values: dict[int, float]) -> dict[str, bytes]:
    """Fields of SamplingParams."""
    return {"bias_ids": pack_column(INT32, values.keys()), "biases": pack_column(FLOAT32, values.values())}


def bad_words(*sequences: Sequence[int]) -> dict[str, bytes]:
    """Fields of SamplingParams."""
    ids = [token for sequence in sequences for token in sequence]
    return {"bad_word_ids": pack_column(INT32, ids), "bad_word_lengths": pack_column(INT32, map(len, sequences))}


def sequences_of(sampling: SamplingParams) -> list[list[int]]:
    """The bad words as fields of SamplingParams."""
    ids = iter(unpack_int32(sampling.bad_word_ids))
    return [[next(ids) for _ in range(length)] for length in unpack_int32(sampling.bad_word_lengths)]


def processed(
    logits: torch.Tensor, sampling: SamplingParams, history: list[int], prompt: int | None = None
) -> NDArray[np.float64]:
    """The reference: the logits processors of one row in float64."""
    s = logits.double().numpy().copy()
    p = float(np.float32(sampling.repetition_penalty))
    generated = history[len(history) if prompt is None else prompt :]
    if sampling.watermark:
        s[green(history[-1], len(s))] += DELTA
    for token in set(history):
        s[token] = s[token] * p if s[token] < 0 else s[token] / p
    for token in set(history):
        s[token] -= sampling.frequency_penalty * history.count(token) / len(history)
    for token in set(generated):
        s[token] -= sampling.count_penalty * generated.count(token) + sampling.presence_penalty
    for token, value in zip(unpack_int32(sampling.bias_ids), unpack_float32(sampling.biases), strict=True):
        s[token] += value
    for *before, last in sequences_of(sampling):
        if before == generated[max(0, len(generated) - len(before)) :] or not before:
            s[last] = -np.inf
    if len(generated) < sampling.min_new_tokens:
        ends = unpack_int32(sampling.end_ids)
        held = s.copy()
        held[ends] = -np.inf
        s = held if (held > -np.inf).any() else s
    s /= float(np.float32(sampling.temperature))
    if 0 < sampling.top_k < len(s):
        s[s < np.sort(s)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1.0:
        order = np.argsort(s, kind="stable")
        e = np.exp(s[order] - s.max())
        drop = np.cumsum(e / e.sum()) <= 1 - sampling.top_p
        drop[-1] = False
        s[order[drop]] = -np.inf
    if sampling.min_p:
        p = np.exp(s - s.max())
        s[p < sampling.min_p * p.max()] = -np.inf
    if sampling.typical_p < 1.0:
        s[~typical(s, sampling.typical_p)] = -np.inf
    if xtc_number(sampling, len(history)) < sampling.xtc_probability:
        p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        top = (p >= np.float32(sampling.xtc_threshold)) & (s > -np.inf)
        if top.any():
            s[top & (s > s[top].min())] = -np.inf
    return s


def xtc_number(sampling: SamplingParams, position: int) -> float:
    """The random number that decides whether XTC removes tokens at a position."""
    seed = np.array([sampling.seed], np.uint64) ^ XTC_SEED
    key = noise_keys(seed, np.array([position]), np.array([sampling.choice], np.uint64))
    return int(key.view(np.uint64)[0, 0] >> np.uint64(11)) / 2**53


def green(last: int, vocab: int) -> list[int]:
    """The green tokens after `last`, as docs/watermark.md describes them."""
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(SEED_FACTOR * last))
    return order[: int(vocab * GAMMA)].tolist()


def typical(s: NDArray[np.float64], mass: float) -> NDArray[np.bool_]:
    """The tokens that typical_p keeps."""
    p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    surprise = np.array([np.inf if one == 0 else -np.log(one) for one in p])
    entropy = sum(one * much for one, much in zip(p, surprise, strict=True) if one)
    kept, total = np.zeros(len(s), bool), 0.0
    for token in np.argsort(abs(surprise - entropy), kind="stable"):
        kept[token] = True
        total += p[token]
        if total >= mass:
            break
    return kept


def reference(
    logits: torch.Tensor, sampling: SamplingParams, history: list[int], prompt: int | None = None
) -> tuple[int, float]:
    s = processed(logits, sampling, history, prompt)
    logprobs = s - s.max() - np.log(np.exp(s - s.max()).sum())
    chosen = int(s.argmax())
    if sampling.samples:
        key = np.array([sampling.seed], np.uint64), np.array([len(history)]), np.array([sampling.choice], np.uint64)
        row_keys = torch.from_numpy(noise_keys(*key))
        q = Noise(len(s), CPU).exponentials(row_keys)[0].double().numpy()
        chosen = int((np.exp(logprobs) / q).argmax())
    return chosen, float(logprobs[chosen])


def penalties(values: Sequence[float]) -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.0, 0.0, *values])


SAMPLING = all_sampling_params(
    do_sample=st.booleans(),
    temperature=st.sampled_from([1.0, 1.0, 0.1, 0.7, 1.5, 20.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 5000, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2, 0.8]),
    choice=st.sampled_from([0, 0, 1, 127]),
    top_n=st.just(0),
    typical_p=st.just(1.0),
    frequency_penalty=penalties([2.0, -2.0, 0.5]),
    count_penalty=penalties([0.1, -2.0, 1.5]),
    presence_penalty=penalties([0.7, 2.0, -1.0]),
    bias_ids=st.sampled_from([b"", b"", pack_column(INT32, [2, 0])]),
    min_new_tokens=st.sampled_from([0, 0, 1, 3]),
    end_ids=st.sampled_from([b"", pack_column(INT32, [1]), pack_column(INT32, [2, 0])]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0]),
).map(lambda sampling: sampling._replace(biases=pack_column(FLOAT32, [-100.0, 1.5]) if sampling.bias_ids else b""))


@settings(max_examples=60)
@given(
    samplings=st.lists(SAMPLING, min_size=1, max_size=6),
    vocab=st.sampled_from([3, 97, TOP_P_WIDTHS[0], TOP_P_WIDTHS[0] + 1, 2003, 9001]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    words=st.lists(st.integers(0, 4), max_size=3),
    random=st.integers(0, 2**32 - 1),
)
def test_every_row_equals_the_reference(
    samplings: list[SamplingParams], vocab: int, scale: float, words: list[int], random: int
) -> None:
    """The bad words of a row are its last tokens, prompt or generated, with the likeliest next token."""
    generator = torch.Generator().manual_seed(random)
    logits = torch.randn(len(samplings), vocab, generator=generator) * scale
    histories = [torch.randint(vocab, (1 + row * 3,), generator=generator).tolist() for row in range(len(samplings))]
    prompts = [(len(history) + 1) // 2 for history in histories]
    for row, likeliest in enumerate(logits.argmax(-1).tolist()):
        sequences = [[*histories[row][len(histories[row]) - size :], likeliest] for size in words]
        samplings[row] = samplings[row]._replace(**bad_words(*sequences))
    ids, logprobs = run(logits, samplings, histories, prompts)
    for row, (sampling, history, prompt) in enumerate(zip(samplings, histories, prompts, strict=True)):
        expected, logprob = reference(logits[row], sampling, history, prompt)
        if ids[row] == expected:
            assert logprobs[row].item() == pytest.approx(logprob, abs=2e-4 if sampling.top_p == 1.0 else 2e-3)
        else:  # a token at the border of top_p, or a photo finish: rare, and only among near-equals
            assert near(logits[row], sampling, history, prompt, int(ids[row])), (row, int(ids[row]), expected)


def near(logits: torch.Tensor, sampling: SamplingParams, history: list[int], prompt: int, got: int) -> bool:
    """Whether a change of p by 1e-5 or of the scores by 1e-5 makes the reference choose `got`."""
    for top_p in {sampling.top_p, max(1e-9, sampling.top_p - 1e-5), min(1.0, sampling.top_p + 1e-5)}:
        other = sampling._replace(top_p=top_p, do_sample=sampling.samples)
        if reference(logits, other, history, prompt)[0] == got:
            return True
        lifted = logits.clone()
        lifted[got] += 1e-5 * max(1.0, float(abs(lifted[got])))
        if reference(lifted, other, history, prompt)[0] == got:
            return True
    return False


MIX = [
    GREEDY,
    SamplingParams(1, do_sample=True),
    SamplingParams(2, temperature=0.7),
    SamplingParams(3, top_k=5),
    SamplingParams(4, top_p=0.9),
    SamplingParams(5, temperature=3.0, top_p=0.99),  # a wide nucleus
    SamplingParams(6, repetition_penalty=1.3),
    SamplingParams(7, temperature=0.9, top_k=50, top_p=0.8, repetition_penalty=1.1),
    SamplingParams(8, typical_p=0.6),
    SamplingParams(9, temperature=3.0, typical_p=0.99),  # wide again
    SamplingParams(10, frequency_penalty=-1.5),
    SamplingParams(11, count_penalty=1.1, presence_penalty=-0.3),
    SamplingParams(12, **bias({3: 5.5, 77: -100.0, 130: 1e-3})),
    SamplingParams(
        13, temperature=0.8, top_k=10, top_p=0.95, typical_p=0.95, frequency_penalty=1.3, presence_penalty=2.0
    ),
    SamplingParams(14, watermark=True),
    SamplingParams(
        15,
        temperature=1.4,
        watermark=True,
        repetition_penalty=0.9,
        min_new_tokens=9,
        end_ids=pack_column(INT32, [5, 1]),
    ),
    SamplingParams(16, min_p=0.05, temperature=1.5),
    SamplingParams(17, min_p=0.2, top_k=30, top_p=0.9, typical_p=0.9),
    SamplingParams(18, do_sample=True, **bad_words([4], [9, 3], [1, 2, 3], [4, 5])),
    SamplingParams(19, xtc_probability=0.6, xtc_threshold=0.01, temperature=0.8),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [131, 8191, 49152])
def test_a_row_has_the_same_bits_in_any_batch(threads: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(32, vocab, generator=generator) * 3
    samplings = [MIX[row % len(MIX)]._replace(seed=row) for row in range(32)]
    histories = [torch.randint(vocab, (1 + row * 5 % 37,), generator=generator).tolist() for row in range(32)]
    prompts = [(len(ids) + 2) // 3 for ids in histories]

    def some(rows: slice) -> tuple[Any, Any]:
        return run(logits[rows], samplings[rows], histories[rows], prompts[rows])

    alone = [some(slice(r, r + 1)) for r in range(32)]
    torch.set_num_threads(threads)
    for size in (1, 2, 3, 7, 32) if threads == 1 else (1, 2, 5):
        for begin in {0, 5, 32 - size}:
            rows = slice(begin, min(begin + size, 32))
            ids, logprobs = some(rows)
            assert ids.tolist() == [int(one[0]) for one in alone[rows]]
            assert torch.equal(logprobs, torch.cat([one[1] for one in alone[rows]]))


DISTRIBUTIONS = [
    *(MIX[k] for k in (1, 2, 3, 4, 5, 7, 8, 13, 15, 16)),
    SamplingParams(20, do_sample=True, repetition_penalty=1.5),
    SamplingParams(21, do_sample=True, frequency_penalty=-2.0),
    SamplingParams(22, do_sample=True, count_penalty=0.7, presence_penalty=-1.0),
    SamplingParams(23, do_sample=True, **bias({3: 2.0, 7: -100.0})),
    SamplingParams(24, do_sample=True, watermark=True),
    SamplingParams(25, do_sample=True, min_p=0.3, **bad_words([3], [4, 2, 5], [9, 2, 6])),
]


@pytest.mark.parametrize("sampling", DISTRIBUTIONS, ids=lambda sampling: str(sampling.seed))
def test_the_sampled_distribution_is_the_processed_one(sampling: SamplingParams) -> None:
    """10,000 samples with as many seeds, against the reference's probabilities: chi-square."""
    count, vocab, history, prompt = 10_000, 24, [9, 4, 4, 11, 4, 2], 2
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    s = processed(logits, sampling, history, prompt)
    probabilities = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    ids, _ = run(
        logits.repeat(count, 1),
        [sampling._replace(seed=seed) for seed in range(count)],
        [history] * count,
        [prompt] * count,
    )
    seen = np.bincount(ids.numpy(), minlength=vocab)
    assert (seen[probabilities == 0] == 0).all()
    often = probabilities * count > 5
    expected = probabilities[often] * count
    chi = ((seen[often] - expected) ** 2 / expected).sum()
    free = max(1, often.sum() - 1)
    assert (chi - free) / np.sqrt(2 * free) < 5


def test_seeds_differ_and_repeat() -> None:
    logits = torch.randn(1, 1000)
    picks = [int(run(logits, [SamplingParams(seed, do_sample=True)], [[1]])[0]) for seed in range(50)]
    again = [int(run(logits, [SamplingParams(seed, do_sample=True)], [[1]])[0]) for seed in range(50)]
    assert picks == again
    assert len(set(picks)) > 25


def test_choices_differ_and_the_first_is_that_of_a_request_for_one() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(7))
    samplings = [SamplingParams(3, do_sample=True, choice=choice) for choice in range(50)]
    picks = run(logits.repeat(50, 1), samplings, [[1]] * 50)[0].tolist()
    assert picks[0] == int(run(logits[None], [SamplingParams(3, do_sample=True)], [[1]])[0])
    assert len(set(picks)) > 25
    assert picks[20:23] == run(logits.repeat(3, 1), samplings[20:23], [[1]] * 3)[0].tolist()
    greedy = [sampling._replace(do_sample=False) for sampling in samplings]
    assert len(set(run(logits.repeat(50, 1), greedy, [[1]] * 50)[0].tolist())) == 1


def test_ties() -> None:
    """Greedy takes the lowest id; top_k keeps all that equal the k-th; top_p keeps its mass and no more."""
    flat = torch.zeros(1, 8)
    ids, logprobs = run(flat, [GREEDY], [[1]])
    assert (ids.tolist(), logprobs.tolist()) == ([0], pytest.approx([-np.log(8)]))
    assert run(flat, [SamplingParams(1, top_k=2)], [[1]])[1].tolist() == pytest.approx([-np.log(8)])
    assert run(flat, [SamplingParams(1, top_p=0.5)], [[1]])[1].tolist() == pytest.approx([-np.log(4)])
    assert argmax(torch.tensor([[0.0, 2.0, 2.0], [3.0, 3.0, 1.0]])).tolist() == [1, 0]


def test_top_k_of_one_is_certain() -> None:
    _, logprobs = run(torch.randn(1, 100), [SamplingParams(1, top_k=1)], [[1]])
    assert logprobs.tolist() == [0.0]


def test_extreme_settings_give_finite_logprobs() -> None:
    logits = torch.randn(4, 100) * 10
    absurd = [
        SamplingParams(1, temperature=1e-45),
        SamplingParams(1, repetition_penalty=1e-45, temperature=1e-45),
        SamplingParams(1, repetition_penalty=1e38, top_p=1e-12),
        SamplingParams(1, temperature=1e38, top_p=1e-300),
    ]
    ids, logprobs = run(logits, absurd, [[1, 2, 3]] * 4)
    assert torch.isfinite(logprobs).all()
    assert ((ids >= 0) & (ids < 100)).all()
    assert ids[0] == logits[0].argmax()
