"""Attention on CPU over paged keys and values, with bit-equal results however queries are batched or chunked.

Queries are computed in tiles: the query heads of one KV head, times as many queries as fit, padded to a fixed number
of rows. Each tile is one item of torch's flash attention kernel for CPU, which walks over the keys in blocks of 512 in
the order of their positions and sums in float32. What a query gets out depends on the shapes alone:

- The rows of a tile do not touch each other, but their number may choose another order of sums.
- Keys behind the query, and those before its window, are masked. They add exact zeros, so it does not matter how many
  follow, nor whether whole blocks before the window are left out.
- The number of keys in the last block may choose another order of sums.

The kernel has no cap for scores. Models with one are computed in float32 out of products of matrices, again with tiles
of a fixed number of rows over whole blocks of keys in order.

`choose_shapes` finds the numbers of rows and of keys that agree bit for bit on this machine, and no others are used.
So a token's result is the same in prefill and in decode, in any chunk, beside any other row, with any thread count.
"""

import logging
import mmap
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.batch import Batch, KVShape

log = logging.getLogger(__name__)

# Rows of a tile. All are compared with the base; more than the widest the kernel divides into such tiles by itself.
TILES = (4, 8, 16, 32)
BASE_TILE = 16
WIDEST_TILE = 32
# The kernel's own block of keys, and shorter last blocks that are tried.
KEY_BLOCK = 512
SHORT_BLOCKS = (128, 256)
# A row with more tiles than this gathers its keys once for all of them; others gather them for each tile.
FEW_TILES = 4
# Keys and values are gathered about this many bytes at a time, to be still in the core's cache when they are used.
GATHER_BYTES = 1 << 20

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Shapes(NamedTuple):
    """Sizes that agree bit for bit."""

    thin: int  # rows of a tile that holds one query
    wide: int  # rows of a tile that holds several
    last_blocks: tuple[int, ...]  # keys in the last block, ascending


class Tile(NamedTuple):
    """Consecutive queries of one row of the batch."""

    row: int
    first: int  # index into T of its first query
    start: int  # position of its first query
    queries: int
    begin: int  # position of the first key that it is computed with, the first of a block


class Part(NamedTuple):
    """Tiles that one kernel call computes: B of Q queries, over `keys` positions of what was gathered, from `first`."""

    queries: Tensor | slice  # int64 [B * Q] index into T
    outputs: Tensor | slice  # int64 [B * Q] where the results go; T for queries that only fill up a tile
    mask: Tensor  # [B, 1, rows or 1, keys] zeros and -inf
    tiles: int
    rows: int
    first: int
    keys: int


class Gather(NamedTuple):
    """Pages that are brought together, and what is computed on them. B sequences of keys, or one for all tiles."""

    index: Tensor  # int64 [2 * kv_heads * B * pages] rows of the cache, keys before values
    sequences: int
    length: int  # positions gathered per sequence
    parts: list[Part]


class Plan(NamedTuple):
    """One step's work, the same in every layer that has the same window."""

    writes: Tensor  # int64 [T * 2 * kv_heads] rows of the cache, seen as one row per position
    gathers: dict[int | None, list[Gather]]  # by window
    tokens: int


class CpuAttention:
    """The backend. The cache of a layer is [2, kv_heads, pages + 1, page_size, head_dim]; the last page stays zero."""

    page_size = 16

    def __init__(self, kv: KVShape, pages: int, device: torch.device) -> None:
        self._kv = kv
        self._pages = pages + 1
        self._group = kv.heads // kv.kv_heads
        self._shapes = choose_shapes(kv)
        self._per_tile = max(1, self._shapes.wide // self._group)
        self._page_bytes = 2 * kv.kv_heads * self.page_size * kv.head_dim * kv.dtype.itemsize
        self._cache = [self._memory() for _ in range(kv.layers)]
        self._head_pages = torch.arange(2 * kv.kv_heads).view(-1, 1) * self._pages
        self._scratch = torch.empty(0, self.page_size * kv.head_dim, dtype=kv.dtype)

    def _memory(self) -> Tensor:
        """One layer's cache, [2 * kv_heads * pages, page_size * head_dim]. Zeros that take memory once written to."""
        zeros = mmap.mmap(-1, self._pages * self._page_bytes)
        return torch.frombuffer(zeros, dtype=self._kv.dtype).view(-1, self.page_size * self._kv.head_dim)

    def plan(self, batch: Batch) -> Plan:
        """See Attention. Layers of one window share their part of the plan."""
        writes = (batch.cache_at + self._head_pages * self.page_size).t().reshape(-1)
        windows = {self._kv.window(layer) for layer in range(self._kv.layers)}
        gathers = {window: self._gathers(batch, window) for window in windows}
        return Plan(writes, gathers, sum(batch.query_lengths))

    def _gathers(self, batch: Batch, window: int | None) -> list[Gather]:
        """Divides the rows into tiles. Rows with few are grouped by the number of keys, the others stand alone."""
        together: dict[tuple[int, bool], list[Tile]] = {}
        gathers: list[Gather] = []
        first = 0
        for row, (count, context) in enumerate(zip(batch.query_lengths, batch.context_lengths, strict=True)):
            start = context - count
            if count > FEW_TILES * self._per_tile:
                gathers.append(self._alone(batch, row, first, start, count, window))
            else:
                for done in range(0, count, self._per_tile):
                    n = min(self._per_tile, count - done)
                    begin = _begin(start + done, window)
                    keys = self._padded(start + done + n - begin)
                    together.setdefault((keys, n == 1), []).append(Tile(row, first + done, start + done, n, begin))
            first += count
        for (keys, single), tiles in together.items():
            at_once = max(1, GATHER_BYTES // (keys // self.page_size * self._page_bytes))
            groups = (tiles[at : at + at_once] for at in range(0, len(tiles), at_once))
            gathers.extend(self._together(batch, keys, single, group, window) for group in groups)
        return gathers

    def write_and_attend(
        self, plan: Plan, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """See Attention. [T, heads, head_dim] in and out."""
        kv = self._kv
        cache = self._cache[layer]
        pairs = torch.cat([key, value], dim=1)
        if kv.dtype is torch.float16:  # an overflow in one request must not reach the next owner of its pages
            pairs.nan_to_num_()
        cache.view(-1, kv.head_dim).index_copy_(0, plan.writes, pairs.view(-1, kv.head_dim))
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
        """Keys and values, [2, sequences, kv_heads, length, head_dim], in memory that the next call reuses."""
        kv = self._kv
        if gather.index.shape[0] > self._scratch.shape[0]:
            self._scratch = torch.empty(gather.index.shape[0], cache.shape[1], dtype=kv.dtype)
        found = self._scratch[: gather.index.shape[0]]
        torch.index_select(cache, 0, gather.index, out=found)
        return found.view(2, kv.kv_heads, gather.sequences, gather.length, kv.head_dim).transpose(1, 2)

    def _attend(self, part: Part, query: Tensor, found: Tensor, scale: float) -> Tensor:
        """The results of a part's queries, [B * Q, heads, head_dim]."""
        kv, group = self._kv, self._group
        query = query[part.queries] if isinstance(part.queries, slice) else query.index_select(0, part.queries)
        count = query.shape[0] // part.tiles
        if count == 1:
            tiles = query.view(part.tiles, kv.kv_heads, group, kv.head_dim)
        else:
            tiles = query.view(part.tiles, count, kv.kv_heads, group, kv.head_dim).transpose(1, 2)
            tiles = tiles.reshape(part.tiles, kv.kv_heads, count * group, kv.head_dim)
        tiles = F.pad(tiles, (0, 0, 0, part.rows - count * group))
        keys, values = found[:, :, :, part.first : part.first + part.keys].expand(2, part.tiles, -1, -1, -1)
        if kv.softcap is None:
            out, _ = _flash(tiles, keys, values, 0.0, False, attn_mask=part.mask, scale=scale)
        else:
            out = _capped(tiles, keys, values, part.mask, scale, kv.softcap)
        out = out[:, :, : count * group]
        if count > 1:
            out = out.unflatten(2, (count, group)).transpose(1, 2)
        return out.reshape(-1, kv.heads, kv.head_dim)

    def _padded(self, keys: int) -> int:
        """The length that `keys` positions are padded to."""
        full, rest = divmod(keys, KEY_BLOCK)
        if not rest:
            return keys
        return full * KEY_BLOCK + next(size for size in self._shapes.last_blocks if size >= rest)

    def _index(self, batch: Batch, rows: list[int], begins: list[int], keys: int) -> Tensor:
        """The cache rows of `keys` positions of batch rows from `begins` on, those behind their context from the zero
        page."""
        chosen = torch.tensor(rows)
        columns = torch.tensor(begins)[:, None] // self.page_size + torch.arange(keys // self.page_size)
        used = torch.tensor([-(-batch.context_lengths[row] // self.page_size) for row in rows])
        behind = columns >= used[:, None]
        table = batch.page_table[chosen[:, None], columns.masked_fill(behind, 0)].to(torch.int64)
        table.masked_fill_(behind, self._pages - 1)
        return (self._head_pages + table.view(1, -1)).view(-1)

    def _together(self, batch: Batch, keys: int, single: bool, tiles: list[Tile], window: int | None) -> Gather:
        """Tiles that each have keys of their own. `single`: of one query each."""
        count = 1 if single else self._per_tile
        rows = self._shapes.thin if single else self._shapes.wide
        firsts, starts, numbers, begins = (torch.tensor(column) for column in list(zip(*tiles, strict=True))[1:])
        offsets = torch.arange(count)
        mask = self._mask((starts - begins)[:, None] + offsets, rows, keys, window)
        queries: Tensor | slice = slice(tiles[0].first, tiles[-1].first + 1)
        outputs = queries
        if not single or tiles[-1].first - tiles[0].first != len(tiles) - 1:
            missing = offsets >= numbers[:, None]
            queries = (firsts[:, None] + offsets).masked_fill_(missing, 0).view(-1)
            outputs = (firsts[:, None] + offsets).masked_fill_(missing, batch.tokens.shape[0]).view(-1)
        index = self._index(batch, [tile.row for tile in tiles], [tile.begin for tile in tiles], keys)
        return Gather(index, len(tiles), keys, [Part(queries, outputs, mask, len(tiles), rows, 0, keys)])

    def _mask(self, positions: Tensor, rows: int, keys: int, window: int | None) -> Tensor:
        """For tiles of `rows` rows, of queries at `positions` [B, Q] among the keys."""
        tiles, count = positions.shape
        mask = torch.zeros(tiles, count, keys, dtype=self._kv.dtype)
        mask.masked_fill_(_unseen(torch.arange(keys), positions[:, :, None], window), float("-inf"))
        if count > 1:
            mask = mask.repeat_interleave(self._group, dim=1)
            mask = F.pad(mask, (0, 0, 0, rows - mask.shape[1]))
        return mask[:, None]

    def _alone(self, batch: Batch, row: int, first: int, start: int, count: int, window: int | None) -> Gather:
        """One row's many tiles, over keys that are gathered once. Later tiles see more keys than earlier ones, or
        others."""
        stretches = list(self._stretches(start, count, window))
        lowest = stretches[0][1]
        parts = [
            self._slope(batch, first, start, count, tiles, begin, reach - begin, begin - lowest, window)
            for tiles, begin, reach in stretches
        ]
        length = stretches[-1][2] - lowest
        return Gather(self._index(batch, [row], [lowest], length), 1, length, parts)

    def _stretches(self, start: int, count: int, window: int | None) -> Iterator[tuple[range, int, int]]:
        """Runs of tiles that are computed with the same keys, from and up to which; long contexts go by whole
        blocks."""
        tiles = -(-count // self._per_tile)
        run = 0
        for tile in range(tiles):
            keys = self._keys(start, count, tile, window)
            if tile + 1 == tiles or self._keys(start, count, tile + 1, window) != keys:
                yield range(run, tile + 1), *keys
                run = tile + 1

    def _keys(self, start: int, count: int, tile: int, window: int | None) -> tuple[int, int]:
        """The positions between which a tile's keys lie."""
        begin = _begin(start + tile * self._per_tile, window)
        keys = start + min((tile + 1) * self._per_tile, count) - begin
        return begin, begin + (self._padded(keys) if keys <= KEY_BLOCK else -(-keys // KEY_BLOCK) * KEY_BLOCK)

    def _slope(
        self,
        batch: Batch,
        first: int,
        start: int,
        count: int,
        tiles: range,
        begin: int,
        keys: int,
        offset: int,
        window: int | None,
    ) -> Part:
        """Tiles that follow each other in one row, last tile first, over `keys` positions from `begin`.

        Tile by tile the borders between seen and masked keys move by the same number of positions, so all masks are
        cuttings from one [rows, keys + queries] tensor that begin ever further to the right. Strides cannot be
        negative: hence the reversed order.
        """
        total, size, rows = batch.tokens.shape[0], self._per_tile, self._shapes.wide
        order = torch.arange(tiles.stop - 1, tiles.start - 1, -1)
        inside = (order[:, None] * size + torch.arange(size)).view(-1)
        missing = inside >= count
        queries = (first + inside).masked_fill_(missing, 0)
        outputs = (first + inside).masked_fill_(missing, total)
        last = start + (tiles.stop - 1) * size - begin  # of the last tile's first query: the first cutting begins at 0
        width = keys + (len(tiles) - 1) * size
        reach = last + torch.arange(rows) // self._group
        shared = torch.zeros(rows, width, dtype=self._kv.dtype)
        shared.masked_fill_(_unseen(torch.arange(width), reach[:, None], window), float("-inf"))
        mask = shared.as_strided((len(tiles), 1, rows, keys), (size, 0, width, 1))
        return Part(queries, outputs, mask, len(tiles), rows, offset, keys)


def _begin(query: int, window: int | None) -> int:
    """The first key that a tile is computed with whose first query is at position `query`: a block's first."""
    return 0 if window is None else max(0, query - window + 1) // KEY_BLOCK * KEY_BLOCK


def _unseen(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Which positions a query does not see: those behind it, and those that its window has left."""
    behind = keys > queries
    return behind if window is None else behind | (keys <= queries - window)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float) -> Tensor:
    """softmax(cap * tanh(scale * q k / cap) + mask) v, for [B, kv_heads, rows, head_dim] in and out."""
    tiles, (keys, values) = query.flatten(0, 1).float(), (x.flatten(0, 1).float() for x in (key, value))
    blocks = list(zip(keys.split(KEY_BLOCK, 1), values.split(KEY_BLOCK, 1), strict=True))
    scores = torch.cat([torch.bmm(tiles, block.transpose(1, 2)) for block, _ in blocks], dim=2)
    scores = torch.tanh(scores * (scale / cap)) * cap
    shares = (scores.unflatten(0, query.shape[:2]) + mask).softmax(-1).flatten(0, 1).split(KEY_BLOCK, 2)
    found = [torch.bmm(share, block) for share, (_, block) in zip(shares, blocks, strict=True)]
    return reduce(torch.add, found).view(query.shape).to(query.dtype)


def choose_shapes(kv: KVShape) -> Shapes:
    """Finds the shapes that give the same bits as a base tile over whole blocks of keys, by trying.

    What is drawn for the trial is fixed, so a restart chooses the same.
    """
    group = kv.heads // kv.kv_heads
    if kv.softcap is not None:
        rows = -(-group // BASE_TILE) * BASE_TILE
        return Shapes(rows, rows, (KEY_BLOCK,))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(8, 1, WIDEST_TILE, kv.head_dim, generator=generator).to(kv.dtype)
    keys, values = torch.randn(2, 8, 1, 2 * KEY_BLOCK, kv.head_dim, generator=generator).to(kv.dtype)

    def attend(rows: int, seen: int, length: int) -> Tensor:
        """With tiles of `rows` rows, the first `seen` of `length` keys."""
        mask = torch.zeros(1, 1, 1, length, dtype=kv.dtype)
        mask[..., seen:] = float("-inf")
        key, value = keys[:, :, :length], values[:, :, :length]
        tiles = query.split(rows, dim=2)
        return torch.cat([_flash(tile, key, value, 0.0, False, attn_mask=mask, scale=0.1)[0] for tile in tiles], 2)

    def agrees(rows: int, block: int) -> bool:
        for before in (0, KEY_BLOCK):
            for seen in (before + 1, before + block // 2 + 1, before + block):
                if not torch.equal(attend(rows, seen, before + block), attend(BASE_TILE, seen, before + KEY_BLOCK)):
                    return False
        return True

    tiles = [size for size in TILES if agrees(size, KEY_BLOCK)]
    blocks = [size for size in SHORT_BLOCKS if all(agrees(tile, size) for tile in tiles)]
    fitting = [size for size in tiles if size >= group] or [-(-group // tiles[-1]) * tiles[-1]]
    shapes = Shapes(fitting[0], fitting[-1], (*blocks, KEY_BLOCK))
    log.info(
        "attention runs with tiles of %d and %d rows over last blocks of %s keys, which agree bit for bit",
        shapes.thin,
        shapes.wide,
        ", ".join(map(str, shapes.last_blocks)),
    )
    return shapes
