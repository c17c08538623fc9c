"""CPU kernels: close to float64, and the same bits for a row in any batch."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import each_case
from tests.worker.cpu_kernels.available import EMULATED, EPSILON, VARIANTS, load_variant, numbers
from tgi.worker.activations import ALPHA, LIMIT, clamped_mul, xielu
from tgi.worker.cpu_kernels.kernels import EPILOGUES, CpuKernels
from tgi.worker.decoder_config import RopeConfig
from tgi.worker.layers.rotary import RotaryEmbedding

CPU = torch.device("cpu")
FACTORS = (0.7, 1.3)  # of xielu and clip
PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda y, _: y,
    "silu": lambda y, _: F.silu(y),
    "gelu": lambda y, _: F.gelu(y),
    "gelu_tanh": lambda y, _: F.gelu(y, approximate="tanh"),
    "relu": lambda y, _: F.relu(y),
    "relu2": lambda y, _: F.relu(y).square(),
    "clamped_silu": lambda y, _: y.clamp(max=LIMIT) * torch.sigmoid(ALPHA * y.clamp(max=LIMIT)),
    "xielu": lambda y, _: xielu(y, *FACTORS),
    "clip": lambda y, _: y.clamp(*FACTORS),
    "add": lambda y, other: y + other,
    "mul": lambda y, other: y * other,
    "clamped_mul": clamped_mul,
}


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return load_variant(request.param)


def weight_types(kernels: CpuKernels) -> list[torch.dtype]:
    """The types of plain weights that these kernels take."""
    return [dtype for dtype in EPSILON if kernels.dtype is torch.float32 or dtype is kernels.dtype]


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        *((64, 32), (200, 64), (96 if EMULATED else 960, 576), (7, 1536), (33, 1), (40, 31), (70, 100)),
        (100, 1155),
    ],
)
def test_products_are_close_to_float64_and_do_not_depend_on_the_other_rows(
    kernels: CpuKernels, outputs: int, inputs: int
) -> None:
    for dtype in weight_types(kernels):
        weight, bias = numbers(outputs, inputs, dtype=dtype), torch.randn(outputs)
        x = numbers(300, inputs, seed=1, dtype=kernels.dtype)
        packed = kernels.pack_weight(weight)
        y = kernels.linear(x, packed, bias, wide=True)
        expected = x.double() @ weight.double().T + bias
        assert (y - expected).abs().max() < 1e-5 * max(inputs, 32)
        for count, first in itertools.product((0, 1, 2, 3, 5, 6, 7, 15, 16, 17, 31, 32, 33, 64, 257), (0, 41)):
            some = kernels.linear(x[first : first + count], packed, bias, wide=True)
            assert torch.equal(some, y[first : first + count])
        assert torch.equal(kernels.linear(x, packed, bias), y.to(kernels.dtype))


def test_a_weight_is_converted_where_that_is_exact_or_needed(kernels: CpuKernels) -> None:
    for dtype in EPSILON:
        weight = numbers(40, 64, dtype=dtype)
        found = kernels.supported_weight(weight)
        assert found.dtype is (dtype if dtype in weight_types(kernels) else kernels.dtype)
        assert torch.equal(found, weight.to(found.dtype))


def test_the_contiguous_copy_of_a_transposed_weight_lives_until_it_is_packed(kernels: CpuKernels) -> None:
    # A copy of this size is unmapped as soon as it is freed.
    weight = torch.arange(32 * 600_000).to(kernels.dtype).view(32, -1).t()
    assert torch.equal(kernels.pack_weight(weight).memory, kernels.pack_weight(weight.contiguous()).memory)


@each_case("then", EPILOGUES)
def test_epilogues_are_computed_on_float32_sums(kernels: CpuKernels, then: str) -> None:
    dtype, epsilon = kernels.dtype, EPSILON[kernels.dtype]
    weight, x = numbers(100, 64, dtype=dtype), 0.3 * numbers(40, 64, seed=1, dtype=dtype)
    other = numbers(40, 100, seed=2, dtype=dtype)
    packed = kernels.pack_weight(weight)
    plus = 4 * torch.randn(40, 100)
    sums = kernels.linear(x, packed, plus=plus, wide=True)
    y = kernels.linear(x, packed, None, EPILOGUES[then], other, plus, factors=FACTORS)
    expected = PLAIN[then](sums.double(), other.double())
    assert ((y.double() - expected).abs() <= epsilon * expected.abs() + 1e-6).all()


@each_case("then", ["silu", "gelu", "gelu_tanh", "clamped_silu"])
def test_activations_are_correct_for_any_magnitude(kernels: CpuKernels, then: str) -> None:
    dtype = kernels.dtype
    smallest, largest = (-7, 4) if dtype is torch.float16 else (-30, 38)  # float16 has subnormal numbers there
    sizes = torch.logspace(smallest, largest, 64)
    x = torch.cat((sizes, -sizes)).to(dtype)[:, None] * torch.eye(1, 64, dtype=dtype)
    packed = kernels.pack_weight(torch.ones(1, 64, dtype=dtype))
    y = kernels.linear(x, packed, None, EPILOGUES[then])
    expected = PLAIN[then](x[:, :1].double(), x[:, :1].double())
    tiny = 2**-25 if dtype is torch.float16 else 1e-35
    assert ((y.double() - expected).abs() <= EPSILON[dtype] * expected.abs() + tiny).all()
    assert kernels.linear(x[:1] * torch.nan, packed, None, EPILOGUES[then]).isnan().all()


def test_adding_zeros_changes_no_bit(kernels: CpuKernels) -> None:
    packed, x = kernels.pack_weight(numbers(64, 64, dtype=kernels.dtype)), numbers(5, 64, seed=1, dtype=kernels.dtype)
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x, packed, plus=torch.zeros(5, 64)))


@each_case(("centred", "size"), [(False, 576), (True, 576), (False, 37), (True, 16)])
def test_norms_are_close_to_float64(kernels: CpuKernels, centred: bool, size: int) -> None:
    x, weight, bias = 3 * numbers(50, size, dtype=kernels.dtype) + 1, torch.randn(size), torch.randn(size)
    y = kernels.norm(x, weight, bias, 1e-5, centred)
    wide = x.double()
    if centred:
        expected = F.layer_norm(wide, (size,), weight.double(), bias.double(), 1e-5)
    else:
        expected = F.rms_norm(wide, (size,), weight.double(), 1e-5) + bias
    epsilon = EPSILON[kernels.dtype]
    assert ((y.double() - expected).abs() <= epsilon * expected.abs() + min(1e-4, epsilon)).all()
    assert all(torch.equal(kernels.norm(x[n : n + 1], weight, bias, 1e-5, centred), y[n : n + 1]) for n in range(9))


@each_case(("neighbours", "dim"), [(False, 64), (False, 48), (True, 64), (True, 20)])
def test_rope_matches_torch(kernels: CpuKernels, neighbours: bool, dim: int) -> None:
    rope = RopeConfig(dim, {"rope_theta": 10000.0}, neighbours)
    ours, torchs = RotaryEmbedding(rope, CPU, kernels), RotaryEmbedding(rope, CPU)
    positions = torch.arange(0, 4000, 37)
    x = numbers(len(positions), 5, 64, dtype=kernels.dtype)
    y, expected = x.clone(), x.clone()
    ours.rotate(y, 4, ours.angles(positions, 4000, 4))
    torchs.rotate(expected, 4, torchs.angles(positions, 4000, 4))
    assert (y.float() - expected.float()).abs().max() < 8 * EPSILON[kernels.dtype]  # the last bit, of numbers up to 8
    assert torch.equal(y[:, 4], x[:, 4])
    assert torch.equal(y[..., dim:], x[..., dim:])


def test_read_memory_reads_every_byte(kernels: CpuKernels) -> None:
    memory = torch.randint(-100, 100, (200, 1000), generator=torch.Generator().manual_seed(1))
    assert kernels.read_memory(memory) == memory.sum()


def test_operations_of_the_peak_measurement_are_those_of_its_chunks(kernels: CpuKernels) -> None:
    one = kernels.fma_peak(1)
    assert one > 0
    assert kernels.fma_peak(7) == 7 * one


@each_case(("heads", "outputs", "inputs", "kept"), [(3, 48, 16, 8), (2, 12, 48, 0), (5, 33, 20, 4)])
def test_products_of_heads(kernels: CpuKernels, heads: int, outputs: int, inputs: int, kept: int) -> None:
    """More rows than are computed together (GATHERED_ROWS in head_products.cpp)."""
    weight = numbers(heads, outputs, inputs, dtype=kernels.dtype)
    rows = 300 if EMULATED else 5000
    x = numbers(rows, heads * (inputs + kept), seed=1, dtype=kernels.dtype)
    last = numbers(rows, outputs + kept, seed=2, dtype=kernels.dtype)
    packed = kernels.pack_heads(weight)
    y = kernels.head_products(x, packed, kept, last).view(rows, heads + 1, outputs + kept)
    assert torch.equal(kernels.head_products(x, packed, kept), y[:, :heads].flatten(1))
    assert torch.equal(y[:, heads], last)
    by_head = x.view(rows, heads, inputs + kept)
    assert torch.equal(y[:, :heads, outputs:], by_head[..., inputs:])
    for head in range(heads):
        own = kernels.linear(by_head[:, head, :inputs], kernels.pack_weight(weight[head]))
        assert torch.equal(y[:, head, :outputs], own)
    assert torch.equal(kernels.head_products(x[41:48], packed, kept), y[41:48, :heads].flatten(1))
