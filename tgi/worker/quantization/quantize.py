"""Makes weights of 8 or 4 bits from plain ones: whole numbers from -127 to 127 or 8-bit floats, and one scale for each
output, by which its largest magnitude is 127 or 448, the largest that such floats have.

8 bits hold any such whole number. 4 bits hold those of the codebook: each group of 32 inputs gets the factor that
leaves the least squared error. Nothing is clipped: a smaller scale can leave an output less squared error, but the
model that was tried was no better for it.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.quantization.codebook import TABLE
from tgi.worker.quantization.weight import QuantizedWeight
from tgi.worker.threads import usable_cores

Quantize: TypeAlias = Callable[[Tensor, str], QuantizedWeight]  # what does as `quantized`

GROUP = 32  # inputs that share a factor
MOST, MOST_FLOAT = 127, 448
# Elements at once: what is computed on the way stays in a core's cache, and torch does not divide it once more.
PIECE = 1 << 15
# What becomes of a weight is looked up, at so many places from one whole number to the next.
FINE = 4
_OFF = torch.arange(-MOST * FINE, MOST * FINE + 1)[:, None, None] / FINE - TABLE  # of each place from each number
ERRORS = _OFF.square().amin(-1)  # float32 [places, factors]
CODES = _OFF.abs().argmin(-1).to(torch.uint8)  # [places, factors]


def room(outputs: int, inputs: int, form: str) -> QuantizedWeight:
    """For a weight that is still to be made."""
    if form == "fp8":
        return QuantizedWeight(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), torch.empty(outputs, 1), None)
    wide = form == "int8"
    return QuantizedWeight(
        codes=torch.empty(outputs, inputs if wide else inputs // 2, dtype=torch.int8 if wide else torch.uint8),
        scales=torch.empty(outputs, 1, dtype=torch.float16),
        shifts=None,
        factors=None if wide else torch.empty(outputs, inputs // GROUP, dtype=torch.uint8),
    )


def quantized(weight: Tensor, form: str) -> QuantizedWeight:
    """The weight [outputs, inputs] as "int8", "int4" or "fp8". `inputs` is a multiple of GROUP. Where a weight is no
    finite number, the scale of its output is none either."""
    made = room(weight.shape[0], weight.shape[1], form)
    most = MOST_FLOAT if made.floating else MOST
    pieces = weight.split(max(1, PIECE // weight.shape[1]))

    @torch.inference_mode()  # as the caller may be, which other threads do not know
    def fill(piece: Tensor, its: QuantizedWeight) -> None:
        numbers = piece.float()
        its.scales.copy_(numbers.abs().amax(1, keepdim=True) / most)
        scales = its.scales.float()
        numbers = (numbers * torch.where(scales == 0, 0.0, scales.reciprocal())).nan_to_num_().clamp_(-most, most)
        if its.factors is not None:
            _choose(numbers, its.codes, its.factors)
        else:
            its.codes.copy_(numbers if its.floating else numbers.round_())

    with ThreadPoolExecutor(usable_cores()) as pool:
        deque(pool.map(fill, pieces, made.split([len(piece) for piece in pieces])), maxlen=0)
    return made


def _choose(numbers: Tensor, codes: Tensor, factors: Tensor) -> None:
    """Fills in codes and factors for numbers from -MOST to MOST, float32 [n, inputs]."""
    places = (numbers * FINE).round_().to(torch.int32).add_(MOST * FINE).view(-1, GROUP)
    chosen = F.embedding_bag(places, ERRORS, mode="sum").argmin(-1)  # of the sums of all its errors, for each group
    factors.copy_(chosen.view(factors.shape))
    found = CODES.view(-1).index_select(0, (places * ERRORS.shape[1] + chosen.int()[:, None]).view(-1))
    torch.bitwise_or(found[::2], found[1::2] << 4, out=codes.view(-1))
