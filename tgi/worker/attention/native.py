"""Attention on CPU by our own kernels, which read the pages in place. See native/attention.cpp."""

from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.batch import Batch, KVShape
from tgi.worker.native.arena import LARGE_PAGE, SMALL_PAGE, region
from tgi.worker.native.kernels import PAGE, Kernels, Rows


class Plan(NamedTuple):
    """One step's rows for the kernel, and the tensors that hold its columns."""

    rows: Rows
    kept: tuple[Tensor, ...]


class NativeAttention:
    """The backend. The cache of a layer is [pages, kv_heads, 2 * PAGE * head_dim], as the kernel writes it."""

    page_size = PAGE

    def __init__(self, kv: KVShape, pages: int, kernels: Kernels) -> None:
        self._kv = kv
        self._kernels = kernels
        self._shape = (pages, kv.kv_heads, 2 * PAGE * kv.head_dim)
        self._cache = [self._memory() for _ in range(kv.layers)]
        self.caches = torch.tensor([cache.data_ptr() for cache in self._cache])  # their addresses, for a program
        self._given = 0  # bytes at the beginning of each layer's cache that the system has given,
        self._layer = 0  # and the first layer that has not been given the LARGE_PAGE behind them too

    def _memory(self) -> Tensor:
        """One layer's cache: zeros that take memory once written to."""
        pages, heads, size = self._shape
        zeros = region(pages * heads * size * self._kv.dtype.itemsize)
        return torch.frombuffer(zeros, dtype=self._kv.dtype).view(self._shape)

    def ready(self, used: int, further: int) -> bool:
        """See Readied. A large page of one layer takes a call."""
        pages, heads, size = self._shape
        page = heads * size * self._kv.dtype.itemsize
        if (begun := -(-used * page // LARGE_PAGE) * LARGE_PAGE) > self._given:
            self._given, self._layer = begun, 0
        if self._given >= min(used + further, pages) * page:
            return False
        memory = self._cache[self._layer].view(-1).view(torch.uint8)
        memory[self._given : self._given + LARGE_PAGE : SMALL_PAGE] = 0
        self._layer += 1
        if self._layer == len(self._cache):
            self._given, self._layer = self._given + LARGE_PAGE, 0
        return True

    def plan(self, batch: Batch) -> Plan:
        """See Attention."""
        columns = (batch.cache_at, batch.cu_query, batch.context, batch.page_table)
        places, bounds, contexts, pages = (column.data_ptr() for column in columns)
        return Plan(Rows(places, bounds, contexts, pages, *batch.page_table.shape), columns)

    def write_and_attend(self, plan: Plan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """See Attention; the result is [T, heads * head_dim]."""
        kv = self._kv
        return self._kernels.attend(self._cache[layer], qkv, plan.rows, scale, kv.window(layer), kv.softcap)
