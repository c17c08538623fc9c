"""Attention on CPU over paged keys and values, with bit-equal results however queries are batched or chunked.

Queries are computed in tiles of 16 rows: the query heads of one KV head, times as many queries as fit. Each tile is
one item of torch's flash attention kernel for CPU, which walks over the keys in blocks of 512 in the order of their
positions and sums in float32. What a query gets out depends on its tile's shape alone:

- A tile has 16 rows always; short ones are padded.
- Keys behind the query are masked. They add exact zeros, so it does not matter how many follow.
- Only the size of the last block of keys may change the order of sums. `_last_blocks` finds which sizes agree with the
  full block on this machine; other lengths are padded to the next of them.

So a token's result is the same in prefill and in decode, in any chunk, beside any other row, with any thread count.
"""

import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.batch import Batch, KVShape

log = logging.getLogger(__name__)

TILE_ROWS = 16
# The kernel's own block of keys, and shorter last blocks that are tried.
KEY_BLOCK = 512
SHORT_BLOCKS = (128, 256)
# A row with more tiles than this gathers its keys once for all of them; others gather them for each tile.
FEW_TILES = 4

CACHE_LINE = 64

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Part(NamedTuple):
    """Tiles that one kernel call computes. B tiles of Q queries, over the first `keys` positions of what was gathered."""

    queries: Tensor | None  # int64 [B * Q] index into T; None: the batch's tokens as they are
    outputs: Tensor | None  # int64 [B * Q] where the results go; T for queries that only fill up a tile
    mask: Tensor  # [B, 1, 16 or 1, keys] zeros and -inf
    tiles: int
    keys: int


class Gather(NamedTuple):
    """Pages that are brought together, and what is computed on them. B sequences of keys, or one for all tiles."""

    index: Tensor  # int64 [2 * kv_heads * B * pages] rows of the cache, keys before values
    sequences: int
    length: int  # positions gathered per sequence
    parts: list[Part]


class Plan(NamedTuple):
    """One step's work, the same in every layer."""

    writes: Tensor  # int64 [2, T * kv_heads] rows of the cache, seen as one row per position
    gathers: list[Gather]
    tokens: int


class CpuAttention:
    """The backend. The cache of a layer is [2, kv_heads, pages + 1, page_size, head_dim]; the last page stays zero."""

    page_size = 16

    def __init__(self, kv: KVShape, pages: int, device: torch.device) -> None:
        self._kv = kv
        self._pages = pages + 1
        self._group = kv.heads // kv.kv_heads
        self._per_tile = max(1, TILE_ROWS // self._group)
        self._rows = -(-self._group // TILE_ROWS) * TILE_ROWS
        self._last = _last_blocks(kv, self._rows)
        shape = (2 * kv.kv_heads * self._pages, self.page_size * kv.head_dim)
        self._cache = [_zeros(shape, kv.dtype) for _ in range(kv.layers)]
        heads = torch.arange(2 * kv.kv_heads).view(2 * kv.kv_heads, 1)
        self._head_pages = heads * self._pages
        self._head_positions = (heads * (self._pages * self.page_size)).view(2, 1, kv.kv_heads)

    def plan(self, batch: Batch) -> Plan:
        """Divides the rows into tiles. Rows with few tiles are grouped by context length, the others stand alone."""
        writes = (batch.cache_at[:, None] + self._head_positions).view(2, -1)
        together: dict[tuple[int, bool], list[tuple[int, int, int, int]]] = {}
        gathers: list[Gather] = []
        first = 0
        for row, (count, context) in enumerate(zip(batch.query_lengths, batch.context_lengths, strict=True)):
            start = context - count
            if count > FEW_TILES * self._per_tile:
                gathers.append(self._alone(batch, row, first, start, count))
            else:
                for done in range(0, count, self._per_tile):
                    n = min(self._per_tile, count - done)
                    keys = self._padded(start + done + n)
                    together.setdefault((keys, n == 1), []).append((row, first + done, start + done, n))
            first += count
        only = not gathers and len(together) == 1
        for (keys, single), tiles in together.items():
            gathers.append(self._together(batch, keys, 1 if single else self._per_tile, tiles, single and only))
        return Plan(writes, gathers, first)

    def write_and_attend(
        self, plan: Plan, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """See Attention. [T, heads, head_dim] in and out."""
        kv = self._kv
        cache = self._cache[layer]
        positions = cache.view(-1, kv.head_dim)
        if kv.dtype is torch.float16:  # an overflow in one request must not reach the next owner of its pages
            key, value = key.nan_to_num(), value.nan_to_num()
        positions.index_copy_(0, plan.writes[0], key.reshape(-1, kv.head_dim))
        positions.index_copy_(0, plan.writes[1], value.reshape(-1, kv.head_dim))
        result: Tensor | None = None
        for gather in plan.gathers:
            found = cache.index_select(0, gather.index)
            found = found.view(2, kv.kv_heads, gather.sequences, gather.length, kv.head_dim).transpose(1, 2)
            for part in gather.parts:
                out = self._attend(part, query, found, scale)
                if part.outputs is None:
                    return out
                if result is None:  # one more row takes what tiles are filled up with
                    result = torch.empty(plan.tokens + 1, kv.heads, kv.head_dim, dtype=kv.dtype)
                result.index_copy_(0, part.outputs, out)
        assert result is not None
        return result[: plan.tokens]

    def _attend(self, part: Part, query: Tensor, found: Tensor, scale: float) -> Tensor:
        """The results of a part's queries, [B * Q, heads, head_dim]."""
        kv, group = self._kv, self._group
        if part.queries is not None:
            query = query.index_select(0, part.queries)
        count = query.shape[0] // part.tiles
        tiles = query.view(part.tiles, count, kv.kv_heads, group, kv.head_dim).transpose(1, 2)
        tiles = tiles.reshape(part.tiles, kv.kv_heads, count * group, kv.head_dim)
        tiles = F.pad(tiles, (0, 0, 0, self._rows - count * group))
        keys, values = found[:, :, :, : part.keys].expand(2, part.tiles, -1, -1, -1)
        out, _ = _flash(tiles, keys, values, 0.0, False, attn_mask=part.mask, scale=scale)
        out = out[:, :, : count * group].unflatten(2, (count, group)).transpose(1, 2)
        return out.reshape(-1, kv.heads, kv.head_dim)

    def _padded(self, keys: int) -> int:
        """The length that `keys` positions are padded to."""
        full, rest = divmod(keys, KEY_BLOCK)
        if not rest:
            return keys
        return full * KEY_BLOCK + next(size for size in self._last if size >= rest)

    def _index(self, batch: Batch, rows: list[int], keys: int) -> Tensor:
        """The cache rows of the first `keys` positions of batch rows, those behind their context from the zero page."""
        wanted = keys // self.page_size
        table = batch.page_table.index_select(0, torch.tensor(rows)).to(torch.int64)[:, :wanted]
        table = F.pad(table, (0, wanted - table.shape[1]), value=self._pages - 1)
        used = torch.tensor([-(-batch.context_lengths[row] // self.page_size) for row in rows])
        table.masked_fill_(torch.arange(wanted) >= used[:, None], self._pages - 1)
        return (self._head_pages + table.view(1, -1)).view(-1)

    def _together(
        self, batch: Batch, keys: int, count: int, tiles: list[tuple[int, int, int, int]], whole: bool
    ) -> Gather:
        """Tiles (row, first query, its position, queries) that each have keys of their own.

        `whole`: they are all of the batch, one query each, in its order.
        """
        rows, firsts, starts, numbers = (torch.tensor(column) for column in zip(*tiles, strict=True))
        offsets = torch.arange(count)
        mask = self._mask(starts[:, None] + offsets, keys)
        if whole:
            queries = outputs = None
        else:
            missing = offsets >= numbers[:, None]
            queries = (firsts[:, None] + offsets).masked_fill_(missing, 0).view(-1)
            outputs = (firsts[:, None] + offsets).masked_fill_(missing, batch.tokens.shape[0]).view(-1)
        index = self._index(batch, rows.tolist(), keys)
        return Gather(index, len(tiles), keys, [Part(queries, outputs, mask, len(tiles), keys)])

    def _mask(self, positions: Tensor, keys: int) -> Tensor:
        """For tiles of queries at `positions` [B, Q]."""
        tiles, count = positions.shape
        mask = torch.zeros(tiles, count, keys, dtype=self._kv.dtype)
        mask.masked_fill_(torch.arange(keys) > positions[:, :, None], float("-inf"))
        if count > 1:
            mask = mask.repeat_interleave(self._group, dim=1)
            mask = F.pad(mask, (0, 0, 0, self._rows - mask.shape[1]))
        return mask[:, None]

    def _alone(self, batch: Batch, row: int, first: int, start: int, count: int) -> Gather:
        """One row's many tiles, over keys that are gathered once. Later tiles see more keys than earlier ones."""
        parts = [
            self._slope(batch, first, start, count, tiles, keys) for tiles, keys in self._stretches(start, count)
        ]
        longest = parts[-1].keys
        return Gather(self._index(batch, [row], longest), 1, longest, parts)

    def _stretches(self, start: int, count: int) -> Iterator[tuple[range, int]]:
        """Runs of tiles whose keys are padded to the same length; long contexts go by whole blocks."""
        tiles = -(-count // self._per_tile)
        run = 0
        for tile in range(tiles):
            keys = self._reach(start, count, tile)
            if tile + 1 == tiles or self._reach(start, count, tile + 1) != keys:
                yield range(run, tile + 1), keys
                run = tile + 1

    def _reach(self, start: int, count: int, tile: int) -> int:
        keys = start + min((tile + 1) * self._per_tile, count)
        return self._padded(keys) if keys <= KEY_BLOCK else -(-keys // KEY_BLOCK) * KEY_BLOCK

    def _slope(self, batch: Batch, first: int, start: int, count: int, tiles: range, keys: int) -> Part:
        """Tiles that follow each other in one row, last tile first.

        Tile by tile the border between seen and masked keys moves by the same number of positions, so all masks are
        windows on one [16, keys + queries] tensor that begin ever further to the right. Strides cannot be negative:
        hence the reversed order.
        """
        total, size = batch.tokens.shape[0], self._per_tile
        order = torch.arange(tiles.stop - 1, tiles.start - 1, -1)
        inside = (order[:, None] * size + torch.arange(size)).view(-1)
        missing = inside >= count
        queries = (first + inside).masked_fill_(missing, 0)
        outputs = (first + inside).masked_fill_(missing, total)
        last = start + (tiles.stop - 1) * size  # position of the last tile's first query: the first window begins at 0
        width = keys + (len(tiles) - 1) * size
        reach = last + torch.arange(self._rows) // self._group
        shared = torch.zeros(self._rows, width, dtype=self._kv.dtype)
        shared.masked_fill_(torch.arange(width) > reach[:, None], float("-inf"))
        mask = shared.as_strided((len(tiles), 1, self._rows, keys), (size, 0, width, 1))
        return Part(queries, outputs, mask, len(tiles), keys)


def _zeros(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written: numpy asks the system for pages, torch.zeros fills them."""
    size = shape[0] * shape[1] * dtype.itemsize
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    begin = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(shape)


def _last_blocks(kv: KVShape, rows: int) -> tuple[int, ...]:
    """Sizes of the last block of keys, ascending, that give the same bits as a whole one."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kv.dtype)

    tiles = 8
    query = draw(tiles, 1, rows, kv.head_dim)
    keys, values = draw(2, tiles, 1, 2 * KEY_BLOCK, kv.head_dim)

    def attend(seen: int, length: int) -> Tensor:
        mask = torch.zeros(1, 1, 1, length, dtype=kv.dtype)
        mask[..., seen:] = float("-inf")
        out, _ = _flash(query, keys[:, :, :length], values[:, :, :length], 0.0, False, attn_mask=mask, scale=0.1)
        return out

    def agrees(size: int) -> bool:
        return all(
            torch.equal(attend(before + seen, before + size), attend(before + seen, before + KEY_BLOCK))
            for before in (0, KEY_BLOCK)
            for seen in (1, size // 2 + 1, size)
        )

    sizes = (*(size for size in SHORT_BLOCKS if agrees(size)), KEY_BLOCK)
    log.info("attention pads the last block of keys to %s positions, which agree bit for bit", " or ".join(map(str, sizes)))
    return sizes
