"""Weights made of 8 and 4 bits: how far they may be from what they were made of."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tgi.worker.quantization.codebook import FACTORS, LEVELS, TABLE
from tgi.worker.quantization.quantize import FINE, GROUP, MOST, MOST_FLOAT, PIECE, quantized

ROUNDING = 2**-11  # of a scale to float16,
SMALLEST = 2**-25  # and by how much it is off where float16 has few bits left
numbers = st.one_of(st.just(0.0), st.floats(-4, 4, width=32), st.floats(-(2**-7), 2**-7, width=32))
weights = st.lists(numbers, min_size=4 * GROUP, max_size=4 * GROUP).map(lambda found: torch.tensor(found).view(2, -1))


def scale(weight: Tensor) -> Tensor:
    """Of each output, by which its largest is MOST."""
    return weight.abs().amax(1, keepdim=True) / MOST


def slack(weight: Tensor) -> Tensor:
    """How far off a weight can be because its scale is rounded, [outputs, 1]."""
    return MOST * (scale(weight) * ROUNDING + SMALLEST)


def drawn(groups: Tensor, row: Tensor) -> Tensor:
    """The nearest numbers of a row of TABLE."""
    return row[(groups[..., None] - row).abs().argmin(-1)]


@settings(deadline=None)
@given(weights)
def test_eight_bits_are_off_by_half_a_step(weight: Tensor) -> None:
    found = quantized(weight, "int8")
    assert (found.bits, found.group, found.factors) == (8, 2 * GROUP, None)
    off = (found.dequantized(torch.float32) - weight).abs()
    assert (off <= scale(weight) * (0.5 + ROUNDING) + slack(weight)).all()


@settings(deadline=None)
@given(weights)
def test_four_bits_are_as_near_as_with_any_factor(weight: Tensor) -> None:
    """But for the place that a weight is looked up at, which is off by half of what is between two."""
    found = quantized(weight, "int4")
    assert (found.bits, found.group) == (4, 2 * GROUP)
    off = (found.dequantized(torch.float32) - weight).view(2, -1, GROUP).norm(dim=-1)
    groups = (weight / torch.where(scale(weight) == 0, 1, scale(weight))).view(2, -1, GROUP)
    allowed = torch.stack([(drawn(groups, row) - groups).norm(dim=-1) for row in TABLE.float()]).amin(0)
    assert (off <= scale(weight) * (allowed + GROUP**0.5 / FINE) + GROUP**0.5 * 2 * slack(weight)).all()


@settings(deadline=None)
@given(weights)
def test_eight_bit_floats_are_off_by_a_sixteenth(weight: Tensor) -> None:
    """Or, close to zero, by half a step between their smallest; scales below float32's normal numbers may become 0."""
    found = quantized(weight, "fp8")
    assert (found.bits, found.group, found.floating, found.scales.dtype) == (8, 2 * GROUP, True, torch.float32)
    scales = weight.abs().amax(1, keepdim=True) / MOST_FLOAT
    off = (found.dequantized(torch.float32) - weight).abs()
    allowed = (1 + 1e-5) * torch.maximum(weight.abs() / 16, scales * 2**-10)
    assert (off <= allowed + torch.finfo(torch.float32).tiny).all()


def test_weights_of_many_pieces_keep_their_order() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(3 * PIECE // 96 + 1, 96, generator=generator).bfloat16()
    for form, most in (("int8", 0.007), ("int4", 0.085), ("fp8", 0.028)):
        found = quantized(weight, form)
        assert found.shape == weight.shape
        off = (found.dequantized(torch.float32) - weight.float()).norm() / weight.float().norm()
        assert float(off) < most
        row = quantized(weight[-1:], form)
        assert torch.equal(row.dequantized(torch.float32), found.dequantized(torch.float32)[-1:])


def test_an_output_longer_than_a_piece_is_made_as_well() -> None:
    weight = torch.randn(2, 2 * PIECE, generator=torch.Generator().manual_seed(6))
    off = quantized(weight, "int8").dequantized(torch.float32) - weight
    assert (off.abs() <= scale(weight) * (0.5 + ROUNDING) + slack(weight)).all()


def test_what_is_on_the_steps_already_stays() -> None:
    """Made of numbers of the table times a power of two, of which one is the largest that there is."""
    generator = torch.Generator().manual_seed(1)
    rows = TABLE[torch.arange(len(TABLE)).repeat(4)].float()
    found = rows.gather(1, torch.randint(0, 16, (len(rows), GROUP), generator=generator))
    found[:, 0] = rows[:, 0]  # the largest of its factor, so that no other can stand for all
    weight = found.view(4, -1) / 64
    assert torch.equal(quantized(weight, "int4").dequantized(torch.float32), weight)
    assert torch.equal(quantized(weight, "int8").dequantized(torch.float32), weight)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_an_output_of_zeros_and_one_beyond_float16_do_not_touch_others(form: str) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    plainly = quantized(weight, form)
    weight[0] = 0
    weight[1, 3], weight[2, 5], weight[3, 7] = math.nan, math.inf, 1e10
    found = quantized(weight, form)
    assert not found.dequantized(torch.float32)[0].any()
    assert not found.scales[1:4].isfinite().any()
    assert torch.equal(found.dequantized(torch.float32)[4], plainly.dequantized(torch.float32)[4])


def test_floats_of_zeros_and_of_what_is_not_finite_do_not_touch_others() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    plainly = quantized(weight, "fp8")
    weight[0], weight[3] = 0, 1e30 * weight[3]
    weight[1, 3], weight[2, 5] = math.nan, math.inf
    found = quantized(weight, "fp8")
    assert not found.dequantized(torch.float32)[0].any()
    assert not found.scales[1:3].isfinite().any()
    assert torch.allclose(found.dequantized(torch.float32)[3], weight[3], rtol=1 / 16, atol=1e27)
    assert torch.equal(found.dequantized(torch.float32)[4], plainly.dequantized(torch.float32)[4])


def test_no_other_levels_leave_less_squared_error_of_normal_weights() -> None:
    """Each is what the weights that are drawn to it, with all factors, ask for: the least squares of factor * level."""
    weight = torch.randn(200, 1024, generator=torch.Generator().manual_seed(3))
    found = quantized(weight, "int4")
    assert found.factors is not None
    chosen = found.factors.view(-1).long()
    exact, taken = (weight / scale(weight)).view(-1, GROUP), found.numbers().view(-1, GROUP)
    factors = (FACTORS / MOST)[chosen][:, None]
    for code, level in enumerate(LEVELS.tolist()):
        its = taken == TABLE[chosen, code][:, None]
        asked = (its * factors * exact).sum() / (its * factors.square()).sum()
        assert float(asked) == pytest.approx(level, abs=1)
