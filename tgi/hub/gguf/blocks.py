"""Block types whose bits are kept: how their blocks divide into the columns of a quantized weight.

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


class Columns(NamedTuple):
    """What n blocks hold. `shifts` is empty where the type has none."""

    codes: Array  # int8 [n, weights of a block]
    scales: Array  # float16 or float32 [n, groups of a block]
    shifts: Array | None = None  # the same


@dataclass(frozen=True, slots=True)
class Form:
    """The columns that a block type becomes."""

    bits: int  # 8: codes as they are. 4: from 0 to 15, two in a byte, the first in its lower half
    group: int  # weights of a scale
    shifted: bool  # whether there are shifts. If not, 4-bit codes c are stored as c + 8
    split: Callable[[Array], Columns]  # of blocks, uint8 [n, bytes of a block]

    @property
    def columns(self) -> dict[str, tuple[str, int]]:
        """Names of columns -> how safetensors calls their type, and for how many weights they have one number."""
        found = {"codes": ("I8", 1) if self.bits == 8 else ("U8", 2), "scales": ("F16", self.group)}
        return found | ({"shifts": ("F16", self.group)} if self.shifted else {})

    def stored(self, blocks: Array) -> list[Array]:
        """The columns of blocks, uint8 [n, bytes of a block], as they are written: each [n, ...]."""
        with np.errstate(invalid="ignore"):  # damaged scales: the caller looks for what is not finite
            codes, scales, shifts = self.split(blocks)
        if self.bits == 4:
            halves = (codes if self.shifted else codes + np.int8(8)).view(np.uint8)
            codes = halves[:, 0::2] | (halves[:, 1::2] << np.uint8(4))
        with np.errstate(over="ignore"):  # too large for float16
            return [codes, scales.astype(np.float16), *(() if shifts is None else (shifts.astype(np.float16),))]


def _cut(blocks: Array, *widths: int) -> list[Array]:
    """Neighbouring bytes of each block, of so many bytes each; the last part is the rest."""
    return [np.ascontiguousarray(part) for part in np.split(blocks, np.cumsum(widths), axis=1)]


def _half(stored: Array) -> Array:
    """Numbers stored as float16."""
    found: Array = stored.view(np.float16)
    return found


def _bits(stored: Array, width: int, run: int) -> Array:
    """Numbers of `width` bits: each run of bytes holds the lowest bits of its own numbers, then the next of others."""
    places = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = stored.reshape(len(stored), -1, 1, run) >> places
    return (runs & np.uint8((1 << width) - 1)).reshape(len(stored), -1)


def _signed(numbers: Array, zero: int) -> Array:
    return numbers.astype(np.int8) - np.int8(zero)


def _q4_0(blocks: Array) -> Columns:
    scale, codes = _cut(blocks, 2)
    return Columns(_signed(_bits(codes, 4, 16), 8), _half(scale))


def _q4_1(blocks: Array) -> Columns:
    scale, shift, codes = _cut(blocks, 2, 2)
    return Columns(_signed(_bits(codes, 4, 16), 0), _half(scale), _half(shift))


def _fives(fifth: Array, codes: Array) -> Array:
    found: Array = _bits(codes, 4, 16) | np.unpackbits(fifth, axis=1, bitorder="little") << np.uint8(4)
    return found


def _q5_0(blocks: Array) -> Columns:
    scale, fifth, codes = _cut(blocks, 2, 4)
    return Columns(_signed(_fives(fifth, codes), 16), _half(scale))


def _q5_1(blocks: Array) -> Columns:
    scale, shift, fifth, codes = _cut(blocks, 2, 2, 4)
    return Columns(_signed(_fives(fifth, codes), 0), _half(scale), _half(shift))


def _q8_0(blocks: Array) -> Columns:
    scale, codes = _cut(blocks, 2)
    return Columns(codes.view(np.int8), _half(scale))


def _iq4_nl(blocks: Array) -> Columns:
    scale, places = _cut(blocks, 2)
    return Columns(np.array(IQ4_NL.kvalues, np.int8)[_bits(places, 4, 16)], _half(scale))


def _times(scale: Array, numbers: Array) -> Array:
    """The groups' own scales, exact in float32."""
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


def _q2_k(blocks: Array) -> Columns:
    packed, codes, scale, least = _cut(blocks, 16, 64, 2)
    return Columns(_signed(_bits(codes, 2, 32), 0), _times(scale, packed & 15), -_times(least, packed >> 4))


def _q3_k(blocks: Array) -> Columns:
    third, codes, packed, scale = _cut(blocks, 32, 64, 12)
    lower, upper = _cut(packed, 8)
    scales = _bits(lower, 4, 8) | _bits(upper, 2, 4) << np.uint8(4)
    return Columns(
        _signed(_bits(codes, 2, 32) | _bits(third, 1, 32) << np.uint8(2), 4), _times(scale, _signed(scales, 32))
    )


def _q4_k(blocks: Array) -> Columns:
    scale, least, packed, codes = _cut(blocks, 2, 2, 12)
    scales, minima = _sixes(packed)
    return Columns(_signed(_bits(codes, 4, 32), 0), _times(scale, scales), -_times(least, minima))


def _q5_k(blocks: Array) -> Columns:
    scale, least, packed, fifth, codes = _cut(blocks, 2, 2, 12, 32)
    scales, minima = _sixes(packed)
    numbers = _bits(codes, 4, 32) | _bits(fifth, 1, 32) << np.uint8(4)
    return Columns(_signed(numbers, 0), _times(scale, scales), -_times(least, minima))


def _q6_k(blocks: Array) -> Columns:
    lower, upper, scales, scale = _cut(blocks, 128, 64, 16)
    numbers = _bits(lower, 4, 64) | _bits(upper, 2, 32) << np.uint8(4)
    return Columns(_signed(numbers, 32), _times(scale, scales.view(np.int8)))


def _iq4_xs(blocks: Array) -> Columns:
    scale, upper, lower, places = _cut(blocks, 2, 2, 4)
    scales = _bits(lower, 4, 1) | _bits(upper, 2, 1) << np.uint8(4)
    return Columns(np.array(IQ4_NL.kvalues, np.int8)[_bits(places, 4, 16)], _times(scale, _signed(scales, 32)))


# The others are dequantized: what they hold is no code times a scale, or no model of these architectures has them.
FORMS = {
    Type.Q4_0: Form(4, 32, False, _q4_0),
    Type.Q4_1: Form(4, 32, True, _q4_1),
    Type.Q5_0: Form(8, 32, False, _q5_0),
    Type.Q5_1: Form(8, 32, True, _q5_1),
    Type.Q8_0: Form(8, 32, False, _q8_0),
    Type.IQ4_NL: Form(8, 32, False, _iq4_nl),
    Type.Q2_K: Form(4, 16, True, _q2_k),
    Type.Q3_K: Form(4, 16, False, _q3_k),
    Type.Q4_K: Form(4, 32, True, _q4_k),
    Type.Q5_K: Form(8, 32, True, _q5_k),
    Type.Q6_K: Form(8, 16, False, _q6_k),
    Type.IQ4_XS: Form(8, 32, False, _iq4_xs),
}
