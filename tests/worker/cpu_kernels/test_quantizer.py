"""Quantization at load by the CPU kernels matches torch's bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import each_case
from tests.worker.cpu_kernels.available import VARIANTS, load_variant
from tgi.worker.cpu_kernels.quantizer import TYPES, CpuQuantizer
from tgi.worker.quantization.quantize import quantize_weight
from tgi.worker.quantization.weight import QuantizedWeight
from tgi.worker.quantization.weight_forms import FACTOR_GROUP

MOST_GROUPS, MOST_OUTPUTS = 5, 6


@pytest.fixture(scope="module", params=VARIANTS)
def quantizer(request: pytest.FixtureRequest) -> CpuQuantizer:
    return CpuQuantizer(load_variant(request.param))


def same(found: QuantizedWeight, wanted: QuantizedWeight) -> bool:
    """Bit for bit, except for the payload of NaN."""
    assert (found.factors is None) == (wanted.factors is None)
    columns = [(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
    # A scale beyond float16 is infinite in both, not the largest float16 in one.
    return all(a.dtype is b.dtype and torch.equal(_numbers(a), _numbers(b)) for a, b in columns)


def _numbers(column: Tensor) -> Tensor:
    """The bits, with one payload for all NaN."""
    return torch.where(column.isnan(), torch.nan, column).view(torch.int16) if column.is_floating_point() else column


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Weights of any magnitude; some outputs, groups and elements are zero, far larger than the others, or NaN."""
    outputs, groups = draw(st.integers(1, MOST_OUTPUTS)), draw(st.integers(1, MOST_GROUPS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = torch.randn(outputs, groups * FACTOR_GROUP, generator=generator) * 2.0 ** draw(st.integers(-40, 40))
    places = st.tuples(st.integers(0, outputs - 1), st.integers(0, groups * FACTOR_GROUP - 1))
    strange = st.sampled_from([0.0, -0.0, 100.0, -3e38, torch.inf, -torch.inf, torch.nan])
    for (output, place), number in draw(st.dictionaries(places, strange, max_size=4)).items():
        weight[output, place] = number
    for output in draw(st.sets(st.integers(0, outputs - 1), max_size=2)):
        weight[output, : FACTOR_GROUP * draw(st.integers(0, groups))] = 0
    return weight.to(draw(st.sampled_from(TYPES)))


@settings(max_examples=80)
@given(weight=weights(), form=st.sampled_from(["int8", "int4"]))
def test_weights_match_torch(quantizer: CpuQuantizer, weight: Tensor, form: str) -> None:
    assert same(quantizer.quantize_weight(weight, form), quantize_weight(weight, form))


@each_case("dtype", TYPES)
@each_case("form", ["int8", "int4"])
def test_many_outputs_match_torch_with_several_threads(quantizer: CpuQuantizer, form: str, dtype: torch.dtype) -> None:
    weight = torch.randn(1000, 192, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert same(quantizer.quantize_weight(weight, form), quantize_weight(weight, form))
    assert same(
        quantizer.quantize_weight(weight.T.contiguous().T, form), quantize_weight(weight, form)
    )  # not contiguous


@each_case("form", ["int8", "int4"])
def test_other_types_are_quantized_by_torch(quantizer: CpuQuantizer, form: str) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert same(quantizer.quantize_weight(weight, form), quantize_weight(weight, form))
