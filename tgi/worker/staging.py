"""Brings host arrays to the device without a wait for what the device still has to do."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def staged(values: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the host, where a copy to that device may start and the host go on at once: for CUDA in pinned
    memory. From other memory the copy would wait for all launched before it, so for a forward pass.

    torch pins a block once and hands it out again when the copies from it are over: after the first steps nothing is
    pinned any more, and nothing waits.
    """
    here = torch.from_numpy(values)
    return here.pin_memory() if device.type == "cuda" else here


def sent(values: NDArray[Any], device: torch.device) -> Tensor:
    """The array there. On CPU it is the same memory; on CUDA the copy is under way on the current stream, in order with
    whatever is launched."""
    here = staged(values, device)
    return here if device.type == "cpu" else here.to(device, non_blocking=True)


def sent_together(columns: tuple[NDArray[Any], ...], device: torch.device) -> list[Tensor]:
    """Columns [n] of integers, each there; off the CPU in one copy, all as wide as the widest."""
    if device.type == "cpu":
        return [torch.from_numpy(column) for column in columns]
    return list(sent(np.concatenate(columns), device).split([len(column) for column in columns]))


def to_host(values: Tensor) -> Tensor:
    """A copy of what is on a GPU in pinned memory, under way on the current stream."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
