"""Quantizes plain weights at load: to 8-bit integers, the 4-bit codebook or 8-bit floats, with one scale per output.

The scale maps an output's largest magnitude to 127, or to 448, the largest number of float8_e4m3fn. 8 bits hold every
integer from -127 to 127; with 4 bits, each group of 32 inputs gets the factor of the codebook (weight.py) that leaves
the least squared error. Nothing is clipped: a smaller scale can leave an output less squared error, but the model that
this was measured with was no better for it.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.host_cpu import usable_cores
from tgi.worker.quantization.weight import CODEBOOK, QuantizedWeight
from tgi.worker.quantization.weight_forms import FACTOR_GROUP

WeightQuantizer: TypeAlias = Callable[[Tensor, str], QuantizedWeight]  # the signature of `quantize_weight`

MAX_INT8, MAX_FLOAT8 = 127, 448
# Elements of a work item: intermediate results stay in a core's cache, and torch does not parallelize them again.
QUANTIZED_AT_ONCE = 1 << 15
# Codes and their errors are looked up on a grid with this many points from one integer to the next.
GRID_STEPS = 4
_GRID = torch.arange(-MAX_INT8 * GRID_STEPS, MAX_INT8 * GRID_STEPS + 1) / GRID_STEPS
_GRID_DIFFERENCES = _GRID[:, None, None] - CODEBOOK  # [points, factors, codes]
GRID_ERRORS = _GRID_DIFFERENCES.square().amin(-1)  # float32 [points, factors] squared error of the nearest level
GRID_CODES = _GRID_DIFFERENCES.abs().argmin(-1).to(torch.uint8)  # [points, factors] code of the nearest level


def quantize_weight(weight: Tensor, form: str) -> QuantizedWeight:
    """The weight [outputs, inputs] as `form`: "int8", "int4" or "fp8". `inputs` is a multiple of FACTOR_GROUP. An
    output with a number that is not finite gets a scale that is not finite."""
    made = empty_weight(weight.shape[0], weight.shape[1], form)
    most = MAX_FLOAT8 if made.floating else MAX_INT8
    pieces = weight.split(max(1, QUANTIZED_AT_ONCE // weight.shape[1]))

    @torch.inference_mode()  # other threads do not inherit the caller's mode
    def fill(piece: Tensor, target: QuantizedWeight) -> None:
        numbers = piece.float()
        target.scales.copy_(numbers.abs().amax(1, keepdim=True) / most)
        scales = target.scales.float()
        numbers = (numbers * torch.where(scales == 0, 0.0, scales.reciprocal())).nan_to_num_().clamp_(-most, most)
        if target.factors is not None:
            _quantize_to_codebook(numbers, target.codes, target.factors)
        else:
            target.codes.copy_(numbers if target.floating else numbers.round_())

    with ThreadPoolExecutor(usable_cores()) as pool:
        deque(pool.map(fill, pieces, made.split([len(piece) for piece in pieces])), maxlen=0)
    return made


def empty_weight(outputs: int, inputs: int, form: str) -> QuantizedWeight:
    """Uninitialized columns of the weight that `quantize_weight` makes."""
    if form == "fp8":
        return QuantizedWeight(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), torch.empty(outputs, 1), None)
    wide = form == "int8"
    return QuantizedWeight(
        codes=torch.empty(outputs, inputs if wide else inputs // 2, dtype=torch.int8 if wide else torch.uint8),
        scales=torch.empty(outputs, 1, dtype=torch.float16),
        shifts=None,
        factors=None if wide else torch.empty(outputs, inputs // FACTOR_GROUP, dtype=torch.uint8),
    )


def _quantize_to_codebook(numbers: Tensor, codes: Tensor, factors: Tensor) -> None:
    """Fills in codes and factors for numbers from -MAX_INT8 to MAX_INT8, float32 [n, inputs]."""
    points = (numbers * GRID_STEPS).round_().to(torch.int32).add_(MAX_INT8 * GRID_STEPS).view(-1, FACTOR_GROUP)
    chosen = F.embedding_bag(points, GRID_ERRORS, mode="sum").argmin(-1)  # least total error of each group
    factors.copy_(chosen.view(factors.shape))
    found = GRID_CODES.view(-1).index_select(0, (points * GRID_ERRORS.shape[1] + chosen.int()[:, None]).view(-1))
    torch.bitwise_or(found[::2], found[1::2] << 4, out=codes.view(-1))
