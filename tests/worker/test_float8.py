"""FP8 matrix products, with torch's CPU implementation of the function that is called on a GPU."""

import logging

import pytest
import torch
import torch.nn.functional as F

from tests.worker.quantization.weights import random_floats, random_whole
from tgi.worker.layers.linear import find_product
from tgi.worker.quantization import float8

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 16), (96, 2048)])
def test_product_is_close_to_that_of_the_dequantized_weight(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Activations are off by a sixteenth at most, so sums by a small part of their usual size; rows of other sizes,
    one of them of zeros, do not matter to each other."""
    weight, bias = random_floats(outputs, inputs), torch.randn(outputs).to(dtype)
    sizes = torch.tensor([1, 0, 1e-3, 100, 1e-4, 3])[:, None]
    x = (torch.randn(6, inputs, generator=torch.Generator().manual_seed(1)) * sizes).to(dtype)
    expected = F.linear(x.float(), weight.dequantized(torch.float32))
    found = float8.float8_matmul(x, weight, None)
    assert found.dtype is dtype
    off = (found.float() - expected).norm(dim=1)
    assert (off <= 0.04 * expected.norm(dim=1) + 1e-7).all()
    assert torch.equal(float8.float8_matmul(x, weight, bias), found + bias)
    assert torch.equal(float8.float8_matmul(x[3:4], weight, None), found[3:4])


def test_results_of_the_largest_activations_are_finite() -> None:
    weight = random_floats(16, 32)
    most = torch.full((1, 32), torch.finfo(BFLOAT16).max).to(BFLOAT16)
    assert float8.float8_matmul(most / 64, weight, None).isfinite().all()


def test_the_self_test_on_a_device(caplog: pytest.LogCaptureFixture) -> None:
    """torch's "meta" device has no data, so the self-test fails there."""
    assert float8.has_float8_matmul(torch.device("cpu"))
    assert not caplog.records
    float8.has_float8_matmul.cache_clear()
    assert not float8.has_float8_matmul(torch.device("meta"))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "8-bit floats are dequantized in products of many rows" in caplog.text
    assert not float8.stays_float8_on(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
def test_find_product_without_our_kernels(dtype: torch.dtype) -> None:
    x = torch.randn(5, 64).to(dtype)
    floats, whole = random_floats(32, 64), random_whole(32, 64, 4)
    for weight in (floats, whole):
        found = find_product(weight, None, dtype, None)(x)
        if weight is floats and dtype is BFLOAT16:
            assert torch.equal(found, float8.float8_matmul(x, weight, None))
        else:
            assert torch.equal(found, F.linear(x, weight.dequantized(dtype)))
