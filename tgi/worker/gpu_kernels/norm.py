"""RMS norm and layer norm over the last dimension in one launch: one program for each row, or for some parts of one."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

ELEMENTS = 1024  # of a program, if several parts fit; else one part
MAX_WARPS = 16


@triton.jit
def _norm(
    x, y, weight, bias, parts, size, x_row, x_part, y_row, y_part, epsilon,
    CENTRED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (part < parts) & (at < size)
    wide = tl.load(x + row * x_row + part * x_part + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - (tl.sum(wide, 1) / size)[:, None], 0.0)
    wide = wide / tl.sqrt(tl.sum(wide * wide, 1) / size + epsilon)[:, None]
    wide *= tl.load(weight + part * size + at, mask=inside, other=0.0)
    if bias is not None:
        wide += tl.load(bias + part * size + at, mask=inside, other=0.0)
    tl.store(y + row * y_row + part * y_part + at, wide.to(y.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> Tensor:
    """RMS norm (layer norm if `centred`) of x [rows, size] or [rows, parts, size] over its last dimension, which is
    contiguous. `weight` and `bias` are contiguous, float32, [size] or [parts, size]. Computed in float32 and rounded
    once."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, y, weight, bias, epsilon, centred)
    return y


def norm_in_place(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> None:
    """The same in place. x may be some columns of a larger matrix."""
    _launch(x, x, weight, bias, epsilon, centred)


def _launch(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool) -> None:
    size = x.shape[-1]
    parts, x_part, y_part = (1, 0, 0) if x.ndim == 2 else (x.shape[1], x.stride(1), y.stride(1))
    if not x.numel():
        return
    assert x.stride(-1) == 1
    assert weight.shape == x.shape[1:]
    block = triton.next_power_of_2(size)
    together = min(triton.next_power_of_2(parts), max(1, ELEMENTS // block))
    _norm[(len(x), triton.cdiv(parts, together))](
        x, y, weight, bias, parts, size, x.stride(0), x_part, y.stride(0), y_part, epsilon, centred, together, block,
        num_warps=max(1, min(MAX_WARPS, together * block // 256)),
    )  # fmt: skip


def self_test(device: torch.device) -> None:
    """Parts that share a warp, and rows that several warps sum. Raises SelfTestFailed if the results differ from
    torch's."""
    for dtype, tolerance in ((torch.bfloat16, 0.01), (torch.float32, 1e-5)):
        x, scales = random_tensor(device, 5, 3, 80, dtype=dtype), random_tensor(device, 3, 80, seed=1)
        expected = F.rms_norm(x.float(), (80,), None, 1e-5) * scales
        check_close("a norm of parts", norm(x[1:], scales, None, 1e-5, False), expected.to(dtype)[1:], tolerance)
        x = random_tensor(device, 2, 3010, dtype=dtype)
        scales, shifts = random_tensor(device, 3000, seed=1), random_tensor(device, 3000, seed=2)
        expected = x.clone()
        expected[:, 7:3007] = F.layer_norm(x[:, 7:3007].float(), (3000,), scales, shifts, 1e-5)
        norm_in_place(x[:, 7:3007], scales, shifts, 1e-5, True)
        check_close("a centred norm in place", x, expected, tolerance)
