"""quantized_matmul in Triton's interpreter, compared with products of the dequantized weight.

In float16: the interpreter cannot multiply bfloat16.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.worker.quantization.weights import random_floats, random_weight, random_whole
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.layers.linear import KERNEL_MAX_ROWS, KERNEL_MAX_ROWS_FP8, Linear, find_product
from tgi.worker.quantization import float8
from tgi.worker.quantization.weight import QuantizedWeight
from tgi.worker.quantization.weight_forms import GROUPS

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
GPU = GpuKernels((9, 0))
HALF = torch.float16


def near(found: Tensor, expected: Tensor) -> None:
    """Both are rounded to float16 at the end. Weights in groups are, too, before they are multiplied, where the
    expected ones are not: each by 2**-11 of itself at most, so a sum by far less than that of its terms' norm."""
    assert found.dtype is HALF
    usual = expected.norm(dim=1, keepdim=True) / expected.shape[1] ** 0.5
    assert ((found.float() - expected).abs() <= 2**-9 * usual + 2**-10 * expected.abs()).all()


def check(weight: QuantizedWeight, rows: int = 5) -> None:
    outputs, inputs = weight.shape
    x, bias = random_tensor(CPU, rows, inputs, dtype=HALF), random_tensor(CPU, outputs, dtype=HALF, seed=1)
    expected = F.linear(x.float(), weight.dequantized(torch.float32), bias.float())
    found = GPU.quantized_matmul(x, weight, bias)
    near(found, expected)
    near(GPU.quantized_matmul(x[1:3], weight, None), expected[1:3] - bias.float())
    assert torch.equal(GPU.quantized_matmul(x[2:3], weight, bias), found[2:3])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shifted", [False, True])
def test_weights_in_groups(bits: int, group: int, shifted: bool) -> None:
    check(random_weight(37, 640, bits, group, shifted))


@pytest.mark.parametrize("inputs", [32, 64, 160, 1024])
def test_one_scale_for_each_output(inputs: int) -> None:
    for weight in (random_whole(21, inputs, 8), random_whole(21, inputs, 4), random_floats(21, inputs)):
        check(weight)


def test_many_inputs_and_rows() -> None:
    check(random_weight(18, 4096, 4, 128, True))
    check(random_floats(9, 64), rows=40)


def test_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi.worker.gpu_kernels.quantized_matmul.MANY_OUTPUTS", 32)
    check(random_whole(67, 64, 4))


def test_a_single_group() -> None:
    check(random_weight(5, 64, 4, 64, True))
    check(random_weight(5, 64, 4, 64, False))


def test_few_rows_use_the_quantized_columns() -> None:
    bias = random_tensor(CPU, 32, dtype=HALF)
    for weight, few in ((random_floats(32, 64), KERNEL_MAX_ROWS_FP8), (random_whole(32, 64, 4), KERNEL_MAX_ROWS)):
        multiply = find_product(weight, bias, HALF, GPU)
        x = random_tensor(CPU, few + 1, 64, dtype=HALF)
        assert torch.equal(multiply(x[:few]), GPU.quantized_matmul(x[:few], weight, bias))
        many = F.linear(x, weight.dequantized(HALF), bias)
        if weight.floating:
            many = float8.float8_matmul(x, weight, bias, GPU.quantize_rows)
        assert torch.equal(multiply(x), many)


@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF])
def test_quantized_rows_match_torch(dtype: torch.dtype) -> None:
    """With numbers that need no rounding, since the interpreter rounds wrongly by up to a half."""
    sizes = torch.tensor([1, 0, 2**-20, 64])[:, None]
    for inputs in (32, 300, 4096):
        x = (float8.quantize_rows(random_tensor(CPU, 4, inputs))[0].float() * sizes).to(dtype)
        (codes, scales), (expected, units) = GPU.quantize_rows(x), float8.quantize_rows(x)
        assert torch.equal(scales, units)
        assert torch.equal(codes.float(), expected.float())


def test_a_layer_keeps_its_quantized_weight_and_applies_the_epilogue() -> None:
    weight, x, other = (
        random_whole(32, 64, 4),
        random_tensor(CPU, 3, 64, dtype=HALF),
        random_tensor(CPU, 3, 32, dtype=HALF),
    )
    expected = GPU.quantized_matmul(x, weight, None)
    assert torch.equal(Linear(weight, None, "add", dtype=HALF, gpu=GPU)(x, other.clone()), expected + other)
    gated = Linear(weight, None, "silu", dtype=HALF, gated=weight, gpu=GPU)
    near(gated(x), (F.silu(expected.float()) * expected.float()))
    assert Linear(weight, None, "none", dtype=HALF, gpu=GPU).logits(x, 2.0).equal(2 * expected.float())
