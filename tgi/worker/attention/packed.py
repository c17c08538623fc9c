"""Attention of whole sequences without a KV cache, packed one after the other: of encoders, and of decoders that end in
a vector. With our CPU kernels the keys and values of one layer lie in pages that the next layer overwrites; elsewhere
torch computes sequence by sequence. A row's result does not depend on other sequences."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tgi.worker.attention.interface import KVCacheSpec
from tgi.worker.attention.sequence import sequence_attention
from tgi.worker.cpu_kernels.kernels import PAGE_SIZE, AttentionRows, KVCache

ALL = 1 << 30  # positions ahead that reach the end of any sequence


class PackedSequences(NamedTuple):
    """Sequences that are computed together: the tokens bounds[r] to bounds[r + 1] - 1 belong to sequence r."""

    tokens: Tensor  # int64 [T] ids
    positions: Tensor  # int64 [T] within each sequence
    bounds: list[int]  # [R + 1]

    @classmethod
    def of(cls, sequences: list[np.ndarray], device: torch.device) -> "PackedSequences":
        """Packs the ids of these sequences, none of which is empty."""
        lengths = [len(one) for one in sequences]
        tokens = np.concatenate(sequences).astype(np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        bounds = [0, *np.cumsum(lengths).tolist()]
        return cls(torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device), bounds)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(stop - start for start, stop in pairwise(self.bounds))


class PackedAttention:
    """Attention over PackedSequences; an AttentionBackend without a cache.

    `ahead` has for each layer how many positions after its own a query sees: 0 for causal attention, ALL for that of
    encoders. Windows limit the positions before: KVCacheSpec.sliding_windows.
    """

    page_size = PAGE_SIZE

    def __init__(self, kv: KVCacheSpec, ahead: list[int], tokens: int) -> None:
        """`tokens`: that are computed at once, in as many sequences; more memory is allocated when it is needed."""
        self._kv = kv
        self._ahead = ahead
        self._pages = 0
        self._memory = torch.empty(0)
        if kv.cpu_kernels is not None:
            self._reserve(2 * -(-tokens // PAGE_SIZE))

    def _reserve(self, pages: int) -> None:
        """Memory for the keys and values of one layer: zeros, since what is not written is multiplied by zero."""
        kv, self._pages = self._kv, pages
        size = kv.parts * PAGE_SIZE * kv.cache_head_dim * kv.dtype.itemsize
        self._memory = torch.zeros(pages, kv.kv_heads, size, dtype=torch.uint8)

    def plan(self, batch: PackedSequences) -> "KernelPlan | PackedSequences":
        if self._kv.cpu_kernels is None:
            return batch
        bounds = np.array(batch.bounds, np.int64)
        lengths = np.diff(bounds)
        pages = -(-lengths // PAGE_SIZE)
        starts = np.cumsum(pages) - pages
        if (total := int(pages.sum())) > self._pages:
            self._reserve(total)
        positions = batch.positions.numpy()
        slots = np.repeat(starts, lengths) * PAGE_SIZE + positions
        table = np.minimum(starts[:, None] + np.arange(int(pages.max())), total - 1)
        arrays = (slots, bounds.astype(np.int32), lengths.astype(np.int32), table.astype(np.int32))
        columns = tuple(torch.from_numpy(np.ascontiguousarray(one)) for one in arrays)
        at_slots, at_bounds, at_lengths, at_table = (column.data_ptr() for column in columns)
        rows = AttentionRows(at_slots, at_bounds, at_lengths, at_table, len(lengths), table.shape[1])
        return KernelPlan(rows, columns)

    def write_and_attend(self, plan: "KernelPlan | PackedSequences", layer: int, qkv: Tensor, scale: float) -> Tensor:
        """The attention [T, heads * result_dim] of qkv [T, heads + parts * kv_heads, head_dim]."""
        kv, ahead = self._kv, self._ahead[layer]
        window = kv.sliding_window(layer)
        if isinstance(plan, KernelPlan):
            assert kv.cpu_kernels is not None
            cache = KVCache(self._memory, kv.cpu_kernels.kv_form(kv.dtype))
            options = window, kv.softcap, ahead, kv.layer_sinks(layer), kv.value_dim
            return kv.cpu_kernels.paged_attention(cache, qkv, plan.rows, scale, *options)
        result = torch.empty(len(qkv), kv.heads * kv.result_dim, dtype=qkv.dtype, device=qkv.device)
        for start, stop in pairwise(plan.bounds):
            result[start:stop] = self._attend(qkv[start:stop], scale, window, ahead, kv.layer_sinks(layer))
        return result

    def _attend(self, qkv: Tensor, scale: float, window: int | None, ahead: int, sinks: Tensor | None) -> Tensor:
        """The attention of one sequence, by torch."""
        kv, length = self._kv, len(qkv)
        query, key, *rest = (
            one.transpose(0, 1)[None] for one in qkv.split([kv.heads, *[kv.kv_heads] * kv.parts], dim=1)
        )
        value = rest[0] if rest else key[..., : kv.result_dim]
        hidden = None
        if window is not None or ahead < length:
            place = torch.arange(length, device=qkv.device)
            distance = place[:, None] - place  # of a query from a key before it
            hidden = (distance < -ahead) | (distance >= (window or length))
        mixed = sequence_attention(query, key, value, hidden, scale, kv.softcap, sinks)
        return mixed[0].transpose(0, 1).reshape(length, -1)


class KernelPlan(NamedTuple):
    """The sequences as our CPU kernels take them: addresses, and the tensors that they point into."""

    rows: AttentionRows
    columns: tuple[Tensor, ...]
