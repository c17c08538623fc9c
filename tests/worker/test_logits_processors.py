"""Logits processors: temperature limits, penalties and biases against their definitions, on borders, and combined.

typical_p is compared with its definition in float64, min_p with transformers. The other processors have documented
examples here and a reference in test_sampling.py.
"""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.cases import each_case
from tests.worker.test_sampling import bias, processed, run, sampling_batch
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.sampling import logits_processors
from tgi.worker.sampling.logits_processors import (
    LOGITS_PROCESSORS,
    TOP_P_WIDTHS,
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_typical_p,
    apply_xtc,
)

MASSES = [0.001, 0.2, 0.5, 0.95, 0.999, 0.999999]


def kept(scores: torch.Tensor, *samplings: SamplingParams) -> NDArray[np.bool_]:
    """The tokens that remain in each row, bool [rows, vocab]."""
    scores = scores.clone()
    batch = sampling_batch(samplings, [[0]] * len(samplings))
    for limit in (apply_top_k, apply_top_p, apply_min_p, apply_typical_p, apply_xtc):
        limit(scores, batch)
    return (scores > -torch.inf).numpy()


def distances(scores: torch.Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The probabilities of one row, and the distance of each token's surprise from the entropy."""
    s = scores.double().numpy()
    p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    entropy = (p[p > 0] * surprise[p > 0]).sum()
    return p, abs(surprise - entropy)


@settings(max_examples=50)
@given(
    masses=st.lists(st.sampled_from([*MASSES, 1.0]), min_size=1, max_size=5),
    vocab=st.sampled_from([1, 2, 3, 97, TOP_P_WIDTHS[0], TOP_P_WIDTHS[0] + 1, 2003, 9001]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0, 1e4]),
    filtered=st.sampled_from([0.0, 0.5, 0.99]),
    random=st.integers(0, 2**32 - 1),
)
def test_typical_p_keeps_the_smallest_typical_set(
    masses: list[float], vocab: int, scale: float, filtered: float, random: int
) -> None:
    """The shortest prefix of the ranking that reaches the mass, within float32 rounding at the border."""
    generator = torch.Generator().manual_seed(random)
    scores = torch.randn(len(masses), vocab, generator=generator) * scale
    scores[torch.rand(scores.shape, generator=generator) < filtered] = -torch.inf
    scores[:, 0] = 0.5  # never nothing
    got = kept(scores, *(SamplingParams(0, typical_p=mass) for mass in masses))
    for row, mass, stays in zip(scores, masses, got, strict=True):
        p, distance = distances(row)
        if mass == 1.0:
            assert (stays == (row > -torch.inf).numpy()).all()
            continue
        blur = 1e-5 * max(1.0, scale)
        assert stays.any()
        assert not stays[p == 0].any() or p[stays & (p > 0)].sum() > 1 - blur
        assert p[stays].sum() >= mass - blur
        if stays.sum() > 1:
            assert p[stays].sum() - p[stays & (distance >= distance[stays].max() - blur)].sum() < mass + blur
        left = ~stays & (p > 0)
        if left.any():
            assert distance[stays & (p > 0)].max() <= distance[left].min() + blur


HALF = [0.5, 0.25, 0.125, 0.125]  # surprise 1, 2, 3, 3 bits; entropy 1.75: distances 0.75, 0.25, 1.25, 1.25


@each_case(
    ("mass", "left"),
    [
        (0.001, [1]),  # at least one; and it need not be the likeliest
        (0.24, [1]),
        (0.26, [0, 1]),  # the token that crosses stays
        (0.74, [0, 1]),
        (0.76, [0, 1, 2]),
        (0.88, [0, 1, 2, 3]),
        (0.999, [0, 1, 2, 3]),
    ],
)
def test_typical_p_ranks_by_distance_from_the_entropy(mass: float, left: list[int]) -> None:
    stays = kept(torch.tensor([HALF]).log(), SamplingParams(0, typical_p=mass))[0]
    assert stays.nonzero()[0][:2].tolist() == left[:2]
    assert stays.sum() == len(left)


@each_case("vocab", [1, 64, 1000])
def test_typical_p_on_a_flat_row(vocab: int) -> None:
    assert kept(torch.zeros(1, vocab), SamplingParams(0, typical_p=0.5)).sum() == max(1, vocab // 2)


def test_typical_p_keeps_a_certain_token() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 90.0, -90.0]])
    assert kept(scores, SamplingParams(0, typical_p=0.9))[0].tolist() == [False, False, True, False]


def test_typical_p_ranks_the_tokens_that_other_limits_leave() -> None:
    """After top_k 2 the distribution is (2/3, 1/3): the likeliest token is the nearest to its entropy."""
    scores = torch.tensor([HALF]).log()
    assert kept(scores, SamplingParams(0, top_k=2, typical_p=0.5))[0].tolist() == [True, False, False, False]
    assert kept(scores, SamplingParams(0, top_p=0.6, typical_p=0.7))[0].tolist() == [True, True, False, False]


def test_a_mass_spread_wider_than_the_first_widths() -> None:
    """Each of TOP_P_WIDTHS is used: rows whose typical set has tens, thousands, and nearly all of the tokens."""
    vocab = 20_000
    scores = torch.randn(3, vocab, generator=torch.Generator().manual_seed(5)) * torch.tensor([[4.0], [0.5], [0.1]])
    together = kept(scores, *[SamplingParams(0, typical_p=mass) for mass in (0.3, 0.2, 0.99)])
    sizes = together.sum(1)
    assert sizes[0] <= TOP_P_WIDTHS[0] < sizes[1] <= TOP_P_WIDTHS[1] < sizes[2]
    for row, mass in enumerate((0.3, 0.2, 0.99)):
        assert (kept(scores[row : row + 1], SamplingParams(0, typical_p=mass))[0] == together[row]).all()


@settings(max_examples=50)
@given(
    shares=st.lists(st.sampled_from([0.0, 1e-30, 0.001, 0.05, 0.3, 0.9, 1.0]), min_size=1, max_size=5),
    vocab=st.sampled_from([1, 2, 97, 2003, 9001]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0]),
    filtered=st.sampled_from([0.0, 0.5, 0.99]),
    random=st.integers(0, 2**32 - 1),
)
def test_min_p_keeps_what_transformers_keeps(
    shares: list[float], vocab: int, scale: float, filtered: float, random: int
) -> None:
    """Except within rounding of the border."""
    generator = torch.Generator().manual_seed(random)
    scores = torch.randn(len(shares), vocab, generator=generator) * scale
    scores[torch.rand(scores.shape, generator=generator) < filtered] = -torch.inf
    scores[:, 0] = 0.5  # never nothing
    got = kept(scores, *(SamplingParams(0, min_p=share) for share in shares))
    for row, share, stays in zip(scores.double(), shares, got, strict=True):
        want = (transformers.MinPLogitsWarper(share)(None, row[None])[0] > -torch.inf).numpy()
        margin = (row - row.max()).numpy() - np.log(share) if share else np.full(vocab, np.inf)
        assert ((stays == want) | (abs(margin) < 1e-5 * max(1.0, scale))).all()
        assert stays[row.argmax()]


@each_case(("share", "left"), [(0.2, 4), (0.2501, 2), (0.49, 2), (0.51, 1), (1.0, 1)])
def test_min_p_is_a_share_of_the_largest_probability(share: float, left: int) -> None:
    stays = kept(torch.tensor([HALF]).log(), SamplingParams(0, min_p=share))[0]
    assert stays.tolist() == [place < left for place in range(4)]


def test_min_p_keeps_all_that_equal_the_likeliest() -> None:
    assert kept(torch.zeros(1, 8), SamplingParams(0, min_p=1.0)).sum() == 8


@each_case(
    ("threshold", "left"),
    [
        (0.1, [False, False, True, True]),  # HALF's last two tokens tie
        (0.2, [False, True, True, True]),
        (0.4, [True, True, True, True]),  # one token alone is kept
        (0.6, [True, True, True, True]),  # there is none
        (0.0, [False, False, True, True]),
    ],
)
def test_xtc_keeps_the_least_likely_of_the_top_tokens(threshold: float, left: list[bool]) -> None:
    sampling = SamplingParams(0, xtc_probability=1.0, xtc_threshold=threshold)
    assert kept(torch.tensor([HALF]).log(), sampling)[0].tolist() == left


def test_xtc_does_not_bring_back_what_other_limits_removed() -> None:
    logits = torch.tensor([HALF]).log()
    sampling = SamplingParams(0, xtc_probability=1.0, xtc_threshold=0.0, top_k=2)
    assert kept(logits, sampling)[0].tolist() == [False, True, False, False]


def test_xtc_acts_at_its_share_of_positions_the_same_ones_for_the_same_seed() -> None:
    count, share = 20_000, 0.3
    logits = torch.tensor([HALF]).log().repeat(count, 1)

    def acts(threshold: float, **fields: int) -> NDArray[np.bool_]:
        """At each of `count` positions of one request, computed in one batch."""
        sampling = SamplingParams(7, xtc_probability=share, xtc_threshold=threshold, **fields)
        batch = sampling_batch([sampling] * count, [[0]] * count)._replace(positions=np.arange(count))
        scores = logits.clone()
        apply_xtc(scores, batch)
        return ~(scores[:, 0] > -torch.inf).numpy()

    first = acts(0.1)
    assert abs(first.mean() - share) < 4 * (share * (1 - share) / count) ** 0.5
    assert (acts(0.1) == first).all()
    assert (acts(0.15) == first).all()
    for other in (acts(0.1, choice=1), acts(0.1)[::-1]):
        assert abs((other == first).mean() - (share**2 + (1 - share) ** 2)) < 0.02


def test_xtc_is_neutral_without_a_probability() -> None:
    scores = torch.randn(1, 97, generator=torch.Generator().manual_seed(1)) * 3
    assert kept(scores, SamplingParams(0, xtc_threshold=0.0)).all()


def test_min_p_ignores_tokens_removed_by_top_k_and_top_p() -> None:
    scores = torch.tensor([HALF]).log()
    assert kept(scores, SamplingParams(0, min_p=0.4, top_k=3))[0].tolist() == [True, True, False, False]
    assert kept(scores, SamplingParams(0, min_p=0.4, top_p=0.8))[0].tolist() == [True, True, False, False]
    assert kept(scores, SamplingParams(0, min_p=0.2, top_p=0.4))[0].tolist() == [True, False, False, False]


# Penalties and biases


GREEDY = SamplingParams(0)
NO_SCORES = torch.zeros(1, 6)


def scores(
    logits: torch.Tensor, samplings: list[SamplingParams], ids: list[list[int]], prompts: list[int]
) -> torch.Tensor:
    """The logits after all processors."""
    made, batch = logits.clone(), sampling_batch(samplings, ids, prompts)
    for process in LOGITS_PROCESSORS:
        process(made, batch)
    return made


def one(sampling: SamplingParams, ids: list[int], prompt: int) -> list[float]:
    """The penalties of one row whose logits are 0."""
    return scores(NO_SCORES, [sampling], [ids], [prompt])[0].tolist()


def test_tgis_frequency_penalty_is_a_share_of_prompt_and_answer() -> None:
    ids = [1, 2, 2, 3, 1, 2, 2, 5]
    assert one(SamplingParams(0, frequency_penalty=2.0), ids, 5) == [0.0, -0.5, -1.0, -0.25, 0.0, -0.25]
    assert one(SamplingParams(0, frequency_penalty=-2.0), ids, 8) == [0.0, 0.5, 1.0, 0.25, 0.0, 0.25]


def test_openais_penalties_count_what_was_generated() -> None:
    ids = [1, 2, 2, 3, 1, 2, 2, 5]
    assert one(SamplingParams(0, count_penalty=0.5), ids, 4) == [0.0, -0.5, -1.0, 0.0, 0.0, -0.5]
    assert one(SamplingParams(0, presence_penalty=0.5), ids, 4) == [0.0, -0.5, -0.5, 0.0, 0.0, -0.5]
    both = SamplingParams(0, count_penalty=-0.5, presence_penalty=2.0)
    assert one(both, ids, 4) == [0.0, -1.5, -1.0, 0.0, 0.0, -1.5]
    assert one(both, ids, 8) == [0.0] * 6  # the first token of an answer: nothing was generated


def test_penalties_and_biases_are_added_after_the_repetition_penalty() -> None:
    """The repetition penalty applies to the model's logits, and does not multiply the bias."""
    sampling = SamplingParams(
        0, repetition_penalty=2.0, frequency_penalty=1.0, count_penalty=0.5, **bias({1: 3.0, 4: -1.0})
    )
    logits = torch.tensor([[1.0, 4.0, -4.0, 1.0, 1.0, 1.0]])
    made = scores(logits, [sampling], [[1, 2, 2, 2]], [3])[0]
    assert made.tolist() == [1.0, 4 / 2 - 0.25 + 3.0, -4.0 * 2 - 0.75 - 0.5, 1.0, 0.0, 1.0]


def test_rows_of_all_kinds_and_lengths_in_one_batch() -> None:
    """Rows without generated ids next to long ones, an id that pads short rows, and rows without penalties."""
    vocab, generator = 50, torch.Generator().manual_seed(2)
    kinds = [
        GREEDY,
        SamplingParams(0, frequency_penalty=1.5),
        SamplingParams(0, count_penalty=0.3),
        SamplingParams(0, presence_penalty=-1.0, repetition_penalty=1.4),
        SamplingParams(0, **bias({0: 100.0, 49: -100.0})),
        SamplingParams(0, frequency_penalty=-1.0, count_penalty=2.0, presence_penalty=1.0, **bias({7: 0.5})),
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


@settings(max_examples=40)
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
    """While the answer is short enough for its penalties to stay below 100."""
    generator = torch.Generator().manual_seed(random)
    logits = torch.randn(1, 97, generator=generator).clamp(-2, 2)
    ids = [*range(97), token, token]
    plain = SamplingParams(
        random, samples, temperature, 0, 1.0, repetition, frequency_penalty=penalty, count_penalty=penalty
    )
    forced, banned = plain._replace(**bias({token: 100.0})), plain._replace(**bias({token: -100.0}))
    assert int(run(logits, [forced], [ids], [97])[0]) == token
    likely = logits.clone()
    likely[0, token] = 20.0
    assert int(run(likely, [banned], [ids], [97])[0]) != token


def test_greedy_rows_are_penalised_too() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.9, -1.0]])
    for sampling in (
        SamplingParams(0, frequency_penalty=1.0),
        SamplingParams(0, count_penalty=0.2),
        SamplingParams(0, presence_penalty=0.2),
        SamplingParams(0, **bias({2: 0.2})),
    ):
        assert not sampling.samples
        assert run(logits, [sampling], [[3, 1]], [1])[0].tolist() == [2]
    assert run(logits, [GREEDY], [[3, 1]], [1])[0].tolist() == [1]


def test_the_largest_counts_are_exact() -> None:
    """An answer of one token, many thousand times."""
    ids = [1] * 100_001
    made = one(SamplingParams(0, count_penalty=0.001, presence_penalty=1.0), ids, 1)
    assert made[1] == pytest.approx(-(100_000 * np.float32(0.001)) - 1.0, abs=1e-5)


PENALIZED = [
    SamplingParams(0, repetition_penalty=1.5),
    SamplingParams(0, frequency_penalty=3.0),
    SamplingParams(0, count_penalty=0.7, presence_penalty=-1.0),
]


@pytest.mark.parametrize("sampling", PENALIZED, ids=["repetition", "frequency", "count"])
def test_a_history_in_parts_gives_the_same_bits(sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of all lengths, some of which end parts before others do, with ids that occur in several parts."""
    generator = torch.Generator().manual_seed(2)
    histories = [torch.randint(20, (length,), generator=generator).tolist() for length in (1, 5, 6, 18, 40)]
    batch = sampling_batch([sampling] * len(histories), histories, [0] * len(histories))
    logits = torch.randn(len(histories), 24, generator=generator) * 4
    found = []
    for part in (5, 100):
        monkeypatch.setattr(logits_processors, "HISTORY_TOKENS", part)
        found.append(logits.clone())
        logits_processors.apply_logits_processors(found[-1], batch)
    assert torch.equal(*found)
    assert not torch.equal(found[0], logits)
