"""Attention on CPU over paged keys and values, with bit-equal results however queries are batched or chunked.

Queries are computed in tiles: the query heads of one KV head, times as many queries as fit, padded to a fixed number
of rows. Each tile is one item of torch's flash attention kernel for CPU, which walks over the keys in blocks of 512 in
the order of their positions. It is given float32, whatever the model's type: queries, keys and values are widened for
it, and its result is rounded once. For types of 16 bits the kernel multiplies by other functions of MKL, and rounds its
result, which hides most differences in the order of sums from a trial, but not from every request. In float32 what a
query gets out depends on the shapes alone:

- The rows of a tile do not touch each other, but their number may choose another order of sums.
- Keys behind the query, and those before its window, are masked. They add exact zeros, so it does not matter how many
  follow, nor whether whole blocks before the window are left out.
- The number of keys in the last block may choose another order of sums.

The kernel has no cap for scores. Models with one are computed out of products of matrices, again with tiles of a fixed
number of rows over whole blocks of keys in order.

`agreeing` finds the numbers of rows and of keys that agree bit for bit on this machine, and no others are used.
So a token's result is the same in prefill and in decode, in any chunk, beside any other row, with any thread count.
"""

import logging
import mmap
from functools import cache, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.attention.tiles import KEY_BLOCK, Gather, Part, Plan, Planner, Shapes
from tgi.worker.batch import Batch, KVShape

log = logging.getLogger(__name__)

# Rows of a tile. All are compared with the base; more than the widest the kernel divides into such tiles by itself.
TILES = (4, 8, 16, 32)
BASE_TILE = 16
WIDEST_TILE = 32
# Shorter last blocks of keys that are tried.
SHORT_BLOCKS = (128, 256)

# What attention is computed in.
WIDE = torch.float32

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class CpuAttention:
    """The backend. The cache of a layer is [2, kv_heads, pages + 1, page_size, head_dim]; the last page stays zero."""

    page_size = 16

    def __init__(self, kv: KVShape, pages: int, device: torch.device) -> None:
        self._kv = kv
        self._pages = pages + 1
        self._group = kv.heads // kv.kv_heads
        self._planner = Planner(kv, self._pages, self.page_size, choose_shapes(kv))
        self._page_bytes = 2 * kv.kv_heads * self.page_size * kv.head_dim * kv.dtype.itemsize
        self._cache = [self._memory() for _ in range(kv.layers)]
        self._gathers = [torch.empty(0, self.page_size * kv.head_dim, dtype=dtype) for dtype in (kv.dtype, WIDE)]

    def _memory(self) -> Tensor:
        """One layer's cache, [2 * kv_heads * pages, page_size * head_dim]. Zeros that take memory once written to."""
        zeros = mmap.mmap(-1, self._pages * self._page_bytes)
        return torch.frombuffer(zeros, dtype=self._kv.dtype).view(-1, self.page_size * self._kv.head_dim)

    def plan(self, batch: Batch) -> Plan:
        """See Attention. Layers of one window share their part of the plan."""
        return self._planner.plan(batch)

    def write_and_attend(self, plan: Plan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """See Attention."""
        kv = self._kv
        cache = self._cache[layer]
        query, pairs = qkv[:, : kv.heads], qkv[:, kv.heads :]
        if kv.dtype is torch.float16:  # an overflow in one request must not reach the next owner of its pages
            pairs = pairs.nan_to_num()
        cache.view(-1, kv.head_dim).index_copy_(0, plan.writes, pairs.reshape(-1, kv.head_dim))
        # One more row takes what tiles are filled up with.
        result = torch.empty(plan.tokens + 1, kv.heads, kv.head_dim, dtype=kv.dtype)
        for gather in plan.gathers[kv.window(layer)]:
            found = self._gathered(cache, gather)
            for part in gather.parts:
                out = self._attend(part, query, found, scale)
                if isinstance(part.outputs, slice):
                    result[part.outputs] = out
                else:
                    result.index_copy_(0, part.outputs, out)
        return result[: plan.tokens]

    def _gathered(self, cache: Tensor, gather: Gather) -> Tensor:
        """Keys and values float32 [2, sequences, kv_heads, length, head_dim], in memory that the next call reuses."""
        kv, rows = self._kv, gather.index.shape[0]
        if rows > self._gathers[0].shape[0]:
            self._gathers = [torch.empty(rows, cache.shape[1], dtype=kind.dtype) for kind in self._gathers]
        found, wide = (memory[:rows] for memory in self._gathers)
        if kv.dtype is WIDE:
            torch.index_select(cache, 0, gather.index, out=wide)
        else:
            wide.copy_(torch.index_select(cache, 0, gather.index, out=found))
        return wide.view(2, kv.kv_heads, gather.sequences, gather.length, kv.head_dim).transpose(1, 2)

    def _attend(self, part: Part, query: Tensor, found: Tensor, scale: float) -> Tensor:
        """The results of a part's queries, [B * Q, heads, head_dim]."""
        kv, group = self._kv, self._group
        query = query[part.queries] if isinstance(part.queries, slice) else query.index_select(0, part.queries)
        count = query.shape[0] // part.tiles
        if count == 1:
            tiles = query.reshape(part.tiles, kv.kv_heads, group, kv.head_dim)
        else:
            tiles = query.reshape(part.tiles, count, kv.kv_heads, group, kv.head_dim).transpose(1, 2)
            tiles = tiles.reshape(part.tiles, kv.kv_heads, count * group, kv.head_dim)
        tiles = F.pad(tiles.to(WIDE), (0, 0, 0, part.rows - count * group))
        keys, values = found[:, :, :, part.first : part.first + part.keys].expand(2, part.tiles, -1, -1, -1)
        if kv.softcap is None:
            out, _ = _flash(tiles, keys, values, 0.0, False, attn_mask=part.mask, scale=scale)
        else:
            out = _capped(tiles, keys, values, part.mask, scale, kv.softcap)
        out = out[:, :, : count * group]
        if count > 1:
            out = out.unflatten(2, (count, group)).transpose(1, 2)
        return out.reshape(-1, kv.heads, kv.head_dim).to(kv.dtype)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """softmax(cap * tanh(scale * q k / cap) + mask) v, for [B, kv_heads, rows, head_dim] in and out."""
    tiles, keys, values = (x.flatten(0, 1) for x in (query, key, value))
    blocks = list(zip(keys.split(KEY_BLOCK, 1), values.split(KEY_BLOCK, 1), strict=True))
    scores = torch.cat([torch.bmm(tiles, block.transpose(1, 2)) for block, _ in blocks], dim=2)
    scores = torch.tanh(scores * (scale / cap)) * cap
    shares = (scores.unflatten(0, query.shape[:2]) + mask).softmax(-1).flatten(0, 1).split(KEY_BLOCK, 2)
    found = [torch.bmm(share, block) for share, (_, block) in zip(shares, blocks, strict=True)]
    return reduce(torch.add, found).view(query.shape)


def choose_shapes(kv: KVShape) -> Shapes:
    """The shapes that give the same bits as a base tile over whole blocks of keys."""
    group = kv.heads // kv.kv_heads
    if kv.softcap is not None:
        rows = -(-group // BASE_TILE) * BASE_TILE
        return Shapes(rows, rows, (KEY_BLOCK,))
    tiles, blocks = agreeing(kv.head_dim)
    fitting = [size for size in tiles if size >= group] or [-(-group // tiles[-1]) * tiles[-1]]
    return Shapes(fitting[0], fitting[-1], blocks)


@cache
def agreeing(head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows of tiles, and the keys of last blocks, that give the same bits as the base; found by trying.

    What is drawn for the trial is fixed, so a restart finds the same.
    """
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(8, 1, WIDEST_TILE, head_dim, generator=generator)
    keys, values = torch.randn(2, 8, 1, 2 * KEY_BLOCK, head_dim, generator=generator)

    def attend(rows: int, seen: int, length: int) -> Tensor:
        """With tiles of `rows` rows, the first `seen` of `length` keys."""
        mask = torch.zeros(1, 1, 1, length)
        mask[..., seen:] = float("-inf")
        key, value = keys[:, :, :length], values[:, :, :length]
        tiles = query.split(rows, dim=2)
        return torch.cat([_flash(tile, key, value, 0.0, False, attn_mask=mask, scale=0.1)[0] for tile in tiles], 2)

    @cache
    def base(seen: int) -> Tensor:
        """What all are compared with: whole blocks, the last of them the one that holds the last key that is seen."""
        return attend(BASE_TILE, seen, -(-seen // KEY_BLOCK) * KEY_BLOCK)

    def agrees(rows: int, block: int) -> bool:
        for before in (0, KEY_BLOCK):
            for seen in (before + 1, before + block // 2 + 1, before + block):
                if not torch.equal(attend(rows, seen, before + block), base(seen)):
                    return False
        return True

    tiles = tuple(size for size in TILES if agrees(size, KEY_BLOCK))
    blocks = (*(size for size in SHORT_BLOCKS if all(agrees(tile, size) for tile in tiles)), KEY_BLOCK)
    log.debug(
        "attention with tiles of %s rows over last blocks of %s keys agrees bit for bit",
        ", ".join(map(str, tiles)),
        ", ".join(map(str, blocks)),
    )
    return tiles, blocks
