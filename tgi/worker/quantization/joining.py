"""One matrix of several weights, which may have come in different forms."""

from collections.abc import Sequence

import torch

from tgi.worker.quantization.weight import QuantizedWeight, Weight, joined, plain


def matrix(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """The weights one above the other, in the fewest bits that hold all of them exactly. Where none of ours does, as
    beside a plain weight, the matrix is plain, in `dtype`."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts):
        common = _common(quantized)
        if common is not None:
            return joined(common)
    return torch.cat([plain(part, dtype) for part in parts])


def _common(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight] | None:
    """The same weights with the same bits, groups and columns, or None."""
    if all(part.factors is not None for part in parts) or all(part.floating for part in parts):
        return list(parts)
    if any(part.floating for part in parts):
        return None
    parts = [part if part.factors is None else QuantizedWeight(part.numbers(), part.scales, None) for part in parts]
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    shifted = any(part.shifts is not None for part in parts)
    if any(part.group % group for part in parts):
        return None
    found = []
    for part in parts:
        part = _finer(part, group)
        if part.bits < bits:
            part = QuantizedWeight(part.numbers(), part.scales, part.shifts)
        if shifted and part.shifts is None:
            # Four bits count from 0 with shifts and from -8 without.
            shifts = part.scales * -8 if part.bits == 4 else torch.zeros_like(part.scales)
            if not shifts.isfinite().all():
                return None
            part = part._replace(shifts=shifts)
        found.append(part)
    return found


def _finer(weight: QuantizedWeight, group: int) -> QuantizedWeight:
    """The same in groups of `group`, which divides its own."""
    times = weight.group // group
    if times == 1:
        return weight
    shifts = None if weight.shifts is None else weight.shifts.repeat_interleave(times, 1)
    return QuantizedWeight(weight.codes, weight.scales.repeat_interleave(times, 1), shifts)
