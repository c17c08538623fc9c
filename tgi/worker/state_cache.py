"""The state of recurrent layers: tensors of a fixed size for each request, in numbered slots.

A recurrent layer keeps no keys and values but, say, the last inputs of a convolution and a matrix. A step reads and
overwrites the slot of each row (ForwardBatch.state_slots). A copy of a slot is a snapshot: a request goes on from it as
from the tokens that lead there. A row with drafts also writes the state before each draft to a slot of its own
(ForwardBatch.kept_states), from which it is copied back if that draft is rejected.
"""

import math
import mmap
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.cpu_kernels.arena import map_region
from tgi.worker.cpu_kernels.recurrent import StateAddresses
from tgi.worker.kv_cache_sizes import state_tensor_bytes


class StateTensor(NamedTuple):
    """A tensor that a layer keeps of a request."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in a slot, padding included."""
        return state_tensor_bytes(self.shape, self.dtype.itemsize)


class StateSpec(NamedTuple):
    """What the recurrent layers of a model keep of a request."""

    layers: tuple[dict[str, StateTensor], ...]  # of each recurrent layer, in their order, by the tensors' names

    @property
    def bytes(self) -> int:
        """Bytes of a slot."""
        return sum(tensor.bytes for layer in self.layers for tensor in layer.values())


class StateCache:
    """Memory for `slots` slots. The bytes of a slot follow each other, so that a copy of it is one copy of memory.

    Slot 0 belongs to no request: rows that pad a batch may write to it, and tokens whose state is not kept.
    """

    def __init__(self, spec: StateSpec, slots: int, device: torch.device, shared: bool = False) -> None:
        """`shared`: with processes that are forked from this one; on CPU."""
        self._region: mmap.mmap | None = None
        if device.type == "cpu":  # mapped at the first write
            self._region = map_region(slots * spec.bytes, shared)
            self._memory = torch.frombuffer(self._region, dtype=torch.uint8).view(slots, -1)
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
        return len(self._memory)

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.values()]

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self._memory.stride(0)

    def discard(self) -> None:
        """Gives the memory of a `shared` cache back to the operating system; all states are zeros."""
        assert self._region is not None
        self._region.madvise(mmap.MADV_REMOVE)  # Linux, which alone has fork servers

    def copy(self, source: int, target: int) -> None:
        """Overwrites slot `target` with slot `source`. On a GPU in the order of the kernels."""
        self._memory[target].copy_(self._memory[source])


class RowGroup(NamedTuple):
    """Consecutive rows with the same number of tokens."""

    rows: slice
    tokens: slice
    each: int  # tokens of each row


class StateRows(NamedTuple):
    """The rows of a step and their state."""

    cache: StateCache
    slots: Tensor  # int32 [R], as the next two ForwardBatch.state_slots, cu_query_lens and context_lens
    cu_query_lens: Tensor
    context_lens: Tensor
    query_lens_host: list[int]
    kept: Tensor | None = None  # int32 [T], ForwardBatch.kept_states

    @property
    def addresses(self) -> StateAddresses:
        """As the CPU kernels take them."""
        slots, bounds, contexts = (x.data_ptr() for x in (self.slots, self.cu_query_lens, self.context_lens))
        kept = None if self.kept is None else self.kept.data_ptr()
        return StateAddresses(slots, bounds, contexts, len(self.slots), self.cache.slot_bytes, kept)

    @property
    def groups(self) -> Iterator[RowGroup]:
        """The rows, in order: all decode rows are one group."""
        row = token = 0
        for count, same in groupby(self.query_lens_host):
            rows = sum(1 for _ in same)
            yield RowGroup(slice(row, row + rows), slice(token, token + rows * count), count)
            row, token = row + rows, token + rows * count

    def read(self, state: Tensor, group: RowGroup) -> Tensor:
        """What the rows of a group find in a state tensor [slots, ...]: [rows, ...], zeros at the start of a
        sequence."""
        own, context = self.slots[group.rows].long(), self.context_lens[group.rows]
        started = context > group.each
        found = state.index_select(0, own)
        return found.where(started.view(-1, *[1] * (state.ndim - 1)), torch.zeros_like(found))

    def write(self, state: Tensor, group: RowGroup, values: Tensor) -> None:
        """Overwrites the state of a group with `values` [rows, ...]."""
        state.index_copy_(0, self.slots[group.rows].long(), values)

    def keep(self, state: Tensor, group: RowGroup, token: int, values: Tensor) -> None:
        """Writes `values` [rows, ...], the state of a group after token number `token` of each row, to the slots that
        keep it."""
        if self.kept is not None:
            state.index_copy_(0, self.kept[group.tokens].view(-1, group.each)[:, token].long(), values)
