"""Causal attention over the pages of the KV cache, for decode rows, prompt chunks, drafts, and mixtures of them.

A program attends with a block of queries of one row, for all heads that share a KV head, to a split of the keys that
they see: flash attention with float32 sums over tiles of keys, which are read in place through the page table. The size
of a tile is independent of the page size. Where rows are few, several splits of a context are computed side by side;
the program that finishes last merges them, so this takes no further launch.

The grid follows from the numbers of rows and tokens alone. Rows and contexts are read on the device, so one captured
CUDA graph serves all steps. A block beyond the queries of its row costs a program that returns at once.

Of latent attention a value is the first elements of its key: both are read once. The scores are the sum of two
products, of these elements and of the rest, which is rotated. All heads share one KV head there, and there may be 128
of them, so the heads of a token are divided among programs.

Keys and values of 8 bits are converted to float16, which represents all of them and takes the fewest instructions; the
queries and the weights of values are then multiplied as float16. In float32 all products are exact.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.attention_arguments import Rows
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

SMALLEST = 16  # minimum side of the matrices of tl.dot
NO_WINDOW = 1 << 30  # larger than any context
CONVERTS_E4M3 = (8, 9)  # the compute capability from which on GPUs, and Triton's compiler, convert e4m3
MAX_FLOAT16 = tl.constexpr(65504.0)
LOG2_E = tl.constexpr(1.4426950408889634)
# Programs that keep a GPU busy. Rows are divided into splits while there are fewer.
PROGRAMS = 256
MAX_SPLITS = 16


class Tile(NamedTuple):
    """The shape of a program's work."""

    queries: int  # of a block, times the heads that share a KV head; a power of two
    keys: int
    warps: int
    stages: int


# For 16-bit numbers and heads of up to 128 elements: by the number of queries times heads of a KV head in the longest
# row. Larger heads and numbers have fewer keys in a tile: a tile of keys has at most TILE_BYTES. Measured on an H100
# (docs/performance-methods.md).
SHORT, MIDDLE, LONG = Tile(16, 64, 2, 4), Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)
MOST_QUERIES = {16: SHORT, 8192: MIDDLE}  # above: LONG
TILE_BYTES = 16 << 10


def tile_for(queries: int, width: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tile:
    """The tile for rows of up to this number of queries (times heads of a KV head) of `width` elements."""
    tile = next((tile for most, tile in MOST_QUERIES.items() if queries <= most), LONG)
    size = width * dtype.itemsize
    if size > 512:  # the queries and two tiles of keys and of values fill the shared memory
        little = capability in LITTLE_MEMORY
        most = SMALLEST if dtype.itemsize == 4 else 32 if little else 64
        few = min(tile.queries, most) == SMALLEST
        return Tile(min(tile.queries, most), SMALLEST, 4 if few else 8, 1 if little or dtype.itemsize == 4 else 2)
    if size > 256:  # the sums of the results take the registers
        tile = tile._replace(queries=min(tile.queries, 64), warps=4, stages=2)
    return tile._replace(keys=max(SMALLEST, min(tile.keys, TILE_BYTES // size)))


# Heads of a token in a program of latent attention: while rows are few, more programs read the same keys.
FEW_LATENT_HEADS, MANY_LATENT_HEADS = 16, 64
# Compute capabilities whose multiprocessors have 100 KB of shared memory, which takes half of those heads.
LITTLE_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))


def latent_heads(rows: int, heads: int, capability: tuple[int, int], batch_invariant: bool = False) -> int:
    """How many heads of a token a program of latent attention has, for a launch with this number of rows."""
    few = not batch_invariant and rows * heads < PROGRAMS * FEW_LATENT_HEADS
    most = FEW_LATENT_HEADS if few else MANY_LATENT_HEADS // (1 + (capability in LITTLE_MEMORY))
    return next(count for count in range(min(most, heads), 0, -1) if heads % count == 0)


def latent_tile(queries: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tile:
    """The tile for rows of up to this number of queries (times heads of a program) of latent attention."""
    if dtype.itemsize == 4:
        return Tile(SMALLEST, SMALLEST, 4, 1)
    if capability in LITTLE_MEMORY:
        return Tile(SMALLEST if queries <= SMALLEST else 32, SMALLEST, 4, 2)
    return Tile(SMALLEST, 32, 4, 2) if queries <= SMALLEST else Tile(64, 32, 8, 2)


def splits_for(blocks: int, lanes: int) -> int:
    """The number of splits of a context, a power of two, for this number of blocks of queries, each with `lanes`
    programs."""
    wanted = PROGRAMS // max(1, blocks * lanes)
    return min(MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    out: Tensor,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    *,
    capability: tuple[int, int],
    counters: Tensor,
    batch_invariant: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
    chunked: bool = False,
    slopes: Tensor | None = None,
    last_keys: Tensor | None = None,
) -> None:
    """Writes the attention of these rows to `out` [T, heads, elements of a value], which is contiguous.

    `query` [T, heads, head_dim] may have a larger stride from token to token. `keys` and `values` [pages, page_size,
    kv_heads, head_dim] are the KV cache of a layer, of the queries' type or of 8-bit floats; they already have the
    step's own. Values of fewer elements than a key are the first of these (latent attention). Scores are multiplied by
    `scale` and limited to cap * tanh(score / cap). `window`: the number of positions that a query sees; None: all.
    `sinks` float32 [heads] are scores without a value. `chunked`: a query sees its own chunk of `window` positions
    instead. `slopes` float32 [heads]: a score is reduced by slope * distance (ALiBi). `last_keys` int32
    [T]: the last position that each query sees, its own or a later one of its row. `capability` is the GPU's.
    `counters` int32 [COUNTERS] are zero before and after. `batch_invariant`: one tile and one split for any shape of a
    step; a query's bits depend on its row's context alone. `tile` and `splits` override what is chosen.
    """
    _, heads, dim = query.shape
    page, kv_heads, size = keys.shape[1], keys.shape[2], out.shape[2]
    width = max(SMALLEST, triton.next_power_of_2(size))
    count, rest = len(rows.context), dim - size
    group = heads // kv_heads if not rest else latent_heads(count, heads, capability, batch_invariant)
    lanes = heads // group  # programs of a token
    if batch_invariant or tile is None:
        longest = MIDDLE.queries if batch_invariant else rows.longest * group
        tile = (
            latent_tile(longest, query.dtype, capability) if rest else tile_for(longest, width, query.dtype, capability)
        )
    splits = 1 if batch_invariant else splits
    padded_group = triton.next_power_of_2(group)
    queries = max(tile.queries, padded_group)
    block = 1 if rows.starts is None else queries // group
    blocks = count if rows.starts is None else rows.tokens // block + count
    splits = splits or splits_for(count if rows.longest * group <= queries else blocks, lanes)
    if splits > 1 and blocks * lanes > len(counters):
        splits = 1
    sums = weights = out
    if splits > 1:
        sums = torch.empty(rows.tokens, heads, splits, size, dtype=torch.float32, device=query.device)
        weights = torch.empty(rows.tokens, heads, splits, 2, dtype=torch.float32, device=query.device)
    by_bits = keys.dtype is torch.float8_e4m3fn and capability < CONVERTS_E4M3
    if by_bits:
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    _attend[blocks, lanes, splits](
        *(
            query,
            keys,
            values,
            rows.table,
            rows.context,
            rows.starts,
            sinks,
            slopes,
            last_keys,
            out,
            sums,
            weights,
            counters,
        ),
        *(count, rows.first, query.stride(0), rows.table.stride(0), NO_WINDOW if window is None else window, scale),
        CAP=cap or 0.0,
        WINDOWED=window is not None,
        CHUNKED=chunked,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        SIZE=size,
        WIDTH=width,
        REST=max(SMALLEST, triton.next_power_of_2(rest)) if rest else 0,
        GROUPS=padded_group,
        PAGE=page,
        BLOCK=block,
        QUERIES=queries,
        KEYS=tile.keys,
        SPLITS=splits,
        BY_BITS=by_bits,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


COUNTERS = 1 << 12  # blocks times KV heads of a launch with splits at most


@triton.jit
def _converted(x, dtype: tl.constexpr, BY_BITS: tl.constexpr):
    """Elements of the cache in the type of computation. BY_BITS: the bits of an e4m3 number, shifted, are those of a
    float16 that is 256 times smaller, exactly. The cache has no NaN."""
    if BY_BITS:
        bits = (x.to(tl.int16) << 7) & -0x4080  # clears the copy of the sign in the exponent
        x = bits.to(tl.float16, bitcast=True)
        if dtype != tl.float16:
            x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def _tiles(
    q, q_rest, peak, total, found,
    keys, values, own_table, head, position, last, first_seen, bias, length, scale, begin, end,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, BIASED: tl.constexpr, CAP: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """Attends to the tiles of keys from `begin` to `end` - 1. MASKED: some of these keys are not visible to some query,
    or lie beyond the context."""
    number = tl.arange(0, WIDTH)
    for tile in range(begin, end):
        at = tile * KEYS + tl.arange(0, KEYS)
        if MASKED:
            page = tl.load(own_table + at // PAGE, mask=at < length, other=0).to(tl.int64)
        else:
            page = tl.load(own_table + at // PAGE).to(tl.int64)
        begins = ((page * PAGE + at % PAGE) * KV_HEADS + head)[:, None] * DIM
        place = begins + number[None, :]
        used = at < length  # memory beyond the context is uninitialized
        if MASKED and WINDOWED:
            used &= at >= tl.min(first_seen, 0)  # pages before the window may be those of other requests
        if MASKED or WIDTH != SIZE:
            written = used[:, None] & (number < SIZE)[None, :]
            key = tl.load(keys + place, mask=written, other=0.0)
        else:
            key = tl.load(keys + place)
        key = _converted(key, q.dtype, BY_BITS)
        score = tl.dot(q, tl.trans(key), input_precision="ieee")
        if REST > 0:
            value = key
            tail = SIZE + tl.arange(0, REST)
            if MASKED or SIZE + REST != DIM:
                other = tl.load(keys + begins + tail[None, :], mask=used[:, None] & (tail < DIM)[None, :], other=0.0)
            else:
                other = tl.load(keys + begins + tail[None, :])
            score = tl.dot(q_rest, tl.trans(_converted(other, q.dtype, BY_BITS)), score, input_precision="ieee")
        else:
            if MASKED or WIDTH != SIZE:
                value = tl.load(values + place, mask=written, other=0.0)
            else:
                value = tl.load(values + place)
            value = _converted(value, q.dtype, BY_BITS)
        score *= scale
        if CAP > 0.0:
            score = CAP - 2 * CAP / (tl.exp(score * (2.0 / CAP)) + 1)  # CAP * tanh(score / CAP)
            score *= LOG2_E
        if BIASED:
            score -= bias[:, None] * (position[:, None] - at[None, :]).to(tl.float32)
        if MASKED:
            hidden = at[None, :] > last[:, None]
            if WINDOWED:
                hidden |= at[None, :] < first_seen[:, None]
            score = tl.where(hidden, float("-inf"), score)
        higher = tl.maximum(peak, tl.max(score, 1))
        if MASKED:
            higher = tl.maximum(higher, -1e30)  # a query may see no key of this tile
        weight = tl.exp2(score - higher[:, None])
        rescale = tl.exp2(peak - higher)
        total = total * rescale + tl.sum(weight, 1)
        found = tl.dot(weight.to(q.dtype), value, found * rescale[:, None], input_precision="ieee")
        peak = higher
    return peak, total, found


@triton.jit
def _merge_chunk(
    out, sums, head, at, start, total, weight, whole, GROUP: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The elements from `start` on of `_merge_splits`."""
    number = start + tl.arange(0, CHUNK)
    given = (total > 0)[:, :, None] & (number < SIZE)[None, None, :]
    found = tl.load(sums + at[:, :, None] * SIZE + number[None, None, :], mask=given, other=0.0, cache_modifier=".cg")
    merged = tl.sum(found * weight[:, :, None], 1) / whole
    where = out + head[:, None] * SIZE + number[None, :]
    tl.store(where, merged.to(out.dtype.element_ty), mask=(head < GROUP)[:, None] & (number < SIZE)[None, :])


@triton.jit
def _merge_splits(
    out, sums, weights, part,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merges the results of the splits of a query for the heads of a group, which begin at `part`. They come from other
    multiprocessors, so not from this one's own cache."""
    head = tl.arange(0, GROUPS)
    at = part + head[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    real = (head < GROUP)[:, None] & (at >= 0)
    total = tl.load(weights + 2 * at + 1, mask=real, other=0.0, cache_modifier=".cg")
    peak = tl.load(weights + 2 * at, mask=total > 0, other=-1e30, cache_modifier=".cg")
    weight = tl.exp2(peak - tl.max(peak, 1)[:, None])
    whole = tl.sum(total * weight, 1)[:, None]
    CHUNK: tl.constexpr = 32 if WIDTH > 32 else WIDTH
    if WIDTH <= 256:
        for start in tl.static_range(0, WIDTH, CHUNK):
            _merge_chunk(out, sums, head, at, start, total, weight, whole, GROUP, SIZE, CHUNK)
    else:  # not unrolled: that would be a megabyte of code
        for start in range(0, WIDTH, CHUNK):
            _merge_chunk(out, sums, head, at, start, total, weight, whole, GROUP, SIZE, CHUNK)


# The alignment of a step's columns and the width of its page table do not compile another kernel.
@triton.jit(
    do_not_specialize=["rows", "first", "table_width", "window"],
    do_not_specialize_on_alignment=["table", "context", "starts", "last_keys", "query_stride"],
)
def _attend(
    query,
    keys,
    values,
    table,
    context,
    starts,
    sinks,
    slopes,
    last_keys,
    out,
    sums,
    weights,
    counters,
    rows,
    first,
    query_stride,
    table_width,
    window,
    scale,
    CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """One block of queries for GROUP heads of one KV head over one split of its keys."""
    LANES: tl.constexpr = HEADS // GROUP
    lane, split = tl.program_id(1), tl.program_id(2)
    head = lane // (LANES // KV_HEADS)
    if starts is None:
        row = tl.program_id(0)
        block, begin_query, count = 0, first + row, 1
    else:
        # The blocks of row r begin at starts[r] // BLOCK + r, counted from the first row. Long prompts come first.
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        origin = tl.load(starts)
        low, high = 0, rows - 1
        while low < high:
            middle = (low + high + 1) // 2
            if (tl.load(starts + middle) - origin) // BLOCK + middle <= program:
                low = middle
            else:
                high = middle - 1
        row = low
        begin_query = tl.load(starts + row)
        count = tl.load(starts + row + 1) - begin_query
        block = program - ((begin_query - origin) // BLOCK + row)
        if block * BLOCK >= count:
            return
    length = tl.load(context + row)
    lowest = length - count + block * BLOCK  # position of the first query
    first_key = tl.maximum(lowest - window + 1, 0)
    if CHUNKED:
        first_key = lowest // window * window
    # The type of computation, and the factor by which the cache's elements are too small in it.
    narrow: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8 and query.dtype.element_ty != tl.float32
    dtype: tl.constexpr = tl.float16 if narrow else query.dtype.element_ty
    SMALLER: tl.constexpr = 256.0 if BY_BITS else 1.0
    number = tl.arange(0, WIDTH)
    place = tl.arange(0, QUERIES)
    of_block, of_group = place // GROUP, place % GROUP
    position = lowest + of_block
    first_seen = position - window + 1
    if CHUNKED:
        first_seen = position // window * window
    real = (of_block < BLOCK) & (block * BLOCK + of_block < count)
    token = (begin_query + block * BLOCK + of_block).to(tl.int64)
    mine = lane * GROUP + of_group
    inside = real[:, None] & (number < SIZE)[None, :]
    last = position
    visible = tl.minimum(lowest + BLOCK, length)  # keys that some query sees
    if last_keys is not None:
        last = tl.where(real, tl.load(last_keys + token, mask=real, other=0), position)
        visible = tl.minimum(tl.max(last, 0) + 1, length)
    first_tile, end_tile = first_key // KEYS, (visible + KEYS - 1) // KEYS
    share = (end_tile - first_tile + SPLITS - 1) // SPLITS
    begin = first_tile + split * share
    end = tl.minimum(begin + share, end_tile)
    own_query = query + (token * query_stride + mine * DIM)[:, None]
    q = tl.load(own_query + number[None, :], mask=inside, other=0.0)
    if narrow:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -MAX_FLOAT16), MAX_FLOAT16).to(dtype)
    q_rest = q
    if REST > 0:
        tail = SIZE + tl.arange(0, REST)
        q_rest = tl.load(own_query + tail[None, :], mask=real[:, None] & (tail < DIM)[None, :], other=0.0)
        if narrow:
            q_rest = tl.minimum(tl.maximum(q_rest.to(tl.float32), -MAX_FLOAT16), MAX_FLOAT16).to(dtype)
    factor = scale * SMALLER if CAP > 0.0 else scale * SMALLER * LOG2_E
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if sinks is not None:  # counted once, in the first split
        peak = tl.where(split == 0, tl.load(sinks + mine) * LOG2_E, peak)
        total = tl.where(split == 0, 1.0, total)
    BIASED: tl.constexpr = slopes is not None
    bias = peak
    if BIASED:
        bias = tl.load(slopes + mine) * LOG2_E
    found = tl.zeros([QUERIES, WIDTH], tl.float32)
    # All queries see all keys of the tiles before `whole`.
    whole = end
    if WINDOWED:
        whole = begin
    else:
        whole = tl.maximum(begin, tl.minimum(end, (lowest + 1) // KEYS))
        peak, total, found = _tiles(
            q, q_rest, peak, total, found,
            keys, values, table + row.to(tl.int64) * table_width, head, position, last, first_seen, bias, length,
            factor, begin, whole, False, WINDOWED, BIASED, CAP, KV_HEADS, DIM, SIZE, WIDTH, REST, PAGE, KEYS, BY_BITS,
        )  # fmt: skip
    peak, total, found = _tiles(
        q, q_rest, peak, total, found,
        keys, values, table + row.to(tl.int64) * table_width, head, position, last, first_seen, bias, length, factor,
        whole, end, True, WINDOWED, BIASED, CAP, KV_HEADS, DIM, SIZE, WIDTH, REST, PAGE, KEYS, BY_BITS,
    )  # fmt: skip
    result = (token * HEADS + mine)[:, None] * SIZE + number[None, :]
    if SPLITS == 1:
        tl.store(out + result, (found * SMALLER / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        part = ((token - first) * HEADS + mine) * SPLITS + split
        tl.store(sums + part[:, None] * SIZE + number[None, :], found * SMALLER, mask=inside)
        tl.store(weights + 2 * part, peak, mask=real)
        tl.store(weights + 2 * part + 1, total, mask=real)
        tl.debug_barrier()  # all threads have written before one of them counts
        counter = counters + tl.program_id(0) * LANES + lane
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counter, 0)
            for one in range(0, tl.minimum(BLOCK, count - block * BLOCK)):
                where = (begin_query + block * BLOCK + one).to(tl.int64) * HEADS + lane * GROUP
                _merge_splits(
                    out + where * SIZE, sums, weights, (where - first * HEADS) * SPLITS,
                    GROUP, GROUPS, SIZE, WIDTH, SPLITS,
                )  # fmt: skip


def self_test(device: torch.device) -> None:
    """Decode rows, prompts and drafts with pages in any order, with a window and a cap, one split and several, for
    every type of cache. Raises SelfTestFailed if the results differ from torch's."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    context = torch.tensor([1, 17, 150], dtype=torch.int32, device=device)
    table = torch.tensor([[11, 0, 0, 0, 0, 0, 0, 0, 0, 0], [4, 9, *[0] * 8], [7, 2, 0, 10, 5, 3, 6, 1, 12, 8]])
    sinks = random_tensor(device, 4, seed=3)
    for cache_dtype, window, cap, counts, splits in (
        (torch.bfloat16, None, None, [1, 1, 1], 4),
        (torch.bfloat16, 100, 2.0, [1, 3, 2], 2),
        (torch.bfloat16, None, None, [1, 8, 8], 8),
        (torch.bfloat16, None, None, [1, 17, 70], 1),
        (torch.bfloat16, 40, None, [1, 1, 150], 1),
        (torch.float8_e4m3fn, None, None, [1, 1, 1], 4),
        (torch.float8_e5m2, 100, None, [1, 5, 9], 1),
    ):
        query = random_tensor(device, sum(counts), 4, 64, dtype=torch.bfloat16)
        keys, values = (random_tensor(device, 13, 16, 2, 64, seed=seed).to(cache_dtype) for seed in (1, 2))
        starts = torch.tensor([0, *counts], device=device).cumsum(0).int() if max(counts) > 1 else None
        rows = Rows(0, sum(counts), max(counts), starts, table.int().to(device), context)
        out = torch.full_like(query, float("nan"))
        positions = torch.cat([torch.arange(n - m, n) for n, m in zip(context.tolist(), counts, strict=True)])
        last = positions.clone()
        last[-counts[-1] // 2 : -1] = last[-2]  # tokens of an image
        ahead = last.int().to(device) if max(counts) > 16 else None
        for own, chunked, slopes, last_keys in (
            (None, False, None, None),
            (sinks, window is not None, sinks.abs(), ahead),
        ):
            paged_attention(
                *(query, keys, values, rows, out, 0.25, window, cap, own),
                chunked=chunked,
                slopes=slopes,
                last_keys=last_keys,
                capability=capability,
                counters=counters,
                splits=splits,
            )
            rows_of = table.tolist(), counts, context.tolist()
            expected = reference_attention(
                *(query, keys, values), *rows_of, 0.25, window, cap, own, chunked, slopes, last_keys
            )
            check_close(f"attention to a cache of {cache_dtype}", out.cpu(), expected, 0.02)


def reference_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: list[list[int]],
    counts: list[int],
    contexts: list[int],
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    slopes: Tensor | None = None,
    last_keys: Tensor | None = None,
) -> Tensor:
    """The reference: row by row in float32, on CPU."""
    kv_heads = keys.shape[2]
    found = []
    ahead = [None] * len(counts) if last_keys is None else last_keys.cpu().split(counts)
    for mine, pages, length, last in zip(query.cpu().float().split(counts), table, contexts, ahead, strict=True):
        key, value = (x.cpu().float()[pages].flatten(0, 1)[:length] for x in (keys, values))
        scores = torch.einsum("thgd,khd->thgk", mine.unflatten(1, (kv_heads, -1)), key) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        own = torch.arange(length - len(mine), length)[:, None, None, None]
        if slopes is not None:
            scores = scores - slopes.cpu().view(kv_heads, -1, 1) * (own - torch.arange(length))
        hidden = torch.arange(length) > (own if last is None else last[:, None, None, None])
        if window is not None:
            hidden |= torch.arange(length) < (own // window * window if chunked else own - window + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            own_sinks = sinks.cpu().view(kv_heads, -1, 1).expand(len(mine), -1, -1, -1)
            scores = torch.cat((scores, own_sinks), -1)
        weights = scores.softmax(-1)[..., :length]
        found.append(torch.einsum("thgk,khd->thgd", weights, value).flatten(1, 2))
    return torch.cat(found).to(query.dtype)
