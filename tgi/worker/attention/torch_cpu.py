"""Attention on CPU with torch's kernels, over a paged KV cache. Batch invariant, for any batch and any chunks.

Queries are computed in tiles: the query heads of one KV head, times as many queries as fit, padded to a fixed number of
rows (tile_planner.py). Each tile is one batch item of torch's flash attention kernel for CPU, which iterates over the
keys in blocks of 512 in the order of their positions.

The kernel gets float32, whatever the model's dtype: queries, keys and values are converted, and the result is rounded
once. (For 16-bit types the kernel uses other MKL functions and rounds its result, which hides most differences in the
order of sums from the measurement below, but not from every request.) In float32, the bits of a query's result depend
on shapes alone:

- The rows of a tile are independent, but their number may change the order of sums.
- Keys after the query, and those before its sliding window, are masked. They add exact zeros, so their number does not
  matter, nor whether whole blocks before the window are left out.
- The number of keys in the last block may change the order of sums.

`agreeing_shapes` measures which numbers of rows and keys agree bit for bit on this machine; only these are used. So a
token's result is the same in prefill and decode, in any chunk, next to any other row, with any thread count.

The kernel has no soft cap for scores. Models with one are computed with matrix products, in tiles of a fixed number of
rows over whole blocks of keys in order.

Attention sinks scale a query's result by the share of the keys in the sum of the softmax, exp(l) / (exp(l) + exp(s)),
where l, which the kernel returns, is the logarithm of the sum over the keys, and s the sink.
"""

import logging
import mmap
from functools import cache, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.attention.interface import ForwardBatch, KVCacheSpec
from tgi.worker.attention.tile_planner import KEY_BLOCK, TileGroup, TilePlan, TilePlanner, TileShapes
from tgi.worker.state_cache import StateCache

log = logging.getLogger(__name__)

# Candidate rows of a tile, compared with BASE_TILE. The kernel itself divides larger tiles into ones of WIDEST_TILE.
TILES = (4, 8, 16, 32)
BASE_TILE = 16
WIDEST_TILE = 32
# Candidate lengths of a last block of keys that is shorter than KEY_BLOCK.
SHORT_BLOCKS = (128, 256)

COMPUTE_DTYPE = torch.float32

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class TorchCpuAttention:
    """Implements AttentionBackend.

    A cache is [parts, kv_heads, pages + 1, page_size, head_dim]; the last page stays zero, for padding. Where a value
    is part of its key, the kernel multiplies with all of the key, since it takes values of no other size.
    """

    page_size = 16
    state: StateCache | None = None  # set by build_attention

    def __init__(self, kv: KVCacheSpec, pages: int, device: torch.device) -> None:
        self._kv = kv
        self._pages = pages + 1
        self._group = kv.heads // kv.kv_heads
        self._planner = TilePlanner(kv, self._pages, self.page_size, choose_shapes(kv))
        self._page_bytes = kv.parts * kv.kv_heads * self.page_size * kv.head_dim * kv.dtype.itemsize
        self._places = kv.places
        self._cache = [self._memory() for _ in range(kv.caches)]
        # Buffers for gathered pages, in the model's dtype and in COMPUTE_DTYPE; they grow on demand.
        width, dtypes = self.page_size * kv.head_dim, (kv.dtype, COMPUTE_DTYPE)
        self._gather_buffers = [torch.empty(0, width, dtype=dtype) for dtype in dtypes]

    @property
    def page_memory(self) -> list[Tensor]:
        """See StorableBackend. The last page is for padding."""
        return [cache.view(-1, self._pages, cache.shape[1]).transpose(0, 1) for cache in self._cache]

    def _memory(self) -> Tensor:
        """A cache [parts * kv_heads * pages, page_size * head_dim]: zeros, mapped at the first write."""
        zeros = mmap.mmap(-1, self._pages * self._page_bytes)
        return torch.frombuffer(zeros, dtype=self._kv.dtype).view(-1, self.page_size * self._kv.head_dim)

    def plan(self, batch: ForwardBatch) -> TilePlan:
        """See AttentionBackend. Layers of a group with the same sliding window share their part of the plan."""
        return self._planner.plan(batch)

    def write_and_attend(self, plan: TilePlan, layer: int, qkv: Tensor, scale: float) -> Tensor:
        kv = self._kv
        group_number, place = self._places[layer]
        cache = self._cache[place]
        query, pairs = qkv[:, : kv.heads], qkv[:, kv.heads :]
        if kv.dtype is torch.float16:  # an overflow in one request must not reach the next request that gets its pages
            pairs = pairs.nan_to_num()
        if pairs.shape[1]:
            cache.view(-1, kv.head_dim).index_copy_(0, plan.writes[group_number], pairs.reshape(-1, kv.head_dim))
        # The last row receives the results of padding queries.
        result = torch.empty(plan.tokens + 1, kv.heads, kv.head_dim, dtype=kv.dtype)
        for group in plan.groups[group_number, kv.reach(layer)]:
            out = self._attend(group, query, self._gather(cache, group), scale, kv.layer_sinks(layer))
            if isinstance(group.outputs, slice):
                result[group.outputs] = out
            else:
                result.index_copy_(0, group.outputs, out)
        return result[: plan.tokens, :, : kv.result_dim]

    def _gather(self, cache: Tensor, group: TileGroup) -> Tensor:
        """Keys and values float32 [2, sequences, kv_heads, keys, head_dim], in a buffer that the next call reuses."""
        kv, rows = self._kv, group.index.shape[0]
        if rows > self._gather_buffers[0].shape[0]:
            width, dtypes = cache.shape[1], (kv.dtype, COMPUTE_DTYPE)
            self._gather_buffers = [torch.empty(rows, width, dtype=dtype) for dtype in dtypes]
        stored, wide = (buffer[:rows] for buffer in self._gather_buffers)
        if kv.dtype is COMPUTE_DTYPE:
            torch.index_select(cache, 0, group.index, out=wide)
        else:
            wide.copy_(torch.index_select(cache, 0, group.index, out=stored))
        stored = wide.view(kv.parts, kv.kv_heads, group.sequences, group.keys, kv.head_dim)
        return stored.expand(2, -1, -1, -1, -1).transpose(1, 2)

    def _attend(
        self, tile_group: TileGroup, query: Tensor, keys_values: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """The results of a group's queries, [B * Q, heads, head_dim]."""
        kv, group, indices = self._kv, self._group, tile_group.queries
        query = query[indices] if isinstance(indices, slice) else query.index_select(0, indices)
        count = query.shape[0] // tile_group.tiles
        if count == 1:
            tiles = query.reshape(tile_group.tiles, kv.kv_heads, group, kv.head_dim)
        else:
            tiles = query.reshape(tile_group.tiles, count, kv.kv_heads, group, kv.head_dim).transpose(1, 2)
            tiles = tiles.reshape(tile_group.tiles, kv.kv_heads, count * group, kv.head_dim)
        tiles = F.pad(tiles.to(COMPUTE_DTYPE), (0, 0, 0, tile_group.rows - count * group))
        keys, values = keys_values.expand(2, tile_group.tiles, -1, -1, -1)
        if kv.softcap is None:
            out, sums = _flash(tiles, keys, values, 0.0, False, attn_mask=tile_group.mask, scale=scale)
        else:
            out, sums = _softcapped_attention(tiles, keys, values, tile_group.mask, scale, kv.softcap)
        out = out[:, :, : count * group]
        if sinks is not None:
            by_row = sinks.view(kv.kv_heads, 1, group).expand(-1, count, -1).reshape(kv.kv_heads, -1)
            out = out * _share_of_keys(sums[:, :, : count * group], by_row)[..., None]
        if count > 1:
            out = out.unflatten(2, (count, group)).transpose(1, 2)
        return out.reshape(-1, kv.heads, kv.head_dim).to(kv.dtype)


def _share_of_keys(sums: Tensor, sinks: Tensor) -> Tensor:
    """exp(sums) / (exp(sums) + exp(sinks)), as a softmax over both, of which torch computes each row alike."""
    return torch.stack((sums, sinks.expand_as(sums)), -1).softmax(-1)[..., 0]


def _softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """softmax(cap * tanh(scale * q k / cap) + mask) v, for [B, kv_heads, rows, head_dim] in and out, and the logarithm
    of the sum of the softmax, [B, kv_heads, rows]."""
    tiles, keys, values = (x.flatten(0, 1) for x in (query, key, value))
    blocks = list(zip(keys.split(KEY_BLOCK, 1), values.split(KEY_BLOCK, 1), strict=True))
    scores = torch.cat([torch.bmm(tiles, block.transpose(1, 2)) for block, _ in blocks], dim=2)
    scores = torch.tanh(scores * (scale / cap)) * cap
    masked = scores.unflatten(0, query.shape[:2]) + mask
    weights = masked.softmax(-1).flatten(0, 1).split(KEY_BLOCK, 2)
    parts = [torch.bmm(weight, block) for weight, (_, block) in zip(weights, blocks, strict=True)]
    return reduce(torch.add, parts).view(query.shape), masked.logsumexp(-1)


def choose_shapes(kv: KVCacheSpec) -> TileShapes:
    """The tile shapes that give the same bits as BASE_TILE rows over whole blocks of keys."""
    group = kv.heads // kv.kv_heads
    if kv.softcap is not None:
        rows = -(-group // BASE_TILE) * BASE_TILE
        return TileShapes(single_rows=rows, multi_rows=rows, last_blocks=(KEY_BLOCK,))
    tiles, blocks = agreeing_shapes(kv.head_dim)
    fitting = [size for size in tiles if size >= group] or [-(-group // tiles[-1]) * tiles[-1]]
    return TileShapes(single_rows=fitting[0], multi_rows=fitting[-1], last_blocks=blocks)


@cache
def agreeing_shapes(head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Measures the rows of tiles, and the keys of last blocks, that give the same bits as the base.

    The random inputs have a fixed seed, so a restart chooses the same.
    """
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(8, 1, WIDEST_TILE, head_dim, generator=generator)
    keys, values = torch.randn(2, 8, 1, 2 * KEY_BLOCK, head_dim, generator=generator)

    def attend(rows: int, seen: int, length: int) -> Tensor:
        """Results with tiles of `rows` rows over `length` keys, of which all but the first `seen` are masked."""
        mask = torch.zeros(1, 1, 1, length)
        mask[..., seen:] = float("-inf")
        key, value = keys[:, :, :length], values[:, :, :length]
        tiles = query.split(rows, dim=2)
        return torch.cat([_flash(tile, key, value, 0.0, False, attn_mask=mask, scale=0.1)[0] for tile in tiles], 2)

    @cache
    def base(seen: int) -> Tensor:
        """The reference: BASE_TILE rows over whole blocks of keys, up to the one of the last key that is not masked."""
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
        "attention: tiles of %s rows and last blocks of %s keys agree bit for bit",
        ", ".join(map(str, tiles)),
        ", ".join(map(str, blocks)),
    )
    return tiles, blocks
