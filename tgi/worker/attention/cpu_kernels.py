"""Attention on CPU with our own kernels, which read the pages in place; see cpu_kernels/attention.cpp."""

import math
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.attention.interface import ForwardBatch, KVCacheSpec
from tgi.worker.cpu_kernels.arena import LARGE_PAGE, SMALL_PAGE, map_region
from tgi.worker.cpu_kernels.kernels import PAGE_SIZE, AttentionRows, CpuKernels, KVCache


class CpuKernelPlan(NamedTuple):
    """The rows of a step as the kernel takes them: pointers, and the tensors that they point into."""

    rows: AttentionRows
    columns: tuple[Tensor, ...]  # keeps the memory of `rows` alive


class CpuKernelAttention:
    """Implements AttentionBackend and PrefaultingBackend.

    The cache of a layer is in the layout of the kernel (KVCache).
    """

    page_size = PAGE_SIZE

    def __init__(self, kv: KVCacheSpec, pages: int, kernels: CpuKernels) -> None:
        self._kv = kv
        self._kernels = kernels
        self._shape = (pages, kv.kv_heads, kv.token_bytes * PAGE_SIZE // (kv.layers * kv.kv_heads))  # in bytes
        self.kv_form = kernels.kv_form(kv.cache_dtype)  # for a program
        self._cache = [self._memory() for _ in range(kv.layers)]
        # Addresses of the layers' caches, int64 [layers], for a program.
        self.caches = torch.tensor([cache.data_ptr() for cache in self._cache])
        self._mapped_bytes = 0  # bytes at the beginning of every layer's cache that are mapped
        self._next_layer = 0  # layers before this one have one LARGE_PAGE more

    def _memory(self) -> Tensor:
        """One layer's cache: zeros whose memory is mapped at the first write. Core dumps leave it out."""
        region = map_region(math.prod(self._shape))
        if hasattr(mmap, "MADV_DONTDUMP"):
            region.madvise(mmap.MADV_DONTDUMP)
        return torch.frombuffer(region, dtype=torch.uint8).view(self._shape)

    def prefault_pages(self, used: int, further: int) -> bool:
        """See PrefaultingBackend. One call maps one large page of one layer."""
        pages, heads, size = self._shape
        page = heads * size
        if (begun := -(-used * page // LARGE_PAGE) * LARGE_PAGE) > self._mapped_bytes:
            self._mapped_bytes, self._next_layer = begun, 0
        if self._mapped_bytes >= min(used + further, pages) * page:
            return False
        memory = self._cache[self._next_layer].view(-1)
        memory[self._mapped_bytes : self._mapped_bytes + LARGE_PAGE : SMALL_PAGE] = 0
        self._next_layer += 1
        if self._next_layer == len(self._cache):
            self._mapped_bytes, self._next_layer = self._mapped_bytes + LARGE_PAGE, 0
        return True

    def plan(self, batch: ForwardBatch) -> CpuKernelPlan:
        """See AttentionBackend."""
        columns = (batch.slot_mapping, batch.cu_query_lens, batch.context_lens, batch.page_table)
        slot_mapping, cu_query_lens, context_lens, page_table = (column.data_ptr() for column in columns)
        return CpuKernelPlan(
            AttentionRows(slot_mapping, cu_query_lens, context_lens, page_table, *batch.page_table.shape), columns
        )

    def write_and_attend(self, plan: CpuKernelPlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """See AttentionBackend; the result is [T, heads * head_dim]."""
        kv = self._kv
        return self._kernels.paged_attention(
            KVCache(self._cache[layer], self.kv_form), qkv, plan.rows, scale, kv.sliding_window(layer), kv.softcap
        )
