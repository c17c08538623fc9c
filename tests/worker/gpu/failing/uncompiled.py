"""A kernel that no compiler takes: numbers in a block are no power of two."""

import torch
import triton
import triton.language as tl

from tgi.worker.gpu.trial import agree, numbers


@triton.jit
def _double(x, y, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(y + at, 2 * tl.load(x + at))


def trial(device: torch.device) -> None:
    x = numbers(device, 5)
    y = torch.empty_like(x)
    _double[(1,)](x, y, 5)
    agree("twice a number", y, 2 * x, 0.01)
