"""Attention of one query a row over pages that are read where they lie.

Flash decoding: a row's context is divided into stretches, each of which a program attends to with all queries of one
KV head, in float32 sums over blocks of keys. A second kernel joins what they found. How a context is divided follows
from its length alone, so a row's result does not depend on its batch; and how many programs there are does not follow
from contexts, which are read on the device, so one recording serves them all. A stretch that a context does not reach
costs a program that ends at once.

Keys and values of 8 bits become float16, which holds all of them and takes the fewest instructions to come by; the
queries and the weights of values are multiplied as float16 then. In float32 all products are exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu.trial import agree, numbers

# Programs that a row is divided among, over all KV heads: about as many as a GPU has multiprocessors.
PROGRAMS = 128
FEWEST_STRETCHES, MOST_STRETCHES = 16, 64
# Bytes of a block of keys in the type that is computed in, and the most keys of one. A block of values is as large, and
# the next ones are under way meanwhile: together they stay below the 99 KiB that any GPU has for a program to share.
BLOCK_BYTES, MOST_KEYS = 16 << 10, 64
SMALLEST = 16  # of the sides of matrices that can be multiplied
EVERYTHING = 1 << 30  # a window that no context fills
CONVERTS_E4M3 = (8, 9)  # the compute capability from which on GPUs, and Triton's compiler with them, do
MOST_HALF = tl.constexpr(65504.0)  # of float16
LOG2_E = tl.constexpr(1.4426950408889634)


def attend(
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
    """What the queries find, [R, heads, head_dim], each that of the last token of its row's context.

    `qkv` [R, heads + 2 * kv_heads, head_dim] begins with the queries. `keys` and `values` [pages, page_size, kv_heads,
    head_dim] are a layer's cache, of the queries' type or of 8-bit floats. `table` int32 [R, P] names each row's pages
    in order, and `context` int32 [R] says how many tokens they hold, from 1 on. All are contiguous, but the rows of
    `table` may be part of longer ones. `scale`, `window`
    and `cap` are those of KVShape and Attention, `capability` the GPU's.
    """
    rows, both, dim = qkv.shape
    page, kv_heads = keys.shape[1:3]
    heads, width = both - 2 * kv_heads, max(SMALLEST, triton.next_power_of_2(dim))
    stretches = stretches_of(kv_heads)
    sums = torch.empty(rows, heads, stretches, dim, dtype=torch.float32, device=qkv.device)
    weights = torch.empty(rows, heads, stretches, 2, dtype=torch.float32, device=qkv.device)
    found = qkv.new_empty(rows, heads, dim)
    by_bits = keys.dtype is torch.float8_e4m3fn and capability < CONVERTS_E4M3
    if by_bits:
        keys, values = keys.view(torch.int8), values.view(torch.int8)
    seen = EVERYTHING if window is None else window
    shapes = {"DIM": dim, "WIDTH": width, "STRETCHES": stretches}
    _attend[rows, kv_heads, stretches](
        *(qkv, keys, values, table, context, sums, weights, table.stride(0), seen, scale),
        CAP=cap or 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK=block_of(width, qkv.dtype),
        QUERIES=max(SMALLEST, triton.next_power_of_2(heads // kv_heads)),
        PAGE=page,
        BY_BITS=by_bits,
        **shapes,
        num_stages=2,
    )
    _join[rows * heads,](sums, weights, found, **shapes)
    return found


def stretches_of(kv_heads: int) -> int:
    """How many stretches a row is divided into, a power of two."""
    return min(MOST_STRETCHES, max(FEWEST_STRETCHES, PROGRAMS // triton.next_power_of_2(kv_heads)))


def block_of(width: int, dtype: torch.dtype) -> int:
    """Keys in a block, of `width` numbers of this type."""
    return max(SMALLEST, min(MOST_KEYS, BLOCK_BYTES // (width * dtype.itemsize)))


@triton.jit
def _converted(x, dtype: tl.constexpr, BY_BITS: tl.constexpr):
    """Numbers of the cache in the type that is computed in. By their bits, e4m3 is a float16 that lacks the last bits
    of its fraction and the first of its exponent: 256 times smaller, and exact. No number of the cache is none."""
    if BY_BITS:
        bits = (x.to(tl.int16) << 7) & -0x4080  # all but the second: the sign has come with all that are left of it
        x = bits.to(tl.float16, bitcast=True)
        if dtype != tl.float16:
            x = x.to(tl.float32)
    return x.to(dtype)


# Where a step puts its columns, and how wide its table is, compiles no second kernel.
@triton.jit(do_not_specialize=["table_width", "window"], do_not_specialize_on_alignment=["table", "context"])
def _attend(
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
    STRETCHES: tl.constexpr,
    BY_BITS: tl.constexpr,
):
    """One stretch of a row for one KV head: of each query the weighted sum of the values, the largest score and the sum
    of weights, which is 0 where a context does not reach. Blocks begin at multiples of their size, and none is without
    a key that is seen."""
    row, head, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(context + row)
    first, end = tl.maximum(length - window, 0) // BLOCK, (length + BLOCK - 1) // BLOCK
    share = (end - first + STRETCHES - 1) // STRETCHES
    begin = first + stretch * share
    end = tl.minimum(begin + share, end)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    query = tl.arange(0, QUERIES)
    part = (row * HEADS + head * GROUP + query) * STRETCHES + stretch
    if begin >= end:
        tl.store(weights + 2 * part + 1, 0.0, mask=query < GROUP)
        return
    # What is computed in, and how much smaller numbers of the cache are in it than they should be.
    narrow: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8 and qkv.dtype.element_ty != tl.float32
    dtype: tl.constexpr = tl.float16 if narrow else qkv.dtype.element_ty
    SMALLER: tl.constexpr = 256.0 if BY_BITS else 1.0
    number = tl.arange(0, WIDTH)
    real = (query < GROUP)[:, None] & (number < DIM)[None, :]
    mine = (head * GROUP + query)[:, None] * DIM + number[None, :]
    q = tl.load(qkv + row * (HEADS + 2 * KV_HEADS) * DIM + mine, mask=real, other=0.0)
    if narrow:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -MOST_HALF), MOST_HALF).to(dtype)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, WIDTH], tl.float32)
    for block in range(begin, end):
        at = block * BLOCK + tl.arange(0, BLOCK)
        page = tl.load(table + row * table_width + at // PAGE, mask=at < length, other=0).to(tl.int64)
        place = ((page * PAGE + at % PAGE) * KV_HEADS + head)[:, None] * DIM + number[None, :]
        written = (at < length)[:, None] & (number < DIM)[None, :]  # what stands behind a context may be anything
        key = _converted(tl.load(keys + place, mask=written, other=0.0), dtype, BY_BITS)
        value = _converted(tl.load(values + place, mask=written, other=0.0), dtype, BY_BITS)
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * (scale * SMALLER)
        if CAP > 0.0:
            score = CAP - 2 * CAP / (tl.exp(score * (2.0 / CAP)) + 1)  # CAP * tanh(score / CAP)
        unseen = (at >= length) | (at < length - window)
        score = tl.where(unseen[None, :], float("-inf"), score * LOG2_E)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fading = tl.exp2(peak - higher)
        total = total * fading + tl.sum(weight, 1)
        found = found * fading[:, None] + tl.dot(weight.to(dtype), value, input_precision="ieee")
        peak = higher
    tl.store(sums + part[:, None] * DIM + number[None, :], found * SMALLER, mask=real)
    tl.store(weights + 2 * part, peak, mask=query < GROUP)
    tl.store(weights + 2 * part + 1, total, mask=query < GROUP)


@triton.jit
def _join(sums, weights, found, DIM: tl.constexpr, WIDTH: tl.constexpr, STRETCHES: tl.constexpr):
    """What one query finds in all its stretches. Of those without a weight nothing else was written."""
    query = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, WIDTH)
    part = query * STRETCHES + tl.arange(0, STRETCHES)
    total = tl.load(weights + 2 * part + 1)
    peak = tl.load(weights + 2 * part, mask=total > 0, other=float("-inf"))
    real = (total > 0)[:, None] & (number < DIM)[None, :]
    parts = tl.load(sums + part[:, None] * DIM + number[None, :], mask=real, other=0.0)
    weight = tl.exp2(peak - tl.max(peak, 0))
    result = tl.sum(parts * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(found + query * DIM + number, result.to(found.dtype.element_ty), mask=number < DIM)


def trial(device: torch.device) -> None:
    """Of short and long contexts whose pages lie in any order, with a window and a cap, in every type of cache."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    context = torch.tensor([1, 17, 150], dtype=torch.int32, device=device)
    table = torch.tensor([[11, 0, 0, 0, 0, 0, 0, 0, 0, 0], [4, 9, *[0] * 8], [7, 2, 0, 10, 5, 3, 6, 1, 12, 8]])
    qkv = numbers(device, 3, 4 + 2 * 2, 64, dtype=torch.bfloat16)
    for kept, window, cap in (
        (torch.bfloat16, None, None),
        (torch.bfloat16, 100, 2.0),
        (torch.float8_e4m3fn, None, None),
        (torch.float8_e5m2, 100, None),
    ):
        keys, values = (numbers(device, 13, 16, 2, 64, seed=seed).to(kept) for seed in (1, 2))
        found = attend(qkv, keys, values, table.int().to(device), context, 0.25, window, cap, capability)
        expected = _plainly(qkv, keys, values, table.tolist(), context.tolist(), 0.25, window, cap)
        agree(f"attention to a cache of {kept}", found.cpu(), expected, 0.02)


def _plainly(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    table: list[list[int]],
    context: list[int],
    scale: float,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """The same row by row in float32, on CPU."""
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
