"""Products of 8-bit floats (e4m3), which GPUs from compute capability 8.9 on multiply as they are.

The activations become 8-bit floats too, each row with a scale by which its largest magnitude is 448, the largest that
the format has. Such a float has three bits behind the first, so each activation is off by at most 1/16 of itself, or by
2**-10 of the scale, and the sums of a product, in float32 and rounded to bfloat16, by about 1/40 of their usual size.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.quantization.quantize import MOST_FLOAT, quantized
from tgi.worker.quantization.weight import QuantizedWeight

Scaled: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]

log = logging.getLogger(__name__)

SINCE = (8, 9)  # CUDA's compute capability
TINY = torch.finfo(torch.float32).tiny
MULTIPLE = 16
ERROR = 0.05  # of a product with random numbers, relative; the formats allow for about half of it


def held_on(device: torch.device) -> bool:
    """Whether weights of 8-bit floats are held there as they are."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= SINCE


def fits(outputs: int, inputs: int) -> bool:
    """Whether there are products with weights of this size."""
    return outputs % MULTIPLE == inputs % MULTIPLE == 0


@cache
def multiplies(device: torch.device) -> bool:
    """Whether `product` computes there, which is tried once; the log says if not."""
    generator = torch.Generator().manual_seed(0)
    weight = quantized(torch.randn(64, 256, generator=generator), "fp8").to(device)
    x = torch.randn(40, 256, generator=generator).to(device, torch.bfloat16)
    expected = F.linear(x, weight.dequantized(torch.bfloat16)).float()
    try:
        off = float((product(x, weight, None).float() - expected).norm() / expected.norm())
    except RuntimeError as error:
        log.warning("8-bit floats are dequantized in products of many rows: torch has none here: %s", error)
        return False
    if not off < ERROR:
        log.warning("8-bit floats are dequantized in products of many rows: torch's are off by %.3f", off)
        return False
    return True


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit floats [rows, inputs] and their float32 scales [rows, 1] for x [rows, inputs]."""
    rows = x.to(torch.float32)
    scales = (rows.abs().amax(1, keepdim=True) / MOST_FLOAT).clamp_min_(TINY)
    return (rows / scales).clamp_(-MOST_FLOAT, MOST_FLOAT).to(torch.float8_e4m3fn), scales


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, scaled: Scaled = scaled) -> Tensor:
    """x @ weight.T + bias, [rows, outputs] in the type of x [rows, inputs], for a weight of 8-bit floats. `scaled` does
    to x what the function of that name does."""
    codes, scales = scaled(x)
    # Scales of rows are taken for results in bfloat16 alone by some of torch's kernels.
    y = torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=scales,
        scale_b=weight.scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(x.dtype)
    return y if bias is None else y.add_(bias)
