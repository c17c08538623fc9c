"""Attention on CUDA, over a paged KV cache in the model's dtype or in 8 bits.

Our own kernels compute it, if they are available: one launch normalizes and rotates queries and keys and writes to the
cache (gpu_kernels/kv_write.py), and one attends (gpu_kernels/paged_attention.py). A batch begins with its decode rows;
the rows after them, prompt chunks and rows with drafts, have a launch of their own with larger tiles.

Without them (--disable-custom-kernels, or a failed self-test) torch computes row by row from gathered pages: slow, and
it materializes all scores of a row. Such steps are not captured as CUDA graphs, since the host must know the contexts.
"""

import logging
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tgi.worker.attention.interface import ForwardBatch, KVCacheSpec, Reach
from tgi.worker.attention.sequence import sequence_attention
from tgi.worker.gpu_kernels.attention_arguments import HeadTransform, Rows
from tgi.worker.kv_cache_sizes import GPU_PAGE_SIZE
from tgi.worker.state_cache import StateCache

if TYPE_CHECKING:
    from tgi.worker.gpu_kernels.flash_attention import PromptAttention

log = logging.getLogger(__name__)

MOST_FLASH_DIM = 256  # of the heads that FlashAttention computes


class CudaPlan(NamedTuple):
    """What all layers of a step share."""

    slot_mapping: Tensor  # int64 [G, T]
    groups: list[tuple[Rows, ...]]  # of each KV group, for our own kernels
    batch: ForwardBatch  # for torch's


class CudaAttention:
    """Implements AttentionBackend, CapturableBackend and TransformingBackend."""

    page_size = GPU_PAGE_SIZE
    state: StateCache | None = None  # set by build_attention

    def __init__(self, kv: KVCacheSpec, pages: int, device: torch.device) -> None:
        self._kv = kv
        self.padding_page = pages
        self._places = kv.places
        self._caches = [PagedCache(kv, pages + 1, self.page_size, device) for _ in range(kv.caches)]
        self._counters = None if kv.gpu_kernels is None else kv.gpu_kernels.split_counters(device)
        self._prompts = _prompt_attention(kv, self.page_size, device)
        kernels = "torch's kernels, row by row" if kv.gpu_kernels is None else "our own kernels"
        log.debug("attention on %s: %s; KV cache in %s", device, kernels, str(kv.cache_dtype).removeprefix("torch."))

    def plan(self, batch: ForwardBatch) -> CudaPlan:
        if self._kv.gpu_kernels is None:
            return CudaPlan(batch.slot_mapping, [], batch)
        columns = batch.query_lens_host, batch.cu_query_lens
        invariant = self._kv.gpu_kernels.batch_invariant
        groups = [launches(*columns, table, batch.context_lens, invariant) for table in batch.page_table]
        return CudaPlan(batch.slot_mapping, groups, batch)

    def write_and_attend(self, plan: CudaPlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        if self._kv.gpu_kernels is not None:
            return self.transform_and_attend(plan, layer, qkv, scale, HeadTransform())
        kv, (group, place) = self._kv, self._places[layer]
        key_scale, value_scale = scales = kv.layer_scales(layer)
        if qkv.shape[1] > kv.heads:
            self._caches[place].write(qkv, plan.slot_mapping[group], scales)
        mixed = self._attend_row_by_row(plan.batch, layer, qkv[:, : kv.heads], scale * key_scale)
        return mixed if value_scale == 1.0 else mixed * value_scale

    def transform_and_attend(
        self, plan: CudaPlan, layer: int, qkv: Tensor, scale: float, transform: HeadTransform
    ) -> Tensor:
        kv, (group, place), kernels = self._kv, self._places[layer], self._kv.gpu_kernels
        assert kernels is not None
        cache = self._caches[place]
        key_scale, value_scale = scales = kv.layer_scales(layer)
        slots = plan.slot_mapping[group]
        if kv.value_dim is None:
            query = kernels.rotate_and_write_kv(
                *(qkv, cache.keys, cache.values, slots, scales, transform.rotation, transform.norm),
                shared=qkv.shape[1] == kv.heads,
            )
        else:
            assert transform.norm is None
            query = kernels.rotate_and_write_latent(qkv, cache.keys, slots, key_scale, transform.rotation)
        last_keys = None if plan.batch.blocks is None else plan.batch.blocks.last_seen(kv.reach(layer))
        mixed = torch.empty(*query.shape[:2], kv.result_dim, dtype=query.dtype, device=query.device)
        for rows in plan.groups[group]:
            if self._prompts is not None and last_keys is None and self._prompts.serves(rows):
                reach = kv.sliding_window(layer), kv.softcap
                self._prompts.attend(query, cache.keys, cache.values, rows, mixed, scale, *reach)
                continue
            kernels.paged_attention(
                *(query, cache.keys, cache.values, rows, mixed, scale * key_scale),
                window=kv.sliding_window(layer),
                cap=kv.softcap,
                sinks=kv.layer_sinks(layer),
                counters=self._counters,
                chunked=layer in kv.chunked,
                slopes=kv.slopes,
                last_keys=None if rows.starts is None else last_keys,
            )
        return mixed if value_scale == 1.0 else mixed.mul_(value_scale)

    def _attend_row_by_row(self, batch: ForwardBatch, layer: int, query: Tensor, scale: float) -> Tensor:
        queries = list(accumulate(batch.query_lens_host, initial=0))
        kv, sinks = self._kv, self._kv.layer_sinks(layer)
        group, place = self._places[layer]
        cache = self._caches[place]
        last_keys = None if batch.blocks is None else batch.blocks.last_seen(kv.reach(layer))
        mixed = torch.empty(*query.shape[:2], kv.result_dim, dtype=query.dtype, device=query.device)
        for row, (count, context) in enumerate(zip(batch.query_lens_host, batch.context_lens_host, strict=True)):
            pages = batch.page_table[group, row, : -(-context // self.page_size)].long()
            keys, values = (x.flatten(0, 1)[:context] for x in cache.gather_pages(pages))
            own = slice(queries[row], queries[row + 1])
            q, k, v = (x.transpose(0, 1)[None] for x in (query[own], keys, values))
            hidden = _hidden_keys(
                count, context, kv.reach(layer), query.device, None if last_keys is None else last_keys[own]
            )
            out = sequence_attention(q, k, v, hidden, scale, kv.softcap, sinks, kv.slopes)
            mixed[own] = out[0].transpose(0, 1)
        return mixed


def launches(
    lens: list[int], starts: Tensor, table: Tensor, context: Tensor, batch_invariant: bool
) -> tuple[Rows, ...]:
    """The launches of our kernel for rows of these numbers of tokens, which begin at the tokens `starts` [R + 1] of a
    step, with this page table [R, P] and these contexts [R]."""
    if batch_invariant:  # one tile for all
        return (Rows(0, sum(lens), max(lens), starts, table, context),)
    decode = next((row for row, count in enumerate(lens) if count > 1), len(lens))
    found = []
    if decode:
        found.append(Rows(0, decode, 1, None, table[:decode], context[:decode]))
    if decode < len(lens):
        others = slice(decode, None)
        tokens, longest = sum(lens[others]), max(lens[others])
        found.append(Rows(decode, tokens, longest, starts[others], table[others], context[others]))
    return tuple(found)


def _prompt_attention(kv: KVCacheSpec, page_size: int, device: torch.device) -> "PromptAttention | None":
    """The library that computes the attention of long prompts (gpu_kernels/flash_attention.py); None: our kernel."""
    kernels = kv.gpu_kernels
    if device.type != "cuda" or kernels is None or kernels.batch_invariant or kv.sinks or kv.value_dim is not None:
        return None
    if kv.dtype.itemsize != 2 or kv.cache_dtype is not kv.dtype or kv.chunked or kv.slopes is not None:
        return None
    if kv.head_dim > MOST_FLASH_DIM:
        return None
    from tgi.worker.gpu_kernels.flash_attention import Heads, choose_prompt_attention

    return choose_prompt_attention(kernels, Heads(kv.heads, kv.kv_heads, kv.head_dim, page_size, kv.dtype), device)


class PagedCache:
    """Keys and values of one layer of each KV group: two tensors [pages, page_size, kv_heads, head_dim], or one where a
    value is part of its key.

    They hold key / scales[0] and value / scales[1] (KVCacheSpec.layer_scales).
    """

    def __init__(self, kv: KVCacheSpec, pages: int, page_size: int, device: torch.device) -> None:
        shape = (pages, page_size, kv.kv_heads, kv.head_dim)
        self._kv = kv
        self.keys = torch.zeros(shape, dtype=kv.cache_dtype, device=device)
        self.values = (
            torch.zeros(shape, dtype=kv.cache_dtype, device=device)
            if kv.value_dim is None
            else self.keys[..., : kv.value_dim]
        )

    def write(self, qkv: Tensor, slot_mapping: Tensor, scales: tuple[float, float]) -> None:
        """Stores the keys and values of `qkv` (see AttentionBackend) at a group's slot mapping [T]."""
        kv = self._kv
        new = qkv[:, kv.heads :].split(kv.kv_heads, 1)
        for cache, x, scale in zip((self.keys, self.values)[: kv.parts], new, scales, strict=False):
            stored = _as_bytes(to_cache_dtype(x, kv.cache_dtype, scale))
            _as_bytes(cache).flatten(0, 1).index_copy_(0, slot_mapping, stored)

    def gather_pages(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, page_size, kv_heads, head_dim] of pages int64 [n], in the model's dtype."""
        return self._gather(self.keys, pages), self._gather(self.values, pages)

    def _gather(self, cache: Tensor, indices: Tensor) -> Tensor:
        return _as_bytes(cache).index_select(0, indices).view(cache.dtype).to(self._kv.dtype)


def to_cache_dtype(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Converts keys or values to the dtype of a cache; for 8-bit types, x / scale.

    An overflow in one request must not reach the next request that gets its pages. So in 8-bit types, to which torch
    converts large values as infinity or NaN, and in float16, values are clamped to the finite range, and NaN becomes 0.
    """
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x if scale == 1.0 else x.float() * (1 / scale)
        return x.clamp(-largest, largest).nan_to_num(0.0).to(dtype)
    return x.nan_to_num() if dtype is torch.float16 else x


def _as_bytes(x: Tensor) -> Tensor:
    """8-bit floats as uint8, since torch's index operations do not support the former."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _hidden_keys(count: int, context: int, reach: Reach, device: torch.device, last_keys: Tensor | None) -> Tensor:
    """Which keys the last `count` positions of a row do not see, [count, context]. `last_keys` [count]: the last one
    that each sees; None: its own."""
    own = torch.arange(context - count, context, device=device)[:, None]
    keys = torch.arange(context, device=device)
    return reach.masked(keys, own, last_keys=None if last_keys is None else last_keys[:, None])
