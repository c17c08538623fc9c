"""LoRA deltas by our GPU kernels: what adapters add to the projections of one step, in one launch for each group of
projections, whatever adapters its rows have (gpu_kernels/lora.py).

Each projection is computed for all tokens as if there were no adapters, and then the deltas are added: a token without
an adapter gets the same bits as in a step without any. A layer that ends in an activation is computed without it, which
is applied after the delta.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.device_copies import copy_to_device
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.lora_arguments import AdapterTiles, PlanShape, padded_rank, write_plan
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import Mlp
from tgi.worker.lora.deltas import AdapterSpan
from tgi.worker.lora.projections import PROJECTION_GROUPS, RANK_MULTIPLE, Columns, ProjectionShapes, group_columns
from tgi.worker.lora.weights import LoraPair, LoraWeights


class LaunchedDeltas:
    """The deltas of one step. `bare` is, for each layer, the first linear layer of its MLP without the activation; None
    for experts."""

    def __init__(
        self, tiles: AdapterTiles, shapes: ProjectionShapes, bare: Sequence[Linear | None], kernels: GpuKernels
    ) -> None:
        self._tiles = tiles
        self._bare = bare
        self._kernels = kernels
        self._columns = {name: group_columns(name, shapes) for name in PROJECTION_GROUPS if name in tiles.groups}

    def layer_deltas(self, layer: int) -> "LaunchedLayerDeltas":
        return LaunchedLayerDeltas(self._tiles, layer, self._columns, self._bare[layer], self._kernels)


class LaunchedLayerDeltas(NamedTuple):
    """The deltas of one layer of a step."""

    tiles: AdapterTiles
    layer: int
    columns: dict[str, Columns]
    bare: Linear | None
    kernels: GpuKernels

    def apply_linear(self, group: str, linear: Linear, x: Tensor, other: Tensor | None = None) -> Tensor:
        """linear(x, other) with the deltas of a group, for a linear layer without an activation."""
        y = linear(x, other)
        if columns := self.columns.get(group):
            self.kernels.add_lora(x, y, self.tiles, self.layer, columns)
        return y

    def apply_mlp_inner(self, mlp: Mlp, x: Tensor) -> Tensor:
        if self.bare is None or "inner" not in self.columns:
            return mlp.gate_up(x)
        columns, first = self.columns["inner"], mlp.gate or mlp.up
        sums = self.bare(x)
        if mlp.gate is None:
            self.kernels.add_lora(x, sums, self.tiles, self.layer, columns)
            return first.activate(sums) if len(columns) == 1 else first.apply_gate(sums)
        # Gate and up are two layers: their weights have different formats.
        (gate, _, width), (up, _, _) = columns
        self.kernels.add_lora(x, sums, self.tiles, self.layer, ((gate, 0, width),))
        active = first.activate(sums)
        delta = torch.zeros_like(sums)
        self.kernels.add_lora(x, delta, self.tiles, self.layer, ((up, 0, width),))
        return mlp.up(x, active).add_(delta.mul_(active))


def padded_weights(adapter: LoraWeights) -> LoraWeights:
    """The adapter with ranks that are multiples of RANK_MULTIPLE."""

    def pad(pair: LoraPair | None) -> LoraPair | None:
        if pair is None or not (missing := -len(pair.b) % RANK_MULTIPLE):
            return pair
        return LoraPair(F.pad(pair.a, (0, missing)), F.pad(pair.b, (0, 0, 0, missing)))

    return LoraWeights([[pad(pair) for pair in pairs] for pairs in adapter.layers])


def adapter_table(adapter: LoraWeights, device: torch.device) -> Tensor:
    """The part of AdapterTiles.table of padded weights, int64 [layers, projections, 3]."""
    entries = [
        [(0, 0, 0) if pair is None else (pair.a.data_ptr(), pair.b.data_ptr(), len(pair.b)) for pair in pairs]
        for pairs in adapter.layers
    ]
    return torch.tensor(entries, dtype=torch.int64).to(device)


def tiles_of_spans(
    spans: Sequence[AdapterSpan], tokens: int, dtype: torch.dtype, device: torch.device, batch_invariant: bool
) -> AdapterTiles:
    """The tiles of a step of this many tokens that was not recorded."""
    numbers = {adapter: number for number, adapter in enumerate(dict.fromkeys(span.adapter for span in spans))}
    owners = np.full(tokens, -1)
    for adapter, first, stop in spans:
        owners[first:stop] = numbers[adapter]
    shape = PlanShape.of(tokens, len(spans), dtype, batch_invariant)
    plan = np.zeros(shape.length, np.int64)
    write_plan(plan, owners, shape)
    return AdapterTiles.of(
        *(torch.stack([adapter.table for adapter in numbers]), copy_to_device(plan, device), shape),
        padded_rank(max(adapter.rank for adapter in numbers)),
        dtype,
        frozenset[str]().union(*(adapter.groups for adapter in numbers)),
    )
