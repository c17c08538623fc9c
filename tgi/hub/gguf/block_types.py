"""Block types whose bits are kept, and how their blocks divide into codes, scales and shifts.

A weight is then scale * code + shift, with a scale, and a shift or none, for each group of neighbouring inputs. Where
a type stores its scales and shifts as float16, they are kept bit for bit. The K types and IQ4_XS store a whole number
for each group and one float16 for 256 weights: the product of both is rounded to float16 here, which changes it by
2^-11 of itself at most. (Rounding a weight to bfloat16 changes that by up to 2^-9.) Layouts: ggml's ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import IQ4_NL

Array = np.ndarray[Any, Any]


class QuantColumns(NamedTuple):
    """The content of n blocks. `shifts` is None if the type has none."""

    codes: Array  # int8 [n, weights of a block]
    scales: Array  # float16 or float32 [n, groups of a block]
    shifts: Array | None = None  # the same


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The stored form of a block type."""

    bits: int  # 8: one code per byte; 4: codes from 0 to 15, two per byte, the first in the low nibble
    group: int  # weights per scale
    shifted: bool  # whether there are shifts; if not, a 4-bit code c is stored as c + 8
    split: Callable[[Array], QuantColumns]  # of blocks, uint8 [n, bytes of a block]

    @property
    def columns(self) -> dict[str, tuple[str, int]]:
        """Column name -> safetensors type, and number of weights per entry."""
        found = {"codes": ("I8", 1) if self.bits == 8 else ("U8", 2), "scales": ("F16", self.group)}
        return found | ({"shifts": ("F16", self.group)} if self.shifted else {})

    def stored(self, blocks: Array) -> list[Array]:
        """The stored columns, each [n, ...], of blocks, uint8 [n, bytes per block]."""
        with np.errstate(invalid="ignore"):  # damaged scales: the caller checks for non-finite values
            codes, scales, shifts = self.split(blocks)
        if self.bits == 4:
            halves = (codes if self.shifted else codes + np.int8(8)).view(np.uint8)
            codes = halves[:, 0::2] | (halves[:, 1::2] << np.uint8(4))
        with np.errstate(over="ignore"):  # too large for float16
            return [codes, scales.astype(np.float16), *(() if shifts is None else (shifts.astype(np.float16),))]


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


def _times(scale: Array, numbers: Array) -> Array:
    """The scale of each group, exact in float32."""
    return _half(scale).astype(np.float32) * numbers.astype(np.float32)


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
    return QuantColumns(_signed(_bits(codes, 2, 32), 0), _times(scale, packed & 15), -_times(least, packed >> 4))


def _q3_k(blocks: Array) -> QuantColumns:
    third, codes, packed, scale = _cut(blocks, 32, 64, 12)
    lower, upper = _cut(packed, 8)
    scales = _bits(lower, 4, 8) | _bits(upper, 2, 4) << np.uint8(4)
    return QuantColumns(
        _signed(_bits(codes, 2, 32) | _bits(third, 1, 32) << np.uint8(2), 4), _times(scale, _signed(scales, 32))
    )


def _q4_k(blocks: Array) -> QuantColumns:
    scale, least, packed, codes = _cut(blocks, 2, 2, 12)
    scales, minima = _sixes(packed)
    return QuantColumns(_signed(_bits(codes, 4, 32), 0), _times(scale, scales), -_times(least, minima))


def _q5_k(blocks: Array) -> QuantColumns:
    scale, least, packed, fifth, codes = _cut(blocks, 2, 2, 12, 32)
    scales, minima = _sixes(packed)
    numbers = _bits(codes, 4, 32) | _bits(fifth, 1, 32) << np.uint8(4)
    return QuantColumns(_signed(numbers, 0), _times(scale, scales), -_times(least, minima))


def _q6_k(blocks: Array) -> QuantColumns:
    lower, upper, scales, scale = _cut(blocks, 128, 64, 16)
    numbers = _bits(lower, 4, 64) | _bits(upper, 2, 32) << np.uint8(4)
    return QuantColumns(_signed(numbers, 32), _times(scale, scales.view(np.int8)))


def _iq4_xs(blocks: Array) -> QuantColumns:
    scale, upper, lower, places = _cut(blocks, 2, 2, 4)
    scales = _bits(lower, 4, 1) | _bits(upper, 2, 1) << np.uint8(4)
    return QuantColumns(np.array(IQ4_NL.kvalues, np.int8)[_bits(places, 4, 16)], _times(scale, _signed(scales, 32)))


# Other types are dequantized: they are no codes times a scale, or no model of these architectures uses them.
FORMS = {
    Type.Q4_0: BlockFormat(4, 32, False, _q4_0),
    Type.Q4_1: BlockFormat(4, 32, True, _q4_1),
    Type.Q5_0: BlockFormat(8, 32, False, _q5_0),
    Type.Q5_1: BlockFormat(8, 32, True, _q5_1),
    Type.Q8_0: BlockFormat(8, 32, False, _q8_0),
    Type.IQ4_NL: BlockFormat(8, 32, False, _iq4_nl),
    Type.Q2_K: BlockFormat(4, 16, True, _q2_k),
    Type.Q3_K: BlockFormat(4, 16, False, _q3_k),
    Type.Q4_K: BlockFormat(4, 32, True, _q4_k),
    Type.Q5_K: BlockFormat(8, 32, True, _q5_k),
    Type.Q6_K: BlockFormat(8, 16, False, _q6_k),
    Type.IQ4_XS: BlockFormat(8, 32, False, _iq4_xs),
}
