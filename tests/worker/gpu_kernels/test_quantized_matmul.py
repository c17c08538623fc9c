"""quantized_matmul in Triton's interpreter, compared with products of the dequantized weight.

In float16: the interpreter cannot multiply bfloat16.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import each_case
from tests.worker.quantization.weights import random_float4, random_floats, random_weight, random_whole
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.quantized_matmul import TILES, quantized_matmul
from tgi.worker.gpu_kernels.self_test import random_tensor
from tgi.worker.layers.linear import KERNEL_MAX_ROWS_FP8, Linear, find_product
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


@each_case("bits", [4, 8])
@each_case("group", GROUPS)
@each_case("shifted", [False, True])
def test_weights_in_groups(bits: int, group: int, shifted: bool) -> None:
    check(random_weight(37, 640, bits, group, shifted))


@each_case("inputs", [32, 64, 160, 1024])
def test_one_scale_for_each_output(inputs: int) -> None:
    for weight in (random_whole(21, inputs, 8), random_whole(21, inputs, 4), random_floats(21, inputs)):
        check(weight)


def test_many_inputs_and_rows() -> None:
    check(random_weight(18, 4096, 4, 128, True))


def block_scaled(outputs: int, inputs: int) -> QuantizedWeight:
    """8-bit floats with a scale for each 128 inputs."""
    weight = random_floats(outputs, inputs)
    return weight._replace(scales=torch.rand(outputs, inputs // 128, generator=torch.Generator().manual_seed(0)) / 100)


@each_case(
    "weight",
    [
        *(random_whole(70, 160, 8), random_whole(70, 160, 4), random_floats(70, 160), block_scaled(70, 256)),
        *(random_weight(70, 160, 4, 32, True), random_weight(70, 128, 8, 128, False)),
        *(random_float4(70, 160, 16), random_float4(70, 160, 32)),
    ],
)
def test_any_number_of_rows(weight: QuantizedWeight) -> None:
    """By the tiles of few rows and many, in several blocks of rows and outputs, in 16 and 32 bits."""
    check(weight)
    x, bias = random_tensor(CPU, 70, weight.shape[1]), random_tensor(CPU, 70, seed=1)
    expected = F.linear(x, weight.dequantized(torch.float32), bias)
    for rows in (40, 70):
        found = GPU.quantized_matmul(x[:rows].half(), weight, bias.half())
        near(found, F.linear(x[:rows].half().float(), weight.dequantized(torch.float32), bias.half().float()))
    found = GPU.quantized_matmul(x[:20], weight, bias)
    assert (found - expected[:20]).norm() <= 1e-6 * expected[:20].norm()


def test_with_one_tile_a_row_has_the_same_bits_in_any_batch() -> None:
    """The interpreter adds up alike in all tiles; so this shows which tile is launched."""
    weight, x = random_weight(40, 256, 4, 32, False), random_tensor(CPU, 80, 256, dtype=HALF)
    invariant = GpuKernels((9, 0), batch_invariant=True)
    tile = TILES[4][1][1]
    for rows in (1, 80):
        found = invariant.quantized_matmul(x[:rows], weight, None)
        assert torch.equal(found, quantized_matmul(x[:rows], weight, None, tile))


def test_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi.worker.gpu_kernels.quantized_matmul.MANY_OUTPUTS", 32)
    check(random_whole(67, 64, 4))


def test_a_single_group() -> None:
    check(random_weight(5, 64, 4, 64, True))
    check(random_weight(5, 64, 4, 64, False))


def test_the_whole_matrix_is_never_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit floats with one scale for each output are multiplied as such by many rows."""
    bias, x = random_tensor(CPU, 32, dtype=HALF), random_tensor(CPU, 70, 256, dtype=HALF)
    weights = random_floats(32, 256), random_whole(32, 256, 4), random_float4(32, 256, 32), block_scaled(32, 256)
    for weight in weights:
        multiply = find_product(weight, bias, HALF, GPU)
        with monkeypatch.context() as patch:
            patch.setattr(QuantizedWeight, "dequantized", None)
            for rows in (KERNEL_MAX_ROWS_FP8, 70):
                expected = GPU.quantized_matmul(x[:rows], weight, bias)
                if weight is weights[0] and rows > KERNEL_MAX_ROWS_FP8:
                    expected = float8.float8_matmul(x, weight, bias, GPU.quantize_rows)
                assert torch.equal(multiply(x[:rows]), expected)


@each_case("dtype", [torch.bfloat16, HALF])
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
