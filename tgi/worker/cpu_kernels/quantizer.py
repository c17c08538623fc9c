"""Quantizes weights at load with a CPU kernel: bit for bit as quantization/quantize.py, in a tenth of the time."""

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from tgi.worker.cpu_kernels.kernels import CpuKernels, format_code
from tgi.worker.quantization import quantize
from tgi.worker.quantization.quantize import GRID_CODES, GRID_ERRORS
from tgi.worker.quantization.weight import QuantizedWeight

TYPES = (torch.bfloat16, torch.float16, torch.float32)
PADDING = 3  # bytes that the kernel reads past the last code, since it gathers 32-bit words


class CpuQuantizer:
    """Holds the lookup tables of the kernel."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels  # keeps its thread pool alive
        self._function = kernels.library.tgi_quantize
        self._function.argtypes, self._function.restype = (
            (c_void_p, c_void_p, c_int64, *[c_void_p] * 5, c_int64, c_int64),
            None,
        )
        self._errors = GRID_ERRORS.contiguous()
        self._codes = torch.cat((GRID_CODES.flatten(), torch.zeros(PADDING, dtype=torch.uint8)))

    def quantize_weight(self, weight: Tensor, form: str) -> QuantizedWeight:
        """See quantize.quantize_weight. Types other than bfloat16, float16 and float32 are left to torch."""
        if weight.dtype not in TYPES:
            return quantize.quantize_weight(weight, form)
        weight = weight.contiguous()
        made = quantize.empty_weight(weight.shape[0], weight.shape[1], form)
        columns = self._errors, self._codes, made.scales, made.codes
        factors = None if made.factors is None else made.factors.data_ptr()
        source = weight.data_ptr(), format_code(weight)
        self._function(
            self._kernels.thread_pool, *source, *(column.data_ptr() for column in columns), factors, *weight.shape
        )
        return made
