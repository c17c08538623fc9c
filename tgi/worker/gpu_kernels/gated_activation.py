"""Elementwise parts of layers, in one launch each: the activation of an MLP's gate, times the up projection; the
activation of an MLP without a gate; the sigmoid gate of attention."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.activations import ACTIVATIONS, FACTORED, gated
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

BLOCK = 1024  # elements of a program


@triton.jit
def _activation(x, THEN: tl.constexpr, first=0.0, second=0.0):
    """An activation of activations.ACTIVATIONS, by name, or of FACTORED, with its factors."""
    if THEN == "xielu":
        low = tl.exp(tl.where(x > -1e-6, -1e-6, x)) - 1.0 - x
        y = tl.where(x > 0, x * x * first, low * second) + 0.5 * x
    elif THEN == "clip":
        y = tl.where(x < first, first, tl.where(x > second, second, x))
    elif THEN == "silu":
        y = x * tl.sigmoid(x)
    elif THEN == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif THEN == "relu":
        y = tl.where(x < 0, 0.0, x)
    elif THEN == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    elif THEN == "clamped_silu":
        x = tl.where(x > 7.0, 7.0, x)
        y = x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(THEN == "gelu_tanh")
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def _multiply(left, right, THEN: tl.constexpr):
    """The product of an activated gate and an up projection: see activations.gated."""
    if THEN == "clamped_silu":
        right = tl.where(right > 7.0, 7.0, tl.where(right < -7.0, -7.0, right)) + 1.0
    return left * right


@triton.jit
def _gated_activation(x, y, size, x_row, THEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    left = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + row * x_row + size + at, mask=inside, other=0.0).to(tl.float32)
    left = _activation(left, THEN).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * size + at, _multiply(left, right, THEN).to(y.dtype.element_ty), mask=inside)


def gated_activation(x: Tensor, then: str) -> Tensor:
    """activations.gated of the left and the right half of the columns of x [rows, 2 * size]: [rows, size]. `then` is
    one of activations.ACTIVATIONS, computed in float32 and rounded before the multiplication, as torch does."""
    rows, size = len(x), x.shape[1] // 2
    y = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        assert x.stride(1) == 1
        _gated_activation[(rows, triton.cdiv(size, BLOCK))](x, y, size, x.stride(0), then, BLOCK)
    return y


@triton.jit
def _plain_activation(x, y, size, first, second, THEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y + at, _activation(wide, THEN, first, second).to(y.dtype.element_ty), mask=at < size)


def activation(x: Tensor, then: str, factors: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """The activation of a contiguous x: one of activations.ACTIVATIONS, or of FACTORED with its factors."""
    y = torch.empty_like(x)
    if x.numel():
        assert x.is_contiguous()
        _plain_activation[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), *factors, then, BLOCK)
    return y


@triton.jit
def _sigmoid_gate(x, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.sigmoid(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32))
    gated = tl.load(y + at, mask=at < size, other=0.0).to(tl.float32) * factor
    tl.store(y + at, gated.to(y.dtype.element_ty), mask=at < size)


def sigmoid_gate(x: Tensor, y: Tensor) -> Tensor:
    """y * sigmoid(x) of contiguous tensors of one shape, in place of y."""
    if y.numel():
        assert x.is_contiguous()
        assert y.is_contiguous()
        _sigmoid_gate[(triton.cdiv(y.numel(), BLOCK),)](x, y, y.numel(), BLOCK)
    return y


def self_test(device: torch.device) -> None:
    """Raises SelfTestFailed if the results differ from torch's."""
    for then in ACTIVATIONS:
        for dtype, tolerance in ((torch.bfloat16, 0.01), (torch.float32, 1e-5)):
            x = 6 * random_tensor(device, 3, 2 * 1100, dtype=dtype)
            left, right = x.chunk(2, 1)
            check_close(f"{then} of a gate", gated_activation(x, then), gated(then, left, right), tolerance)
            check_close(then, activation(x, then), ACTIVATIONS[then](x), tolerance)
    x, factors = 4 * random_tensor(device, 3, 2 * 1100), (0.4, 0.7)
    for then, function in FACTORED.items():
        check_close(then, activation(x, then, factors), function(x, *factors), 1e-5)
    left, right = x.chunk(2, 1)
    expected = right * left.sigmoid()
    check_close("a sigmoid gate", sigmoid_gate(left.contiguous(), right.contiguous()), expected, 1e-5)
