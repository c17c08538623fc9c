"""Causal convolutions of recurrent layers, and the gated short convolution that LFM2 mixes tokens with."""

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.cpu_kernels import recurrent
from tgi.worker.cpu_kernels.kernels import CpuKernels
from tgi.worker.cpu_kernels.program import Program
from tgi.worker.cpu_kernels.recurrent import ConvForm
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.recurrence import ChosenRows, MixerTensors, Recurrence
from tgi.worker.mixers.short_conv import ShortConvConfig
from tgi.worker.state_cache import StateRows


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, rows: StateRows, window: Tensor) -> Tensor:
    """A convolution of each channel of x [T, channels] over the tokens of its row, float32 [T, channels]: `weight` is
    float32 [kernel, channels], for the oldest input first. Reads and overwrites `window` [slots, kernel - 1, channels].
    """
    found = []
    for group in rows.groups:
        own = x[group.tokens].view(-1, group.each, x.shape[1])
        inputs = torch.cat((rows.read(window, group), own), 1)
        for token in range(group.each if rows.kept is not None else 0):
            rows.keep(window, group, token, inputs[:, token + 1 : token + len(weight)])
        rows.write(window, group, inputs[:, group.each :])
        wide = inputs.to(torch.float32)
        sums = reduce(torch.add, (wide[:, n : n + group.each] * tap for n, tap in enumerate(weight)))
        found.append(sums.flatten(0, 1))
    y = torch.cat(found)
    return y if bias is None else y + bias


class ShortConv(NamedTuple):
    """ShortConvConfig between its two projections."""

    layer: int  # its number among the recurrent layers
    weight: Tensor  # float32 [kernel, channels], for the oldest input first
    bias: Tensor | None  # float32 [channels]
    kernels: CpuKernels | GpuKernels | None  # None: torch's

    @property
    def widths(self) -> tuple[int, int, int]:
        channels = self.weight.shape[1]
        return 3 * channels, channels, 0

    @property
    def linears(self) -> list[Linear]:
        """Its linear layers: none."""
        return []

    def __call__(self, normed: Tensor, x: Tensor, rows: StateRows) -> Tensor:
        """c * conv(b * u) [T, channels] of x = [b, c, u] [T, 3 * channels]. `normed` is not needed."""
        window = rows.cache.layers[self.layer]["window"]
        if isinstance(self.kernels, GpuKernels):
            return self.kernels.causal_conv(x, self.weight, self.bias, True, rows, window)
        if isinstance(self.kernels, CpuKernels):
            return recurrent.causal_conv(
                self.kernels, x, window, self.weight, self.bias, ConvForm.GATED, rows.addresses
            )
        b, c, u = x.chunk(3, 1)
        return (convolve(b * u, self.weight, self.bias, rows, window) * c).to(x.dtype)

    def append_to(self, program: Program, normed: int, x: int, gates: int, y: int) -> None:
        """Appends it to a program, of buffer x, written to y."""
        program.conv(x, y, self.layer, self.weight, self.bias, ConvForm.GATED)


def load(tensors: MixerTensors, config: ShortConvConfig, local: range, number: int) -> Recurrence:
    """Recurrent layer `number` of a rank that has the channels `local`."""
    chosen, size = torch.arange(local.start, local.stop), config.channels
    weight = tensors.vector("conv.weight", chosen, size, 1, config.kernel)[:, 0].t().contiguous()
    bias = tensors.vector("conv.bias", chosen, size) if config.bias else None
    thirds = torch.cat([chosen + third * size for third in range(3)])
    return Recurrence(
        tensors.input([ChosenRows("in_proj", 3 * size, thirds)], config.bias),
        ShortConv(number, weight, bias, tensors.kernels),
        tensors.output("out_proj", size, local, config.bias),
    )
