"""Makes weights of 8 or 4 bits from plain ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgi.worker.quantization.weight import QuantizedWeight

SMALLEST_GROUP = 32
_PIECE = 1 << 22  # elements quantized at once: what is computed on the way has several times their memory


def quantized(weight: Tensor, form: str) -> QuantizedWeight:
    """The weight [outputs, inputs] as "int8" or "int4". `inputs` is a multiple of SMALLEST_GROUP."""
    rows = max(1, _PIECE // weight.shape[1])
    parts = [_FORMS[form](piece.float()) for piece in weight.split(rows)]
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return QuantizedWeight(codes, scales, None)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    grouped = weight.view(weight.shape[0], -1, SMALLEST_GROUP)
    scales = _float16(grouped.abs().amax(-1) / 127)
    return _codes(grouped, scales, -127, 127).view(weight.shape), scales


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    grouped = weight.view(weight.shape[0], -1, SMALLEST_GROUP)
    scales = _float16(grouped.abs().amax(-1) / 7)
    codes = (_codes(grouped, scales, -8, 7) + 8).view(weight.shape).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


_FORMS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"int8": _int8, "int4": _int4}


def _float16(scales: Tensor) -> Tensor:
    return scales.to(torch.float16)


def _codes(grouped: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    """The nearest codes of [outputs, groups, group], int8. Where a scale is zero they are too."""
    inverse = scales.float().reciprocal().nan_to_num(posinf=0.0, neginf=0.0)
    return (grouped * inverse[:, :, None]).round().clamp(least, most).to(torch.int8)
