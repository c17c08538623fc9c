"""Copies between host and device: small ones that wait for no kernels that are already launched, and weights."""

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


STAGED_BYTES = 64 << 20  # of a buffer


class StagedCopies:
    """Copies large host tensors to a GPU through two buffers of pinned memory: one is filled, by all threads of torch,
    while the other is copied. A direct copy from memory that is not pinned, such as a mapped file, fills the driver's
    buffers with one thread."""

    def __init__(self, device: torch.device, pinned: bool = True, size: int = STAGED_BYTES) -> None:
        self._device = device
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def copy(self, values: Tensor) -> Tensor:
        """The tensor on the device; the copy of its last part may be queued on the current stream still."""
        found = torch.empty(values.shape, dtype=values.dtype, device=self._device)
        if not values.numel():
            return found
        flat = found.view(-1).view(torch.uint8)
        parts = values.contiguous().view(-1).view(torch.uint8).split(len(self._buffers[0]))
        for target, part in zip(flat.split(len(self._buffers[0])), parts, strict=True):
            self._turn = 1 - self._turn
            buffer, copied = self._buffers[self._turn][: len(part)], self._copied[self._turn]
            if copied is not None:
                copied.synchronize()
            target.copy_(buffer.copy_(part), non_blocking=True)
            if self._device.type == "cuda":
                self._copied[self._turn] = torch.cuda.Event()
                self._copied[self._turn].record()  # type: ignore[union-attr]
        return found


def copy_to_host(values: Tensor) -> Tensor:
    """A copy of a CUDA tensor in pinned memory, queued on the current stream."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
