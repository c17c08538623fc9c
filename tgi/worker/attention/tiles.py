"""Divides a step's rows into the tiles that attention on CPU computes, and says which keys each needs. See cpu.py."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.batch import Batch, KVShape

# Keys are computed in blocks of this many, from position 0 on: the kernel's own size.
KEY_BLOCK = 512
# A row with more tiles than this gathers its keys once for all of them; others gather them for each tile.
FEW_TILES = 4
# Keys and values are gathered about this many bytes at a time, to be still in the core's cache when they are used.
GATHER_BYTES = 1 << 20


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
    mask: Tensor  # float32 [B, 1, rows or 1, keys] zeros and -inf
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


class Planner:
    """Plans the steps of one model over a cache of `pages` pages, the last of which stays zero."""

    def __init__(self, kv: KVShape, pages: int, page_size: int, shapes: Shapes) -> None:
        self.page_size = page_size
        self._kv = kv
        self._pages = pages
        self._group = kv.heads // kv.kv_heads
        self._shapes = shapes
        self._per_tile = max(1, shapes.wide // self._group)
        self._page_bytes = 2 * kv.kv_heads * page_size * kv.head_dim * torch.float32.itemsize
        self._head_pages = torch.arange(2 * kv.kv_heads).view(-1, 1) * pages

    def plan(self, batch: Batch) -> Plan:
        """One step's work, for each window that layers have."""
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

    def _padded(self, keys: int) -> int:
        """The length that `keys` positions are padded to."""
        full, rest = divmod(keys, KEY_BLOCK)
        if not rest:
            return keys
        return full * KEY_BLOCK + next(size for size in self._shapes.last_blocks if size >= rest)

    def _index(self, batch: Batch, rows: list[int], begins: list[int], keys: int) -> Tensor:
        """The cache rows of `keys` positions of batch rows from `begins` on, those behind their context from the zero
        page."""
        wanted, first = keys // self.page_size, min(begins) // self.page_size
        table = batch.page_table.index_select(0, torch.tensor(rows)).to(torch.int64)[:, first:]
        columns = torch.arange(wanted)
        if max(begins) > min(begins):
            columns = columns + (torch.tensor(begins)[:, None] // self.page_size - first)
            table = table.gather(1, columns.clamp(max=table.shape[1] - 1))
        else:
            table = F.pad(table[:, :wanted], (0, wanted - min(wanted, table.shape[1])))
        used = torch.tensor([-(-batch.context_lengths[row] // self.page_size) - first for row in rows])
        table.masked_fill_(columns >= used[:, None], self._pages - 1)
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
        mask = torch.zeros(tiles, count, keys)
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
        shared = torch.zeros(rows, width)
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
