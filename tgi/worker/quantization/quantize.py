"""Makes weights of 8 or 4 bits from plain ones, in groups of 32 inputs and without shifts.

8 bits: the largest number of a group becomes 127 or -127. That is near enough that more thought gains nothing.

4 bits: codes reach from -8 to 7, so the number of largest magnitude becomes a negative code, whatever its sign: the
scale may be negative. Whether it is best drawn to -8, to -7 or beyond the end differs from group to group, so all are
tried. For the codes found, the scale with the least squared error is known: with weights w and codes c it is w.c / c.c,
and what it explains of w.w is (w.c)^2 / c.c, by which the best of the three is chosen.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tgi.worker.quantization.weight import QuantizedWeight
from tgi.worker.threads import usable_cores

GROUP = 32
EXTREMES = (-8.0, -7.0, -9.0)  # codes that the number of largest magnitude in a group is drawn to, in 4 bits
# Elements at once: what is computed on the way stays in a core's cache, and torch does not divide it once more.
PIECE = 1 << 15


def quantized(weight: Tensor, form: str) -> QuantizedWeight:
    """The weight [outputs, inputs] as "int8" or "int4". `inputs` is a multiple of GROUP."""
    (outputs, inputs), wide = weight.shape, form == "int8"
    groups = weight.reshape(-1, GROUP)
    codes = torch.empty(len(groups), GROUP if wide else GROUP // 2, dtype=torch.int8 if wide else torch.uint8)
    scales = torch.empty(len(groups), dtype=torch.float16)
    make, some = _int8 if wide else _int4, PIECE // GROUP

    @torch.inference_mode()  # as the caller may be, which other threads do not know
    def fill(piece: tuple[Tensor, Tensor, Tensor]) -> None:
        found, its_codes, its_scales = piece
        for column, made in zip((its_codes, its_scales), make(found.float()), strict=True):
            column.copy_(made)

    with ThreadPoolExecutor(usable_cores()) as pool:
        deque(pool.map(fill, zip(groups.split(some), codes.split(some), scales.split(some), strict=True)), maxlen=0)
    return QuantizedWeight(codes.view(outputs, -1), scales.view(outputs, inputs // GROUP), None)


def _int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    scales = (groups.abs().amax(-1) / 127).to(torch.float16)
    return _codes(groups, scales.float(), -127, 127).to(torch.int8), scales


def _int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best, scales = torch.full_like(extreme, -1.0), torch.zeros_like(extreme)
    for end in EXTREMES:
        codes = _codes(groups, extreme / end, -8, 7)
        common, own = (groups * codes).sum(-1), (codes * codes).sum(-1).clamp_min(1.0)
        explained = common * common / own
        better = explained > best
        best = torch.where(better, explained, best)
        scales = torch.where(better, common / own, scales)
    scales = scales.to(torch.float16)
    numbers = (_codes(groups, scales.float(), -8, 7) + 8).to(torch.uint8)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, scales


def _codes(groups: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """The nearest codes of [n, GROUP], as float32. Where a scale is zero they are too."""
    inverse = torch.where(scales == 0, 0.0, scales.reciprocal())
    return (groups * inverse[:, None]).round_().clamp_(least, most)
