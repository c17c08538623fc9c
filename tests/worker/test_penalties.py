"""Penalties and biases: the contract's formulas on small numbers, each row by itself, and what they cannot undo."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.test_sampling import bias, draws, processed, run
from tgi.kernel.messages import Sampling
from tgi.worker.sampling import PROCESSORS

GREEDY = Sampling(0)
NO_SCORES = torch.zeros(1, 6)


def scores(logits: torch.Tensor, samplings: list[Sampling], ids: list[list[int]], prompts: list[int]) -> torch.Tensor:
    """What the processors make of them."""
    made, batch = logits.clone(), draws(samplings, ids, prompts)
    for process in PROCESSORS:
        process(made, batch)
    return made


def one(sampling: Sampling, ids: list[int], prompt: int) -> list[float]:
    """The penalties of one row, its scores being 0 without them."""
    return scores(NO_SCORES, [sampling], [ids], [prompt])[0].tolist()


def test_tgis_frequency_penalty_is_a_share_of_prompt_and_answer() -> None:
    ids = [1, 2, 2, 3, 1, 2, 2, 5]
    assert one(Sampling(0, frequency_penalty=2.0), ids, 5) == [0.0, -0.5, -1.0, -0.25, 0.0, -0.25]
    assert one(Sampling(0, frequency_penalty=-2.0), ids, 8) == [0.0, 0.5, 1.0, 0.25, 0.0, 0.25]


def test_openais_penalties_count_what_was_generated() -> None:
    ids = [1, 2, 2, 3, 1, 2, 2, 5]
    assert one(Sampling(0, count_penalty=0.5), ids, 4) == [0.0, -0.5, -1.0, 0.0, 0.0, -0.5]
    assert one(Sampling(0, presence_penalty=0.5), ids, 4) == [0.0, -0.5, -0.5, 0.0, 0.0, -0.5]
    both = Sampling(0, count_penalty=-0.5, presence_penalty=2.0)
    assert one(both, ids, 4) == [0.0, -1.5, -1.0, 0.0, 0.0, -1.5]
    assert one(both, ids, 8) == [0.0] * 6  # the first token of an answer: nothing was generated


def test_penalties_and_biases_add_up_behind_the_repetition_penalty() -> None:
    """The repetition penalty sees the model's own scores, and the bias is not multiplied."""
    sampling = Sampling(0, repetition_penalty=2.0, frequency_penalty=1.0, count_penalty=0.5, **bias({1: 3.0, 4: -1.0}))
    logits = torch.tensor([[1.0, 4.0, -4.0, 1.0, 1.0, 1.0]])
    made = scores(logits, [sampling], [[1, 2, 2, 2]], [3])[0]
    assert made.tolist() == [1.0, 4 / 2 - 0.25 + 3.0, -4.0 * 2 - 0.75 - 0.5, 1.0, 0.0, 1.0]


def test_rows_of_all_kinds_and_lengths_side_by_side() -> None:
    """Rows without generated ids beside long ones, a first id that fills short rows, and rows that ask for nothing."""
    vocab, generator = 50, torch.Generator().manual_seed(2)
    kinds = [
        GREEDY,
        Sampling(0, frequency_penalty=1.5),
        Sampling(0, count_penalty=0.3),
        Sampling(0, presence_penalty=-1.0, repetition_penalty=1.4),
        Sampling(0, **bias({0: 100.0, 49: -100.0})),
        Sampling(0, frequency_penalty=-1.0, count_penalty=2.0, presence_penalty=1.0, **bias({7: 0.5})),
    ]
    samplings = [kinds[row % 6] for row in range(36)]
    ids = [torch.randint(9, (1 + row * row % 41,), generator=generator).tolist() for row in range(36)]
    prompts = [max(1, len(one) - row % 7 * 5) for row, one in enumerate(ids)]
    logits = torch.randn(36, vocab, generator=generator) * 5
    made = scores(logits, samplings, ids, prompts)
    for row in range(36):
        alone = scores(logits[row : row + 1], samplings[row : row + 1], ids[row : row + 1], prompts[row : row + 1])
        assert torch.equal(made[row], alone[0])
        want = processed(logits[row], samplings[row], ids[row], prompts[row])
        assert made[row].numpy() == pytest.approx(want, abs=1e-5)
        if samplings[row] == GREEDY:
            assert torch.equal(made[row], logits[row])


@settings(max_examples=100)
@given(
    token=st.integers(0, 96),
    repetition=st.sampled_from([1.0, 0.5, 20.0]),
    penalty=st.sampled_from([0.0, 2.0, -2.0]),
    temperature=st.sampled_from([1.0, 0.2, 2.0]),
    samples=st.booleans(),
    random=st.integers(0, 2**32 - 1),
)
def test_a_bias_bans_and_forces_under_any_penalty(
    token: int, repetition: float, penalty: float, temperature: float, samples: bool, random: int
) -> None:
    """As far as the answer is short enough for its penalties to stay below 100."""
    generator = torch.Generator().manual_seed(random)
    logits = torch.randn(1, 97, generator=generator).clamp(-2, 2)
    ids = [*range(97), token, token]
    plain = Sampling(random, samples, temperature, 0, 1.0, repetition, frequency_penalty=penalty, count_penalty=penalty)
    forced, banned = plain._replace(**bias({token: 100.0})), plain._replace(**bias({token: -100.0}))
    assert int(run(logits, [forced], [ids], [97])[0]) == token
    likely = logits.clone()
    likely[0, token] = 20.0
    assert int(run(likely, [banned], [ids], [97])[0]) != token


def test_greedy_rows_are_penalised_too() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.9, -1.0]])
    for sampling in (
        Sampling(0, frequency_penalty=1.0),
        Sampling(0, count_penalty=0.2),
        Sampling(0, presence_penalty=0.2),
        Sampling(0, **bias({2: 0.2})),
    ):
        assert not sampling.samples
        assert run(logits, [sampling], [[3, 1]], [1])[0].tolist() == [2]
    assert run(logits, [GREEDY], [[3, 1]], [1])[0].tolist() == [1]


def test_the_largest_counts_are_exact() -> None:
    """An answer of one token, many thousand times."""
    ids = [1] * 100_001
    made = one(Sampling(0, count_penalty=0.001, presence_penalty=1.0), ids, 1)
    assert made[1] == pytest.approx(-(100_000 * np.float32(0.001)) - 1.0, abs=1e-5)
