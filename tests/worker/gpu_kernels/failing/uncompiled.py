"""A kernel that no compiler takes: numbers in a block are no power of two."""

import torch
import triton
import triton.language as tl

from tgi.worker.gpu_kernels.self_test import check_close, random_tensor


@triton.jit
def _double(x, y, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(y + at, 2 * tl.load(x + at))


def self_test(device: torch.device) -> None:
    x = random_tensor(device, 5)
    y = torch.empty_like(x)
    _double[(1,)](x, y, 5)
    check_close("twice a number", y, 2 * x, 0.01)
