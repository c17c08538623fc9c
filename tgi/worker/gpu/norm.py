"""Norms over the last dimension in one launch: a program for each row, or for each part of one."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu.trial import agree, numbers

MOST_WARPS = 16


@triton.jit
def _norm(
    x, y, weight, bias, parts, size, x_row, x_part, y_row, y_part, epsilon, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    at = tl.arange(0, BLOCK)
    inside = at < size
    wide = tl.load(x + row * x_row + part * x_part + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / size, 0.0)
    wide = wide / tl.sqrt(tl.sum(wide * wide, 0) / size + epsilon)
    wide *= tl.load(weight + part * size + at, mask=inside, other=0.0)
    if bias is not None:
        wide += tl.load(bias + part * size + at, mask=inside, other=0.0)
    tl.store(y + row * y_row + part * y_part + at, wide.to(y.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> Tensor:
    """The norm of x [rows, size] or [rows, parts, size] over its last dimension, whose numbers lie side by side.
    `weight` and `bias` are dense, float32, [size] or [parts, size]. Computed in float32 and rounded once."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, y, weight, bias, epsilon, centred)
    return y


def norm_in_place(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> None:
    """x becomes its norm. It may be some columns of a larger matrix."""
    _launch(x, x, weight, bias, epsilon, centred)


def _launch(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> None:
    size = x.shape[-1]
    parts, x_part, y_part = (1, 0, 0) if x.ndim == 2 else (x.shape[1], x.stride(1), y.stride(1))
    if not x.numel():
        return
    assert x.stride(-1) == 1
    assert weight.shape == x.shape[1:]
    block = triton.next_power_of_2(size)
    _norm[(x.shape[0] * parts,)](
        x, y, weight, bias, parts, size, x.stride(0), x_part, y.stride(0), y_part, epsilon, centred, block,
        num_warps=max(1, min(MOST_WARPS, block // 256)),
    )  # fmt: skip


def trial(device: torch.device) -> None:
    """See choose.py."""
    for dtype, tolerance in ((torch.bfloat16, 0.01), (torch.float32, 1e-5)):
        x = numbers(device, 5, 3, 80, dtype=dtype)
        scales, shifts = numbers(device, 3, 80, seed=1), numbers(device, 240, seed=2)
        expected = F.rms_norm(x.float(), (80,), None, 1e-5) * scales
        agree("a norm of parts", norm(x[1:], scales, None, 1e-5, False), expected.to(dtype)[1:], tolerance)
        expected = F.layer_norm(x.view(5, 240).float(), (240,), scales.view(-1), shifts, 1e-5)
        inside = torch.zeros(5, 300, dtype=dtype, device=device)
        inside[:, 7:247] = x.view(5, 240)
        norm_in_place(inside[:, 7:247], scales.view(-1), shifts, 1e-5, True)
        agree("a centred norm in place", inside, F.pad(expected.to(dtype), (7, 53)), tolerance)
