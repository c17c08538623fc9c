"""Attention of one query a row over pages that are copied together, in shapes that do not depend on the contexts.

So a step of it can be recorded: whatever the contexts, the same operations run on the same memory. Each row reads as
many pages as its row of the page table is wide, and a mask hides what is behind its context. Plain operations of torch:
the queries that share a KV head stand where several queries of a sequence would.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.attention.cache import Cache
from tgi.worker.batch import Batch, KVShape

# What the keys and values of one layer may take when they are copied together. More would not be read quickly either.
MOST_BYTES = 256 << 20
# The shortest context that a step is recorded for. The next are twice as long each: at most half of it is read in vain.
SHORTEST = 512


class Plan(NamedTuple):
    """One step's arguments, the same in every layer: R rows of P pages, L = P * page_size."""

    writes: Tensor  # int64 [R] position in the cache of each token
    pages: Tensor  # int64 [R * P] row after row
    masks: dict[int | None, Tensor]  # by window: [R, 1, 1, L], 0 or -inf


def bounds(kv: KVShape, rows: int, longest: int, page_size: int) -> list[int]:
    """The contexts that steps of so many rows are recorded for, ascending; none is far beyond `longest`."""
    most = MOST_BYTES // (2 * kv.kv_heads * kv.head_dim * kv.dtype.itemsize * rows)
    whole = -(-longest // page_size) * page_size
    found, bound = [], min(SHORTEST, whole)
    while bound <= most:
        found.append(bound)
        if bound == whole:
            break
        bound = min(2 * bound, whole)
    return found


def plan(batch: Batch, kv: KVShape, page_size: int) -> Plan:
    """Of a batch whose rows have a token each."""
    length = batch.page_table.shape[1] * page_size
    own, keys = batch.positions[:, None], torch.arange(length, device=batch.positions.device)
    masks = {}
    for window in set(kv.windows) or {None}:
        unseen = keys > own
        if window is not None:
            unseen |= keys <= own - window
        zeros = torch.zeros(len(own), length, dtype=kv.dtype, device=own.device)
        masks[window] = zeros.masked_fill_(unseen, -torch.inf)[:, None, None]
    return Plan(batch.cache_at, batch.page_table.flatten().long(), masks)


def attend(plan: Plan, query: Tensor, cache: Cache, scale: float, window: int | None, cap: float | None) -> Tensor:
    """[R, heads, head_dim], for queries of that shape and the cache of a layer."""
    rows, mask = len(query), plan.masks[window]
    key, value = (x.view(rows, -1, *x.shape[2:]).transpose(1, 2) for x in cache.pages(plan.pages))
    grouped = query.view(rows, key.shape[1], -1, query.shape[2])
    if cap is None:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        scores = torch.tanh(grouped.float() @ key.float().transpose(2, 3) * (scale / cap)) * cap
        out = ((scores + mask).softmax(-1) @ value.float()).to(query.dtype)
    return out.reshape(query.shape)
