"""Sampling against a plain reference in float64, statistically, and bit for bit under any batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tgi.kernel.messages import Sampling
from tgi.worker.noise import Noise, keys
from tgi.worker.sampling import NUCLEUS, Draws, argmax, sample

CPU = torch.device("cpu")
GREEDY = Sampling(0)


def draws(samplings: Sequence[Sampling], histories: Sequence[list[int]]) -> Draws:
    def history(rows: NDArray[np.int64]) -> torch.Tensor:
        longest = max(len(histories[row]) for row in rows)
        return torch.tensor([histories[r] + histories[r][:1] * (longest - len(histories[r])) for r in rows])

    def column(name: str, dtype: Any) -> NDArray[Any]:
        return np.array([getattr(sampling, name) for sampling in samplings], dtype)

    return Draws(
        column("samples", bool),
        column("temperature", np.float32),
        column("top_k", np.int64),
        column("top_p", np.float64),
        column("repetition_penalty", np.float32),
        column("seed", np.uint64),
        column("choice", np.uint64),
        column("top_n", np.int64),
        np.array([len(ids) for ids in histories]),
        history,
    )


def run(logits: torch.Tensor, samplings: Sequence[Sampling], histories: Sequence[list[int]]) -> tuple[Any, Any]:
    drawn = sample(logits.clone(), draws(samplings, histories), Noise(logits.shape[1], CPU))
    return drawn.ids, drawn.logprobs


def processed(logits: torch.Tensor, sampling: Sampling, history: list[int]) -> NDArray[np.float64]:
    """The reference: one row, in float64, formula by formula."""
    s = logits.double().numpy().copy()
    p = float(np.float32(sampling.repetition_penalty))
    for token in set(history):
        s[token] = s[token] * p if s[token] < 0 else s[token] / p
    s /= float(np.float32(sampling.temperature))
    if 0 < sampling.top_k < len(s):
        s[s < np.sort(s)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1.0:
        order = np.argsort(s, kind="stable")
        e = np.exp(s[order] - s.max())
        drop = np.cumsum(e / e.sum()) <= 1 - sampling.top_p
        drop[-1] = False
        s[order[drop]] = -np.inf
    return s


def reference(logits: torch.Tensor, sampling: Sampling, history: list[int]) -> tuple[int, float]:
    s = processed(logits, sampling, history)
    logprobs = s - s.max() - np.log(np.exp(s - s.max()).sum())
    chosen = int(s.argmax())
    if sampling.samples:
        key = np.array([sampling.seed], np.uint64), np.array([len(history)]), np.array([sampling.choice], np.uint64)
        row_keys = torch.from_numpy(keys(*key))
        q = Noise(len(s), CPU).exponentials(row_keys)[0].double().numpy()
        chosen = int((np.exp(logprobs) / q).argmax())
    return chosen, float(logprobs[chosen])


SAMPLING = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    do_sample=st.booleans(),
    temperature=st.sampled_from([1.0, 1.0, 0.1, 0.7, 1.5, 20.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 5000, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2, 0.8]),
    choice=st.sampled_from([0, 0, 1, 127]),
    top_n=st.just(0),
)


@settings(max_examples=60, deadline=None)
@given(
    samplings=st.lists(SAMPLING, min_size=1, max_size=6),
    vocab=st.sampled_from([3, 97, NUCLEUS[0], NUCLEUS[0] + 1, 2003, 9001]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    random=st.integers(0, 2**32 - 1),
)
def test_every_row_equals_the_reference(samplings: list[Sampling], vocab: int, scale: float, random: int) -> None:
    generator = torch.Generator().manual_seed(random)
    logits = torch.randn(len(samplings), vocab, generator=generator) * scale
    histories = [torch.randint(vocab, (1 + row * 3,), generator=generator).tolist() for row in range(len(samplings))]
    ids, logprobs = run(logits, samplings, histories)
    for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True)):
        expected, logprob = reference(logits[row], sampling, history)
        s = processed(logits[row], sampling, history)
        if ids[row] == expected:
            assert logprobs[row].item() == pytest.approx(logprob, abs=2e-4 if sampling.top_p == 1.0 else 2e-3)
        else:  # a token at the border of top_p, or a photo finish: rare, and only among near-equals
            assert near(logits[row], sampling, history, int(ids[row]), expected), (row, int(ids[row]), expected, s)


def near(logits: torch.Tensor, sampling: Sampling, history: list[int], got: int, expected: int) -> bool:
    """Whether a change of p by 1e-5 or of the scores by 1e-5 makes the reference choose `got`."""
    for top_p in {sampling.top_p, max(1e-9, sampling.top_p - 1e-5), min(1.0, sampling.top_p + 1e-5)}:
        other = sampling._replace(top_p=top_p, do_sample=sampling.samples)
        if reference(logits, other, history)[0] == got:
            return True
        lifted = logits.clone()
        lifted[got] += 1e-5 * max(1.0, float(abs(lifted[got])))
        if reference(lifted, other, history)[0] == got:
            return True
    return False


MIX = [
    GREEDY,
    Sampling(1, do_sample=True),
    Sampling(2, temperature=0.7),
    Sampling(3, top_k=5),
    Sampling(4, top_p=0.9),
    Sampling(5, temperature=3.0, top_p=0.99),  # a wide nucleus
    Sampling(6, repetition_penalty=1.3),
    Sampling(7, temperature=0.9, top_k=50, top_p=0.8, repetition_penalty=1.1),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [131, 8191, 49152])
def test_a_row_has_the_same_bits_in_any_batch(threads: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(32, vocab, generator=generator) * 3
    samplings = [MIX[row % len(MIX)]._replace(seed=row) for row in range(32)]
    histories = [torch.randint(vocab, (1 + row * 5 % 37,), generator=generator).tolist() for row in range(32)]
    alone = [run(logits[r : r + 1], samplings[r : r + 1], histories[r : r + 1]) for r in range(32)]
    torch.set_num_threads(threads)
    for size in (1, 2, 3, 7, 32) if threads == 1 else (1, 2, 5):
        for begin in {0, 5, 32 - size}:
            rows = slice(begin, min(begin + size, 32))
            ids, logprobs = run(logits[rows], samplings[rows], histories[rows])
            assert ids.tolist() == [int(one[0]) for one in alone[rows]]
            assert torch.equal(logprobs, torch.cat([one[1] for one in alone[rows]]))


@pytest.mark.parametrize("sampling", [MIX[1], MIX[2], MIX[3], MIX[4], MIX[7]], ids=str)
def test_the_drawn_distribution_is_the_processed_one(sampling: Sampling) -> None:
    """20,000 draws at as many positions, against the reference's probabilities."""
    count, vocab = 20_000, 24
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    s = processed(logits, sampling, [0])
    probabilities = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    batch = draws([sampling] * count, [[0]] * count)._replace(position=np.arange(count))
    ids = sample(logits.repeat(count, 1), batch, Noise(vocab, CPU)).ids
    seen = np.bincount(ids.numpy(), minlength=vocab)
    assert (seen[probabilities == 0] == 0).all()
    often = probabilities * count > 5
    expected = probabilities[often] * count
    chi = ((seen[often] - expected) ** 2 / expected).sum()
    free = max(1, often.sum() - 1)
    assert (chi - free) / np.sqrt(2 * free) < 5


def test_seeds_differ_and_repeat() -> None:
    logits = torch.randn(1, 1000)
    picks = [int(run(logits, [Sampling(seed, do_sample=True)], [[1]])[0]) for seed in range(50)]
    again = [int(run(logits, [Sampling(seed, do_sample=True)], [[1]])[0]) for seed in range(50)]
    assert picks == again
    assert len(set(picks)) > 25


def test_choices_differ_and_the_first_is_that_of_a_request_for_one() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(7))
    samplings = [Sampling(3, do_sample=True, choice=choice) for choice in range(50)]
    picks = run(logits.repeat(50, 1), samplings, [[1]] * 50)[0].tolist()
    assert picks[0] == int(run(logits[None], [Sampling(3, do_sample=True)], [[1]])[0])
    assert len(set(picks)) > 25
    assert picks[20:23] == run(logits.repeat(3, 1), samplings[20:23], [[1]] * 3)[0].tolist()
    greedy = [sampling._replace(do_sample=False) for sampling in samplings]
    assert len(set(run(logits.repeat(50, 1), greedy, [[1]] * 50)[0].tolist())) == 1


def test_ties() -> None:
    """Greedy takes the lowest id; top_k keeps all that equal the k-th; top_p keeps its mass and no more."""
    flat = torch.zeros(1, 8)
    ids, logprobs = run(flat, [GREEDY], [[1]])
    assert (ids.tolist(), logprobs.tolist()) == ([0], pytest.approx([-np.log(8)]))
    assert run(flat, [Sampling(1, top_k=2)], [[1]])[1].tolist() == pytest.approx([-np.log(8)])
    assert run(flat, [Sampling(1, top_p=0.5)], [[1]])[1].tolist() == pytest.approx([-np.log(4)])
    assert argmax(torch.tensor([[0.0, 2.0, 2.0], [3.0, 3.0, 1.0]])).tolist() == [1, 0]


def test_top_k_of_one_is_certain() -> None:
    _, logprobs = run(torch.randn(1, 100), [Sampling(1, top_k=1)], [[1]])
    assert logprobs.tolist() == [0.0]


def test_absurd_settings_give_numbers() -> None:
    logits = torch.randn(4, 100) * 10
    absurd = [
        Sampling(1, temperature=1e-45),
        Sampling(1, repetition_penalty=1e-45, temperature=1e-45),
        Sampling(1, repetition_penalty=1e38, top_p=1e-12),
        Sampling(1, temperature=1e38, top_p=1e-300),
    ]
    ids, logprobs = run(logits, absurd, [[1, 2, 3]] * 4)
    assert torch.isfinite(logprobs).all()
    assert ((ids >= 0) & (ids < 100)).all()
    assert ids[0] == logits[0].argmax()
