"""Noise: uniform, independent between neighbouring seeds, positions and ids, and a pure function of its key."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tgi.worker.sampling.noise import Noise, noise_keys

CPU = torch.device("cpu")


def uniform(
    seeds: list[int], positions: list[int], vocab: int, choice: int = 0, least: bool = False
) -> NDArray[np.float64]:
    """The uniform numbers from which the exponentials are computed, [n, vocab]; with `least` that of each row, [n]."""
    choices = np.full(len(seeds), choice, np.uint64)
    row_keys = torch.from_numpy(noise_keys(np.array(seeds, np.uint64), np.array(positions, np.int64), choices))
    noise, parts = Noise(vocab, CPU), []
    for at in range(0, len(seeds), noise.rows):
        part = noise.exponentials(row_keys[at : at + noise.rows])
        assert part.isfinite().all()
        assert (part > 0).all()
        parts.append(part.amin(1) if least else part.clone())
    return 1 - np.exp(-torch.cat(parts).double().numpy())


def chi_square(values: NDArray[np.float64], bins: int = 64) -> float:
    """The distance of the histogram's chi-square from its mean, in standard deviations."""
    counts, _ = np.histogram(values, bins, (0, 1))
    expected = values.size / bins
    return float((((counts - expected) ** 2 / expected).sum() - (bins - 1)) / np.sqrt(2 * (bins - 1)))


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63, 2**64 - 1])
def test_uniform_over_ids_positions_and_seeds(seed: int) -> None:
    assert abs(chi_square(uniform([seed] * 8, list(range(8)), 49152))) < 5
    # One id over many positions, and over many neighbouring seeds.
    assert abs(chi_square(uniform([seed] * 40_000, list(range(40_000)), 3)[:, 1])) < 5
    assert abs(chi_square(uniform([(seed + i) % 2**64 for i in range(40_000)], [7] * 40_000, 3)[:, 1])) < 5


def test_neighbours_are_independent() -> None:
    base = uniform([5, 5, 6, 5], [10, 11, 10, 10], 49152)
    other = uniform([5], [10], 49152, choice=1)
    third = uniform([5], [10], 49152, choice=2)
    pairs = [(base[0], base[1]), (base[0], base[2]), (base[0, :-1], base[0, 1:])]
    pairs += [(base[0], other[0]), (base[0], third[0]), (other[0], third[0])]
    for one, two in pairs:
        assert abs(np.corrcoef(one, two)[0, 1]) * np.sqrt(one.size) < 5
        joint, _, _ = np.histogram2d(one, two, 8, [[0, 1], [0, 1]])
        expected = one.size / 64
        assert abs(((joint - expected) ** 2 / expected).sum() - 63) / np.sqrt(126) < 5
    assert np.array_equal(base[0], base[3])


def test_small_values_are_fine_grained() -> None:
    """The least of 49,152 numbers decides a race: over many samples it must not fall on a coarse grid.

    They lie some 2e-5 apart; on a grid of 2^-31 a few of 400 coincide, on one of 2^-24 half of them would.
    """
    least = uniform([3] * 400, list(range(400)), 49152, least=True)
    assert len(set(least)) > 390
    assert abs(np.mean(least) * 49152 - 1) < 0.25


def test_a_number_depends_on_its_key_and_id_alone() -> None:
    whole = uniform([1, 2, 3], [4, 5, 6], 49152)
    assert np.array_equal(uniform([2], [5], 49152)[0], whole[1])
    assert np.array_equal(uniform([2], [5], 1000)[0], whole[1, :1000])


def test_known_values() -> None:
    """The hash is part of what makes seeds repeatable over releases: these numbers must never change."""
    seeds, positions = np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 1000], np.int64)
    row_keys = noise_keys(seeds, positions, np.zeros(3, np.uint64))
    assert row_keys.tolist() == KEYS
    assert noise_keys(seeds, positions, np.array([1, 0, 7], np.uint64)).tolist() == [OTHERS[0], KEYS[1], OTHERS[1]]
    drawn = Noise(5, CPU).exponentials(torch.from_numpy(row_keys[1:2]))[0]
    assert drawn.tolist() == pytest.approx(DRAWN, rel=1e-6)


KEYS = [[1293516399, -1492722385], [-698682850, -369270711], [1695124641, -997122386]]
OTHERS = [[-1765376928, 791848836], [-1095301512, 542043015]]
DRAWN = [0.31832355260849, 3.3910062313079834, 0.43463224172592163, 0.3508296608924866, 1.6298506259918213]
