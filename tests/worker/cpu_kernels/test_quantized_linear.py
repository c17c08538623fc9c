"""Products with weights in groups. The dot engine's have the same bits as with the weight dequantized to bfloat16; the
FMA engine's scale the sums of groups and are close to float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases import each_case
from tests.worker.cpu_kernels.available import EMULATED, EPSILON, VARIANTS, library, load_variant, numbers
from tests.worker.cpu_kernels.test_linear import weight_types
from tests.worker.quantization.weights import random_float4
from tgi.microkernel.host.heap import release_freed_memory
from tgi.worker.cpu_kernels.kernels import EPILOGUES, CpuKernels, PackedWeight
from tgi.worker.quantization.weight import QuantizedWeight, scale_weight
from tgi.worker.quantization.weight_forms import GROUPS

ROWS = (1, 2, 17, 33, 70) if EMULATED else tuple(range(1, 71))


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return load_variant(request.param)


def quantized(
    bits: int, group: int, shifts: bool, outputs: int, inputs: int, dtype: torch.dtype = torch.float16
) -> QuantizedWeight:
    """A random weight with scales of this type; it has every code if it is large enough."""
    count = outputs * inputs * bits // 8
    codes = torch.arange(count).mul(37).to(torch.uint8).view(outputs, -1)
    scales, more = (numbers(outputs, inputs // group, seed=seed, dtype=dtype) for seed in (3, 4))
    return QuantizedWeight(codes.view(torch.int8) if bits == 8 else codes, scales, more if shifts else None)


def exact_values(weight: QuantizedWeight) -> Tensor:
    """The weight, float64 [outputs, inputs]."""
    values = weight.decoded().double().view(*weight.scales.shape, -1) * weight.scales[:, :, None].double()
    return (values if weight.shifts is None else values + weight.shifts[:, :, None].double()).view(weight.shape)


def assert_as_dequantized(kernels: CpuKernels, weight: QuantizedWeight, counts: tuple[int, ...]) -> None:
    packed = kernels.pack_weight(weight)
    x = numbers(max(counts), weight.shape[1], seed=1, dtype=kernels.dtype)
    if kernels.dot_engine:
        expected = kernels.linear(x, kernels.pack_weight(weight.dequantized(torch.bfloat16)), wide=True)
    else:
        expected = kernels.linear(x, packed, wide=True)
        values = exact_values(weight)
        off, size = (expected - x.double() @ values.T).abs(), x.double().abs() @ values.abs().T
        assert ((off <= 1e-5 * size) | (~expected.isfinite() & ~size.isfinite())).all()
    for count in counts:
        found = kernels.linear(x[:count], packed, wide=True)
        torch.testing.assert_close(found, expected[:count], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", [8, 4])
def test_products_match_the_dequantized_weight(kernels: CpuKernels, bits: int, group: int, shifts: bool) -> None:
    assert_as_dequantized(kernels, quantized(bits, group, shifts, 64, 384), ROWS)
    assert_as_dequantized(kernels, quantized(bits, group, shifts, 33, 1152), (1, 17, 32, 40 if EMULATED else 300))
    assert_as_dequantized(kernels, quantized(bits, group, shifts, 7, 256), (1, 33))


@each_case("shifts", [False, True])
@each_case("group", GROUPS)
@each_case("bits", [8, 4])
def test_gathered_rows_match_the_dequantized_weight(kernels: CpuKernels, bits: int, group: int, shifts: bool) -> None:
    for outputs, inputs in ((1, 128), (33, 384), (71, 1152)):
        weight = quantized(bits, group, shifts, outputs, inputs)
        assert_rows(kernels, kernels.pack_weight(weight), weight.dequantized(kernels.dtype))


def test_gathered_rows_of_a_plain_weight_are_exact(kernels: CpuKernels) -> None:
    for outputs, inputs in ((1, 32), (33, 96), (71, 1152), (40, 100), (3, 7)):
        for dtype in weight_types(kernels):
            weight = numbers(outputs, inputs, dtype=dtype)
            assert_rows(kernels, kernels.pack_weight(weight), weight.to(kernels.dtype))


def assert_rows(kernels: CpuKernels, packed: PackedWeight, weight: Tensor) -> None:
    """One row, all rows, repeated rows, a strided list of ids, and no row. A zero may have either sign."""
    several = torch.arange(100).mul(29).remainder(len(weight))
    for ids in (torch.tensor([len(weight) - 1]), torch.arange(len(weight)), several, several[::2], several[:0]):
        found = kernels.gather_rows(packed, ids)
        assert found.dtype is weight.dtype
        assert torch.equal(found, weight[ids])


@each_case("group", [32, 16])
def test_4_bit_floats_have_the_bits_of_twice_as_large_integers(kernels: CpuKernels, group: int) -> None:
    for outputs, inputs in ((75, 416), (7, 96)):
        weight = scale_weight(random_float4(outputs, inputs, group), 3.0)  # not the scales of MXFP4
        floats, integers = (
            kernels.pack_weight(kernels.supported_weight(one)) for one in (weight, weight.as_integers())
        )
        assert floats.memory.nbytes < 0.7 * integers.memory.nbytes
        for rows in (1, 2, 7, 40, 200):
            x = numbers(rows, inputs, dtype=kernels.dtype)
            assert torch.equal(kernels.linear(x, floats), kernels.linear(x, integers))
        assert_rows(kernels, floats, weight.dequantized(kernels.dtype))


@each_case(("bits", "group"), [(8, 32), (4, 16)])
def test_inputs_need_not_be_a_multiple_of_128(kernels: CpuKernels, bits: int, group: int) -> None:
    assert_as_dequantized(kernels, quantized(bits, group, True, 40, 288), (1, 40))


@each_case("bits", [8, 4])
@each_case("then", EPILOGUES)
def test_epilogues_match_the_dequantized_weight(kernels: CpuKernels, then: str, bits: int) -> None:
    weight = quantized(bits, 32, bits == 4, 100, 64)
    widest = torch.bfloat16 if kernels.dot_engine else torch.float32
    packed, plain = (kernels.pack_weight(one) for one in (weight, weight.dequantized(widest)))
    x, other = (numbers(40, size, dtype=kernels.dtype) for size in (64, 100))
    bias, plus = torch.randn(100), torch.randn(40, 200)[:, 50:150]
    first, second = (kernels.linear(x, one, bias, EPILOGUES[then], other, plus) for one in (packed, plain))
    if then == "relu2":  # a difference of sums grows with them
        first, second = first.sqrt(), second.sqrt()
    if kernels.dot_engine:
        assert torch.equal(first, second)
    else:
        torch.testing.assert_close(first, second, rtol=2 * EPSILON[kernels.dtype], atol=1e-3)


@each_case("shifts", [False, True])
@each_case("bits", [8, 4])
def test_scales_of_any_magnitude(kernels: CpuKernels, bits: int, shifts: bool) -> None:
    # Zero, the smallest subnormal float16, the smallest normal one, the largest; then infinity and NaN.
    sizes = torch.tensor([0.0, 2**-24, -(2**-24), 2**-14, 1e-6, 65504.0, -65504.0, 1.0], dtype=torch.float16)
    weight = quantized(bits, 32, shifts, 32, 512)
    scales = sizes.repeat(64).view(32, 16)
    assert_as_dequantized(
        kernels, QuantizedWeight(weight.codes, scales, scales.flip(0, 1) if shifts else None), (1, 40)
    )
    for odd in (torch.inf, torch.nan):
        scales = torch.ones(32, 16, dtype=torch.float16)
        scales[5, 3] = odd
        assert_as_dequantized(kernels, QuantizedWeight(weight.codes, scales, scales if shifts else None), (1, 40))


@each_case("bits", [8, 4])
def test_views_of_a_weight_can_be_packed(kernels: CpuKernels, bits: int) -> None:
    whole = quantized(bits, 64, True, 96, 128)
    x = numbers(3, 128, dtype=kernels.dtype)
    y = kernels.linear(x, kernels.pack_weight(whole))
    parts = [kernels.linear(x, kernels.pack_weight(part)) for part in whole.split([40, 56])]
    assert torch.equal(torch.cat(parts, 1), y)


@each_case(("bits", "group", "shifts"), [(8, 32, False), (4, 32, True), (4, 128, False)])
def test_a_packed_weight_takes_no_more_than_its_columns(
    kernels: CpuKernels, bits: int, group: int, shifts: bool
) -> None:
    weight = quantized(bits, group, shifts, 64, 256)
    assert kernels.pack_weight(weight).memory.nbytes == weight.nbytes


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(8, 16), (8, 32), (4, 32), (4, 128)])
def test_scales_in_float32(kernels: CpuKernels, bits: int, group: int, shifts: bool) -> None:
    """The dot engine takes scales in float16 where there are shifts."""
    weight = quantized(bits, group, shifts, 70, 384, torch.float32)
    supported = kernels.supported_weight(weight)
    assert isinstance(supported, QuantizedWeight)
    assert supported.scales.dtype is (torch.float16 if kernels.dot_engine and shifts else torch.float32)
    assert_as_dequantized(kernels, supported, (1, 40))
    assert_rows(kernels, kernels.pack_weight(supported), exact_values(supported).float().to(kernels.dtype))


def test_an_unsupported_group_size_is_rejected(kernels: CpuKernels) -> None:
    odd: Tensor = torch.zeros(32, 96, dtype=torch.int8)
    with pytest.raises(AssertionError):
        kernels.pack_weight(QuantizedWeight(odd, torch.ones(32, 2).half(), None))


def test_packed_weights_take_their_size_and_are_freed() -> None:
    kernels = CpuKernels(library(), 1)
    weight = torch.ones(1 << 13, 1 << 10, dtype=torch.bfloat16)

    def resident() -> int:
        """Without the pages of files, which come back to memory when they are used, and without freed blocks: the C
        library keeps those that stand between others, here the 64 MiB of the concatenated weight."""
        release_freed_memory()
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    kernels.pack_weight(weight[:32])
    before = resident()
    small, large = (
        [kernels.pack_weight(weight[: 1 << 12]) for _ in range(9)],
        kernels.pack_weight(torch.cat([weight] * 4)),
    )
    taken = sum(one.memory.nbytes for one in (*small, large))
    assert abs(resident() - before - taken) < 0.1 * taken
    del small, large
    assert resident() - before < 0.7 * (64 << 20)
