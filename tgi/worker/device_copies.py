"""Copies between host and device that do not wait for the kernels that are already launched."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def pin_for_copy(values: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a host tensor from which an asynchronous copy to the device can start: for CUDA in pinned memory.
    A copy from other memory would wait for all kernels launched before it, thus for a forward pass.

    torch pins a block once and reuses it when its copies are done: after the first steps nothing is pinned any more.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def copy_to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device. On CPU it shares the array's memory; on CUDA the copy is queued on the
    current stream."""
    tensor = pin_for_copy(values, device)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def copy_columns_to_device(columns: tuple[NDArray[Any], ...], device: torch.device) -> list[Tensor]:
    """Integer columns [n] as tensors on the device. On CUDA they are copied at once, all in the widest dtype."""
    if device.type == "cpu":
        return [torch.from_numpy(column) for column in columns]
    return list(copy_to_device(np.concatenate(columns), device).split([len(column) for column in columns]))


def copy_to_host(values: Tensor) -> Tensor:
    """A copy of a CUDA tensor in pinned memory, queued on the current stream."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
