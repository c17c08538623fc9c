"""The activation of an MLP's gate, times the up projection, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.activations import ACTIVATIONS, gated
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

BLOCK = 1024  # elements of a program


@triton.jit
def _activation(x, THEN: tl.constexpr):
    """An activation of activations.ACTIVATIONS, by name."""
    if THEN == "silu":
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


def self_test(device: torch.device) -> None:
    """Raises SelfTestFailed if the results differ from torch's."""
    for then in ACTIVATIONS:
        for dtype, tolerance in ((torch.bfloat16, 0.01), (torch.float32, 1e-5)):
            x = 6 * random_tensor(device, 3, 2 * 1100, dtype=dtype)
            left, right = x.chunk(2, 1)
            check_close(f"{then} of a gate", gated_activation(x, then), gated(then, left, right), tolerance)
