"""Helpers of the self-tests: each kernel is compared with torch on a small case before the worker relies on it."""

import torch
from torch import Tensor


class SelfTestFailed(Exception):
    """A kernel's result differs from torch's. The text has the figures."""


def random_tensor(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same ones for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raises SelfTestFailed if shapes or types differ, or any element by more than `tolerance` times the largest
    magnitude of `expected`."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise SelfTestFailed(
            f"{what} is {found.dtype} {list(found.shape)}, where {expected.dtype} {list(expected.shape)} is expected"
        )
    wide, right = found.to(torch.float32), expected.to(torch.float32)
    wrong, largest = float((wide - right).abs().max()), float(right.abs().max())
    if not wrong <= tolerance * largest:
        raise SelfTestFailed(
            f"{what} differs from torch's by {wrong:.3g}, where the largest number is {largest:.3g} and "
            f"{tolerance:.3g} of it are expected at most"
        )
