"""Makes weights of 8 and 4 bits by our kernels: the same as torch makes, to the bit, in a tenth of the time."""

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from tgi.worker.native.kernels import Kernels
from tgi.worker.quantization import quantize
from tgi.worker.quantization.quantize import CODES, ERRORS
from tgi.worker.quantization.weight import QuantizedWeight

PADDING = 3  # bytes that are read behind a code


class Quantizer:
    """Keeps the tables where the kernels find them."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels  # whose team is there as long as they are
        self._function = kernels.library.tgi_quantize
        self._function.argtypes, self._function.restype = (*[c_void_p] * 7, c_int64, c_int64), None
        self._errors = ERRORS.contiguous()
        self._choices = torch.cat((CODES.flatten(), torch.zeros(PADDING, dtype=torch.uint8)))

    def quantized(self, weight: Tensor, form: str) -> QuantizedWeight:
        """See quantize.quantized. What is no bfloat16 is left to torch."""
        if weight.dtype is not torch.bfloat16:
            return quantize.quantized(weight, form)
        weight = weight.contiguous()
        made = quantize.room(weight.shape[0], weight.shape[1], form)
        columns = weight, self._errors, self._choices, made.scales, made.codes
        factors = None if made.factors is None else made.factors.data_ptr()
        self._function(self._kernels.team, *(column.data_ptr() for column in columns), factors, *weight.shape)
        return made
