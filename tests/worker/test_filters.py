"""typical_p against its definition in float64, min_p against transformers: on random scores, on the contract's borders,
behind other limits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import MinPLogitsWarper

from tests.worker.test_sampling import draws
from tgi.kernel.messages import Sampling
from tgi.worker.filters import NUCLEUS, keep_min_p, keep_top_k, keep_top_p, keep_typical_p

MASSES = [0.001, 0.2, 0.5, 0.95, 0.999, 0.999999]


def kept(scores: torch.Tensor, *samplings: Sampling) -> NDArray[np.bool_]:
    """Which tokens of each row are left."""
    scores = scores.clone()
    batch = draws(samplings, [[0]] * len(samplings))
    for limit in (keep_top_k, keep_top_p, keep_min_p, keep_typical_p):
        limit(scores, batch)
    return (scores > -torch.inf).numpy()


def distances(scores: torch.Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of one row: probabilities, and how far each token's surprise is from the entropy."""
    s = scores.double().numpy()
    p = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    entropy = (p[p > 0] * surprise[p > 0]).sum()
    return p, abs(surprise - entropy)


@settings(max_examples=120)
@given(
    masses=st.lists(st.sampled_from([*MASSES, 1.0]), min_size=1, max_size=5),
    vocab=st.sampled_from([1, 2, 3, 97, NUCLEUS[0], NUCLEUS[0] + 1, 2003, 9001]),
    scale=st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0, 1e4]),
    filtered=st.sampled_from([0.0, 0.5, 0.99]),
    random=st.integers(0, 2**32 - 1),
)
def test_what_is_kept_is_the_smallest_typical_set(
    masses: list[float], vocab: int, scale: float, filtered: float, random: int
) -> None:
    """A prefix of the ranking that reaches the mass, and does not without its last token; float32 may blur borders."""
    generator = torch.Generator().manual_seed(random)
    scores = torch.randn(len(masses), vocab, generator=generator) * scale
    scores[torch.rand(scores.shape, generator=generator) < filtered] = -torch.inf
    scores[:, 0] = 0.5  # never nothing
    got = kept(scores, *(Sampling(0, typical_p=mass) for mass in masses))
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


@pytest.mark.parametrize(
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
def test_ranked_by_distance_from_the_entropy(mass: float, left: list[int]) -> None:
    stays = kept(torch.tensor([HALF]).log(), Sampling(0, typical_p=mass))[0]
    assert stays.nonzero()[0][:2].tolist() == left[:2]
    assert stays.sum() == len(left)


@pytest.mark.parametrize("vocab", [1, 64, 1000])
def test_a_flat_row_keeps_its_mass(vocab: int) -> None:
    assert kept(torch.zeros(1, vocab), Sampling(0, typical_p=0.5)).sum() == max(1, vocab // 2)


def test_a_certain_token_stays() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 90.0, -90.0]])
    assert kept(scores, Sampling(0, typical_p=0.9))[0].tolist() == [False, False, True, False]


def test_it_ranks_what_the_other_limits_leave() -> None:
    """Behind top_k 2 the distribution is (2/3, 1/3): the likeliest is the nearest to its entropy."""
    scores = torch.tensor([HALF]).log()
    assert kept(scores, Sampling(0, top_k=2, typical_p=0.5))[0].tolist() == [True, False, False, False]
    assert kept(scores, Sampling(0, top_p=0.6, typical_p=0.7))[0].tolist() == [True, True, False, False]


def test_a_mass_spread_wider_than_any_first_look() -> None:
    """Every width is tried: rows whose typical set has tens, thousands, and all but none of the tokens."""
    vocab = 20_000
    scores = torch.randn(3, vocab, generator=torch.Generator().manual_seed(5)) * torch.tensor([[4.0], [0.5], [0.1]])
    together = kept(scores, *[Sampling(0, typical_p=mass) for mass in (0.3, 0.2, 0.99)])
    sizes = together.sum(1)
    assert sizes[0] <= NUCLEUS[0] < sizes[1] <= NUCLEUS[1] < sizes[2]
    for row, mass in enumerate((0.3, 0.2, 0.99)):
        assert (kept(scores[row : row + 1], Sampling(0, typical_p=mass))[0] == together[row]).all()


@settings(max_examples=120)
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
    got = kept(scores, *(Sampling(0, min_p=share) for share in shares))
    for row, share, stays in zip(scores.double(), shares, got, strict=True):
        want = (MinPLogitsWarper(share)(None, row[None])[0] > -torch.inf).numpy()
        margin = (row - row.max()).numpy() - np.log(share) if share else np.full(vocab, np.inf)
        assert ((stays == want) | (abs(margin) < 1e-5 * max(1.0, scale))).all()
        assert stays[row.argmax()]


@pytest.mark.parametrize(("share", "left"), [(0.2, 4), (0.2501, 2), (0.49, 2), (0.51, 1), (1.0, 1)])
def test_min_p_is_a_share_of_the_largest_probability(share: float, left: int) -> None:
    stays = kept(torch.tensor([HALF]).log(), Sampling(0, min_p=share))[0]
    assert stays.tolist() == [place < left for place in range(4)]


def test_min_p_keeps_all_that_equal_the_likeliest() -> None:
    assert kept(torch.zeros(1, 8), Sampling(0, min_p=1.0)).sum() == 8


def test_min_p_does_not_see_what_top_k_and_top_p_have_filtered() -> None:
    scores = torch.tensor([HALF]).log()
    assert kept(scores, Sampling(0, min_p=0.4, top_k=3))[0].tolist() == [True, True, False, False]
    assert kept(scores, Sampling(0, min_p=0.4, top_p=0.8))[0].tolist() == [True, True, False, False]
    assert kept(scores, Sampling(0, min_p=0.2, top_p=0.4))[0].tolist() == [True, False, False, False]
