"""Writes the keys and values of a step into the KV cache of a layer, converted to its type, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi.worker.gpu_kernels.self_test import check_close, random_tensor

# For each 8-bit float type: bits of the fraction, and bias of the exponent.
FRACTION_AND_BIAS = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}


def write_kv(
    qkv: Tensor, keys: Tensor, values: Tensor, slots: Tensor, divisors: tuple[float, float] = (1.0, 1.0)
) -> None:
    """Writes the keys and values of `qkv` [T, heads + 2 * kv_heads, head_dim], which has queries, keys and values.

    `keys` and `values` [pages, page_size, kv_heads, head_dim] are the cache, of the type of `qkv` or of 8-bit floats.
    `slots` int64 [T] is the slot mapping: page * page_size + offset. All are contiguous. For 8-bit floats, keys and
    values are divided by `divisors` first. For 8-bit floats and float16, magnitudes are limited to the largest number,
    and NaN becomes 0.
    """
    tokens, both, dim = qkv.shape
    kv_heads = keys.shape[2]
    fraction, bias = FRACTION_AND_BIAS.get(keys.dtype, (0, 0))
    most = torch.finfo(keys.dtype).max if fraction or keys.dtype is torch.float16 else 0.0
    if fraction:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    _write_kv[tokens,](
        *(qkv, keys, values, slots, 1 / divisors[0], 1 / divisors[1]),
        QUERIES=(both - 2 * kv_heads) * dim,
        NUMBERS=kv_heads * dim,
        BLOCK=triton.next_power_of_2(kv_heads * dim),
        MOST=most,
        FRACTION=fraction,
        BIAS=bias,
    )


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


# The alignment of a step's slots does not compile another kernel.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kv(
    qkv,
    keys,
    values,
    slots,
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
    slot = tl.load(slots + token) * NUMBERS
    key = tl.load(begin + number, mask=real, other=0.0)
    value = tl.load(begin + NUMBERS + number, mask=real, other=0.0)
    key, value = _convert(key, key_factor, MOST, FRACTION, BIAS), _convert(value, value_factor, MOST, FRACTION, BIAS)
    tl.store(keys + slot + number, key.to(keys.dtype.element_ty), mask=real)
    tl.store(values + slot + number, value.to(values.dtype.element_ty), mask=real)


def self_test(device: torch.device) -> None:
    """Every type of cache, with numbers of all magnitudes. Raises SelfTestFailed if the results differ from torch's."""
    slots, most = torch.tensor([37, 5, 16], device=device), torch.finfo(torch.float16).max
    qkv = (2.0 ** (12 * random_tensor(device, 3, 4 + 2 * 2, 64)) - 1).clamp(max=most).half()
    for cache_dtype in (torch.float16, *FRACTION_AND_BIAS):
        keys, values = (torch.zeros(3, 16, 2, 64, dtype=cache_dtype, device=device) for _ in range(2))
        write_kv(qkv, keys, values, slots)
        written = torch.cat([x.float().flatten(0, 1)[slots] for x in (keys, values)], 1)
        expected = qkv[:, 4:].float().clamp(max=torch.finfo(cache_dtype).max).to(cache_dtype).float()
        check_close(f"what is written as {cache_dtype}", written, expected, 0)
