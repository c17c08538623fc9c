"""Integer weights with scales and zero points: the common form of the GPTQ, AWQ and compressed-tensors formats."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.quantization.weight import QuantizedWeight
from tgi.worker.quantization.weight_forms import divided_group

DEQUANTIZED_AT_ONCE = 1 << 17  # elements, few enough for a core's cache
SCALE_ERROR = 2.0**-10  # maximum relative error of a scale that is rounded to float16


class AffineWeight(NamedTuple):
    """A weight [outputs, inputs] of 8 or 4 bits: scales[o, g] * (codes[o, i] - zeros[o, g]), g the group of input i."""

    bits: int
    inputs: int
    codes: Tensor  # uint8 [outputs, at least inputs * bits / 8], low bits first, counting from 0
    zeros: Tensor  # uint8 [outputs, groups]
    scales: Tensor  # float [outputs, groups]
    order: Tensor | None = None  # the group of each input, int64 [inputs]; None: the groups follow each other

    def unsupported_reason(self, exact: bool = False, float8: bool = False) -> str | None:
        if self.order is not None:
            return "its groups are scattered over the inputs (act-order)"
        if self._group_size() is None:
            return f"its groups of {self.inputs // self.scales.shape[1]} inputs are not made of 16, 32, 64 or 128"
        half = self.scales.to(torch.float16).float()
        if not exact and not torch.all((half - self.scales.float()).abs() <= SCALE_ERROR * self.scales.float().abs()):
            return "its scales are beyond what float16 has"
        return None

    def quantized(self, exact: bool = False) -> QuantizedWeight:
        """The same weight. `unsupported_reason` must be None.

        Codes are unchanged. Scales are rounded to float16 if they have another type, with a relative error of at most
        2**-11 (SCALE_ERROR if the result is subnormal). A zero point becomes a shift of -scale * zero, rounded to
        float16, with an error of at most zero / 2048 of the level spacing: 0.0073 with 4 bits, 0.0625 with 8 bits, for
        which zero points count from the middle of the codes. A zero point in the middle needs no shift and is exact.
        `exact`: where float16 would round a scale or a shift, all are float32.
        """
        group = self._group_size()
        assert group is not None
        repeats = self.inputs // group // self.scales.shape[1]
        codes = self.codes[:, : self.inputs * self.bits // 8].contiguous()
        middle = 1 << (self.bits - 1)
        factors = [self.scales.float()]
        if self._common_zero() != middle:
            zeros = self.zeros.float() - (middle if self.bits == 8 else 0)
            factors.append(-factors[0] * zeros)
        rounds = exact and any((one.half() != one).any() for one in factors)
        dtype = torch.float32 if rounds else torch.float16
        scales, *shifts = (one.to(dtype).repeat_interleave(repeats, 1) for one in factors)
        if self.bits == 8:
            codes = (codes ^ 0x80).view(torch.int8)
        return QuantizedWeight(codes, scales, *(shifts or [None]))

    def dequantized(self) -> Tensor:
        """The weight, float32 [outputs, inputs], without rounding of scales and zero points."""
        order, zero = self.order, self._common_zero()
        if order is None:
            order = torch.arange(self.inputs) // (self.inputs // self.scales.shape[1])

        def piece(rows: slice) -> Tensor:
            numbers = unpack_bits(self.codes[rows], self.bits)[:, : self.inputs].float()
            numbers -= self.zeros[rows].float().index_select(1, order) if zero is None else zero
            return numbers.mul_(self.scales[rows].float().index_select(1, order))

        return build_by_rows(self.codes.shape[0], self.inputs, piece)

    def _common_zero(self) -> int | None:
        """The zero point of all groups if it is the same, else None."""
        first = self.zeros[0, 0]
        return int(first) if bool((self.zeros == first).all()) else None

    def _group_size(self) -> int | None:
        """The group size in QuantizedWeight: other groups are divided into several with the same scale. None:
        impossible."""
        return divided_group(self.inputs // self.scales.shape[1])


def build_by_rows(outputs: int, inputs: int, piece: Callable[[slice], Tensor]) -> Tensor:
    """A weight float32 [outputs, inputs] that is computed for some outputs at a time, so that intermediate results
    take little memory and reuse it."""
    found = torch.empty(outputs, inputs)
    step = max(1, DEQUANTIZED_AT_ONCE // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        found[rows] = piece(rows)
    return found


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Unpacks 8-bit or 4-bit numbers to uint8 [rows, n] from bytes, or larger words, that hold them low bits first."""
    octets = packed.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Packs 4-bit numbers uint8 [rows, n] to bytes [rows, n / 2], low bits first."""
    return numbers[:, 0::2] | (numbers[:, 1::2] << 4)
