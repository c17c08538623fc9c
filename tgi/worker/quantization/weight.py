"""QuantizedWeight: the one representation of quantized weights, its 4-bit tables, and the stacking of weights."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tgi.worker.quantization.weight_forms import GROUPS, MX_GROUP

DEQUANTIZED_AT_ONCE = 1 << 24  # elements


class QuantizedWeight(NamedTuple):
    """A weight [outputs, inputs] of 8 or 4 bits. With g = i // group,

        weight[o, i] = scales[o, g] * codes[o, i] + shifts[o, g].

    The columns by kind of weight:

    - 8-bit integers: codes are int8 [outputs, inputs].
    - 4-bit integers: codes are uint8 [outputs, inputs // 2]. Byte j has input 2 j in its lower half and 2 j + 1 in its
      upper half. With shifts, codes are 0 to 15; without shifts, they represent -8 to 7.
    - 4-bit codebook (`factors` is not None): one scale for each output, no shifts, codes packed as above, and
      weight[o, i] = scales[o, 0] * CODEBOOK[factors[o, i // 32], codes[o, i]].
    - 4-bit floats (`factors` are int8): one float64 scale for each output, no shifts, codes of E2M1 packed as above.
      Factors are the bits of 8-bit floats, of e8m0 for each 32 inputs (MXFP4) or of e4m3 for each 16 (NVFP4):
      weight[o, i] = E2M1[codes[o, i]] * float32(factors[o, g] * scales[o, 0]). A checkpoint may divide factors by a
      number; with 64 bits the product with its reciprocal is the quotient, to float32. On our CPU kernels these
      products are the scales [outputs, groups], in float16 or float32, and `factors` has no columns.
    - 8-bit floats: codes are float8_e4m3fn [outputs, inputs], without shifts. Scales are float32: with codes of up to
      448 they are often so small that float16 has too few bits for them. Where each output has one scale, it is one
      that torch's matrix products of 8-bit floats take.

    Scales and shifts of groups are float16. They are float32 where float16 would round those of a checkpoint and the
    model computes in float32.

    Every column has one row for each output, so weights are split and concatenated by outputs without conversion.
    """

    codes: Tensor
    scales: Tensor  # float16, float32 or float64 [outputs, inputs // group]
    shifts: Tensor | None  # the dtype of scales [outputs, inputs // group]; None: all zero
    factors: Tensor | None = None  # uint8 [outputs, inputs // 32], rows of CODEBOOK; int8 for 4-bit floats

    @property
    def bits(self) -> int:
        """Bits of a code: 8 or 4."""
        return 4 if self.codes.dtype is torch.uint8 else 8

    @property
    def floating(self) -> bool:
        return self.codes.dtype is torch.float8_e4m3fn

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def is_float4(self) -> bool:
        return self.factors is not None and self.factors.dtype is torch.int8

    @property
    def factor_group(self) -> int:
        """The number of inputs that share a factor; 1 where there are no factors."""
        return self.shape[1] // self.factors.shape[1] if self.factors is not None and self.factors.shape[1] else 1

    @property
    def is_integer(self) -> bool:
        """Whether each output is 8-bit integers, or codebook entries, times one scale; false where all inputs happen to
        be one of GROUPS. CPU kernels multiply such a weight with integer arithmetic."""
        integers = self.codes.dtype is torch.int8 and self.shifts is None
        single = integers and self.group == self.shape[1] and self.group not in GROUPS
        return single or (self.factors is not None and not self.is_float4)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self if column is not None)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs], computed in float32 and rounded once. Computed for some outputs at a time, so
        that it needs little memory besides the result."""
        outputs, inputs = self.shape
        found = torch.empty(outputs, inputs, dtype=dtype, device=self.device)
        pieces = found.split(max(1, DEQUANTIZED_AT_ONCE // inputs))
        for piece, part in zip(pieces, self.split([len(piece) for piece in pieces]), strict=True):
            part = part.as_integers()
            grouped = part.decoded().view(*part.scales.shape, part.group).float()
            grouped *= part.scales.float()[:, :, None]
            if part.shifts is not None:
                grouped += part.shifts.float()[:, :, None]
            piece.copy_(grouped.view(piece.shape))
        return found

    def decoded(self) -> Tensor:
        """The numbers that the codes represent, before scales and shifts: int8 or float8_e4m3fn [outputs, inputs]."""
        if self.bits == 8:
            return self.codes
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).view(self.shape)
        assert not self.is_float4
        if self.factors is not None:
            places = codes.view(*self.factors.shape, -1) + self.factors[:, :, None] * CODEBOOK.shape[1]
            return codebook_on(self.device).view(-1).index_select(0, places.int().view(-1)).view(self.shape)
        return codes.to(torch.int8) - (8 if self.shifts is None else 0)

    def with_group_scales(self) -> "QuantizedWeight":
        """The same weight; 4-bit floats have a scale for each group, in float16 where it has all of them exactly."""
        if self.factors is None or not self.is_float4 or not self.factors.shape[1]:
            return self
        if self.factor_group == MX_GROUP:
            numbers = powers_on(self.device)[self.factors.view(torch.uint8).int()]
        else:
            numbers = self.factors.view(torch.float8_e4m3fn).double()
        wide = (numbers * self.scales).float()
        half = wide.half()
        exact = torch.equal(half.float(), wide) and torch.equal((half / 2).float(), wide / 2)
        return self._replace(scales=half if exact else wide, factors=self.factors[:, :0])

    def as_integers(self) -> "QuantizedWeight":
        """The same weight, of which 4-bit floats become 8-bit integers in groups, twice as large."""
        if not self.is_float4:
            return self
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).view(self.shape)
        doubled = e2m1_on(self.device).index_select(0, codes.int().view(-1)).view(self.shape)
        return QuantizedWeight(doubled, self.with_group_scales().scales / 2, None)

    def split(self, outputs: Sequence[int]) -> list["QuantizedWeight"]:
        """Views of consecutive outputs, one for each of these counts."""
        columns = [[None] * len(outputs) if column is None else column.split(list(outputs)) for column in self]
        return [QuantizedWeight(*parts) for parts in zip(*columns, strict=True)]

    def inputs(self, inputs: range) -> "QuantizedWeight | None":
        """The weight of these inputs. None if they do not begin and end with groups that can be represented."""
        start, stop = inputs.start, inputs.stop
        whole = self
        if self.scales.shape[1] > 1 and (start % self.group or stop % self.group):
            group = math.gcd(self.group, start, stop)
            if group not in GROUPS:
                return None
            whole = _with_group(self, group)
        if self.factors is not None and (start % self.factor_group or stop % self.factor_group):
            return None
        of_groups = slice(None) if whole.scales.shape[1] == 1 else slice(start // whole.group, stop // whole.group)
        of_codes = slice(start * self.bits // 8, stop * self.bits // 8)
        of_factors = slice(start // self.factor_group, stop // self.factor_group)
        slices = of_codes, of_groups, of_groups, of_factors
        return QuantizedWeight(
            *(
                None if column is None else column[:, part].contiguous()
                for column, part in zip(whole, slices, strict=True)
            )
        )

    def rows(self, outputs: Tensor) -> "QuantizedWeight":
        """The weight of these outputs, int64 [n]."""
        return QuantizedWeight(*(None if column is None else column.index_select(0, outputs) for column in self))

    def with_factors(self, dtype: torch.dtype) -> "QuantizedWeight":
        """The weight with scales and shifts of that dtype."""
        return self._replace(
            scales=self.scales.to(dtype), shifts=None if self.shifts is None else self.shifts.to(dtype)
        )

    def to(self, device: torch.device) -> "QuantizedWeight":
        return QuantizedWeight(*(None if column is None else column.to(device) for column in self))


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of the same kind and group size, stacked by outputs."""
    columns = zip(*parts, strict=True)
    return QuantizedWeight(*(None if column[0] is None else torch.cat(column) for column in columns))


Weight: TypeAlias = Tensor | QuantizedWeight


def select_part(weight: Weight, outputs: range, inputs: range, dtype: torch.dtype) -> Weight:
    """The part of a weight with these outputs and inputs. One that no QuantizedWeight represents is plain, in
    `dtype`."""
    all_outputs, all_inputs = weight.shape
    if len(outputs) < all_outputs:
        counts = (outputs.start, len(outputs), all_outputs - outputs.stop)
        weight = weight.split(counts)[1]
    if len(inputs) == all_inputs:
        return weight
    if isinstance(weight, Tensor):
        return weight[:, inputs.start : inputs.stop].contiguous()
    part = weight.inputs(inputs)
    return weight.dequantized(dtype)[:, inputs.start : inputs.stop].contiguous() if part is None else part


def as_plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a tensor of that dtype."""
    return weight.dequantized(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)


# The 4-bit codebook of weights quantized at load (quantize.py): a code selects a level, a factor the level spacing.
#
# With integer weights of 8 bits and one scale for each output a kernel's sums are exact integers. The levels minimize
# the squared error, given the factors, for normally distributed weights: each level is the mean of the weights that are
# rounded to it (Lloyd, "Least squares quantization in PCM", 1982). They reach further on one side, so the wider factors
# come with both signs, and the largest number of a group can be on the side that suits it. The narrower factors are for
# outputs with a few weights much larger than the rest.
CODEBOOK_LEVELS = torch.tensor([-127, -101, -80, -63, -48, -35, -22, -10, 0, 13, 25, 39, 53, 70, 89, 113])
CODEBOOK_FACTORS = torch.tensor([127, -127, 102, -102, 79, -79, 56, 32])  # of 127
# int8 [factors, codes]. Code 8 is zero with all factors.
CODEBOOK = (CODEBOOK_FACTORS[:, None] * CODEBOOK_LEVELS / 127).round().to(torch.int8)


# 4-bit floats: twice the number of each code, of a sign, two exponent bits and one of the fraction.
E2M1_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


@cache
def e2m1_on(device: torch.device) -> Tensor:
    """E2M1_DOUBLED on this device."""
    return E2M1_DOUBLED.to(device)


@cache
def powers_on(device: torch.device) -> Tensor:
    """The number of each e8m0, float64 [256]; the last one stands for no number."""
    return torch.tensor([*(2.0 ** (bits - 127) for bits in range(255)), math.nan], dtype=torch.float64).to(device)


@cache
def codebook_on(device: torch.device) -> Tensor:
    """CODEBOOK on this device, cached: during the capture of a CUDA graph nothing can be copied to the GPU."""
    return CODEBOOK.to(device)


def scale_weight(weight: Weight, factor: float) -> Weight:
    """The weight times a number."""
    if isinstance(weight, Tensor):
        return weight * factor
    shifts = None if weight.shifts is None else weight.shifts * factor
    return weight._replace(scales=weight.scales * factor, shifts=shifts)


def stack_weights(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """One weight of these, stacked by outputs, in the fewest bits that represent all of them exactly. Plain weights of
    one type keep it. If no QuantizedWeight represents all parts, for example where one is plain, the result is plain,
    in `dtype`."""
    if len(parts) == 1:
        return parts[0]
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(plain) == len(parts) and len({part.dtype for part in plain}) == 1:
        return torch.cat(plain)
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts):
        common = _common_form(quantized)
        if common is not None:
            return concatenate(common)
    return torch.cat([as_plain(part, dtype) for part in parts])


def _common_form(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight] | None:
    """The same weights converted to the same bits, group size and columns, or None if that is not exact."""
    kinds = {(part.is_float4, part.factor_group, part.is_float4 and part.group) for part in parts}
    if all(part.factors is not None for part in parts) and len(kinds) == 1:
        wide = any(part.scales.dtype is torch.float32 for part in parts)
        return [part.with_factors(torch.float32) for part in parts] if wide else list(parts)
    if all(part.floating for part in parts) and len({part.group for part in parts}) == 1:
        return list(parts)
    if any(part.floating for part in parts):
        return None
    parts = [part.as_integers() for part in parts]
    parts = [part if part.factors is None else QuantizedWeight(part.decoded(), part.scales, None) for part in parts]
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    shifted = any(part.shifts is not None for part in parts)
    dtype = torch.float32 if any(part.scales.dtype is torch.float32 for part in parts) else torch.float16
    if any(part.group % group for part in parts):
        return None
    found = []
    for part in parts:
        part = _with_group(part, group).with_factors(dtype)
        if part.bits < bits:
            part = QuantizedWeight(part.decoded(), part.scales, part.shifts)
        if shifted and part.shifts is None:
            # 4-bit codes count from 0 with shifts and from -8 without.
            shifts = part.scales * -8 if part.bits == 4 else torch.zeros_like(part.scales)
            if not shifts.isfinite().all():
                return None
            part = part._replace(shifts=shifts)
        found.append(part)
    return found


def _with_group(weight: QuantizedWeight, group: int) -> QuantizedWeight:
    """The same weight in groups of `group` inputs, a divisor of its group size."""
    times = weight.group // group
    if times == 1:
        return weight
    shifts = None if weight.shifts is None else weight.shifts.repeat_interleave(times, 1)
    return weight._replace(scales=weight.scales.repeat_interleave(times, 1), shifts=shifts)
