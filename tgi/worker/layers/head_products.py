"""Products of each head with a matrix of its own: the absorbed matrices of latent attention (see LatentConfig)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.cpu_kernels.kernels import CpuKernels, PackedHeads
from tgi.worker.cpu_kernels.program import Program
from tgi.worker.layers.linear import ROW_TILE


class HeadProducts:
    """y[t, h] = [weight[h] x[t, h, :inputs], x[t, h, inputs:]], for weight [heads, outputs, inputs].

    The last `kept` elements of a head are kept as they are. Batch invariant: on torch's kernels calls have ROW_TILE
    rows, unless `any_rows` says that the caller needs no invariance.
    """

    def __init__(self, weight: Tensor, kept: int, kernels: CpuKernels | None = None, any_rows: bool = False) -> None:
        self.heads, self.outputs, self.inputs = weight.shape
        self.kept = kept
        self.any_rows = any_rows
        self._kernels = kernels
        self._packed: PackedHeads | None = None if kernels is None else kernels.pack_heads(weight)
        self._weight = weight.transpose(1, 2).contiguous() if kernels is None else None  # [heads, inputs, outputs]

    def __call__(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        """y [rows, heads * (outputs + kept)] for x [rows, heads * (inputs + kept)]. `last` [rows, outputs + kept]: one
        more head, which follows the others in y."""
        if self._kernels is not None:
            assert self._packed is not None
            return self._kernels.head_products(x, self._packed, self.kept, last)
        heads = x.view(len(x), self.heads, self.inputs + self.kept)
        y = x.new_empty(len(x), self.heads + (last is not None), self.outputs + self.kept)
        own, given = y[:, : self.heads, : self.outputs], heads[:, :, : self.inputs].transpose(0, 1)
        if self.any_rows:
            assert self._weight is not None
            torch.bmm(given, self._weight, out=own.transpose(0, 1))
        else:
            own.copy_(self._products(given).transpose(0, 1))
        if self.kept:
            y[:, : self.heads, self.outputs :] = heads[:, :, self.inputs :]
        if last is not None:
            y[:, self.heads] = last
        return y.flatten(1)

    def append_to(self, program: Program, x: int, y: int, last: int | None = None) -> None:
        """Appends these products to a program; x, y and last are buffer numbers. Our CPU kernels only."""
        assert self._packed is not None
        program.head_products(x, y, self._packed, self.kept, last)

    def _products(self, x: Tensor) -> Tensor:
        """[heads, rows, outputs] for x [heads, rows, inputs]."""
        assert self._weight is not None
        rows = x.shape[1]
        tiles = F.pad(x, (0, 0, 0, -rows % ROW_TILE)).split(ROW_TILE, 1)
        return torch.cat([torch.bmm(tile.contiguous(), self._weight) for tile in tiles], 1)[:, :rows]
