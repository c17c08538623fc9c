"""Attention on CUDA, over pages in the model's type or in 8 bits (cache.py).

Rows of one token are for our own kernel (gpu/attend.py), if there is one, which reads pages where they lie. It does so
beside any of the ways below: it divides a long context among many multiprocessors and needs no more than its length for
that, where the kernels below keep a row's result independent of its batch only if one of them reads it all. A step
begins with these rows, and what is behind them is planned as if it were alone.

Prompts go through torch's own variable-length attention, torch.nn.attention.varlen.varlen_attn. torch brings Flash
Attention 2, which reads keys in one piece. Flash Attention 3 (Hopper) or 4 (Blackwell), if their package is installed,
take its place and read pages where they lie. So there are three ways, chosen once:

- "paged": FA3 or FA4. One split of the keys per query (`num_splits=1`) keeps a row's result independent of its batch.
- "packed": FA2, and all caches of 8 bits, since queries and keys are to be of one type. The pages in use are first
  copied together, in the order of the rows and in the model's type.
- "plain": float32, which no flash kernel computes, and capped scores, which varlen_attn does not offer. As packed, then
  row by row. It is slow, and takes memory for all scores of a row.

Steps that are recorded (recorded.py) read pages where they lie too, where that is possible: our own kernel takes
contexts from the device, and FA3 counts there how many blocks of keys a row has from `seqused_k`, so what the host says
of contexts may be a bound. With a page table, FA3 takes its bound from the table's width and leaves `max_k` alone; it
serves to choose how keys are split, which `num_splits=1` has settled. FA2 wants the keys in one piece, whose length the
host must know: without our own kernel, gathered.py stands in for it and for "plain".

The arguments are checked on CPU against a reference in place of the kernels. No GPU has run this file yet.
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

from tgi.worker.attention import gathered
from tgi.worker.attention.cache import Cache
from tgi.worker.batch import Batch, KVShape

log = logging.getLogger(__name__)

# What varlen_attn can be told: before torch 2.12 nothing of pages, nor that heads are grouped, which it sees itself.
TAKEN = frozenset(inspect.signature(varlen_attn).parameters)


class Plan(NamedTuple):
    """One step's arguments, the same in every layer."""

    writes: Tensor  # int64 [T] position in the cache of each token
    cu_query: Tensor  # int32 [R + 1]
    context: Tensor  # int32 [R]
    page_table: Tensor  # int32 [R, P]
    longest_query: int
    longest_context: int
    reads: Tensor | None  # int64 [sum of contexts] positions in the cache, row after row; None when paged
    cu_context: Tensor | None  # int32 [R + 1]; None when paged
    query_lengths: list[int]
    context_lengths: list[int]


class Single(NamedTuple):
    """Arguments of rows that have a token each, which our own kernel reads on the device."""

    writes: Tensor  # as in Plan, like the next ones
    context: Tensor
    page_table: Tensor


class Mixed(NamedTuple):
    """A step that begins with rows of a token each, and others."""

    writes: Tensor  # of all
    single: Single
    others: Plan


AnyPlan: TypeAlias = Plan | Single | Mixed | gathered.Plan


class CudaAttention:
    """The backend. The last page of the cache is nobody's."""

    page_size = 16

    def __init__(self, kv: KVShape, pages: int, device: torch.device, way: str | None = None) -> None:
        self._kv = kv
        self._way = way or _choose(kv, device)
        self.spare = pages
        self._caches = [Cache(kv, layer, pages + 1, self.page_size, device) for layer in range(kv.layers)]
        kept, single = str(kv.kept).removeprefix("torch."), "" if kv.gpu is None else ", of single tokens our own"
        log.debug("attention on %s is %s%s, over keys and values kept as %s", device, self._way, single, kept)

    def bounds(self, rows: int, longest: int) -> list[int]:
        """See Recordable. Pages that are read in place cost nothing where a context does not reach."""
        if self._kv.gpu is not None or self._way == "paged":
            return [longest]
        return gathered.bounds(self._kv, rows, longest, self.page_size)

    def plan(self, batch: Batch) -> AnyPlan:
        """See Attention."""
        if self._kv.gpu is not None and (count := _singles(batch)):
            single = Single(batch.cache_at, batch.context[:count], batch.page_table[:count])
            if count == len(batch.query_lengths):
                return single
            return Mixed(batch.cache_at, single, self._plan(_behind(batch, count)))
        if batch.recorded and self._way != "paged":
            return gathered.plan(batch, self._kv, self.page_size)
        return self._plan(batch)

    def _plan(self, batch: Batch) -> Plan:
        reads = cu_context = None
        if self._way != "paged":
            reads, cu_context = self._reads(batch)
        return Plan(
            writes=batch.cache_at,
            cu_query=batch.cu_query,
            context=batch.context,
            page_table=batch.page_table,
            longest_query=max(batch.query_lengths),
            longest_context=max(batch.context_lengths),
            reads=reads,
            cu_context=cu_context,
            query_lengths=batch.query_lengths,
            context_lengths=batch.context_lengths,
        )

    def write_and_attend(self, plan: AnyPlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """See Attention."""
        cache = self._caches[layer]
        key_divisor, value_divisor = cache.divisors
        cache.write(qkv, plan.writes)
        found = self._attend(plan, layer, qkv, scale * key_divisor)
        return found if value_divisor == 1.0 else found * value_divisor

    def _attend(self, plan: AnyPlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """What the queries find in the cache as it is, [T, heads, head_dim]."""
        kv, cache, window = self._kv, self._caches[layer], self._kv.window(layer)
        if isinstance(plan, Single):
            assert kv.gpu is not None
            rest = plan.page_table, plan.context, scale, window, kv.softcap
            found: Tensor = kv.gpu.attend(qkv, cache.keys, cache.values, *rest)
            return found
        if isinstance(plan, Mixed):
            count = len(plan.single.context)
            parts = (plan.single, qkv[:count]), (plan.others, qkv[count:])
            return torch.cat([self._attend(part, layer, its, scale) for part, its in parts])
        query = qkv[:, : kv.heads].contiguous()
        if isinstance(plan, gathered.Plan):
            return gathered.attend(plan, query, cache, scale, window, kv.softcap)
        paged = plan.reads is None
        keys, values = (cache.keys, cache.values) if plan.reads is None else cache.tokens(plan.reads)
        if self._way == "plain":
            return self._row_by_row(plan, layer, query, keys, values, scale)
        more: dict[str, Any] = {}
        if paged:
            more = {"seqused_k": plan.context, "block_table": plan.page_table, "num_splits": 1}
        if kv.heads != kv.kv_heads and "enable_gqa" in TAKEN:
            more["enable_gqa"] = True
        found = varlen_attn(
            query,
            keys,
            values,
            plan.cu_query,
            plan.cu_context,
            plan.longest_query,
            plan.longest_context,
            scale=scale,
            # Keys before and behind a query's own; -1: all.
            window_size=(-1 if window is None else window - 1, 0),
            **more,
        )
        return found

    def _reads(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where every row's keys lie, and the running sum of their numbers. Computed on the device."""
        device = batch.context.device
        total = sum(batch.context_lengths)
        ends = batch.context.to(torch.int64)
        rows = torch.repeat_interleave(torch.arange(len(batch.context_lengths), device=device), ends, output_size=total)
        starts = ends.cumsum(0) - ends
        inside = torch.arange(total, device=device) - starts[rows]
        pages = batch.page_table[rows, inside // self.page_size].to(torch.int64)
        return pages * self.page_size + inside % self.page_size, F.pad(ends.cumsum(0), (1, 0)).to(torch.int32)

    def _row_by_row(self, plan: Plan, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        queries = list(accumulate(plan.query_lengths, initial=0))
        contexts = list(accumulate(plan.context_lengths, initial=0))
        window, cap = self._kv.window(layer), self._kv.softcap
        found = torch.empty_like(query)
        for row, (count, context) in enumerate(zip(plan.query_lengths, plan.context_lengths, strict=True)):
            mine = slice(queries[row], queries[row + 1])
            seen = slice(contexts[row], contexts[row + 1])
            q, k, v = (x.transpose(0, 1)[None] for x in (query[mine], keys[seen], values[seen]))
            if cap is None and window is None:
                bias: Tensor = causal_lower_right(count, context)
            else:
                bias = _mask(count, context, window, query)
            if cap is None:
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=bias, scale=scale, enable_gqa=self._kv.heads != self._kv.kv_heads
                )
            else:
                out = _capped(q, k, v, bias, scale, cap)
            found[mine] = out[0].transpose(0, 1)
        return found


def _singles(batch: Batch) -> int:
    """How many rows with a token each the batch begins with."""
    rows = batch.query_lengths
    return next((row for row, count in enumerate(rows) if count > 1), len(rows))


def _behind(batch: Batch, rows: int) -> Batch:
    """The rows behind so many that have a token each. Where tokens go is left as it is."""
    return batch._replace(
        cu_query=batch.cu_query[rows:] - rows,
        context=batch.context[rows:],
        page_table=batch.page_table[rows:],
        query_lengths=batch.query_lengths[rows:],
        context_lengths=batch.context_lengths[rows:],
    )


def _mask(count: int, context: int, window: int | None, like: Tensor) -> Tensor:
    """[count, context]: zeros where a row's last `count` positions see a key, and -inf."""
    own = torch.arange(context - count, context, device=like.device)[:, None]
    keys = torch.arange(context, device=like.device)
    unseen = keys > own
    if window is not None:
        unseen |= keys <= own - window
    return torch.zeros(count, context, device=like.device, dtype=like.dtype).masked_fill_(unseen, float("-inf"))


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """softmax(cap * tanh(scale * q k / cap) + mask) v in float32, for [1, heads, tokens, head_dim] in and out."""
    group = query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.tanh(query.float() @ keys.transpose(2, 3) * (scale / cap)) * cap
    return ((scores + mask).softmax(-1) @ values).to(query.dtype)


def _choose(kv: KVShape, device: torch.device) -> str:
    """The way for this model on this device. Activates the newest flash attention that is installed for it."""
    if kv.dtype is torch.float32 or kv.softcap is not None:
        return "plain"
    if kv.kept is not kv.dtype:
        return "packed"
    major, _ = torch.cuda.get_device_capability(device)
    wanted = {9: "FA3", 10: "FA4"}.get(major)
    if wanted is None or "block_table" not in TAKEN or wanted not in flash.list_flash_attention_impls():
        return "packed"
    try:
        flash.activate_flash_attention_impl(wanted)
    except (ImportError, RuntimeError) as error:  # the latter where a package has not all that torch looks for
        log.debug("%s is not installed (%s): pages are copied together for each layer", wanted, error)
        return "packed"
    return "paged"
