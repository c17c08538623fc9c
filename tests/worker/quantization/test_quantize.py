"""Weights made of 8 and 4 bits: how far they may be from what they were made of."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tgi.worker.quantization.quantize import GROUP, PIECE, quantized

ROUNDING = 2**-11  # of a scale to float16,
SMALLEST = 2**-25  # and by how much it is off where float16 has few bits left
numbers = st.one_of(st.just(0.0), st.floats(-4, 4, width=32), st.floats(-(2**-7), 2**-7, width=32))
weights = st.lists(numbers, min_size=2 * GROUP, max_size=2 * GROUP).map(lambda found: torch.tensor(found).view(1, -1))


def largest(weight: Tensor) -> Tensor:
    """The largest magnitude of each number's group."""
    return weight.view(-1, GROUP).abs().amax(1).repeat_interleave(GROUP).view(weight.shape)


@settings(deadline=None)
@given(weights)
def test_eight_bits_are_off_by_half_a_step(weight: Tensor) -> None:
    found = quantized(weight, "int8").dequantized(torch.float32)
    step = largest(weight) / 127
    assert ((found - weight).abs() <= step * (0.5 + 128 * ROUNDING) + 128 * SMALLEST).all()


@settings(deadline=None)
@given(weights)
def test_four_bits_are_nearer_than_by_the_largest_alone(weight: Tensor) -> None:
    """Which is how others make them: the number of largest magnitude becomes -8."""
    found = quantized(weight, "int4").dequantized(torch.float32)
    groups = weight.view(-1, GROUP)
    scale = groups.gather(1, groups.abs().argmax(1, keepdim=True)) / -8
    plainly = torch.where(scale == 0, 0, scale * (groups / scale).round().clamp(-8, 7)).view(weight.shape)
    off, allowed = ((other - weight).double().square().view(-1, GROUP).sum(1) for other in (found, plainly))
    size = largest(weight).view(-1, GROUP)[:, 0].double()
    assert (off.sqrt() <= allowed.sqrt() + GROUP**0.5 * (size * ROUNDING + 8 * SMALLEST)).all()


def test_weights_of_many_pieces_keep_their_order() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(3 * PIECE // 96 + 1, 96, generator=generator).bfloat16()
    for form, most in (("int8", 0.006), ("int4", 0.085)):
        found = quantized(weight, form)
        assert found.shape == weight.shape
        assert found.group == GROUP
        off = (found.dequantized(torch.float32) - weight.float()).norm() / weight.float().norm()
        assert float(off) < most
        row = quantized(weight[-1:], form)
        assert torch.equal(row.dequantized(torch.float32), found.dequantized(torch.float32)[-1:])


def test_what_is_on_the_steps_already_stays() -> None:
    """Made of whole numbers times a power of two, of which one is the largest that a code can be."""
    codes = torch.randint(-7, 8, (4, 64), generator=torch.Generator().manual_seed(1)).float()
    codes[:, ::GROUP] = -8
    assert torch.equal(quantized(codes / 64, "int4").dequantized(torch.float32), codes / 64)
