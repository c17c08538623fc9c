"""Products with MXFP4 weights. On the dot engine sums of groups are exact, so the same bits for any of its kernels; the
FMA engine multiplies the activations as they are. Both are close to the dequantized weight."""

import pytest
import torch
from torch import Tensor

from tests.cases import each_case
from tests.worker.cpu_kernels.available import EMULATED, VARIANTS, load_variant, numbers
from tests.worker.cpu_kernels.test_quantized_linear import assert_rows
from tests.worker.quantization.weights import random_float4
from tgi.worker.cpu_kernels.kernels import MXFP4_FORMAT, CpuKernels, PackedWeight
from tgi.worker.quantization.weight import QuantizedWeight, scale_weight

SHAPES = ((64, 384), (33, 1184), (7, 96), (100, 32))
COUNTS = (1, 2, 3, 7, 40) if EMULATED else (*range(1, 36), 47, 64, 65, 100, 257, 300, 513, 620)


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return load_variant(request.param)


def packed_weight(kernels: CpuKernels, weight: QuantizedWeight) -> PackedWeight:
    return kernels.pack_weight(kernels.supported_weight(weight))


def defined(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The definition of the dot engine's product, float32 [rows, outputs]: activations as integers of units of their
    group, exact sums of groups, which are added in float32."""
    integers = weight.as_integers()
    rows = x.double().unflatten(1, (-1, 32))
    units = 2.0 ** (torch.frexp(rows.abs().amax(2, keepdim=True)).exponent - 14)
    units = torch.where(rows.abs().amax(2, keepdim=True) == 0, 0.0, units.double())
    rounded = torch.where(units == 0, 0.0, rows / units).round()
    sums = torch.einsum("rgi,ogi->gro", rounded, integers.codes.double().unflatten(1, (-1, 32)))
    sums *= units[:, :, 0].T[:, :, None] * integers.scales.double().T[:, None]
    total = torch.zeros(len(x), len(integers.codes))
    for group in sums.float():
        total += group
    return total


def expected_product(kernels: CpuKernels, x: Tensor, weight: QuantizedWeight) -> Tensor:
    """What `linear` returns: on the FMA engine, as for twice as large integers."""
    if kernels.dot_engine:
        return defined(x, weight)
    return kernels.linear(x, packed_weight(kernels, weight.as_integers()), wide=True)


@each_case("shape", SHAPES)
def test_results_have_the_bits_of_the_definition(kernels: CpuKernels, shape: tuple[int, int]) -> None:
    weight = random_float4(*shape, 32)
    packed = packed_weight(kernels, weight)
    assert packed.form & MXFP4_FORMAT
    x = numbers(max(COUNTS), shape[1], seed=1, dtype=kernels.dtype)
    x *= 2.0 ** numbers(*x.shape, seed=2).float().mul(3).round()  # groups of large and small numbers
    expected = expected_product(kernels, x, weight)
    for count in COUNTS:
        assert torch.equal(kernels.linear(x[:count], packed, wide=True), expected[:count]), count
    assert torch.equal(kernels.linear(x[20:], packed, wide=True), expected[20:])


def test_results_are_close_to_the_dequantized_weight(kernels: CpuKernels) -> None:
    weight, x = random_float4(64, 1184, 32), numbers(20, 1184, dtype=kernels.dtype)
    expected = x.double() @ weight.dequantized(torch.float32).double().T
    off = (kernels.linear(x, packed_weight(kernels, weight), wide=True) - expected).norm() / expected.norm()
    assert float(off) < 2e-5  # a hundredth of what rounding a result to bfloat16 loses


def test_gathered_rows_are_exact(kernels: CpuKernels) -> None:
    for outputs, inputs in ((1, 32), (33, 96), (71, 1152)):
        weight = random_float4(outputs, inputs, 32)
        assert_rows(kernels, packed_weight(kernels, weight), weight.dequantized(kernels.dtype))


def test_gate_and_up_projection(kernels: CpuKernels) -> None:
    gate, up = (random_float4(72, 160, 32, seed=seed) for seed in (1, 2))
    packed = kernels.pack_weight(*map(kernels.supported_weight, (gate, up)))
    x = numbers(40, 160, dtype=kernels.dtype)
    both = [kernels.linear(x, packed_weight(kernels, one)) for one in (gate, up)]
    found = kernels.linear(x, packed)
    assert torch.equal(found, (both[0].float() * kernels.linear(x, packed_weight(kernels, up), wide=True)).to(x.dtype))
    for count in (1, 2, 9):
        assert torch.equal(kernels.linear(x[:count], packed), found[:count])


def test_extreme_and_invalid_activations_do_not_change_other_rows(kernels: CpuKernels) -> None:
    weight = random_float4(64, 192, 32)
    packed, x = packed_weight(kernels, weight), numbers(9, 192, dtype=kernels.dtype)
    expected = expected_product(kernels, x, weight)
    x[1] = 0
    x[3] = 2.0**-120  # zero in float16
    x[5, 7], x[6, 0], x[7, 191] = torch.nan, torch.inf, -torch.inf
    x[8] = torch.finfo(kernels.dtype).max / 2
    for count in (1, 9, 40):
        y = kernels.linear(torch.cat([x] * 5)[:count], packed, wide=True)[:9]
        assert torch.equal(y[:1], expected[:1])
        if count == 1:
            continue
        assert torch.equal(y[[2, 4]], expected[[2, 4]])
        assert not y[1].any()
        assert y[3].abs().max() < 2.0**-100
        assert not y[5:8].isfinite().any()
        assert not (kernels.dot_engine and y[8].isfinite().any())


def test_scales_that_are_not_those_of_mxfp4(kernels: CpuKernels) -> None:
    """Tiny scales count as 0; other numbers than powers of two have the general format of groups."""
    weight = random_float4(40, 96, 32)
    x = numbers(9, 96, dtype=kernels.dtype)
    assert not packed_weight(kernels, scale_weight(weight, 3.0)).form & MXFP4_FORMAT
    assert not packed_weight(kernels, scale_weight(weight, 2.0**60)).form & MXFP4_FORMAT
    assert weight.factors is not None
    weight.factors.view(torch.uint8)[::3] = 0  # 2^-127
    packed = packed_weight(kernels, weight)
    assert packed.form & MXFP4_FORMAT
    y = kernels.linear(x, packed, wide=True)
    assert y[:, ::3].abs().max() < 1e-30
    kept = [output for output in range(40) if output % 3]
    others = packed_weight(kernels, weight.rows(torch.tensor(kept)))
    assert torch.equal(y[:, kept], kernels.linear(x, others, wide=True))
