"""Decode attention: one query per row, over the pages of the KV cache.

Flash decoding: the context of a row is divided into splits. One program attends to a split with all queries of one KV
head, with float32 sums over blocks of keys; a second kernel merges the splits. The division of a context follows from
its length alone, so a row's result does not depend on its batch. The number of programs does not depend on the
contexts, which are read on the device, so one captured CUDA graph serves all steps. A split beyond the end of a context
costs a program that returns at once.

Keys and values of 8 bits are converted to float16, which represents all of them and takes the fewest instructions; the
queries and the weights of values are then multiplied as float16. In float32 all products are exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

# Programs of a row, over all KV heads: about as many as a GPU has multiprocessors. The results of the splits take 64
# MiB for 256 rows of 32 heads of 128 elements, with 8 KV heads.
PROGRAMS = 128
MIN_SPLITS, MAX_SPLITS = 16, 64
# Bytes of a block of keys in the type of computation, and the maximum number of keys. With a block of values and the
# next blocks, which are loaded meanwhile, they stay below the 99 KiB of shared memory that any GPU has for a program.
BLOCK_BYTES, MAX_KEYS = 16 << 10, 64
SMALLEST = 16  # minimum side of the matrices of tl.dot
NO_WINDOW = 1 << 30  # larger than any context
CONVERTS_E4M3 = (8, 9)  # the compute capability from which on GPUs, and Triton's compiler, convert e4m3
MAX_FLOAT16 = tl.constexpr(65504.0)
LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    context: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
    capability: tuple[int, int],
) -> Tensor:
    """The attention of the last token of each row, [R, heads, head_dim].

    `qkv` [R, heads + 2 * kv_heads, head_dim] begins with the queries. `keys` and `values` [pages, page_size, kv_heads,
    head_dim] are the KV cache of a layer, of the queries' type or of 8-bit floats. `table` int32 [R, P] has the page
    table of each row, `context` int32 [R] the context lengths, from 1 on. All are contiguous; the rows of `table` may
    have a larger stride. Scores are multiplied by `scale` and limited to cap * tanh(score / cap). `window`: the number
    of positions that a query sees; None: all. `capability` is the GPU's.
    """
    rows, both, dim = qkv.shape
    page, kv_heads = keys.shape[1:3]
    heads, width = both - 2 * kv_heads, max(SMALLEST, triton.next_power_of_2(dim))
    splits = splits_of(kv_heads)
    sums = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=qkv.device)
    weights = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=qkv.device)
    found = qkv.new_empty(rows, heads, dim)
    by_bits = keys.dtype is torch.float8_e4m3fn and capability < CONVERTS_E4M3
    if by_bits:
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    seen = NO_WINDOW if window is None else window
    shapes = {"DIM": dim, "WIDTH": width, "SPLITS": splits}
    _attend_split[rows, kv_heads, splits](
        *(qkv, keys, values, table, context, sums, weights, table.stride(0), seen, scale),
        CAP=cap or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK=block_size_of(width, qkv.dtype),
        QUERIES=max(SMALLEST, triton.next_power_of_2(heads // kv_heads)),
        PAGE=page,
        BY_BITS=by_bits,
        **shapes,
        num_stages=2,
    )
    _merge_splits[rows * heads,](sums, weights, found, **shapes)
    return found


def splits_of(kv_heads: int) -> int:
    """The number of splits of a row, a power of two."""
    return min(MAX_SPLITS, max(MIN_SPLITS, PROGRAMS // triton.next_power_of_2(kv_heads)))


def block_size_of(width: int, dtype: torch.dtype) -> int:
    """The number of keys in a block, for keys of `width` elements of this type."""
    return max(SMALLEST, min(MAX_KEYS, BLOCK_BYTES // (width * dtype.itemsize)))


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


# The alignment of a step's columns and the width of its page table do not compile another kernel.
@triton.jit(do_not_specialize=["table_width", "window"], do_not_specialize_on_alignment=["table", "context"])
def _attend_split(
    qkv,
    keys,
    values,
    table,
    context,
    sums,
    weights,
    table_width,
    window,
    scale,
    CAP: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """One split of a row for one KV head: for each query the weighted sum of the values, the largest score and the sum
    of weights, which is 0 for a split beyond the context. Blocks start at multiples of their size, and each has at
    least one visible key."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(context + row)
    first, end = tl.maximum(length - window, 0) // BLOCK, (length + BLOCK - 1) // BLOCK
    share = (end - first + SPLITS - 1) // SPLITS
    begin = first + split * share
    end = tl.minimum(begin + share, end)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    query = tl.arange(0, QUERIES)
    part = (row * HEADS + head * GROUP + query) * SPLITS + split
    if begin >= end:
        tl.store(weights + 2 * part + 1, 0.0, mask=query < GROUP)
        return
    # The type of computation, and the factor by which the cache's elements are too small in it.
    narrow: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8 and qkv.dtype.element_ty != tl.float32
    dtype: tl.constexpr = tl.float16 if narrow else qkv.dtype.element_ty
    SMALLER: tl.constexpr = 256.0 if BY_BITS else 1.0
    number = tl.arange(0, WIDTH)
    real = (query < GROUP)[:, None] & (number < DIM)[None, :]
    mine = (head * GROUP + query)[:, None] * DIM + number[None, :]
    q = tl.load(qkv + row * (HEADS + 2 * KV_HEADS) * DIM + mine, mask=real, other=0.0)
    if narrow:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -MAX_FLOAT16), MAX_FLOAT16).to(dtype)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, WIDTH], tl.float32)
    for block in range(begin, end):
        at = block * BLOCK + tl.arange(0, BLOCK)
        page = tl.load(table + row * table_width + at // PAGE, mask=at < length, other=0).to(tl.int64)
        place = ((page * PAGE + at % PAGE) * KV_HEADS + head)[:, None] * DIM + number[None, :]
        written = (at < length)[:, None] & (number < DIM)[None, :]  # memory beyond the context is uninitialized
        key = _converted(tl.load(keys + place, mask=written, other=0.0), dtype, BY_BITS)
        value = _converted(tl.load(values + place, mask=written, other=0.0), dtype, BY_BITS)
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * (scale * SMALLER)
        if CAP > 0.0:
            score = CAP - 2 * CAP / (tl.exp(score * (2.0 / CAP)) + 1)  # CAP * tanh(score / CAP)
        hidden = (at >= length) | (at < length - window)
        score = tl.where(hidden[None, :], float("-inf"), score * LOG2_E)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        rescale = tl.exp2(peak - higher)
        total = total * rescale + tl.sum(weight, 1)
        found = found * rescale[:, None] + tl.dot(weight.to(dtype), value, input_precision="ieee")
        peak = higher
    tl.store(sums + part[:, None] * DIM + number[None, :], found * SMALLER, mask=real)
    tl.store(weights + 2 * part, peak, mask=query < GROUP)
    tl.store(weights + 2 * part + 1, total, mask=query < GROUP)


@triton.jit
def _merge_splits(sums, weights, found, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Merges the splits of one query. For a split with a sum of weights of 0 nothing else was written."""
    query = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, WIDTH)
    part = query * SPLITS + tl.arange(0, SPLITS)
    total = tl.load(weights + 2 * part + 1)
    peak = tl.load(weights + 2 * part, mask=total > 0, other=float("-inf"))
    real = (total > 0)[:, None] & (number < DIM)[None, :]
    parts = tl.load(sums + part[:, None] * DIM + number[None, :], mask=real, other=0.0)
    weight = tl.exp2(peak - tl.max(peak, 0))
    result = tl.sum(parts * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(found + query * DIM + number, result.to(found.dtype.element_ty), mask=number < DIM)


def self_test(device: torch.device) -> None:
    """Short and long contexts with pages in any order, with a window and a cap, for every type of cache. Raises
    SelfTestFailed if the results differ from torch's."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    context = torch.tensor([1, 17, 150], dtype=torch.int32, device=device)
    table = torch.tensor([[11, 0, 0, 0, 0, 0, 0, 0, 0, 0], [4, 9, *[0] * 8], [7, 2, 0, 10, 5, 3, 6, 1, 12, 8]])
    qkv = random_tensor(device, 3, 4 + 2 * 2, 64, dtype=torch.bfloat16)
    for cache_dtype, window, cap in (
        (torch.bfloat16, None, None),
        (torch.bfloat16, 100, 2.0),
        (torch.float8_e4m3fn, None, None),
        (torch.float8_e5m2, 100, None),
    ):
        keys, values = (random_tensor(device, 13, 16, 2, 64, seed=seed).to(cache_dtype) for seed in (1, 2))
        found = paged_attention(qkv, keys, values, table.int().to(device), context, 0.25, window, cap, capability)
        expected = _reference_attention(qkv, keys, values, table.tolist(), context.tolist(), 0.25, window, cap)
        check_close(f"attention to a cache of {cache_dtype}", found.cpu(), expected, 0.02)


def _reference_attention(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    table: list[list[int]],
    context: list[int],
    scale: float,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """The reference: row by row in float32, on CPU."""
    kv_heads, dim = keys.shape[2:]
    queries = qkv.cpu().float()[:, : -2 * kv_heads].unflatten(1, (kv_heads, -1))
    found = []
    for query, pages, length in zip(queries, table, context, strict=True):
        key, value = (x.cpu().float()[pages].view(-1, kv_heads, dim)[:length] for x in (keys, values))
        scores = torch.einsum("hgd,khd->hgk", query, key) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores[..., : max(0, length - (window or length))] = -torch.inf
        found.append(torch.einsum("hgk,khd->hgd", scores.softmax(-1), value).flatten(0, 1))
    return torch.stack(found).to(qkv.dtype)
