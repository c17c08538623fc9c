"""A weight on evenly spaced levels, which is what the integer formats of checkpoints have in common."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.quantization.weight import GROUPS, QuantizedWeight

PIECE = 1 << 17  # numbers dequantized at once, few enough for a core's cache
SCALE_ERROR = 2.0**-10  # relative, of a scale that is rounded to float16


class Levels(NamedTuple):
    """A weight [outputs, inputs] of 8 or 4 bits: scales[o, g] * (codes[o, i] - zeros[o, g]), g the group of input i."""

    bits: int
    inputs: int
    codes: Tensor  # uint8 [outputs, at least inputs * bits / 8], low bits first, counting from 0
    zeros: Tensor  # uint8 [outputs, groups]
    scales: Tensor  # float [outputs, groups]
    order: Tensor | None = None  # the group of each input, int64 [inputs]; None: the groups follow each other

    def misfit(self) -> str | None:
        """Why this is no QuantizedWeight; None: it is one."""
        if self.order is not None:
            return "its groups are scattered over the inputs (act-order)"
        if self._group() is None:
            return f"its groups of {self.inputs // self.scales.shape[1]} inputs are not made of 16, 32, 64 or 128"
        half = self.scales.to(torch.float16).float()
        if not torch.all((half - self.scales.float()).abs() <= SCALE_ERROR * self.scales.float().abs()):
            return "its scales are beyond what float16 has"
        return None

    def quantized(self) -> QuantizedWeight:
        """The same weight, unless it is a misfit.

        Codes and scales are the same; scales that are not in float16 already are rounded to it, by at most 2**-11 of
        their value (SCALE_ERROR where float16 is subnormal). A zero point becomes a shift of -scale * zero, rounded to
        float16: by at most zero / 2048 of a level, thus 0.0073 of one in 4 bits and 0.0625 in 8, where zero points
        count from the middle of the codes. A zero point in the middle of 4 or 8 bits is no shift, and exact.
        """
        group = self._group()
        assert group is not None
        repeats = self.inputs // group // self.scales.shape[1]
        codes = self.codes[:, : self.inputs * self.bits // 8].contiguous()
        middle = 1 << (self.bits - 1)
        shifts = None
        if self._only_zero() != middle:
            zeros = self.zeros.float() - (middle if self.bits == 8 else 0)
            shifts = (-self.scales.float() * zeros).to(torch.float16).repeat_interleave(repeats, 1)
        if self.bits == 8:
            codes = (codes ^ 0x80).view(torch.int8)
        return QuantizedWeight(codes, self.scales.to(torch.float16).repeat_interleave(repeats, 1), shifts)

    def dequantized(self) -> Tensor:
        """The weight, float32 [outputs, inputs], without any error of its own."""
        order, zero = self.order, self._only_zero()
        if order is None:
            order = torch.arange(self.inputs) // (self.inputs // self.scales.shape[1])

        def piece(rows: slice) -> Tensor:
            numbers = unpacked(self.codes[rows], self.bits)[:, : self.inputs].float()
            numbers -= self.zeros[rows].float().index_select(1, order) if zero is None else zero
            return numbers.mul_(self.scales[rows].float().index_select(1, order))

        return by_rows(self.codes.shape[0], self.inputs, piece)

    def _only_zero(self) -> int | None:
        """The zero point of all groups, if they have the same."""
        first = self.zeros[0, 0]
        return int(first) if bool((self.zeros == first).all()) else None

    def _group(self) -> int | None:
        """Inputs of a scale in QuantizedWeight: longer groups are cut into several of the same scale."""
        size = self.inputs // self.scales.shape[1]
        return max((group for group in GROUPS if size % group == 0), default=None)


def by_rows(outputs: int, inputs: int, piece: Callable[[slice], Tensor]) -> Tensor:
    """A weight float32 [outputs, inputs] made by some outputs at a time, so that what is needed between takes little
    memory, and none that has to be fetched anew for each step."""
    found = torch.empty(outputs, inputs)
    step = max(1, PIECE // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        found[rows] = piece(rows)
    return found


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Numbers uint8 [rows, n] of 8 or 4 bits out of bytes, or of larger words, that hold them low bits first."""
    octets = packed.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def packed(numbers: Tensor) -> Tensor:
    """Bytes [rows, n / 2] of numbers uint8 [rows, n] of 4 bits, low bits first."""
    return numbers[:, 0::2] | (numbers[:, 1::2] << 4)
