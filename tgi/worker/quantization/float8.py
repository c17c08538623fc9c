"""Matrix products of 8-bit floats (e4m3) with torch, on GPUs from compute capability 8.9 on.

The activations are quantized too (dynamic per-row quantization): each row gets a scale that maps its largest magnitude
to 448, the largest number of the format. An 8-bit float has a 3-bit fraction, so each activation is off by at most 1/16
of itself, or by 2**-10 of the scale. The sums of a product, in float32 and rounded to bfloat16, are off by about 1/40
of their typical size.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.quantization.quantize import MAX_FLOAT8, quantize_weight
from tgi.worker.quantization.weight import QuantizedWeight

RowQuantizer: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]  # the signature of `quantize_rows`

log = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 9)  # CUDA's compute capability
MIN_ROW_SCALE = torch.finfo(torch.float32).tiny
MAX_RELATIVE_ERROR = 0.05  # of a product of random numbers; the formats account for about half of it


def stays_float8_on(device: torch.device) -> bool:
    """Whether weights of 8-bit floats are kept as they are on this device, else they are dequantized at load."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


@cache
def has_float8_matmul(device: torch.device) -> bool:
    """Whether `float8_matmul` computes correct products on this device. Tested once; a failure is logged."""
    generator = torch.Generator().manual_seed(0)
    weight = quantize_weight(torch.randn(64, 256, generator=generator), "fp8").to(device)
    x = torch.randn(40, 256, generator=generator).to(device, torch.bfloat16)
    expected = F.linear(x, weight.dequantized(torch.bfloat16)).float()
    try:
        off = float((float8_matmul(x, weight, None).float() - expected).norm() / expected.norm())
    except RuntimeError as error:
        log.warning("8-bit floats are dequantized in products of many rows: torch has none here: %s", error)
        return False
    if not off < MAX_RELATIVE_ERROR:
        log.warning("8-bit floats are dequantized in products of many rows: torch's are off by %.3f", off)
        return False
    return True


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit floats [rows, inputs] and float32 scales [rows, 1] of x [rows, inputs]."""
    rows = x.to(torch.float32)
    scales = (rows.abs().amax(1, keepdim=True) / MAX_FLOAT8).clamp_min_(MIN_ROW_SCALE)
    return (rows / scales).clamp_(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn), scales


def float8_matmul(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, row_quantizer: RowQuantizer = quantize_rows
) -> Tensor:
    """x @ weight.T + bias, [rows, outputs] in the type of x [rows, inputs], for a weight of 8-bit floats.
    `row_quantizer` quantizes the activations."""
    codes, scales = row_quantizer(x)
    # Some of torch's kernels take row scales only for results in bfloat16.
    y = torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales,
        scale_b=weight.scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(x.dtype)
    return y if bias is None else y.add_(bias)
