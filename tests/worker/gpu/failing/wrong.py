"""A kernel that doubles numbers, but not the last one."""

import torch
import triton
import triton.language as tl

from tgi.worker.gpu.trial import agree, numbers


@triton.jit
def _double(x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n - 1)


def trial(device: torch.device) -> None:
    x = numbers(device, 5)
    y = torch.zeros_like(x)
    _double[(1,)](x, y, 5, 8)
    agree("twice a number", y, 2 * x, 0.01)
