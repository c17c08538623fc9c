"""Block types whose bits are kept, and how their blocks divide into codes, scales and shifts.

A weight is then scale * code + shift, with a scale, and a shift or none, for each group of neighbouring inputs. Nothing
is rounded. Most types store a number of few bits for each group and one float16 for all groups of a block: both are
kept, as scales of 8 bits and a super-scale, whose product is the scale of the group. The worker makes the product
(quantization/weight_sources.py). Layouts: ggml's ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import IQ4_NL, NVFP4, dequantize

Array = np.ndarray[Any, Any]


class QuantColumns(NamedTuple):
    """The content of n blocks. `shifts` is None if the type has none. Scales and shifts are int8 if there are
    super-scales, which multiply both, uint8 of 4-bit floats, else floats."""

    codes: Array  # int8 [n, weights of a block]
    scales: Array  # [n, groups of a block]
    shifts: Array | None = None  # the same
    super_scales: Array | None = None  # float32 [n, 1]
    super_shifts: Array | None = None  # float32 [n, 1], where there are shifts too


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The stored form of a block type."""

    bits: int  # 8: one code per byte; 4: codes from 0 to 15, two per byte, the first in the low nibble
    group: int  # weights per scale
    shifted: bool  # whether there are shifts; if not, a 4-bit code c is stored as c + 8
    split: Callable[[Array], QuantColumns]  # of blocks, uint8 [n, bytes of a block]
    super_group: int = 0  # weights per super-scale; 0: scales and shifts are floats
    float4: bool = False  # codes are those of 4-bit floats (e2m1); scales are the bits of e8m0, named factors

    @property
    def columns(self) -> dict[str, tuple[str, int]]:
        """Column name -> safetensors type, and number of weights per entry."""
        if self.float4:
            return {"codes": ("U8", 2), "factors": ("U8", self.group)}
        names = ("scales", "shifts") if self.shifted else ("scales",)
        found = {"codes": ("I8", 1) if self.bits == 8 else ("U8", 2)}
        found |= dict.fromkeys(names, ("I8" if self.super_group else "F16", self.group))
        return found | {f"super_{name}": ("F32", self.super_group) for name in names if self.super_group}

    def stored(self, blocks: Array) -> list[Array]:
        """The stored columns, each [n, ...], of blocks, uint8 [n, bytes per block]."""
        with np.errstate(invalid="ignore"):  # damaged scales: the caller checks for non-finite values
            codes, *factors = self.split(blocks)
        if self.bits == 4:
            halves = (codes if self.shifted or self.float4 else codes + np.int8(8)).view(np.uint8)
            codes = halves[:, 0::2] | (halves[:, 1::2] << np.uint8(4))
        return [codes, *(column for column in factors if column is not None)]


def _cut(blocks: Array, *widths: int) -> list[Array]:
    """Splits each block into adjacent parts of the given sizes; the last part is the rest."""
    return [np.ascontiguousarray(part) for part in np.split(blocks, np.cumsum(widths), axis=1)]


def _half(stored: Array) -> Array:
    """Float16 numbers in bytes."""
    found: Array = stored.view(np.float16)
    return found


def _bits(stored: Array, width: int, run: int) -> Array:
    """Unpacks numbers of `width` bits: a run of bytes has the lowest bits of its numbers, then the next bits."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = stored.reshape(len(stored), -1, 1, run) >> shifts
    return (runs & np.uint8((1 << width) - 1)).reshape(len(stored), -1)


def _signed(numbers: Array, zero: int) -> Array:
    return numbers.astype(np.int8) - np.int8(zero)


def _q4_0(blocks: Array) -> QuantColumns:
    scale, codes = _cut(blocks, 2)
    return QuantColumns(_signed(_bits(codes, 4, 16), 8), _half(scale))


def _q4_1(blocks: Array) -> QuantColumns:
    scale, shift, codes = _cut(blocks, 2, 2)
    return QuantColumns(_signed(_bits(codes, 4, 16), 0), _half(scale), _half(shift))


def _fives(fifth: Array, codes: Array) -> Array:
    found: Array = _bits(codes, 4, 16) | np.unpackbits(fifth, axis=1, bitorder="little") << np.uint8(4)
    return found


def _q5_0(blocks: Array) -> QuantColumns:
    scale, fifth, codes = _cut(blocks, 2, 4)
    return QuantColumns(_signed(_fives(fifth, codes), 16), _half(scale))


def _q5_1(blocks: Array) -> QuantColumns:
    scale, shift, fifth, codes = _cut(blocks, 2, 2, 4)
    return QuantColumns(_signed(_fives(fifth, codes), 0), _half(scale), _half(shift))


def _q8_0(blocks: Array) -> QuantColumns:
    scale, codes = _cut(blocks, 2)
    return QuantColumns(codes.view(np.int8), _half(scale))


def _iq4_nl(blocks: Array) -> QuantColumns:
    scale, places = _cut(blocks, 2)
    return QuantColumns(np.array(IQ4_NL.kvalues, np.int8)[_bits(places, 4, 16)], _half(scale))


def _wide(stored: Array) -> Array:
    """Float16 numbers in bytes, as float32."""
    return _half(stored).astype(np.float32)


def _sixes(packed: Array) -> tuple[Array, Array]:
    """Scales and minima of the eight groups of a Q4_K or Q5_K block, 6 bits each in 12 bytes: the first four of both
    lie in the lower bits of the first eight bytes, the upper two bits of the others above those, the rest at the end.
    """
    scales, minima, rest = _cut(packed, 4, 4)
    return (
        np.concatenate((scales & 63, (rest & 15) | ((scales >> 2) & 48)), axis=1),
        np.concatenate((minima & 63, (rest >> 4) | ((minima >> 2) & 48)), axis=1),
    )


def _q2_k(blocks: Array) -> QuantColumns:
    packed, codes, scale, least = _cut(blocks, 16, 64, 2)
    numbers = _signed(_bits(codes, 2, 32), 0)
    return QuantColumns(numbers, _signed(packed & 15, 0), _signed(packed >> 4, 0), _wide(scale), -_wide(least))


def _q3_k(blocks: Array) -> QuantColumns:
    third, codes, packed, scale = _cut(blocks, 32, 64, 12)
    lower, upper = _cut(packed, 8)
    scales = _bits(lower, 4, 8) | _bits(upper, 2, 4) << np.uint8(4)
    numbers = _signed(_bits(codes, 2, 32) | _bits(third, 1, 32) << np.uint8(2), 4)
    return QuantColumns(numbers, _signed(scales, 32), None, _wide(scale))


def _q4_k(blocks: Array) -> QuantColumns:
    scale, least, packed, codes = _cut(blocks, 2, 2, 12)
    scales, minima = (_signed(numbers, 0) for numbers in _sixes(packed))
    return QuantColumns(_signed(_bits(codes, 4, 32), 0), scales, minima, _wide(scale), -_wide(least))


def _q5_k(blocks: Array) -> QuantColumns:
    scale, least, packed, fifth, codes = _cut(blocks, 2, 2, 12, 32)
    scales, minima = (_signed(numbers, 0) for numbers in _sixes(packed))
    numbers = _bits(codes, 4, 32) | _bits(fifth, 1, 32) << np.uint8(4)
    return QuantColumns(_signed(numbers, 0), scales, minima, _wide(scale), -_wide(least))


def _q6_k(blocks: Array) -> QuantColumns:
    lower, upper, scales, scale = _cut(blocks, 128, 64, 16)
    numbers = _bits(lower, 4, 64) | _bits(upper, 2, 32) << np.uint8(4)
    return QuantColumns(_signed(numbers, 32), scales.view(np.int8), None, _wide(scale))


def _iq4_xs(blocks: Array) -> QuantColumns:
    scale, upper, lower, places = _cut(blocks, 2, 2, 4)
    scales = _bits(lower, 4, 1) | _bits(upper, 2, 1) << np.uint8(4)
    numbers = np.array(IQ4_NL.kvalues, np.int8)[_bits(places, 4, 16)]
    return QuantColumns(numbers, _signed(scales, 32), None, _wide(scale))


# Types whose codes are entries of large tables: the gguf package decodes them, with the scale of each group set to 1.


def _decoded(block: Type, blocks: Array) -> Array:
    codes: Array = dequantize(blocks, block).astype(np.int8)
    return codes


def _odd(numbers: Array) -> Array:
    """Scales of n + 1/2 or 2n + 1, as the latter."""
    return _signed(2 * numbers + 1, 0)


def _with_scale(blocks: Array, scale: float) -> Array:
    """A copy of blocks that begin with a scale, which is replaced."""
    found = blocks.copy()
    found[:, :2] = np.array([scale], np.float16).view(np.uint8)
    return found


def _iq2_xxs(blocks: Array) -> QuantColumns:
    unit = _with_scale(blocks, 8.0)
    unit[:, 9::8] &= 15
    return QuantColumns(_decoded(Type.IQ2_XXS, unit), _odd(blocks[:, 9::8] >> 4), None, _wide(blocks[:, :2].copy()) / 8)


def _iq2(block: Type, blocks: Array) -> QuantColumns:
    """IQ2_XS and IQ2_S, which both end with 4 bits for each group."""
    unit = _with_scale(blocks, 8.0)
    unit[:, -8:] = 0
    scales = _bits(blocks[:, -8:].copy(), 4, 1)
    return QuantColumns(_decoded(block, unit), _odd(scales), None, _wide(blocks[:, :2].copy()) / 8)


def _iq3_xxs(blocks: Array) -> QuantColumns:
    unit = _with_scale(blocks, 4.0)
    unit[:, 69::4] &= 15
    numbers = _decoded(Type.IQ3_XXS, unit)
    return QuantColumns(numbers, _odd(blocks[:, 69::4] >> 4), None, _wide(blocks[:, :2].copy()) / 4)


def _iq3_s(blocks: Array) -> QuantColumns:
    unit = _with_scale(blocks, 1.0)
    unit[:, -4:] = 0
    scales = _bits(blocks[:, -4:].copy(), 4, 1)
    return QuantColumns(_decoded(Type.IQ3_S, unit), _odd(scales), None, _wide(blocks[:, :2].copy()))


def _iq1_s(blocks: Array) -> QuantColumns:
    unit = _with_scale(blocks, 8.0)
    unit[:, 35::2] &= 0x8F
    scales = (blocks[:, 35::2] >> 4) & 7
    return QuantColumns(_decoded(Type.IQ1_S, unit), _odd(scales), None, _wide(blocks[:, :2].copy()) / 8)


def _iq1_m(blocks: Array) -> QuantColumns:
    """The float16 of a block is in the upper 4 bits of four words, which have the scales of four groups below."""
    rest, tail = _cut(blocks, 48)
    words = tail.view(np.uint16)
    quarters = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    scale = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1).astype(np.uint8)
    unit = np.array([0, 0, 0x8000, 0x4000], np.uint16).view(np.uint8)  # 8.0
    numbers = _decoded(Type.IQ1_M, np.concatenate((rest, np.broadcast_to(unit, tail.shape)), axis=1))
    return QuantColumns(numbers, _odd(scales), None, scale / 8)


def _ternary(block: Type, blocks: Array) -> QuantColumns:
    """TQ1_0 and TQ2_0: -1, 0 and 1 times a float16 at the end of the block, which is two of our largest groups.

    They become 0, 1 and 2 with a shift. Without one they would be 7, 8 and 9, less 8: kernels that sum the codes of a
    group before they subtract would lose digits.
    """
    unit = blocks.copy()
    unit[:, -2:] = np.array([1.0], np.float16).view(np.uint8)
    scales = np.repeat(_half(blocks[:, -2:].copy()), 2, axis=1)
    return QuantColumns(_decoded(block, unit) + np.int8(1), scales, -scales)


def _mxfp4(blocks: Array) -> QuantColumns:
    exponent, places = _cut(blocks, 1)
    return QuantColumns(_bits(places, 4, 16).view(np.int8), exponent)


def _nvfp4(blocks: Array) -> QuantColumns:
    scales, places = _cut(blocks, 4)
    codes = np.array(NVFP4.kvalues, np.int8)[_bits(places, 4, 8)]
    return QuantColumns(codes, NVFP4.ue4m3_to_fp32(scales).astype(np.float16))  # exact: 4 bits


# Other types are plain numbers.
FORMS = {
    Type.Q4_0: BlockFormat(4, 32, False, _q4_0),
    Type.Q4_1: BlockFormat(4, 32, True, _q4_1),
    Type.Q5_0: BlockFormat(8, 32, False, _q5_0),
    Type.Q5_1: BlockFormat(8, 32, True, _q5_1),
    Type.Q8_0: BlockFormat(8, 32, False, _q8_0),
    Type.IQ4_NL: BlockFormat(8, 32, False, _iq4_nl),
    Type.Q2_K: BlockFormat(4, 16, True, _q2_k, 256),
    Type.Q3_K: BlockFormat(4, 16, False, _q3_k, 256),
    Type.Q4_K: BlockFormat(4, 32, True, _q4_k, 256),
    Type.Q5_K: BlockFormat(8, 32, True, _q5_k, 256),
    Type.Q6_K: BlockFormat(8, 16, False, _q6_k, 256),
    Type.IQ4_XS: BlockFormat(8, 32, False, _iq4_xs, 256),
    Type.IQ2_XXS: BlockFormat(8, 32, False, _iq2_xxs, 256),
    Type.IQ2_XS: BlockFormat(8, 16, False, partial(_iq2, Type.IQ2_XS), 256),
    Type.IQ2_S: BlockFormat(8, 16, False, partial(_iq2, Type.IQ2_S), 256),
    Type.IQ3_XXS: BlockFormat(8, 32, False, _iq3_xxs, 256),
    Type.IQ3_S: BlockFormat(8, 32, False, _iq3_s, 256),
    Type.IQ1_S: BlockFormat(8, 32, False, _iq1_s, 256),
    Type.IQ1_M: BlockFormat(8, 16, False, _iq1_m, 256),
    Type.TQ1_0: BlockFormat(4, 128, True, partial(_ternary, Type.TQ1_0)),
    Type.TQ2_0: BlockFormat(4, 128, True, partial(_ternary, Type.TQ2_0)),
    Type.MXFP4: BlockFormat(4, 32, False, _mxfp4, float4=True),
    Type.NVFP4: BlockFormat(8, 16, False, _nvfp4),
}
