"""Attention on CPU with our own kernels, which read the pages in place; see cpu_kernels/attention.cpp."""

import math
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.attention.interface import ForwardBatch, KVCacheSpec
from tgi.worker.cpu_kernels.arena import LARGE_PAGE, SMALL_PAGE, map_region
from tgi.worker.cpu_kernels.kernels import PAGE_SIZE, AttentionRows, CpuKernels, KVCache
from tgi.worker.state_cache import StateCache


class CpuKernelPlan(NamedTuple):
    """The rows of a step as the kernel takes them: pointers, and the tensors that they point into."""

    rows: list[AttentionRows]  # of each KV group; those of the first one lead to the others
    columns: tuple[Tensor, ...]  # keeps the memory of `rows` alive


class CpuKernelAttention:
    """Implements AttentionBackend and PrefaultingBackend.

    A cache is in the layout of the kernel (KVCache).
    """

    page_size = PAGE_SIZE
    state: StateCache | None = None  # set by build_attention

    def __init__(self, kv: KVCacheSpec, pages: int, kernels: CpuKernels) -> None:
        self._kv = kv
        self._kernels = kernels
        self._shape = (pages, kv.kv_heads, kv.token_bytes * PAGE_SIZE // (max(1, kv.caches) * kv.kv_heads))  # in bytes
        self.kv_form = kernels.kv_form(kv.cache_dtype)  # for a program
        self._places = kv.places
        self._cache = [self._memory() for _ in range(kv.caches)]
        # For a program, int64 [layers, 2]: the address of each layer's cache, and its KV group.
        addresses = [(self._cache[cache].data_ptr(), group) for group, cache in self._places]
        self.caches = torch.tensor(addresses, dtype=torch.int64).view(-1, 2)
        self._mapped_bytes = 0  # bytes at the beginning of every cache that are mapped
        self._next_cache = 0  # caches before this one have one LARGE_PAGE more

    def _memory(self) -> Tensor:
        """A cache: zeros whose memory is mapped at the first write. Core dumps leave it out."""
        region = map_region(math.prod(self._shape))
        if hasattr(mmap, "MADV_DONTDUMP"):
            region.madvise(mmap.MADV_DONTDUMP)
        return torch.frombuffer(region, dtype=torch.uint8).view(self._shape)

    def prefault_pages(self, used: int, further: int) -> bool:
        """See PrefaultingBackend. One call maps one large page of one cache."""
        pages, heads, size = self._shape
        page = heads * size
        if (begun := -(-used * page // LARGE_PAGE) * LARGE_PAGE) > self._mapped_bytes:
            self._mapped_bytes, self._next_cache = begun, 0
        if self._mapped_bytes >= min(used + further, pages) * page:
            return False
        memory = self._cache[self._next_cache].view(-1)
        memory[self._mapped_bytes : self._mapped_bytes + LARGE_PAGE : SMALL_PAGE] = 0
        self._next_cache += 1
        if self._next_cache == len(self._cache):
            self._mapped_bytes, self._next_cache = self._mapped_bytes + LARGE_PAGE, 0
        return True

    def plan(self, batch: ForwardBatch) -> CpuKernelPlan:
        """See AttentionBackend."""
        columns = (batch.slot_mapping, batch.cu_query_lens, batch.context_lens, batch.page_table)
        bounds, contexts = batch.cu_query_lens.data_ptr(), batch.context_lens.data_ptr()
        rows = [
            AttentionRows(slots.data_ptr(), bounds, contexts, table.data_ptr(), *table.shape)
            for slots, table in zip(batch.slot_mapping, batch.page_table, strict=True)
        ]
        return CpuKernelPlan(rows, columns)

    def write_and_attend(self, plan: CpuKernelPlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """See AttentionBackend; the result is [T, heads * result_dim]."""
        kv, (group, cache) = self._kv, self._places[layer]
        return self._kernels.paged_attention(
            KVCache(self._cache[cache], self.kv_form),
            qkv,
            plan.rows[group],
            scale,
            kv.sliding_window(layer),
            kv.softcap,
            sinks=kv.layer_sinks(layer),
            value_dim=kv.value_dim,
        )
