"""Divides the rows of a step into tiles for torch_cpu.py, and plans which keys to gather for each."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.attention.interface import ForwardBatch, KVCacheSpec, Reach

# Block size of torch's kernel: it iterates over keys in blocks of this many, from the first key that it is given.
KEY_BLOCK = 512
# A row with more tiles than this is divided into parts of at most PART queries, whose tiles share their keys. The other
# tiles have keys of their own.
FEW_TILES = 4
PART = 256
# Target size of one gather of keys and values: they should still be in the core's cache when they are used.
GATHER_BYTES = 1 << 20


class TileShapes(NamedTuple):
    """Sizes whose results agree bit for bit; see torch_cpu.agreeing_shapes."""

    single_rows: int  # rows of a tile that holds one query
    multi_rows: int  # rows of a tile that holds several queries
    last_blocks: tuple[int, ...]  # allowed numbers of keys in the last block, ascending


class QueryTile(NamedTuple):
    """Consecutive queries of one row of the batch."""

    row: int
    first: int  # index of the first query among the T tokens of the batch
    start: int  # position of the first query in its sequence
    queries: int
    begin: int  # position of the first key; a multiple of KEY_BLOCK


class TileGroup(NamedTuple):
    """Tiles of one kernel call: B tiles of Q queries each, and the pages that are gathered for them: a sequence of keys
    for each tile, or one for all."""

    index: Tensor  # int64 [parts * kv_heads * sequences * pages] rows of the cache, keys before values
    sequences: int
    keys: int  # positions of a sequence
    queries: Tensor | slice  # int64 [B * Q] indices into the T tokens of the batch
    outputs: Tensor | slice  # int64 [B * Q] indices into the result; T for padding queries
    mask: Tensor  # float32 [B, kv_heads or 1, rows or 1, keys], added to the scores: 0 or what ALiBi adds, or -inf
    tiles: int  # B
    rows: int  # of a tile


class TilePlan(NamedTuple):
    """The plan of one step."""

    writes: Tensor  # int64 [G, T * parts * kv_heads] rows of the cache, viewed with one row per position
    groups: dict[tuple[int, Reach], list[TileGroup]]  # by KV group and reach
    tokens: int  # T


class TilePlanner:
    """Plans steps of one model over a cache of `pages` pages, of which the last stays zero."""

    def __init__(self, kv: KVCacheSpec, pages: int, page_size: int, shapes: TileShapes) -> None:
        self.page_size = page_size
        self._kv = kv
        self._pages = pages
        self._group = kv.heads // kv.kv_heads
        self._shapes = shapes
        self._queries_per_tile = max(1, shapes.multi_rows // self._group)
        self._page_bytes = kv.parts * kv.kv_heads * page_size * kv.head_dim * torch.float32.itemsize
        self._head_pages = torch.arange(kv.parts * kv.kv_heads).view(-1, 1) * pages

    def plan(self, batch: ForwardBatch) -> TilePlan:
        """The plan of a step, for each KV group and reach of the model's layers."""
        heads = self._head_pages * self.page_size
        writes = (batch.slot_mapping[:, None] + heads).transpose(1, 2).flatten(1)
        kinds = {(group, self._kv.reach(layer)) for layer, (group, _) in enumerate(self._kv.places)}
        groups = {
            (group, reach): self._groups(batch._replace(page_table=batch.page_table[group]), reach)
            for group, reach in kinds
        }
        return TilePlan(writes, groups, sum(batch.query_lens_host))

    def _groups(self, batch: ForwardBatch, reach: Reach) -> list[TileGroup]:
        """Divides the rows into tiles. Short rows are grouped by their number of keys; long rows are planned alone.
        `batch` has the page table [R, P] of one group."""
        short: dict[tuple[int, bool], list[QueryTile]] = {}
        groups: list[TileGroup] = []
        first = 0
        last_keys = None if batch.blocks is None else batch.blocks.last_seen(reach)
        shifted = not reach.chunked and self._kv.slopes is None  # see _long_part
        for row, (count, context) in enumerate(zip(batch.query_lens_host, batch.context_lens_host, strict=True)):
            start = context - count
            seen = None if last_keys is None else last_keys[first : first + count]
            if seen is not None and torch.equal(seen, torch.arange(start, context)):
                seen = None
            if count > FEW_TILES * self._queries_per_tile and shifted and seen is None:
                done = 0
                while done < count:  # a part ends with a block of keys, or in the middle of one
                    n = min(PART - (start + done) % PART, count - done)
                    groups.append(self._long_part(batch, row, first + done, start + done, n, reach))
                    done += n
            else:
                for done in range(0, count, self._queries_per_tile):
                    n = min(self._queries_per_tile, count - done)
                    begin = _first_key(reach, start + done)
                    end = start + done + n if seen is None else int(seen[done + n - 1]) + 1
                    keys = self._padded_keys(end - begin)
                    tile = QueryTile(row, first + done, start + done, n, begin)
                    short.setdefault((keys, n == 1), []).append(tile)
            first += count
        for (keys, single), tiles in short.items():
            at_once = max(1, GATHER_BYTES // (keys // self.page_size * self._page_bytes))
            parts = (tiles[at : at + at_once] for at in range(0, len(tiles), at_once))
            groups.extend(self._short_tiles(batch, keys, single, part, reach) for part in parts)
        return groups

    def _padded_keys(self, keys: int) -> int:
        """The number of keys that `keys` keys are padded to."""
        full, rest = divmod(keys, KEY_BLOCK)
        if not rest:
            return keys
        return full * KEY_BLOCK + next(size for size in self._shapes.last_blocks if size >= rest)

    def _index(self, batch: ForwardBatch, rows: list[int], begins: list[int], keys: int) -> Tensor:
        """TileGroup.index for `keys` positions of each batch row, from `begins` on.

        Positions beyond a row's context are gathered from the zero page.
        """
        wanted, first = keys // self.page_size, min(begins) // self.page_size
        table = batch.page_table.index_select(0, torch.tensor(rows)).to(torch.int64)[:, first:]
        columns = torch.arange(wanted)
        if max(begins) > min(begins):
            columns = columns + (torch.tensor(begins)[:, None] // self.page_size - first)
            table = table.gather(1, columns.clamp(max=table.shape[1] - 1))
        else:
            table = F.pad(table[:, :wanted], (0, wanted - min(wanted, table.shape[1])))
        used = torch.tensor([-(-batch.context_lens_host[row] // self.page_size) - first for row in rows])
        table.masked_fill_(columns >= used[:, None], self._pages - 1)
        return (self._head_pages + table.view(1, -1)).view(-1)

    def _short_tiles(
        self, batch: ForwardBatch, keys: int, single: bool, tiles: list[QueryTile], reach: Reach
    ) -> TileGroup:
        """Tiles with a sequence of keys each. `single`: the tiles have one query each."""
        count = 1 if single else self._queries_per_tile
        rows = self._shapes.single_rows if single else self._shapes.multi_rows
        firsts = torch.tensor([tile.first for tile in tiles])
        numbers = torch.tensor([tile.queries for tile in tiles])
        starts = torch.tensor([tile.start - tile.begin for tile in tiles])
        offsets = torch.arange(count)
        begins = torch.tensor([tile.begin for tile in tiles])
        last_keys = None if batch.blocks is None else batch.blocks.last_seen(reach)
        if last_keys is not None:  # those of padding queries are not used
            at = (firsts[:, None] + offsets).clamp(max=len(last_keys) - 1)
            last_keys = last_keys[at] - begins[:, None]
        mask = self._mask(starts[:, None] + offsets, begins, rows, keys, reach, last_keys)
        queries: Tensor | slice = slice(tiles[0].first, tiles[-1].first + 1)
        outputs = queries
        if not single or tiles[-1].first - tiles[0].first != len(tiles) - 1:
            missing = offsets >= numbers[:, None]
            queries = (firsts[:, None] + offsets).masked_fill_(missing, 0).view(-1)
            outputs = (firsts[:, None] + offsets).masked_fill_(missing, batch.tokens.shape[0]).view(-1)
        index = self._index(batch, [tile.row for tile in tiles], [tile.begin for tile in tiles], keys)
        return TileGroup(index, len(tiles), keys, queries, outputs, mask, len(tiles), rows)

    def _mask(
        self, positions: Tensor, begins: Tensor, rows: int, keys: int, reach: Reach, last_keys: Tensor | None
    ) -> Tensor:
        """TileGroup.mask for tiles of `rows` rows, with queries at `positions` [B, Q] relative to the first key, which
        is at `begins` [B]. `last_keys` [B, Q]: the last one that each sees, relative to it; None: its own."""
        tiles, count = positions.shape
        mask = torch.zeros(tiles, count, keys)
        seen = None if last_keys is None else last_keys[:, :, None]
        hidden = reach.masked(torch.arange(keys), positions[:, :, None], begins[:, None, None], seen)
        mask.masked_fill_(hidden, float("-inf"))
        if self._kv.slopes is not None:
            slopes = self._kv.slopes.view(1, self._kv.kv_heads, 1, self._group, 1)
            distances = positions[:, None, :, None, None] - torch.arange(keys)
            biased = (mask[:, None, :, None] - slopes * distances).flatten(2, 3)  # [B, kv_heads, Q * group, keys]
            return F.pad(biased, (0, 0, 0, rows - biased.shape[2]))
        if count > 1:
            mask = mask.repeat_interleave(self._group, dim=1)
            mask = F.pad(mask, (0, 0, 0, rows - mask.shape[1]))
        return mask[:, None]

    def _long_part(self, batch: ForwardBatch, row: int, first: int, start: int, count: int, reach: Reach) -> TileGroup:
        """The tiles of `count` consecutive queries of a row, which share their keys; the last tile first.

        From one tile to the next, the borders between visible and masked keys move by the same number of positions. So
        all masks are views of one tensor [rows, keys + queries], each beginning further to the right than the one
        before. Strides cannot be negative, hence the reversed order.
        """
        begin = _first_key(reach, start)
        keys = self._padded_keys(start + count - begin)
        size, rows = self._queries_per_tile, self._shapes.multi_rows
        tiles = -(-count // size)
        inside = (torch.arange(tiles - 1, -1, -1)[:, None] * size + torch.arange(size)).view(-1)
        missing = inside >= count
        queries = (first + inside).masked_fill_(missing, 0)
        outputs = (first + inside).masked_fill_(missing, batch.tokens.shape[0])
        # Relative to the first key: the first query of the last tile, whose mask begins at column 0.
        last = start + (tiles - 1) * size - begin
        width = keys + (tiles - 1) * size
        shared = torch.zeros(rows, width)
        shared.masked_fill_(
            reach.masked(torch.arange(width), last + torch.arange(rows)[:, None] // self._group), float("-inf")
        )
        mask = shared.as_strided((tiles, 1, rows, keys), (size, 0, width, 1))
        return TileGroup(self._index(batch, [row], [begin], keys), 1, keys, queries, outputs, mask, tiles, rows)


def _first_key(reach: Reach, query: int) -> int:
    """Position of the first key of a tile whose first query is at position `query`: the start of a key block."""
    return max(0, reach.first_seen(query)) // KEY_BLOCK * KEY_BLOCK
