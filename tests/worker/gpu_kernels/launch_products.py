"""Launches quantized_matmul for all kinds of weights, with the sizes of real models."""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from tgi.worker.gpu_kernels.float8 import quantize_rows
from tgi.worker.gpu_kernels.quantized_matmul import quantized_matmul
from tgi.worker.quantization import float8
from tgi.worker.quantization.weight import QuantizedWeight

WIDE = 8192  # outputs of a large matrix


def forms(outputs: int, inputs: int) -> Iterator[QuantizedWeight]:
    """Uninitialized weights of all kinds, with the usual group sizes."""

    def column(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(outputs, width, dtype=dtype)

    codes = column(inputs, torch.int8), column(inputs // 2, torch.uint8)
    single = column(1, torch.float16)
    yield QuantizedWeight(codes[0], single, None)
    yield QuantizedWeight(codes[1], single, None, column(inputs // 32, torch.uint8))
    yield QuantizedWeight(column(inputs, torch.float8_e4m3fn), single.float(), None)
    for group in (32, 128):
        scales = column(inputs // group, torch.float16)
        for code in codes:
            yield QuantizedWeight(code, scales, None)
            yield QuantizedWeight(code, scales, scales)
    for group in (32, 16):  # MXFP4, NVFP4
        yield QuantizedWeight(codes[1], single.double(), None, column(inputs // group, torch.int8))
    yield QuantizedWeight(column(inputs, torch.float8_e4m3fn), column(inputs // 128, torch.float32), None)


def launches(dtype: torch.dtype) -> None:
    """See compile_launches.py. Half of them have a bias, and some many outputs. All forms are compiled for one
    capability and type, some of them for many rows too; some are for the others."""
    capability = divmod(triton.runtime.driver.active.get_current_target().arch, 10)
    x, bias = torch.empty(300, 2048, dtype=dtype), torch.empty(WIDE, dtype=dtype)
    if capability >= float8.MIN_CAPABILITY and dtype is not torch.float32:
        for inputs in (2048, 14336):
            quantize_rows(torch.empty(3, inputs, dtype=dtype))
    full = (dtype, capability) == (torch.bfloat16, (9, 0))
    for number, weight in enumerate(forms(WIDE, 2048)):
        if weight.floating and capability < float8.MIN_CAPABILITY:
            continue
        if number not in ((1, 10) if dtype is torch.float32 else FEW_FORMS) and not full:
            continue
        outputs = WIDE if number % 3 == 0 else 512
        part, biased = weight.split([outputs, WIDE - outputs])[0], bias[:outputs] if number % 2 else None
        for rows in (3, 40, 300) if full and number in FEW_FORMS else (3,):
            quantized_matmul(x[:rows], part, biased)


FEW_FORMS = (0, 1, 2, 3, 11, 12)
