"""Our own kernels: right beside float64, the same bits for a row whatever else is computed."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.worker.ours import library
from tgi.worker.layers.rotary import Rope, Rotary
from tgi.worker.native.kernels import THEN, Kernels

CPU = torch.device("cpu")
# Without AMX the same numbers come from AVX-512. Where a processor has no AMX these are the same kernels twice.
VARIANTS = {"best": (), "without AMX": ("-mno-amx-tile", "-mno-amx-bf16")}
PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda y, _: y,
    "silu": lambda y, _: F.silu(y),
    "gelu": lambda y, _: F.gelu(y),
    "gelu_tanh": lambda y, _: F.gelu(y, approximate="tanh"),
    "add": lambda y, other: y + other,
    "mul": lambda y, other: y * other,
}


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(library(*VARIANTS[request.param]), 2)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (200, 64), (960, 576), (7, 1536)])
def test_products_are_right_and_do_not_depend_on_the_other_rows(kernels: Kernels, outputs: int, inputs: int) -> None:
    weight, x, bias = numbers(outputs, inputs), numbers(300, inputs, seed=1), torch.randn(outputs)
    packed = kernels.pack(weight)
    y = kernels.linear(x, packed, bias, wide=True)
    expected = x.double() @ weight.double().T + bias
    assert (y - expected).abs().max() < 1e-5 * inputs
    for count, first in itertools.product((0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 257), (0, 41)):
        some = kernels.linear(x[first : first + count], packed, bias, wide=True)
        assert torch.equal(some, y[first : first + count])


def test_a_weight_that_is_not_in_order_is_packed_from_memory_that_stays(kernels: Kernels) -> None:
    # A copy of so much memory goes back to the system as soon as nobody has it.
    weight = torch.arange(32 * 600_000).bfloat16().view(32, -1).t()
    assert torch.equal(kernels.pack(weight).memory, kernels.pack(weight.contiguous()).memory)


@pytest.mark.parametrize("then", THEN)
def test_what_follows_a_product_is_computed_on_its_float32_sums(kernels: Kernels, then: str) -> None:
    weight, x, other = numbers(100, 64), 0.3 * numbers(40, 64, seed=1), numbers(40, 100, seed=2)
    packed = kernels.pack(weight)
    plus = torch.randn(40, 100)
    sums = kernels.linear(x, packed, plus=plus, wide=True)
    y = kernels.linear(x, packed, None, THEN[then], other, plus)
    expected = PLAIN[then](sums.double(), other.double())
    assert (y.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("then", ["silu", "gelu", "gelu_tanh"])
def test_what_follows_a_product_is_right_for_numbers_of_any_size(kernels: Kernels, then: str) -> None:
    sizes = torch.logspace(-30, 38, 64)
    x = torch.cat((sizes, -sizes)).bfloat16()[:, None] * torch.eye(1, 64, dtype=torch.bfloat16)
    packed = kernels.pack(torch.ones(1, 64, dtype=torch.bfloat16))
    y = kernels.linear(x, packed, None, THEN[then])
    expected = PLAIN[then](x[:, :1].double(), x[:, :1].double())
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-35).all()
    assert kernels.linear(x[:1] * torch.nan, packed, None, THEN[then]).isnan().all()


def test_nothing_added_changes_no_bit(kernels: Kernels) -> None:
    packed, x = kernels.pack(numbers(64, 64)), numbers(5, 64, seed=1)
    assert torch.equal(kernels.linear(x, packed), kernels.linear(x, packed, plus=torch.zeros(5, 64)))


@pytest.mark.parametrize(("centred", "size"), [(False, 576), (True, 576), (False, 37), (True, 16)])
def test_norms(kernels: Kernels, centred: bool, size: int) -> None:
    x, weight, bias = 3 * numbers(50, size) + 1, torch.randn(size), torch.randn(size)
    y = kernels.norm(x, weight, bias, 1e-5, centred)
    wide = x.double()
    if centred:
        expected = F.layer_norm(wide, (size,), weight.double(), bias.double(), 1e-5)
    else:
        expected = F.rms_norm(wide, (size,), weight.double(), 1e-5) + bias
    assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4).all()
    assert all(torch.equal(kernels.norm(x[n : n + 1], weight, bias, 1e-5, centred), y[n : n + 1]) for n in range(9))


@pytest.mark.parametrize(("neighbours", "dim"), [(False, 64), (False, 48), (True, 64), (True, 20)])
def test_turning_is_torchs(kernels: Kernels, neighbours: bool, dim: int) -> None:
    rope = Rope(dim, {"rope_theta": 10000.0}, neighbours)
    ours, torchs = Rotary(rope, CPU, kernels), Rotary(rope, CPU)
    positions = torch.arange(0, 4000, 37)
    x = numbers(len(positions), 5, 64)
    y, expected = x.clone(), x.clone()
    ours.rotate(y, 4, ours.angles(positions, 4000, 4))
    torchs.rotate(expected, 4, torchs.angles(positions, 4000, 4))
    assert (y.float() - expected.float()).abs().max() < 0.04  # the last bit of a bfloat16
    assert torch.equal(y[:, 4], x[:, 4])
    assert torch.equal(y[..., dim:], x[..., dim:])


def test_all_memory_is_read(kernels: Kernels) -> None:
    memory = torch.randint(-100, 100, (200, 1000), generator=torch.Generator().manual_seed(1))
    assert kernels.read(memory) == memory.sum()
