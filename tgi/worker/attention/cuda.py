"""Attention on CUDA, over a paged KV cache in the model's dtype or in 8 bits. Batch invariant.

Decode rows (one token each) run on our own kernel (gpu_kernels/paged_attention.py), if it is available. It reads pages
in place and divides a long context among many multiprocessors by the length of that context alone, while the kernels
below are batch invariant only if one of them reads a whole context. A batch begins with its decode rows; the rows after
them are planned as a batch of their own.

Prompts run on torch's variable-length attention, torch.nn.attention.varlen.varlen_attn. torch brings Flash Attention 2,
which needs contiguous keys. Flash Attention 3 (Hopper) or 4 (Blackwell), if their package is installed, replace it and
read pages in place. The implementation is chosen once:

- "paged": FA3 or FA4. One split of the keys per query (`num_splits=1`) makes it batch invariant.
- "packed": FA2, and 8-bit caches, since queries and keys must have the same dtype. The pages in use are first gathered
  in the order of the rows, in the model's dtype.
- "plain": float32, which no flash kernel supports, and soft caps, which varlen_attn does not offer. Gathers pages like
  "packed", then computes row by row. Slow, and materializes all scores of a row.

Steps captured as CUDA graphs (engine/cuda_graphs.py) read pages in place where possible: our own kernel reads contexts
on the device, and FA3 computes the number of key blocks of a row there from `seqused_k`, so host-side contexts may be
upper bounds. With a page table, FA3 takes its bound from the table's width and uses `max_k` only to choose the splits,
which `num_splits=1` fixes. FA2 needs contiguous keys, whose length the host must know: without our own kernel, padded
decode attention (at the end of this module) replaces it and "plain".

Tests on CPU check the arguments against a reference implementation. This module has not been run on a GPU yet.
"""

import inspect
import logging
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as flash
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from tgi.worker.attention.interface import ForwardBatch, KVCacheSpec
from tgi.worker.kv_cache_sizes import GPU_PAGE_SIZE

log = logging.getLogger(__name__)

# Parameters of varlen_attn. Before torch 2.12 it has none for pages, nor for grouped heads (which it then detects).
VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)


class VarlenPlan(NamedTuple):
    """Arguments of variable-length attention for one step. Fields as in ForwardBatch, where not described."""

    slot_mapping: Tensor  # int64 [T]
    cu_query_lens: Tensor  # int32 [R + 1]
    context_lens: Tensor  # int32 [R]
    page_table: Tensor  # int32 [R, P]
    longest_query: int
    longest_context: int
    read_slots: Tensor | None  # int64 [sum of contexts] slots to gather, row by row; None if "paged"
    cu_context_lens: Tensor | None  # int32 [R + 1] cumulative context lengths; None if "paged"
    query_lens_host: list[int]
    context_lens_host: list[int]


class DecodeRowsPlan(NamedTuple):
    """Arguments of our own kernel for decode rows (one token each). Fields as in VarlenPlan."""

    slot_mapping: Tensor
    context_lens: Tensor
    page_table: Tensor


class MixedPlan(NamedTuple):
    """A step with decode rows and, after them, other rows."""

    slot_mapping: Tensor  # of all tokens
    decode: DecodeRowsPlan
    others: VarlenPlan


class PaddedDecodePlan(NamedTuple):
    """Arguments of padded decode attention for one step: R rows of P pages, L = P * page_size positions."""

    slot_mapping: Tensor  # int64 [R]
    pages: Tensor  # int64 [R * P] row by row
    masks: dict[int | None, Tensor]  # by sliding window: [R, 1, 1, L], 0 or -inf


CudaPlan: TypeAlias = VarlenPlan | DecodeRowsPlan | MixedPlan | PaddedDecodePlan


class CudaAttention:
    """Implements AttentionBackend and CapturableBackend. `way` overrides the choice of the implementation."""

    page_size = GPU_PAGE_SIZE

    def __init__(self, kv: KVCacheSpec, pages: int, device: torch.device, way: str | None = None) -> None:
        self._kv = kv
        self._way = way or _choose(kv, device)
        self.padding_page = pages
        self._caches = [LayerKVCache(kv, layer, pages + 1, self.page_size, device) for layer in range(kv.layers)]
        decode = "" if kv.gpu_kernels is None else ", our own kernel for decode rows"
        dtype = str(kv.cache_dtype).removeprefix("torch.")
        log.debug("attention on %s: %s%s; KV cache in %s", device, self._way, decode, dtype)

    def capture_context_bounds(self, rows: int, longest: int) -> list[int]:
        """See CapturableBackend. One bound suffices if pages are read in place: only those of the context are read."""
        if self._kv.gpu_kernels is not None or self._way == "paged":
            return [longest]
        return padded_context_bounds(self._kv, rows, longest, self.page_size)

    def plan(self, batch: ForwardBatch) -> CudaPlan:
        """See AttentionBackend."""
        if self._kv.gpu_kernels is not None and (count := _count_decode_rows(batch)):
            decode = DecodeRowsPlan(batch.slot_mapping, batch.context_lens[:count], batch.page_table[:count])
            if count == len(batch.query_lens_host):
                return decode
            others = self._plan_varlen(_without_decode_rows(batch, count))
            return MixedPlan(slot_mapping=batch.slot_mapping, decode=decode, others=others)
        if batch.in_cuda_graph and self._way != "paged":
            return plan_padded_decode(batch, self._kv, self.page_size)
        return self._plan_varlen(batch)

    def _plan_varlen(self, batch: ForwardBatch) -> VarlenPlan:
        read_slots = cu_context_lens = None
        if self._way != "paged":
            read_slots, cu_context_lens = self._read_slots(batch)
        return VarlenPlan(
            slot_mapping=batch.slot_mapping,
            cu_query_lens=batch.cu_query_lens,
            context_lens=batch.context_lens,
            page_table=batch.page_table,
            longest_query=max(batch.query_lens_host),
            longest_context=max(batch.context_lens_host),
            read_slots=read_slots,
            cu_context_lens=cu_context_lens,
            query_lens_host=batch.query_lens_host,
            context_lens_host=batch.context_lens_host,
        )

    def write_and_attend(self, plan: CudaPlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """See AttentionBackend."""
        cache = self._caches[layer]
        key_scale, value_scale = cache.scales
        cache.write(qkv, plan.slot_mapping)
        mixed = self._attend(plan, layer, qkv, scale * key_scale)
        return mixed if value_scale == 1.0 else mixed * value_scale

    def _attend(self, plan: CudaPlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """Attention over the cache as stored, without its scales: [T, heads, head_dim]."""
        kv, cache, window = self._kv, self._caches[layer], self._kv.sliding_window(layer)
        if isinstance(plan, DecodeRowsPlan):
            assert kv.gpu_kernels is not None
            rest = plan.page_table, plan.context_lens, scale, window, kv.softcap
            mixed: Tensor = kv.gpu_kernels.paged_attention(qkv, cache.keys, cache.values, *rest)
            return mixed
        if isinstance(plan, MixedPlan):
            count = len(plan.decode.context_lens)
            parts = (plan.decode, qkv[:count]), (plan.others, qkv[count:])
            return torch.cat([self._attend(part, layer, rows, scale) for part, rows in parts])
        query = qkv[:, : kv.heads].contiguous()
        if isinstance(plan, PaddedDecodePlan):
            return attend_padded(plan, query, cache, scale, window, kv.softcap)
        paged = plan.read_slots is None
        keys, values = (cache.keys, cache.values) if plan.read_slots is None else cache.gather_slots(plan.read_slots)
        if self._way == "plain":
            return self._attend_row_by_row(plan, layer, query, keys, values, scale)
        options: dict[str, Any] = {}
        if paged:
            options = {"seqused_k": plan.context_lens, "block_table": plan.page_table, "num_splits": 1}
        if kv.heads != kv.kv_heads and "enable_gqa" in VARLEN_PARAMETERS:
            options["enable_gqa"] = True
        mixed = varlen_attn(
            query,
            keys,
            values,
            plan.cu_query_lens,
            plan.cu_context_lens,
            plan.longest_query,
            plan.longest_context,
            scale=scale,
            # Visible keys before and after a query's own; -1 = all.
            window_size=(-1 if window is None else window - 1, 0),
            **options,
        )
        return mixed

    def _read_slots(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """VarlenPlan.read_slots and cu_context_lens, computed on the device."""
        device = batch.context_lens.device
        total = sum(batch.context_lens_host)
        lens = batch.context_lens.to(torch.int64)
        row_numbers = torch.arange(len(batch.context_lens_host), device=device)
        rows = torch.repeat_interleave(row_numbers, lens, output_size=total)
        starts = lens.cumsum(0) - lens
        positions = torch.arange(total, device=device) - starts[rows]
        pages = batch.page_table[rows, positions // self.page_size].to(torch.int64)
        return pages * self.page_size + positions % self.page_size, F.pad(lens.cumsum(0), (1, 0)).to(torch.int32)

    def _attend_row_by_row(
        self, plan: VarlenPlan, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        queries = list(accumulate(plan.query_lens_host, initial=0))
        contexts = list(accumulate(plan.context_lens_host, initial=0))
        window, cap = self._kv.sliding_window(layer), self._kv.softcap
        mixed = torch.empty_like(query)
        for row, (count, context) in enumerate(zip(plan.query_lens_host, plan.context_lens_host, strict=True)):
            own = slice(queries[row], queries[row + 1])
            visible = slice(contexts[row], contexts[row + 1])
            q, k, v = (x.transpose(0, 1)[None] for x in (query[own], keys[visible], values[visible]))
            if cap is None and window is None:
                bias: Tensor = causal_lower_right(count, context)
            else:
                bias = _mask(count, context, window, query)
            if cap is None:
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=bias, scale=scale, enable_gqa=self._kv.heads != self._kv.kv_heads
                )
            else:
                out = _softcapped_attention(q, k, v, bias, scale, cap)
            mixed[own] = out[0].transpose(0, 1)
        return mixed


def _count_decode_rows(batch: ForwardBatch) -> int:
    """The number of rows with one token at the beginning of the batch."""
    rows = batch.query_lens_host
    return next((row for row, count in enumerate(rows) if count > 1), len(rows))


def _without_decode_rows(batch: ForwardBatch, rows: int) -> ForwardBatch:
    """The batch without its first `rows` rows, which have one token each: only the fields that _plan_varlen reads."""
    return batch._replace(
        cu_query_lens=batch.cu_query_lens[rows:] - rows,
        context_lens=batch.context_lens[rows:],
        page_table=batch.page_table[rows:],
        query_lens_host=batch.query_lens_host[rows:],
        context_lens_host=batch.context_lens_host[rows:],
    )


def _mask(count: int, context: int, window: int | None, like: Tensor) -> Tensor:
    """[count, context]: 0 where the last `count` positions of a row see a key, else -inf."""
    own = torch.arange(context - count, context, device=like.device)[:, None]
    keys = torch.arange(context, device=like.device)
    masked = keys > own
    if window is not None:
        masked |= keys <= own - window
    return torch.zeros(count, context, device=like.device, dtype=like.dtype).masked_fill_(masked, float("-inf"))


def _softcapped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """softmax(cap * tanh(scale * q k / cap) + mask) v in float32, for [1, heads, tokens, head_dim] in and out."""
    group = query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.tanh(query.float() @ keys.transpose(2, 3) * (scale / cap)) * cap
    return ((scores + mask).softmax(-1) @ values).to(query.dtype)


def _choose(kv: KVCacheSpec, device: torch.device) -> str:
    """Chooses the implementation for this model and device. Activates FA3 or FA4 if it is installed."""
    if kv.dtype is torch.float32 or kv.softcap is not None:
        return "plain"
    if kv.cache_dtype is not kv.dtype:
        return "packed"
    major, _ = torch.cuda.get_device_capability(device)
    wanted = {9: "FA3", 10: "FA4"}.get(major)
    if wanted is None or "block_table" not in VARLEN_PARAMETERS or wanted not in flash.list_flash_attention_impls():
        return "packed"
    try:
        flash.activate_flash_attention_impl(wanted)
    except (ImportError, RuntimeError) as error:  # RuntimeError: the package lacks functions that torch needs
        log.debug("%s is not installed (%s): each layer gathers its pages", wanted, error)
        return "packed"
    return "paged"


class LayerKVCache:
    """Keys and values of one layer: two tensors [pages, page_size, kv_heads, head_dim].

    They hold key / scales[0] and value / scales[1]; the scales are 1 if the cache is not quantized.
    """

    def __init__(self, kv: KVCacheSpec, layer: int, pages: int, page_size: int, device: torch.device) -> None:
        shape = (pages, page_size, kv.kv_heads, kv.head_dim)
        self._kv = kv
        self.scales = kv.layer_scales(layer)
        self.keys = torch.zeros(shape, dtype=kv.cache_dtype, device=device)
        self.values = torch.zeros(shape, dtype=kv.cache_dtype, device=device)

    def write(self, qkv: Tensor, slot_mapping: Tensor) -> None:
        """Stores the keys and values of `qkv` [T, heads + 2 * kv_heads, head_dim] at ForwardBatch.slot_mapping."""
        kv = self._kv
        if kv.gpu_kernels is not None:
            kv.gpu_kernels.write_kv(qkv, self.keys, self.values, slot_mapping, self.scales)
            return
        new = qkv[:, kv.heads :].split(kv.kv_heads, 1)
        for cache, x, scale in zip((self.keys, self.values), new, self.scales, strict=True):
            stored = _as_bytes(to_cache_dtype(x, kv.cache_dtype, scale))
            _as_bytes(cache).flatten(0, 1).index_copy_(0, slot_mapping, stored)

    def gather_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv_heads, head_dim] of slots int64 [n], in the model's dtype."""
        return self._gather(self.keys.flatten(0, 1), slots), self._gather(self.values.flatten(0, 1), slots)

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


# Padded decode attention: one query per row over pages gathered into tensors whose shapes depend on the width of the
# page table alone, not on the contexts, so that a CUDA graph can capture it. A mask hides positions beyond a row's
# context. Query heads that share a KV head take the place of several queries of one sequence.


# Bound of the gathered keys and values of one layer. Larger batches and contexts run without a CUDA graph.
MAX_GATHER_BYTES = 256 << 20
# The shortest context bound that is captured. Each further bound doubles, so at most half of the keys are padding.
SHORTEST_CAPTURE = 512


def padded_context_bounds(kv: KVCacheSpec, rows: int, longest: int, page_size: int) -> list[int]:
    """See CapturableBackend. The last bound is `longest` rounded up to whole pages, if MAX_GATHER_BYTES allows it."""
    most = MAX_GATHER_BYTES // (2 * kv.kv_heads * kv.head_dim * kv.dtype.itemsize * rows)
    whole = -(-longest // page_size) * page_size
    bounds, bound = [], min(SHORTEST_CAPTURE, whole)
    while bound <= most:
        bounds.append(bound)
        if bound == whole:
            break
        bound = min(2 * bound, whole)
    return bounds


def plan_padded_decode(batch: ForwardBatch, kv: KVCacheSpec, page_size: int) -> PaddedDecodePlan:
    """The plan of a batch whose rows have one token each."""
    length = batch.page_table.shape[1] * page_size
    own, keys = batch.positions[:, None], torch.arange(length, device=batch.positions.device)
    masks = {}
    for window in set(kv.sliding_windows) or {None}:
        masked = keys > own
        if window is not None:
            masked |= keys <= own - window
        zeros = torch.zeros(len(own), length, dtype=kv.dtype, device=own.device)
        masks[window] = zeros.masked_fill_(masked, -torch.inf)[:, None, None]
    return PaddedDecodePlan(batch.slot_mapping, batch.page_table.flatten().long(), masks)


def attend_padded(
    plan: PaddedDecodePlan, query: Tensor, cache: LayerKVCache, scale: float, window: int | None, cap: float | None
) -> Tensor:
    """Attention of `query` [R, heads, head_dim] over a layer's cache, in the same shape."""
    rows, mask = len(query), plan.masks[window]
    key, value = (x.view(rows, -1, *x.shape[2:]).transpose(1, 2) for x in cache.gather_pages(plan.pages))
    grouped = query.view(rows, key.shape[1], -1, query.shape[2])
    if cap is None:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        scores = torch.tanh(grouped.float() @ key.float().transpose(2, 3) * (scale / cap)) * cap
        out = ((scores + mask).softmax(-1) @ value.float()).to(query.dtype)
    return out.reshape(query.shape)
