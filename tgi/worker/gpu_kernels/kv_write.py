"""From the qkv projection to attention in one launch: norms of queries and keys, rotary embedding, KV cache write.

Queries go to a tensor of their own; keys and values go to the pages of the KV cache, converted to its type.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.attention_arguments import HeadNorm, Rotation
from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

# For each 8-bit float type: bits of the fraction, and bias of the exponent.
FRACTION_AND_BIAS = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}
ELEMENTS = 1024  # of a program


def rotate_and_write_kv(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    divisors: tuple[float, float] = (1.0, 1.0),
    rotation: Rotation | None = None,
    norm: HeadNorm | None = None,
    shared: bool = False,
) -> Tensor:
    """Writes the keys and values of `qkv` [T, heads + 2 * kv_heads, head_dim], and returns the queries [T, heads,
    head_dim]. Queries and keys are normalized, then rotated, or the other way round; all in float32, rounded once.
    `shared`: `qkv` has queries alone, whose keys and values an earlier layer has written.

    `keys` and `values` [pages, page_size, kv_heads, head_dim] are the cache, of the type of `qkv` or of 8-bit floats.
    `slots` int64 [T] is the slot mapping: page * page_size + offset. All are contiguous. For 8-bit floats, keys and
    values are divided by `divisors` first. For 8-bit floats and float16, magnitudes are limited to the largest number,
    and NaN becomes 0.
    """
    tokens, both, dim = qkv.shape
    kv_heads = 0 if shared else keys.shape[2]
    heads = both - 2 * kv_heads
    fraction, bias = FRACTION_AND_BIAS.get(keys.dtype, (0, 0))
    most = torch.finfo(keys.dtype).max if fraction or keys.dtype is torch.float16 else 0.0
    if fraction:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    query = qkv.new_empty(tokens, heads, dim)
    width = triton.next_power_of_2(dim)
    together = min(triton.next_power_of_2(both), max(1, ELEMENTS // width))
    angles, positions, neighbours, start = rotation or (None, None, False, 0)
    assert not start
    weight, epsilon, norm_last = norm or (None, 0.0, False)
    _rotate_and_write_kv[tokens, triton.cdiv(both, together)](
        *(qkv, query, keys, values, slots, angles, positions, weight, epsilon, 1 / divisors[0], 1 / divisors[1]),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        WIDTH=width,
        ROTARY=0 if angles is None else angles.shape[2],
        NEIGHBOURS=neighbours,
        NORMED=0 if weight is None else len(weight),
        NORM_LAST=norm_last,
        TOGETHER=together,
        MOST=most,
        FRACTION=fraction,
        BIAS=bias,
    )
    return query


@triton.jit
def _convert(x, factor, MOST: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """Elements in the type of the cache; 8-bit floats as their bit patterns, which every GPU can compute."""
    if MOST > 0.0:
        x = x.to(tl.float32)
        if FRACTION > 0:
            x *= factor
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -MOST), MOST)
    if FRACTION > 0:
        CUT: tl.constexpr = 23 - FRACTION  # bits of float32's fraction that are dropped
        SUBNORMAL: tl.constexpr = 2.0 ** (
            CUT + 1 - BIAS
        )  # added to it, a float32 has its last bit where the 8-bit subnormals have theirs
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Rounds to nearest, ties to even. A carry out of the fraction increments the exponent, as it should.
        normal = (size - ((127 - BIAS) << 23) + (1 << (CUT - 1)) - 1 + ((size >> CUT) & 1)) >> CUT
        small = (tl.abs(x) + SUBNORMAL).to(tl.int32, bitcast=True) & 0x7FFFFF
        bits = tl.where(size < ((128 - BIAS) << 23), small, normal) | ((bits >> 24) & 0x80)
        x = bits.to(tl.uint8)
    return x


# The alignment of a step's slots and positions does not compile another kernel.
@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _rotate_and_write_kv(
    qkv,
    query,
    keys,
    values,
    slots,
    angles,
    positions,
    weight,
    epsilon,
    key_factor,
    value_factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NORMED: tl.constexpr,
    NORM_LAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    MOST: tl.constexpr,
    FRACTION: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    number = tl.arange(0, WIDTH)[None, :]
    BOTH: tl.constexpr = HEADS + 2 * KV_HEADS
    inside = (head < BOTH) & (number < DIM)
    turned = inside & (head < HEADS + KV_HEADS)
    normed = inside & (head < NORMED)
    here = qkv + (token * BOTH + head) * DIM
    stored = tl.load(here + number, mask=inside, other=0.0)
    x = stored.to(tl.float32)
    if weight is not None and not NORM_LAST:
        norm = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + epsilon)[:, None]
        scaled = x * norm * tl.load(weight + head * DIM + number, mask=normed, other=1.0)
        x = tl.where(normed, scaled, x)
    if ROTARY > 0:
        # Element i becomes x[i] cos[i] -+ x[partner] sin[i]; cos and sin are stored for both elements of a pair.
        partner = (
            number ^ 1 if NEIGHBOURS else tl.where(number < ROTARY // 2, number + ROTARY // 2, number - ROTARY // 2)
        )
        first = number % 2 == 0 if NEIGHBOURS else number < ROTARY // 2
        pair = turned & (number < ROTARY)
        other = tl.load(here + partner, mask=pair, other=0.0).to(tl.float32)
        if weight is not None and not NORM_LAST:
            other *= norm * tl.load(weight + head * DIM + partner, mask=pair, other=1.0)
        waves = angles + tl.load(positions + token) * (2 * ROTARY) + number
        cos = tl.load(waves, mask=number < ROTARY, other=1.0)
        sin = tl.load(waves + ROTARY, mask=number < ROTARY, other=0.0)
        x = tl.where(pair, x * cos + tl.where(first, -other, other) * sin, x)
    if NORM_LAST:
        norm_after = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + epsilon)[:, None]
        scaled_after = x * norm_after * tl.load(weight + head * DIM + number, mask=normed, other=1.0)
        x = tl.where(normed, scaled_after, x)
    # Rounded as the model's type first: the cache holds what the queries' type would.
    x = x.to(stored.dtype)
    tl.store(query + (token * HEADS + head) * DIM + number, x, mask=inside & (head < HEADS))
    slot = tl.load(slots + token) * KV_HEADS
    key = _convert(x, key_factor, MOST, FRACTION, BIAS).to(keys.dtype.element_ty)
    value = _convert(x, value_factor, MOST, FRACTION, BIAS).to(values.dtype.element_ty)
    tl.store(keys + (slot + head - HEADS) * DIM + number, key, mask=turned & (head >= HEADS))
    owner = head - HEADS - KV_HEADS
    tl.store(values + (slot + owner) * DIM + number, value, mask=inside & (owner >= 0))


def self_test(device: torch.device) -> None:
    """Every type of cache with numbers of all magnitudes; both kinds of pairs, with and without norms. Raises
    SelfTestFailed if the results differ from torch's."""
    slots, most = torch.tensor([37, 5, 16], device=device), torch.finfo(torch.float16).max
    qkv = (2.0 ** (12 * random_tensor(device, 3, 4 + 2 * 2, 64)) - 1).clamp(max=most).half()
    for cache_dtype in (torch.float16, *FRACTION_AND_BIAS):
        keys, values = (torch.zeros(3, 16, 2, 64, dtype=cache_dtype, device=device) for _ in range(2))
        query = rotate_and_write_kv(qkv, keys, values, slots)
        written = torch.cat([x.float().flatten(0, 1)[slots] for x in (keys, values)], 1)
        expected = qkv[:, 4:].float().clamp(max=torch.finfo(cache_dtype).max).to(cache_dtype).float()
        check_close(f"what is written as {cache_dtype}", written, expected, 0)
        check_close("queries that are not rotated", query, qkv[:, :4], 0)
    positions = torch.tensor([3, 0, 8], device=device)
    waves, weight = random_tensor(device, 9, 2, 10, seed=1), random_tensor(device, 5, 24, seed=2)
    for neighbours, norm, (dtype, tolerance) in (
        (False, None, (torch.bfloat16, 0.01)),
        (True, HeadNorm(weight, 1e-5), (torch.float32, 1e-5)),
        (False, HeadNorm(weight, 1e-5), (torch.bfloat16, 0.01)),
        (False, HeadNorm(weight, 1e-5, after_rotation=True), (torch.float32, 1e-5)),
    ):
        table = waves.repeat_interleave(2, dim=2) if neighbours else waves.repeat(1, 1, 2)
        qkv = random_tensor(device, 3, 3 + 2 * 2, 24, dtype=dtype)
        keys, values = (torch.zeros(3, 16, 2, 24, dtype=dtype, device=device) for _ in range(2))
        x = _normed(qkv[:, :5].float(), norm, last=False)
        cos, sin = table[positions][:, :, None].unbind(1)
        flat = x[..., :20]
        if neighbours:
            across = torch.stack((-flat[..., 1::2], flat[..., ::2]), -1).flatten(-2)
        else:
            across = torch.cat((-flat[..., 10:], flat[..., :10]), -1)
        rotated = torch.cat((flat * cos + across * sin, x[..., 20:]), -1)
        expected = _normed(rotated, norm, last=True).to(dtype)
        query = rotate_and_write_kv(qkv, keys, values, slots, (1.0, 1.0), Rotation(table, positions, neighbours), norm)
        check_close("rotated queries", query, expected[:, :3], tolerance)
        check_close("rotated keys", keys.flatten(0, 1)[slots], expected[:, 3:], tolerance)
        check_close("values", values.flatten(0, 1)[slots], qkv[:, 5:], 0)


def _normed(x: Tensor, norm: HeadNorm | None, last: bool) -> Tensor:
    """The norm of x, if it applies there: after the rotation if `last`."""
    if norm is None or norm.after_rotation != last:
        return x
    return x * (x.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt() * norm.weight
