"""How a kernel is tried before anything relies on it: on a small case, beside torch."""

import torch
from torch import Tensor


class Differs(Exception):
    """A kernel does not compute what torch does. The text has the figures."""


def numbers(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers for a trial, the same ones each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def agree(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raises Differs where they differ by more than `tolerance` of the largest number that is expected."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Differs(
            f"{what} is {found.dtype} {list(found.shape)}, where {expected.dtype} {list(expected.shape)} is expected"
        )
    wide, right = found.to(torch.float32), expected.to(torch.float32)
    wrong, largest = float((wide - right).abs().max()), float(right.abs().max())
    if not wrong <= tolerance * largest:
        raise Differs(
            f"{what} differs from torch's by {wrong:.3g}, where the largest number is {largest:.3g} and "
            f"{tolerance:.3g} of it are expected at most"
        )
