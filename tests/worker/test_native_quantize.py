"""Weights made of 8 and 4 bits by the kernels: to the bit what torch makes of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.ours import library
from tgi.worker.native.kernels import Kernels
from tgi.worker.native.quantize import Quantizer
from tgi.worker.quantization.quantize import GROUP, quantized
from tgi.worker.quantization.weight import QuantizedWeight

MOST_GROUPS, MOST_OUTPUTS = 5, 6


@pytest.fixture(scope="module")
def quantizer() -> Quantizer:
    return Quantizer(Kernels(library(), 2))


def same(found: QuantizedWeight, wanted: QuantizedWeight) -> bool:
    """To the bit, but for which NaN one is."""
    assert (found.factors is None) == (wanted.factors is None)
    columns = [(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
    # A scale that float16 cannot hold is infinite in both, not merely as large as it gets in one.
    return all(a.dtype is b.dtype and torch.equal(_numbers(a), _numbers(b)) for a, b in columns)


def _numbers(column: Tensor) -> Tensor:
    """The bits, of NaN always the same ones."""
    return torch.where(column.isnan(), torch.nan, column).view(torch.int16) if column.is_floating_point() else column


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Of any magnitude, in which some outputs, groups and numbers are zero, far larger than the others, or none."""
    outputs, groups = draw(st.integers(1, MOST_OUTPUTS)), draw(st.integers(1, MOST_GROUPS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = torch.randn(outputs, groups * GROUP, generator=generator) * 2.0 ** draw(st.integers(-40, 40))
    places = st.tuples(st.integers(0, outputs - 1), st.integers(0, groups * GROUP - 1))
    strange = st.sampled_from([0.0, -0.0, 100.0, -3e38, torch.inf, -torch.inf, torch.nan])
    for (output, place), number in draw(st.dictionaries(places, strange, max_size=4)).items():
        weight[output, place] = number
    for output in draw(st.sets(st.integers(0, outputs - 1), max_size=2)):
        weight[output, : GROUP * draw(st.integers(0, groups))] = 0
    return weight.bfloat16()


@settings(max_examples=200)
@given(weight=weights(), form=st.sampled_from(["int8", "int4"]))
def test_the_same_as_torch_makes(quantizer: Quantizer, weight: Tensor, form: str) -> None:
    assert same(quantizer.quantized(weight, form), quantized(weight, form))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_many_outputs_are_shared_by_threads(quantizer: Quantizer, form: str) -> None:
    weight = torch.randn(1000, 192, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert same(quantizer.quantized(weight, form), quantized(weight, form))
    assert same(quantizer.quantized(weight.T.contiguous().T, form), quantized(weight, form))  # not dense


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_what_is_no_bfloat16_is_made_all_the_same(quantizer: Quantizer, form: str) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
    assert same(quantizer.quantized(weight, form), quantized(weight, form))
