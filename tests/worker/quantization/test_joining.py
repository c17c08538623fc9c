"""Stacked weights of different kinds represent exactly the same numbers."""

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.quantization.weights import random_float4, random_floats, random_weight, random_whole
from tgi.worker.quantization.weight import QuantizedWeight, stack_weights
from tgi.worker.quantization.weight_forms import GROUPS

FORMS = list(product((4, 8), GROUPS, (False, True)))
forms = st.lists(st.sampled_from(FORMS), min_size=1, max_size=3)


@settings(deadline=None)
@given(forms)
def test_quantized_weights_are_stacked_without_loss(chosen: list[tuple[int, int, bool]]) -> None:
    parts = [random_weight(3, 256, *form, seed=number) for number, form in enumerate(chosen)]
    found = stack_weights(parts, torch.bfloat16)
    assert isinstance(found, QuantizedWeight)
    assert (found.bits, found.group) == (max(form[0] for form in chosen), min(form[1] for form in chosen))
    assert torch.equal(found.dequantized(torch.float32), torch.cat([part.dequantized(torch.float32) for part in parts]))


@settings(deadline=None)
@given(forms, st.integers(1, 7))
def test_float32_scales_are_stacked_without_loss(chosen: list[tuple[int, int, bool]], wide: int) -> None:
    """Of 17 bits, as those of K types."""
    parts = [random_weight(3, 256, *form, seed=number) for number, form in enumerate(chosen)]
    for number, part in enumerate(parts):
        if wide >> number & 1:
            shifts = None if part.shifts is None else part.shifts.float() * 61
            parts[number] = part._replace(scales=part.scales.float() * 61, shifts=shifts)
    found = stack_weights(parts, torch.float32)
    assert isinstance(found, QuantizedWeight)
    assert found.shifts is None or found.shifts.dtype is found.scales.dtype
    assert torch.equal(found.dequantized(torch.float32), torch.cat([part.dequantized(torch.float32) for part in parts]))


@settings(deadline=None)
@given(st.lists(st.sampled_from((4, 8)), min_size=1, max_size=3), forms)
def test_weights_with_one_scale_for_each_output_are_stacked_without_loss(
    whole: list[int], others: list[tuple[int, int, bool]]
) -> None:
    parts = [random_whole(3, 256, bits, seed=number) for number, bits in enumerate(whole)]
    parts += [random_weight(2, 256, *form, seed=number) for number, form in enumerate(others)]
    for chosen in (parts, parts[: len(whole)]):
        found = stack_weights(chosen, torch.bfloat16)
        assert isinstance(found, QuantizedWeight)
        expected = torch.cat([part.dequantized(torch.float32) for part in chosen])
        assert torch.equal(found.dequantized(torch.float32), expected)
    assert (found.bits, found.group) == (max(whole), 256)
    assert (found.factors is None) == (max(whole) == 8)


def test_8_bit_floats_stay_quantized_only_among_themselves() -> None:
    one, other, integers = random_floats(3, 64), random_floats(2, 64, seed=1), random_whole(2, 64, 8)
    found = stack_weights([one, other], torch.bfloat16)
    assert isinstance(found, QuantizedWeight)
    assert found.floating
    expected = [part.dequantized(torch.float32) for part in (one, other)]
    assert torch.equal(found.dequantized(torch.float32), torch.cat(expected))
    joined = stack_weights([one, integers], torch.float32)
    assert isinstance(joined, torch.Tensor)
    assert torch.equal(joined, torch.cat([expected[0], integers.dequantized(torch.float32)]))


def test_4_bit_floats_stay_so_among_their_kind_and_become_integers_among_others() -> None:
    mx, nv = (random_float4(3, 128, group, seed=group) for group in (32, 16))
    other = random_float4(2, 128, 32)
    for one, more, bits, group in (
        (mx, other, 4, 128),
        (mx.with_group_scales(), other.with_group_scales()._replace(scales=torch.ones(2, 4)), 4, 32),
        (mx, nv, 8, 16),
        (nv, random_weight(2, 128, 4, 32, True), 8, 16),
        (mx, random_whole(2, 128, 4), 8, 32),
    ):
        found = stack_weights([one, more], torch.bfloat16)
        assert isinstance(found, QuantizedWeight)
        assert (found.bits, found.group) == (bits, group)
        expected = torch.cat([part.dequantized(torch.float32) for part in (one, more)])
        assert torch.equal(found.dequantized(torch.float32), expected)
    assert torch.equal(mx.rows(torch.tensor([2, 0])).dequantized(torch.float32), mx.dequantized(torch.float32)[[2, 0]])
    for weight, held in product((mx, nv), (False, True)):
        part = (weight.with_group_scales() if held else weight).inputs(range(32, 96))
        assert part is not None
        assert torch.equal(part.dequantized(torch.float32), weight.dequantized(torch.float32)[:, 32:96])
    assert mx.inputs(range(16, 64)) is None
    part = mx.with_group_scales().inputs(range(16, 64))
    assert part is not None
    assert torch.equal(part.dequantized(torch.float32), mx.dequantized(torch.float32)[:, 16:64])


def test_with_a_plain_weight_the_result_is_plain() -> None:
    quantized, plain = random_weight(3, 64, 4, 32, False), torch.randn(2, 64)
    found = stack_weights([plain, quantized], torch.bfloat16)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, torch.cat([plain.bfloat16(), quantized.dequantized(torch.bfloat16)]))


def test_shifts_beyond_float16_make_the_result_plain() -> None:
    parts = [random_weight(2, 64, 4, 32, shifted) for shifted in (False, True)]
    parts[0] = parts[0]._replace(scales=torch.full_like(parts[0].scales, 60000.0))
    found = stack_weights(parts, torch.float32)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found[:2], parts[0].dequantized(torch.float32))
