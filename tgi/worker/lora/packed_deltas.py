"""LoRA deltas on our own CPU kernels: computed first, and added to the accumulators of the projections.

So an activation follows the addition, and a token without an adapter adds an exact zero: it gets the same bits as in a
step without adapters. See cpu_kernels/lora.cpp.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.cpu_kernels.kernels import MAX_TILE_ROWS, CpuKernels, LoraTiles
from tgi.worker.cpu_kernels.program import LoraStep, lora_step
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import Mlp
from tgi.worker.lora.deltas import AdapterSpan
from tgi.worker.lora.projections import PANEL, PROJECTION_GROUPS, PROJECTIONS, ProjectionShapes, padded
from tgi.worker.lora.weights import LoraPair, LoraWeights

FIELDS = 3  # of a LoraPair in cpu_kernels/lora.h


class PackedWeights:
    """An adapter in the memory layout of the kernels, for a model with projections of these shapes and this dtype."""

    def __init__(self, weights: LoraWeights, shapes: ProjectionShapes, dtype: torch.dtype) -> None:
        self.groups = weights.groups
        self._dtype = dtype
        self._kept: list[Tensor] = []
        # By group: the addresses and ranks of the pairs, int64 [layers, projections, FIELDS].
        self.pairs = {
            group: torch.tensor(
                [[self._pair(pairs[PROJECTIONS.index(name)]) for name in names] for pairs in weights.layers]
            )
            for group, names in _group_projections(shapes).items()
        }

    def _pair(self, pair: LoraPair | None) -> tuple[int, int, int]:
        """The address of a, the address of b, and the rank, padded to a multiple of PANEL."""
        if pair is None:
            return (0, 0, 0)
        a, b = (_pack(matrix, self._dtype) for matrix in pair)
        self._kept += (a, b)
        return (a.data_ptr(), b.data_ptr(), padded(pair.a.shape[1]))


def _group_projections(shapes: ProjectionShapes) -> dict[str, list[str]]:
    """The projections of each group that a model has."""
    return {
        group: [name for matrix in matrices for name in matrix if name in shapes]
        for group, matrices in PROJECTION_GROUPS.items()
    }


def _pack(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Packs a matrix [depth, columns], padded with zeros to multiples of 32, in the order of element_index in
    elements.h: bfloat16 [columns / 32][depth / 2][32][2], other types [columns / 32][depth][32]."""
    depth, columns = matrix.shape
    filled = F.pad(matrix.to(dtype), (0, padded(columns) - columns, 0, padded(depth) - depth))
    paired = 2 if dtype is torch.bfloat16 else 1
    blocks = filled.view(padded(depth) // paired, paired, padded(columns) // PANEL, PANEL)
    return blocks.permute(2, 0, 3, 1).contiguous()


class PackedGroup(NamedTuple):
    """The deltas of one projection group in a step; the buffer is reused by each layer."""

    adapters: Tensor  # int64 [layers, adapters] the address of each adapter's pairs
    bounds: Tensor  # int64 [parts + 1] columns of `plus` before each projection
    plus: Tensor  # float32 [rows, columns]


class PackedDeltas:
    """The deltas of one step of `rows` tokens."""

    def __init__(self, spans: Sequence[AdapterSpan], rows: int, shapes: ProjectionShapes, kernels: CpuKernels) -> None:
        mine: dict[PackedWeights, list[range]] = {}
        for adapter, first, stop in spans:
            mine.setdefault(adapter, []).append(range(first, stop))
        self._kernels = kernels
        self._adapters = len(mine)
        self._tiles = _tiles(list(mine.values()))
        self._groups = {
            group: _build_group(
                [adapter.pairs[group] for adapter in mine], [shapes[name].outputs for name in names], rows
            )
            for group, names in _group_projections(shapes).items()
            if any(group in adapter.groups for adapter in mine)
        }

    def layer_deltas(self, layer: int) -> "PackedLayerDeltas":
        return PackedLayerDeltas(self._kernels, self._tiles, self._groups, layer)

    def adapted(self) -> LoraStep:
        """The deltas of all layers, for a program."""
        return lora_step(self._tiles, self._adapters, [self._groups.get(group) for group in PROJECTION_GROUPS])


class PackedLayerDeltas(NamedTuple):
    """The deltas of one layer of a step."""

    kernels: CpuKernels
    tiles: LoraTiles
    groups: dict[str, PackedGroup]
    layer: int

    def apply_linear(self, group: str, linear: Linear, x: Tensor, other: Tensor | None = None) -> Tensor:
        return linear(x, other, self._plus(group, x))

    def apply_mlp_inner(self, mlp: Mlp, x: Tensor) -> Tensor:
        plus = self._plus("inner", x)
        if plus is None:
            return mlp.gate_up(x)
        if mlp.gate is None:
            return mlp.up(x, None, plus)
        width = mlp.gate.outputs
        return mlp.up(x, mlp.gate(x, None, plus[:, :width]), plus[:, width:])

    def _plus(self, group: str, x: Tensor) -> Tensor | None:
        found = self.groups.get(group)
        if found is None:
            return None
        self.kernels.lora(x, found.plus, self.tiles, found.adapters[self.layer].data_ptr(), found.bounds)
        return found.plus


def _tiles(ranges: list[list[range]]) -> LoraTiles:
    """Tiles of the tokens of each adapter."""
    tokens, bounds, owners = [], [0], []
    for owner, own in enumerate(ranges):
        mine = np.concatenate([np.arange(one.start, one.stop) for one in own])
        tokens.append(mine)
        for first in range(0, len(mine), MAX_TILE_ROWS):
            bounds.append(bounds[-1] + min(MAX_TILE_ROWS, len(mine) - first))
            owners.append(owner)
    return LoraTiles(torch.from_numpy(np.concatenate(tokens)), torch.tensor(bounds), torch.tensor(owners))


def _build_group(pairs: list[Tensor], outputs: list[int], rows: int) -> PackedGroup:
    layers = torch.arange(len(pairs[0]))[:, None] * pairs[0][0].nbytes
    bounds = torch.tensor([0, *outputs]).cumsum(0)
    return PackedGroup(
        layers + torch.tensor([one.data_ptr() for one in pairs]), bounds, torch.zeros(rows, int(bounds[-1]))
    )
