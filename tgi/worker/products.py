"""How a linear layer multiplies where its weight may stay quantized, that is on a GPU: y = x @ weight.T + bias.

Few rows are multiplied straight from the columns of the weight by our own kernel, if there is one. For many, each call
makes numbers of the whole weight; to weights of 8-bit floats, it makes the activations 8-bit floats as well.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker import float8
from tgi.worker.gpu.kernels import Gpu
from tgi.worker.quantization.weight import QuantizedWeight, Weight

# Rows up to which our kernel computes, by what it would cost to do otherwise. No GPU has been asked yet.
FEW, FEW_FLOATS = 64, 16

Product = Callable[[Tensor], Tensor]


def find_product(weight: Weight, bias: Tensor | None, dtype: torch.dtype, gpu: Gpu | None) -> Product:
    """What multiplies x [rows, inputs] in `dtype` where the weight lies."""
    if isinstance(weight, Tensor):
        return partial(F.linear, weight=weight, bias=bias)
    dequantizing = partial(_dequantizing, weight, bias, dtype)
    if dtype is torch.float32:
        return dequantizing
    floats = weight.floating and float8.multiplies(weight.device)
    scaled = float8.scaled if gpu is None else gpu.scaled
    many = partial(float8.product, weight=weight, bias=bias, scaled=scaled) if floats else dequantizing
    if gpu is None:
        return many
    return partial(_by_rows, FEW_FLOATS if floats else FEW, partial(gpu.product, weight=weight, bias=bias), many)


def _dequantizing(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, x: Tensor) -> Tensor:
    return F.linear(x, weight.dequantized(dtype), bias)


def _by_rows(few: int, by_few: Product, by_many: Product, x: Tensor) -> Tensor:
    return by_few(x) if x.shape[0] <= few else by_many(x)
