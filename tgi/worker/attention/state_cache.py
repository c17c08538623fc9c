"""The recurrent state of requests: what layers without pages keep (short convolutions, gated delta rules).

The state of a request is a fixed number of bytes, in a slot. Slot s belongs to the request in slot s of the worker, and
each step overwrites the state there. Slots with negative numbers, -1 to -snapshots, hold snapshots: copies of a state
at a page border, from which other requests with the same prefix go on. Only the scheduler assigns them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StateTensor(NamedTuple):
    """A tensor that a layer keeps of each request."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StateSpec(NamedTuple):
    """The recurrent layers of a model, in order, each with what it keeps of a request."""

    layers: Sequence[Sequence[StateTensor]]

    @property
    def bytes(self) -> int:
        """Of one slot, over all layers."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for layer in self.layers for one in layer)


class StateCache:
    """Owns the tensors. `layers[n][name]` is [slots + snapshots, *shape] of the n-th recurrent layer.

    A row begins with zeros if its context was empty before the step, whatever its slot holds.
    """

    def __init__(self, spec: StateSpec, slots: int, snapshots: int, device: torch.device) -> None:
        self.layers: list[dict[str, Tensor]] = [
            {one.name: torch.zeros(slots + snapshots, *one.shape, dtype=one.dtype, device=device) for one in layer}
            for layer in spec.layers
        ]

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies the states of slots (int64 [n], on the device) to other slots, all at once. No target is twice."""
        for layer in self.layers:
            for tensor in layer.values():
                tensor[targets] = tensor[sources]
