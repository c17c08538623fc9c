"""A weight in few bits, and what it stands for."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tgi.worker.quantization.codebook import TABLE, table_on

GROUPS = (16, 32, 64, 128)  # inputs that may share a scale
PIECE = 1 << 24  # elements dequantized at once


class QuantizedWeight(NamedTuple):
    """A weight [outputs, inputs] in 8 or 4 bits and groups of inputs with a scale of their own. With g = i // group,

        weight[o, i] = scales[o, g] * codes[o, i] + shifts[o, g].

    8 bits: codes are int8 [outputs, inputs]. 4 bits: codes are uint8 [outputs, inputs // 2], of which byte j has input
    2 j in its lower half and 2 j + 1 in its upper one; they count from 0 to 15 with shifts and, without, stand for -8
    to 7. Where there are factors, there is one scale for each output and there are no shifts, and 4 bits stand for
    numbers of 8 bits, by their own factor for each 32 inputs:

        weight[o, i] = scales[o, 0] * TABLE[factors[o, i // 32], codes[o, i]].

    Codes may be 8-bit floats, float8_e4m3fn [outputs, inputs], with one scale for each output and no shifts. These
    scales are float32: products of 8-bit floats take them so, and with codes of up to 448 they are often so small that
    float16 has too few bits for them.

    Every column has a row for each output, so weights are split and joined by outputs as they are.
    """

    codes: Tensor
    scales: Tensor  # float16 [outputs, inputs // group]; float32 for 8-bit floats
    shifts: Tensor | None  # the same; None: all zero
    factors: Tensor | None = None  # uint8 [outputs, inputs // 32], rows of TABLE

    @property
    def bits(self) -> int:
        """8 or 4."""
        return 4 if self.codes.dtype is torch.uint8 else 8

    @property
    def floating(self) -> bool:
        """Whether the codes are 8-bit floats."""
        return self.codes.dtype is torch.float8_e4m3fn

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Inputs of a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def whole(self) -> bool:
        """Whether it is whole numbers of 8 bits times one scale for each output, of as many inputs as no group has."""
        integers = self.codes.dtype is torch.int8 and self.shifts is None
        single = integers and self.group == self.shape[1] and self.group not in GROUPS
        return single or self.factors is not None

    @property
    def device(self) -> torch.device:
        """Where the columns are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self if column is not None)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs], computed in float32 and rounded once; some outputs at a time, so that little
        more memory is used than the result takes."""
        outputs, inputs = self.shape
        found = torch.empty(outputs, inputs, dtype=dtype, device=self.device)
        pieces = found.split(max(1, PIECE // inputs))
        for piece, part in zip(pieces, self.split([len(piece) for piece in pieces]), strict=True):
            grouped = part.numbers().view(*part.scales.shape, self.group).float()
            grouped *= part.scales.float()[:, :, None]
            if part.shifts is not None:
                grouped += part.shifts.float()[:, :, None]
            piece.copy_(grouped.view(piece.shape))
        return found

    def numbers(self) -> Tensor:
        """What the codes stand for, int8 or 8-bit floats [outputs, inputs]."""
        if self.bits == 8:
            return self.codes
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).view(self.shape)
        if self.factors is not None:
            places = codes.view(*self.factors.shape, -1) + self.factors[:, :, None] * TABLE.shape[1]
            return table_on(self.device).view(-1).index_select(0, places.int().view(-1)).view(self.shape)
        return codes.to(torch.int8) - (8 if self.shifts is None else 0)

    def split(self, outputs: Sequence[int]) -> list["QuantizedWeight"]:
        """Weights of so many outputs each, views."""
        columns = [[None] * len(outputs) if column is None else column.split(list(outputs)) for column in self]
        return [QuantizedWeight(*parts) for parts in zip(*columns, strict=True)]

    def rows(self, outputs: Tensor) -> "QuantizedWeight":
        """The weight of some outputs alone, int64 [n]."""
        return QuantizedWeight(*(None if column is None else column.index_select(0, outputs) for column in self))

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same there."""
        return QuantizedWeight(*(None if column is None else column.to(device) for column in self))


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of the same form, one above the other."""
    columns = zip(*parts, strict=True)
    return QuantizedWeight(*(None if column[0] is None else torch.cat(column) for column in columns))


Weight: TypeAlias = Tensor | QuantizedWeight


def plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a tensor of that dtype."""
    return weight.dequantized(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)
