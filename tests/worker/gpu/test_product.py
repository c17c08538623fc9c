"""Products from quantized columns, by our kernel in Triton's interpreter, beside those of what the weights stand for.

In float16: the interpreter cannot multiply bfloat16.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.worker.quantization.weights import random_floats, random_weight, random_whole
from tgi.worker import float8
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.gpu.trial import numbers
from tgi.worker.linear import Linear
from tgi.worker.products import FEW, FEW_FLOATS, find_product
from tgi.worker.quantization.weight import GROUPS, QuantizedWeight

CPU = torch.device("cpu")
GPU = Gpu((9, 0))
HALF = torch.float16


def near(found: Tensor, expected: Tensor) -> None:
    """Both are rounded to float16 at the end. Weights in groups are, too, before they are multiplied, where the
    expected ones are not: each by 2**-11 of itself at most, so a sum by far less than that of its terms' norm."""
    assert found.dtype is HALF
    usual = expected.norm(dim=1, keepdim=True) / expected.shape[1] ** 0.5
    assert ((found.float() - expected).abs() <= 2**-9 * usual + 2**-10 * expected.abs()).all()


def check(weight: QuantizedWeight, rows: int = 5) -> None:
    outputs, inputs = weight.shape
    x, bias = numbers(CPU, rows, inputs, dtype=HALF), numbers(CPU, outputs, dtype=HALF, seed=1)
    expected = F.linear(x.float(), weight.dequantized(torch.float32), bias.float())
    found = GPU.product(x, weight, bias)
    near(found, expected)
    near(GPU.product(x[1:3], weight, None), expected[1:3] - bias.float())
    assert torch.equal(GPU.product(x[2:3], weight, bias), found[2:3])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shifted", [False, True])
def test_in_groups(bits: int, group: int, shifted: bool) -> None:
    check(random_weight(37, 640, bits, group, shifted))


@pytest.mark.parametrize("inputs", [32, 64, 160, 4096])
def test_with_a_scale_for_each_output(inputs: int) -> None:
    for weight in (random_whole(21, inputs, 8), random_whole(21, inputs, 4), random_floats(21, inputs)):
        check(weight)


def test_of_many_inputs_and_rows() -> None:
    check(random_weight(18, 14336, 4, 128, True))
    check(random_floats(9, 64), rows=40)


def test_of_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi.worker.gpu.product.MANY_OUTPUTS", 32)
    check(random_whole(67, 64, 4))


def test_with_one_group_alone() -> None:
    check(random_weight(5, 64, 4, 64, True))
    check(random_weight(5, 64, 4, 64, False))


def test_few_rows_are_multiplied_from_the_columns() -> None:
    bias = numbers(CPU, 32, dtype=HALF)
    for weight, few in ((random_floats(32, 64), FEW_FLOATS), (random_whole(32, 64, 4), FEW)):
        multiply = find_product(weight, bias, HALF, GPU)
        x = numbers(CPU, few + 1, 64, dtype=HALF)
        assert torch.equal(multiply(x[:few]), GPU.product(x[:few], weight, bias))
        many = F.linear(x, weight.dequantized(HALF), bias)
        if weight.floating:
            many = float8.product(x, weight, bias, GPU.scaled)
        assert torch.equal(multiply(x), many)


@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF])
def test_rows_in_8_bit_floats_are_those_of_torch(dtype: torch.dtype) -> None:
    """Of numbers that need no rounding, with which the interpreter is wrong by up to a half."""
    sizes = torch.tensor([1, 0, 2**-20, 64])[:, None]
    for inputs in (32, 300, 4096):
        x = (float8.scaled(numbers(CPU, 4, inputs))[0].float() * sizes).to(dtype)
        (codes, scales), (expected, units) = GPU.scaled(x), float8.scaled(x)
        assert torch.equal(scales, units)
        assert torch.equal(codes.float(), expected.float())


def test_a_layer_keeps_its_weight_in_few_bits_and_adds_what_it_is_given() -> None:
    weight, x, other = random_whole(32, 64, 4), numbers(CPU, 3, 64, dtype=HALF), numbers(CPU, 3, 32, dtype=HALF)
    expected = GPU.product(x, weight, None)
    assert torch.equal(Linear(weight, None, "add", dtype=HALF, gpu=GPU)(x, other.clone()), expected + other)
    gated = Linear(weight, None, "silu", dtype=HALF, gated=weight, gpu=GPU)
    near(gated(x), (F.silu(expected.float()) * expected.float()))
    assert Linear(weight, None, "none", dtype=HALF, gpu=GPU).scores(x, 2.0).equal(2 * expected.float())
