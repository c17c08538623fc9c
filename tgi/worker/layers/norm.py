"""Normalization over the last dimension, computed in float32."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch import float32 as wide

from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.program import Program
from tgi.worker.gpu_kernels.attention_arguments import HeadNorm
from tgi.worker.gpu_kernels.kernels import GpuKernels


class Norm(NamedTuple):
    """y = weight * (x - m) / sqrt(mean((x - m)^2) + epsilon) + bias, in x's dtype.

    m is 0 (RMS norm; Zhang and Sennrich, 2019) or, if `centred`, the mean of x (layer norm; Ba et al., 2016). Weight
    and bias are float32, since operations on mixed dtypes are slow. A weight of more than one dimension scales the last
    dimensions of x; the mean is still taken over the last one alone.
    """

    weight: Tensor
    bias: Tensor | None
    epsilon: float
    centred: bool
    # Used for x with one dimension more than `weight`: its rows. None: torch's kernels.
    kernels: CpuKernels | GpuKernels | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of each row of x [..., size]."""
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

    def normalize_in_place(self, x: Tensor) -> None:
        """Overwrites x, a view of some columns of a matrix, with its norm."""
        if isinstance(self.kernels, GpuKernels):
            self.kernels.norm_in_place(x, self.weight, self.bias, self.epsilon, self.centred)
        else:
            x.copy_(self(x))

    def of_heads(self, after_rotation: bool) -> HeadNorm | None:
        """This norm, if it is an RMS norm of each head."""
        if self.weight.ndim != 2 or self.centred or self.bias is not None:
            return None
        return HeadNorm(self.weight, self.epsilon, after_rotation)

    def append_to(self, program: Program, x: int, y: int, start: int = 0) -> None:
        """Appends this norm to a program: of the columns from `start` on of buffer x, written to those of buffer y."""
        program.norm(x, y, start, self.weight, self.bias, self.epsilon, self.centred)
