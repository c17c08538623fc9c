"""Quantization at load: bounds of its error."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tgi.worker.quantization.quantize import (
    FACTOR_GROUP,
    GRID_STEPS,
    MAX_FLOAT8,
    MAX_INT8,
    QUANTIZED_AT_ONCE,
    quantize_weight,
)
from tgi.worker.quantization.weight import CODEBOOK, CODEBOOK_FACTORS, CODEBOOK_LEVELS

pytestmark = pytest.mark.slow

ROUNDING = 2**-11  # relative error of a scale in float16,
SMALLEST = 2**-25  # and the absolute error of a subnormal one
numbers = st.one_of(st.just(0.0), st.floats(-4, 4, width=32), st.floats(-(2**-7), 2**-7, width=32))
weights = st.lists(numbers, min_size=4 * FACTOR_GROUP, max_size=4 * FACTOR_GROUP).map(
    lambda found: torch.tensor(found).view(2, -1)
)


def scale(weight: Tensor) -> Tensor:
    """The scale of each output, [outputs, 1], before rounding."""
    return weight.abs().amax(1, keepdim=True) / MAX_INT8


def slack(weight: Tensor) -> Tensor:
    """The error of a weight that is due to the rounding of its scale, [outputs, 1]."""
    return MAX_INT8 * (scale(weight) * ROUNDING + SMALLEST)


def drawn(groups: Tensor, row: Tensor) -> Tensor:
    """The nearest numbers of a row of CODEBOOK."""
    return row[(groups[..., None] - row).abs().argmin(-1)]


@settings(deadline=None, max_examples=30)
@given(weights)
def test_int8_errors_are_at_most_half_a_step(weight: Tensor) -> None:
    found = quantize_weight(weight, "int8")
    assert (found.bits, found.group, found.factors) == (8, 2 * FACTOR_GROUP, None)
    off = (found.dequantized(torch.float32) - weight).abs()
    assert (off <= scale(weight) * (0.5 + ROUNDING) + slack(weight)).all()


@settings(deadline=None, max_examples=30)
@given(weights)
def test_int4_uses_the_best_factor(weight: Tensor) -> None:
    """Up to the rounding of a weight to the lookup grid, by half of a grid step."""
    found = quantize_weight(weight, "int4")
    assert (found.bits, found.group) == (4, 2 * FACTOR_GROUP)
    off = (found.dequantized(torch.float32) - weight).view(2, -1, FACTOR_GROUP).norm(dim=-1)
    groups = (weight / torch.where(scale(weight) == 0, 1, scale(weight))).view(2, -1, FACTOR_GROUP)
    allowed = torch.stack([(drawn(groups, row) - groups).norm(dim=-1) for row in CODEBOOK.float()]).amin(0)
    assert (
        off <= scale(weight) * (allowed + FACTOR_GROUP**0.5 / GRID_STEPS) + FACTOR_GROUP**0.5 * 2 * slack(weight)
    ).all()


@settings(deadline=None, max_examples=30)
@given(weights)
def test_fp8_errors_are_at_most_a_sixteenth(weight: Tensor) -> None:
    """Or, close to zero, by half a step between their smallest; scales below float32's normal numbers may become 0."""
    found = quantize_weight(weight, "fp8")
    assert (found.bits, found.group, found.floating, found.scales.dtype) == (8, 2 * FACTOR_GROUP, True, torch.float32)
    scales = weight.abs().amax(1, keepdim=True) / MAX_FLOAT8
    off = (found.dequantized(torch.float32) - weight).abs()
    allowed = (1 + 1e-5) * torch.maximum(weight.abs() / 16, scales * 2**-10)
    assert (off <= allowed + torch.finfo(torch.float32).tiny).all()


def test_outputs_of_many_work_items_keep_their_order() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(3 * QUANTIZED_AT_ONCE // 96 + 1, 96, generator=generator).bfloat16()
    for form, most in (("int8", 0.007), ("int4", 0.085), ("fp8", 0.028)):
        found = quantize_weight(weight, form)
        assert found.shape == weight.shape
        off = (found.dequantized(torch.float32) - weight.float()).norm() / weight.float().norm()
        assert float(off) < most
        row = quantize_weight(weight[-1:], form)
        assert torch.equal(row.dequantized(torch.float32), found.dequantized(torch.float32)[-1:])


def test_an_output_longer_than_a_work_item_is_quantized() -> None:
    weight = torch.randn(2, 2 * QUANTIZED_AT_ONCE, generator=torch.Generator().manual_seed(6))
    off = quantize_weight(weight, "int8").dequantized(torch.float32) - weight
    assert (off.abs() <= scale(weight) * (0.5 + ROUNDING) + slack(weight)).all()


def test_representable_weights_are_unchanged() -> None:
    """Numbers of the codebook times a power of two, one of which is the largest."""
    generator = torch.Generator().manual_seed(1)
    rows = CODEBOOK[torch.arange(len(CODEBOOK)).repeat(4)].float()
    found = rows.gather(1, torch.randint(0, 16, (len(rows), FACTOR_GROUP), generator=generator))
    found[:, 0] = rows[:, 0]  # the largest number of its factor, so that no other factor fits
    weight = found.view(4, -1) / 64
    assert torch.equal(quantize_weight(weight, "int4").dequantized(torch.float32), weight)
    assert torch.equal(quantize_weight(weight, "int8").dequantized(torch.float32), weight)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_zeros_and_overflows_do_not_affect_other_outputs(form: str) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    plainly = quantize_weight(weight, form)
    weight[0] = 0
    weight[1, 3], weight[2, 5], weight[3, 7] = math.nan, math.inf, 1e10
    found = quantize_weight(weight, form)
    assert not found.dequantized(torch.float32)[0].any()
    assert not found.scales[1:4].isfinite().any()
    assert torch.equal(found.dequantized(torch.float32)[4], plainly.dequantized(torch.float32)[4])


def test_zeros_and_nonfinite_floats_do_not_affect_other_outputs() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    plainly = quantize_weight(weight, "fp8")
    weight[0], weight[3] = 0, 1e30 * weight[3]
    weight[1, 3], weight[2, 5] = math.nan, math.inf
    found = quantize_weight(weight, "fp8")
    assert not found.dequantized(torch.float32)[0].any()
    assert not found.scales[1:3].isfinite().any()
    assert torch.allclose(found.dequantized(torch.float32)[3], weight[3], rtol=1 / 16, atol=1e27)
    assert torch.equal(found.dequantized(torch.float32)[4], plainly.dequantized(torch.float32)[4])


def test_the_codebook_minimizes_the_squared_error_of_normal_weights() -> None:
    """Each level is the least-squares solution for the weights that are rounded to it, over all factors."""
    weight = torch.randn(200, 1024, generator=torch.Generator().manual_seed(3))
    found = quantize_weight(weight, "int4")
    assert found.factors is not None
    chosen = found.factors.view(-1).long()
    exact, taken = (weight / scale(weight)).view(-1, FACTOR_GROUP), found.decoded().view(-1, FACTOR_GROUP)
    factors = (CODEBOOK_FACTORS / MAX_INT8)[chosen][:, None]
    for code, level in enumerate(CODEBOOK_LEVELS.tolist()):
        its = taken == CODEBOOK[chosen, code][:, None]
        asked = (its * factors * exact).sum() / (its * factors.square()).sum()
        assert float(asked) == pytest.approx(level, abs=1)
