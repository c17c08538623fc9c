"""Writes the keys and values of a step into the cache of a layer, as numbers of its type: one launch for both."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu.trial import agree, numbers

# Of each 8-bit float, its bits for the fraction and the bias of its exponent.
FRACTION_AND_BIAS = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}


def keep(qkv: Tensor, keys: Tensor, values: Tensor, places: Tensor, divisors: tuple[float, float] = (1.0, 1.0)) -> None:
    """Writes what stands behind the queries in `qkv` [T, heads + 2 * kv_heads, head_dim]: the keys, then the values.

    `keys` and `values` [pages, page_size, kv_heads, head_dim] are the cache, of the type of `qkv` or of 8-bit floats.
    `places` int64 [T] says where each token's go: page * page_size + offset. All are contiguous. In 8 bits they are
    divided first. In 8 bits and in float16 what is too large becomes the largest number, and what is no number 0.
    """
    tokens, both, dim = qkv.shape
    kv_heads = keys.shape[2]
    fraction, bias = FRACTION_AND_BIAS.get(keys.dtype, (0, 0))
    most = torch.finfo(keys.dtype).max if fraction or keys.dtype is torch.float16 else 0.0
    if fraction:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    _keep[tokens,](
        *(qkv, keys, values, places, 1 / divisors[0], 1 / divisors[1]),
        QUERIES=(both - 2 * kv_heads) * dim,
        NUMBERS=kv_heads * dim,
        BLOCK=triton.next_power_of_2(kv_heads * dim),
        MOST=most,
        FRACTION=fraction,
        BIAS=bias,
    )


@triton.jit
def _narrowed(x, factor, MOST: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """Numbers as the cache holds them; 8-bit floats as their bits, which every GPU can compute."""
    if MOST > 0.0:
        x = x.to(tl.float32)
        if FRACTION > 0:
            x *= factor
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -MOST), MOST)
    if FRACTION > 0:
        CUT: tl.constexpr = 23 - FRACTION  # bits of float32's fraction that go
        SUBNORMAL: tl.constexpr = 2.0 ** (
            CUT + 1 - BIAS
        )  # beside it, float32 ends where numbers without a leading 1 do
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Round to nearest, of two the even one. A carry out of the fraction makes the exponent one more, as it should.
        normal = (size - ((127 - BIAS) << 23) + (1 << (CUT - 1)) - 1 + ((size >> CUT) & 1)) >> CUT
        small = (tl.abs(x) + SUBNORMAL).to(tl.int32, bitcast=True) & 0x7FFFFF
        bits = tl.where(size < ((128 - BIAS) << 23), small, normal) | ((bits >> 24) & 0x80)
        x = bits.to(tl.uint8)
    return x


# Places lie wherever a step's columns put them, and compile no second kernel.
@triton.jit(do_not_specialize_on_alignment=["places"])
def _keep(
    qkv,
    keys,
    values,
    places,
    key_factor,
    value_factor,
    QUERIES: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    FRACTION: tl.constexpr,
    BIAS: tl.constexpr,
):
    token, number = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real = number < NUMBERS
    begin = qkv + token * (QUERIES + 2 * NUMBERS) + QUERIES
    place = tl.load(places + token) * NUMBERS
    key = tl.load(begin + number, mask=real, other=0.0)
    value = tl.load(begin + NUMBERS + number, mask=real, other=0.0)
    key, value = _narrowed(key, key_factor, MOST, FRACTION, BIAS), _narrowed(value, value_factor, MOST, FRACTION, BIAS)
    tl.store(keys + place + number, key.to(keys.dtype.element_ty), mask=real)
    tl.store(values + place + number, value.to(values.dtype.element_ty), mask=real)


def trial(device: torch.device) -> None:
    """In every type of cache, with numbers of all sizes."""
    places, most = torch.tensor([37, 5, 16], device=device), torch.finfo(torch.float16).max
    qkv = (2.0 ** (12 * numbers(device, 3, 4 + 2 * 2, 64)) - 1).clamp(max=most).half()
    for kept in (torch.float16, *FRACTION_AND_BIAS):
        keys, values = (torch.zeros(3, 16, 2, 64, dtype=kept, device=device) for _ in range(2))
        keep(qkv, keys, values, places)
        written = torch.cat([x.float().flatten(0, 1)[places] for x in (keys, values)], 1)
        agree(
            f"what is kept as {kept}", written, qkv[:, 4:].float().clamp(max=torch.finfo(kept).max).to(kept).float(), 0
        )
