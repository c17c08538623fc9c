"""Norms over the last dimension, computed in float32."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch import float32 as wide

from tgi.worker.gpu.kernels import Gpu
from tgi.worker.native.kernels import Kernels
from tgi.worker.native.program import Program


class Norm(NamedTuple):
    """y = weight * (x - m) / sqrt(mean((x - m)^2) + epsilon) + bias, in x's dtype.

    m is 0 (root mean square norm; Zhang and Sennrich, 2019) or, where `centred`, the mean of x (layer norm; Ba et al.,
    2016). Weight and bias are float32, since operations on mixed dtypes are slow. `weight` may have more than one
    dimension: then it scales the last ones of x, which is normed over the last alone.
    """

    weight: Tensor
    bias: Tensor | None
    epsilon: float
    centred: bool
    kernels: Kernels | Gpu | None = None  # for x with as many dimensions as `weight`, and one for its rows

    def __call__(self, x: Tensor) -> Tensor:
        size = self.weight.shape[-1:]
        flat = self.weight.ndim == 1
        if self.kernels is not None:
            return self.kernels.norm(x, self.weight, self.bias, self.epsilon, self.centred)
        weight, bias = (self.weight, self.bias) if flat else (None, None)
        if self.centred:
            y = F.layer_norm(x.to(wide), size, weight, bias, self.epsilon)
        else:
            y = F.rms_norm(x.to(wide), size, weight, self.epsilon)
        return (y if flat else y * self.weight).to(x.dtype)

    def in_place(self, x: Tensor) -> None:
        """x, some columns of a matrix, becomes its norm."""
        if isinstance(self.kernels, Gpu):
            self.kernels.norm_in_place(x, self.weight, self.bias, self.epsilon, self.centred)
        else:
            x.copy_(self(x))

    def write(self, program: Program, x: int, y: int, start: int = 0) -> None:
        """Writes this norm down: of the numbers from `start` on of the rows in buffer x, to the same place in y."""
        program.norm(x, y, start, self.weight, self.bias, self.epsilon, self.centred)
