"""Products with integer weights. The dot engine's sums are exact, so the same bits for any of its kernels; the FMA
engine multiplies the activations as they are. Both are close to the dequantized weight."""

import pytest
import torch
from torch import Tensor

from tests.cases import each_case
from tests.worker.cpu_kernels.available import VARIANTS, load_variant, numbers
from tests.worker.cpu_kernels.test_linear import FACTORS, PLAIN
from tgi.worker.cpu_kernels.kernels import EPILOGUES, CpuKernels
from tgi.worker.quantization.weight import CODEBOOK, QuantizedWeight

SHAPES = ((64, 384), (33, 1184), (7, 96), (100, 288), (40, 4896))


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return load_variant(request.param)


def whole(bits: int, outputs: int, inputs: int) -> QuantizedWeight:
    """A weight with all codes and factors."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    codes = torch.randint(0, 256, (outputs, inputs * bits // 8), generator=generator).to(torch.uint8)
    scales = (torch.rand(outputs, 1, generator=generator) / 100).half()
    if bits == 8:
        return QuantizedWeight(codes.view(torch.int8), scales, None)
    factors = torch.randint(0, len(CODEBOOK), (outputs, inputs // 32), generator=generator).to(torch.uint8)
    return QuantizedWeight(codes, scales, None, factors)


def expected_product(kernels: CpuKernels, x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The definition of `CpuKernels.linear`, float32 [rows, outputs]: for the FMA engine by a product with the same
    integers as a plain weight."""
    if kernels.dot_engine:
        return exactly(x, weight)
    whole_numbers = kernels.pack_weight(weight.decoded().float())
    return kernels.linear(x, whole_numbers, wide=True) * weight.scales.float().T


def exactly(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The definition of the dot engine's product."""
    largest = x.float().abs().amax(1, keepdim=True)
    given = torch.where(
        largest == 0, 0, torch.tensor(32767.0) / largest
    )  # a division, not a product with the reciprocal
    wanted = (x.float() * given).round().double() + 32768  # float64 represents the integers and their sums exactly
    each = weight.decoded().double().T
    upper, lower = (wanted // 256) @ each - 128 * each.sum(0), (wanted % 256) @ each
    sums = (upper.float().double() * 256 + lower.float().double()).float()
    return sums * weight.scales.float().T * (largest / 32767)


@each_case("shape", SHAPES)
@each_case("bits", [8, 4])
def test_sums_are_exact_for_any_number_of_rows(kernels: CpuKernels, bits: int, shape: tuple[int, int]) -> None:
    weight = whole(bits, *shape)
    assert weight.is_integer
    packed = kernels.pack_weight(weight)
    x = numbers(620, shape[1], seed=1, dtype=kernels.dtype)
    expected = expected_product(kernels, x, weight)
    for count in (*range(1, 36), 47, 48, 49, 64, 65, 100, 257, 300, 513, 620):
        assert torch.equal(kernels.linear(x[:count], packed, wide=True), expected[:count])
    assert torch.equal(kernels.linear(x[600:], packed, wide=True), expected[600:])


@each_case("bits", [8, 4])
def test_results_are_close_to_the_dequantized_weight(kernels: CpuKernels, bits: int) -> None:
    weight, x = whole(bits, 64, 1184), numbers(20, 1184, dtype=kernels.dtype)
    expected = x.double() @ weight.dequantized(torch.float32).double().T
    off = (kernels.linear(x, kernels.pack_weight(weight), wide=True) - expected).norm() / expected.norm()
    assert float(off) < 1e-4  # much less than the rounding of a result to bfloat16, about 1.7e-3


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("then", EPILOGUES)
def test_epilogues_match_those_of_other_products(kernels: CpuKernels, then: str, bits: int) -> None:
    weight = whole(bits, 100, 160)
    packed = kernels.pack_weight(weight)
    x, other = (numbers(40, size, dtype=kernels.dtype) for size in (160, 100))
    bias, plus = torch.randn(100), torch.randn(40, 200)[:, 50:150]
    found = kernels.linear(x, packed, bias, EPILOGUES[then], other, plus, factors=FACTORS)
    for count in (1, 17):
        assert torch.equal(
            kernels.linear(x[:count], packed, bias, EPILOGUES[then], other[:count], plus[:count], factors=FACTORS),
            found[:count],
        )
    sums = expected_product(kernels, x, weight) + bias + plus
    expected = PLAIN[then](sums, other)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-5)


@each_case("bits", [8, 4])
def test_rows_of_zeros_and_extreme_or_invalid_activations(kernels: CpuKernels, bits: int) -> None:
    """Zeros, the largest and smallest numbers, infinity and NaN do not change other rows."""
    weight = whole(bits, 64, 192)
    packed, x = kernels.pack_weight(weight), numbers(9, 192, dtype=kernels.dtype)
    expected = expected_product(kernels, x, weight)
    x[1] = 0
    x[3] = 2.0**-120  # zero in float16
    x[5, 7], x[6, 0], x[7, 191] = torch.nan, torch.inf, -torch.inf
    x[8] = torch.where(x[8] > 0, torch.finfo(kernels.dtype).max / 2, -torch.finfo(kernels.dtype).max / 2)
    extreme = expected_product(kernels, x[8:], weight)[0]
    for count in (9, 40):
        y = kernels.linear(torch.cat([x] * 5)[:count], packed, wide=True)[:9]
        assert torch.equal(y[[0, 2, 4]], expected[[0, 2, 4]])
        assert not y[1].any()
        assert y[3].abs().max() < 2.0**-100
        assert not y[5:8].isfinite().any()
        torch.testing.assert_close(y[8], extreme, rtol=0, atol=0, equal_nan=True)


@each_case("bits", [8, 4])
def test_outputs_of_zeros_are_zero(kernels: CpuKernels, bits: int) -> None:
    weight = whole(bits, 40, 160)
    weight.scales[3] = 0
    x = numbers(20, 160, dtype=kernels.dtype)
    y = kernels.linear(x, kernels.pack_weight(weight), wide=True)
    assert not y[:, 3].any()
    assert torch.equal(y, expected_product(kernels, x, weight))


@each_case("shape", SHAPES)
@each_case("bits", [8, 4])
def test_gathered_rows_match_the_dequantized_weight(kernels: CpuKernels, bits: int, shape: tuple[int, int]) -> None:
    weight = whole(bits, *shape)
    packed, plain = kernels.pack_weight(weight), weight.dequantized(kernels.dtype)
    several = torch.arange(100).mul(29).remainder(shape[0])
    for ids in (torch.arange(shape[0]), several, several[:0]):
        assert torch.equal(kernels.gather_rows(packed, ids).view(torch.uint8), plain[ids].view(torch.uint8))


@each_case("bits", [8, 4])
def test_views_of_a_weight_can_be_packed(kernels: CpuKernels, bits: int) -> None:
    weight, x = whole(bits, 96, 192), numbers(3, 192, dtype=kernels.dtype)
    parts = [kernels.linear(x, kernels.pack_weight(part)) for part in weight.split([40, 56])]
    assert torch.equal(torch.cat(parts, 1), kernels.linear(x, kernels.pack_weight(weight)))


@each_case("bits", [8, 4])
def test_a_packed_weight_takes_little_more_than_its_columns(kernels: CpuKernels, bits: int) -> None:
    """Panels add float32 scales and the corrections of sums."""
    weight = whole(bits, 64, 1152)
    assert kernels.pack_weight(weight).memory.nbytes < 1.02 * weight.nbytes
