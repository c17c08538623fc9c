"""The state of recurrent layers: tensors of a fixed size for each request, in numbered slots.

A recurrent layer keeps no keys and values but, say, the last inputs of a convolution and a matrix. A step reads and
overwrites the slot of each row (ForwardBatch.state_slots). A copy of a slot is a snapshot: a request goes on from it as
from the tokens that lead there.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.cpu_kernels.arena import map_region

ALIGNMENT = 64  # bytes; each tensor of a slot begins at a multiple


class StateTensor(NamedTuple):
    """A tensor that a layer keeps of a request."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in a slot, padding included."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


class StateSpec(NamedTuple):
    """What the recurrent layers of a model keep of a request."""

    layers: tuple[dict[str, StateTensor], ...]  # of each recurrent layer, in their order, by the tensors' names

    @property
    def bytes(self) -> int:
        """Bytes of a slot."""
        return sum(tensor.bytes for layer in self.layers for tensor in layer.values())


class StateCache:
    """Memory for `slots` slots. The bytes of a slot follow each other, so that a copy of it is one copy of memory.

    Slot 0 belongs to no request: rows that pad a batch may write to it.
    """

    def __init__(self, spec: StateSpec, slots: int, device: torch.device) -> None:
        if device.type == "cpu":  # mapped at the first write
            self._memory = torch.frombuffer(map_region(slots * spec.bytes), dtype=torch.uint8).view(slots, -1)
        else:
            self._memory = torch.zeros(slots, spec.bytes, dtype=torch.uint8, device=device)
        self.layers: list[dict[str, Tensor]] = []  # of each recurrent layer, tensors [slots, *shape]
        start = 0
        for layer in spec.layers:
            tensors = {}
            for name, (shape, dtype) in layer.items():
                columns = self._memory[:, start : start + math.prod(shape) * dtype.itemsize]
                tensors[name] = columns.view(dtype).unflatten(1, shape)
                start += layer[name].bytes
            self.layers.append(tensors)

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self._memory)

    def copy(self, source: int, target: int) -> None:
        """Overwrites slot `target` with slot `source`. On a GPU in the order of the kernels."""
        self._memory[target].copy_(self._memory[source])
