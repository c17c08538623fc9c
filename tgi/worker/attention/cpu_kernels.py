"""Attention on CPU with our own kernels, which read the pages in place; see cpu_kernels/attention.cpp."""

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
    """Implements AttentionBackend, PrefaultingBackend and StorableBackend.

    A cache is in the layout of the kernel (KVCache).
    """

    page_size = PAGE_SIZE
    state: StateCache | None = None  # set by build_attention

    def __init__(self, kv: KVCacheSpec, pages: int, kernels: CpuKernels, shared: bool = False) -> None:
        """`shared`: processes that are forked from this one have the same cache, not a copy."""
        self._kv = kv
        self._kernels = kernels
        self._pages = pages
        self.kv_form = kernels.kv_form(kv.cache_dtype)  # for a program
        self._regions: list[mmap.mmap] = []
        self._cache: list[Tensor] = []  # of all caches
        self._places: list[tuple[int, Tensor]] = [(0, torch.empty(0))] * kv.layers  # of each layer, its group and cache
        for spec, layers in kv.by_shape():
            size = spec.token_bytes * PAGE_SIZE // (max(1, spec.caches) * spec.kv_heads)  # bytes of a page and head
            self._regions += (regions := [_map_cache(pages * spec.kv_heads * size, shared) for _ in range(spec.caches)])
            caches = [torch.frombuffer(one, dtype=torch.uint8).view(pages, spec.kv_heads, size) for one in regions]
            self._cache += caches
            for layer, (group, cache) in zip(layers, spec.places, strict=True):
                self._places[layer] = group, caches[cache]
        # For a program, int64 [layers, 2]: the address of each layer's cache, and its KV group.
        addresses = [(cache.data_ptr(), group) for group, cache in self._places]
        self.caches = torch.tensor(addresses, dtype=torch.int64).view(-1, 2)
        self._mapped = [0] * len(self._cache)  # bytes at the beginning of each cache that are mapped

    @property
    def page_memory(self) -> list[Tensor]:
        return self._cache

    def prefault_pages(self, used: int, further: int) -> bool:
        """See PrefaultingBackend. One call maps one large page of one cache."""
        if not self._cache:  # no layer has attention
            return False
        sizes = [cache[0].nbytes for cache in self._cache]  # of a page
        self._mapped = [
            max(mapped, -(-used * size // LARGE_PAGE) * LARGE_PAGE)
            for mapped, size in zip(self._mapped, sizes, strict=True)
        ]
        least = min(range(len(sizes)), key=lambda cache: self._mapped[cache] / sizes[cache])
        begin = self._mapped[least]
        if begin >= min(used + further, self._pages) * sizes[least]:
            return False
        # A write that changes nothing: pages that a predecessor has computed may be there (`shared`).
        self._cache[least].view(-1)[begin : begin + LARGE_PAGE : SMALL_PAGE] |= 0
        self._mapped[least] += LARGE_PAGE
        return True

    def discard_pages(self) -> None:
        for region in self._regions:
            region.madvise(mmap.MADV_REMOVE)  # of shared memory; only Linux has fork servers, which share it
        self._mapped = [0] * len(self._cache)

    def plan(self, batch: ForwardBatch) -> CpuKernelPlan:
        columns: tuple[Tensor, ...] = (batch.slot_mapping, batch.cu_query_lens, batch.context_lens, batch.page_table)
        bounds, contexts = batch.cu_query_lens.data_ptr(), batch.context_lens.data_ptr()
        blocks: tuple[int, bool] | tuple[()] = ()
        if batch.blocks is not None:
            columns += (batch.blocks.last_keys,)
            blocks = (batch.blocks.last_keys.data_ptr(), batch.blocks.windows_alone)
        rows = [
            AttentionRows(slots.data_ptr(), bounds, contexts, table.data_ptr(), *table.shape, *blocks)
            for slots, table in zip(batch.slot_mapping, batch.page_table, strict=True)
        ]
        return CpuKernelPlan(rows, columns)

    def write_and_attend(self, plan: CpuKernelPlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        kv, (group, cache) = self._kv, self._places[layer]
        return self._kernels.paged_attention(
            KVCache(cache, self.kv_form),
            qkv,
            plan.rows[group],
            scale,
            kv.sliding_window(layer),
            kv.softcap,
            sinks=kv.layer_sinks(layer),
            value_dim=kv.value_dim,
            shared_heads=kv.heads if qkv.shape[1] == kv.heads else None,
            chunked=layer in kv.chunked,
            slopes=kv.slopes,
        )


def _map_cache(size: int, shared: bool) -> mmap.mmap:
    """The memory of a cache: zeros, which are mapped at the first write. Core dumps leave it out."""
    region = map_region(size, shared)
    if hasattr(mmap, "MADV_DONTDUMP"):
        region.madvise(mmap.MADV_DONTDUMP)
    return region
