"""LoRA deltas by our GPU kernels: what adapters add to the projections of one step, in two launches for each group of
projections, whatever adapters its rows have (gpu_kernels/lora.py).

Each projection is computed for all tokens as if there were no adapters, and then the deltas are added: a token without
an adapter gets the same bits as in a step without any. A layer that ends in an activation is computed without it, which
is applied after the delta.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tgi.worker.device_copies import copy_to_device
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.gpu_kernels.lora_arguments import LoraRuns
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import Mlp
from tgi.worker.lora.deltas import AdapterSpan
from tgi.worker.lora.projections import PROJECTION_GROUPS, Columns, ProjectionShapes, group_columns
from tgi.worker.lora.weights import LoraWeights


class LaunchedDeltas:
    """The deltas of one step. `bare` is, for each layer, the first linear layer of its MLP without the activation; None
    for experts."""

    def __init__(
        self, runs: LoraRuns, shapes: ProjectionShapes, bare: Sequence[Linear | None], kernels: GpuKernels
    ) -> None:
        self._runs = runs
        self._bare = bare
        self._kernels = kernels
        self._columns = {name: group_columns(name, shapes) for name in PROJECTION_GROUPS if name in runs.groups}

    def layer_deltas(self, layer: int) -> "LaunchedLayerDeltas":
        return LaunchedLayerDeltas(self._runs, layer, self._columns, self._bare[layer], self._kernels)


class LaunchedLayerDeltas(NamedTuple):
    """The deltas of one layer of a step."""

    runs: LoraRuns
    layer: int
    columns: dict[str, Columns]
    bare: Linear | None
    kernels: GpuKernels

    def apply_linear(self, group: str, linear: Linear, x: Tensor, other: Tensor | None = None) -> Tensor:
        """linear(x, other) with the deltas of a group, for a linear layer without an activation."""
        y = linear(x, other)
        if columns := self.columns.get(group):
            self.kernels.add_lora(x, y, self.runs, self.layer, columns)
        return y

    def apply_mlp_inner(self, mlp: Mlp, x: Tensor) -> Tensor:
        if self.bare is None or "inner" not in self.columns:
            return mlp.gate_up(x)
        columns, first = self.columns["inner"], mlp.gate or mlp.up
        sums = self.bare(x)
        if mlp.gate is None:
            self.kernels.add_lora(x, sums, self.runs, self.layer, columns)
            return first.activate(sums) if len(columns) == 1 else first.apply_gate(sums)
        # Gate and up are two layers: their weights have different formats.
        (gate, _, width), (up, _, _) = columns
        self.kernels.add_lora(x, sums, self.runs, self.layer, ((gate, 0, width),))
        active = first.activate(sums)
        delta = torch.zeros_like(sums)
        self.kernels.add_lora(x, delta, self.runs, self.layer, ((up, 0, width),))
        return mlp.up(x, active).add_(delta.mul_(active))


def adapter_table(adapter: LoraWeights, device: torch.device) -> Tensor:
    """The adapter's part of LoraRuns.table, int64 [layers, projections, 3]."""
    entries = [
        [(0, 0, 0) if pair is None else (pair.a.data_ptr(), pair.b.data_ptr(), pair.b.shape[0]) for pair in pairs]
        for pairs in adapter.layers
    ]
    return torch.tensor(entries, dtype=torch.int64).to(device)


def runs_of_spans(spans: Sequence[AdapterSpan], dtype: torch.dtype, device: torch.device) -> LoraRuns:
    """The runs of a step that was not recorded."""
    numbers = {adapter: number for number, adapter in enumerate(dict.fromkeys(span.adapter for span in spans))}
    columns = [(numbers[span.adapter], span.first, span.stop) for span in spans]
    packed = copy_to_device(np.array(columns, np.int32), device)
    return LoraRuns(
        table=torch.stack([adapter.table for adapter in numbers]),
        adapters=packed[:, 0].contiguous(),
        bounds=packed[:, 1:],
        runs=len(spans),
        longest=max(span.stop - span.first for span in spans),
        rank=max(adapter.rank for adapter in numbers),
        dtype=dtype,
        groups=frozenset[str]().union(*(adapter.groups for adapter in numbers)),
    )
