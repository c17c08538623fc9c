"""LoRA deltas by torch: what adapters add to the projections of one step.

The tokens of one adapter are computed in tiles of a few different row counts, which agree bit for bit (weights.py). So
the result of a token depends on nothing but the token and its adapter. Each projection is computed for all tokens as if
there were no adapters, and then the deltas are added: a token without an adapter gets the same bits as in a step
without any.

A linear layer that ends in an activation would apply it before the delta is added. So for tokens whose adapter changes
the inner projections of MLPs, the first of these is computed without its activation, which is applied after the delta.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.device_copies import copy_to_device
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import Mlp
from tgi.worker.lora.projections import PROJECTION_GROUPS, Columns, ProjectionShapes, group_columns
from tgi.worker.lora.weights import LoraWeights

# A multiple of torch's vector width, and fewer elements than torch divides among threads.
LANES = 64
ELEMENTS = (1 << 15) - LANES


class AdapterSpan(NamedTuple):
    """A range of tokens in a step that has an adapter."""

    adapter: Any  # as Model.load_adapter returned it
    first: int
    stop: int


class GroupDeltas(NamedTuple):
    """The deltas of one projection group (see PROJECTION_GROUPS) in a step, for the n tokens with such adapters."""

    tokens: Tensor  # int64 [n], sorted by adapter
    counts: dict[LoraWeights, int]  # tokens of each adapter, in this order
    dtype: torch.dtype  # in which they are computed

    def compute(self, layer: int, x: Tensor, columns: Columns) -> Tensor:
        """The deltas [n, outputs] of the projections in these columns, for their inputs x [n, inputs]."""
        x = x.to(self.dtype)
        found = x.new_zeros(len(x), sum(width for _, _, width in columns))
        first = 0
        for adapter, count in self.counts.items():
            padded = adapter.rows.padded(count)
            mine = F.pad(x[first : first + count], (0, 0, 0, padded - count))
            tiles = [mine[start:stop] for start, stop in adapter.rows.split(padded)]
            for projection, start, width in columns:
                if (pair := adapter.layers[layer][projection]) is not None:
                    delta = torch.cat([torch.mm(torch.mm(tile, pair.a), pair.b) for tile in tiles])
                    found[first : first + count, start : start + width] = delta[:count]
            first += count
        return found

    def add(self, y: Tensor, deltas: Tensor) -> None:
        """Adds the deltas to their rows of y, rounded once."""
        y.index_copy_(0, self.tokens, (y.index_select(0, self.tokens) + deltas).to(y.dtype))


class LoraDeltas:
    """The deltas of one step, computed in `dtype`.

    `bare` is, for each layer, the first linear layer of its MLP without the activation; None for experts.
    """

    def __init__(
        self,
        spans: Sequence[AdapterSpan],
        shapes: ProjectionShapes,
        bare: Sequence[Linear | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._bare = bare
        self._columns = {name: group_columns(name, shapes) for name in PROJECTION_GROUPS}
        self._groups: dict[str, GroupDeltas] = {}
        for name in PROJECTION_GROUPS:
            tokens: dict[LoraWeights, list[int]] = {}
            for adapter, first, stop in spans:
                if name in adapter.groups:
                    tokens.setdefault(adapter, []).extend(range(first, stop))
            if tokens:
                counts = {adapter: len(own) for adapter, own in tokens.items()}
                every = np.concatenate([np.array(own) for own in tokens.values()])
                self._groups[name] = GroupDeltas(copy_to_device(every, device), counts, dtype)

    def layer_deltas(self, layer: int) -> "LayerLoraDeltas":
        return LayerLoraDeltas(self._groups, self._columns, layer, self._bare[layer])


class LayerLoraDeltas(NamedTuple):
    """The deltas of one layer of a step."""

    groups: dict[str, GroupDeltas]
    columns: dict[str, Columns]
    layer: int
    bare: Linear | None

    def apply_linear(self, group: str, linear: Linear, x: Tensor, other: Tensor | None = None) -> Tensor:
        """linear(x, other) with the deltas of a group, for a linear layer without an activation."""
        y = linear(x, other)
        if (deltas := self.groups.get(group)) is not None:
            deltas.add(y, deltas.compute(self.layer, x.index_select(0, deltas.tokens), self.columns[group]))
        return y

    def apply_mlp_inner(self, mlp: Mlp, x: Tensor) -> Tensor:
        """Mlp.gate_up with the deltas of the group "inner"."""
        deltas = self.groups.get("inner")
        if deltas is None or self.bare is None:
            return mlp.gate_up(x)
        mine = x.index_select(0, deltas.tokens)
        found = deltas.compute(self.layer, mine, self.columns["inner"])
        first, width = mlp.gate or mlp.up, self.bare.outputs
        active = _activated(self.bare(mine) + found[:, :width], first.activate)
        y = first(x).index_copy_(0, deltas.tokens, active.to(x.dtype))
        if mlp.gate is None:
            return y
        y = mlp.up(x, y)
        deltas.add(y, found[:, width:] * active)
        return y


def _activated(x: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """The activation of x, with bits that do not depend on an element's position. torch computes the elements after the
    last full vector of each thread's share by another exp(), so x is padded and split into parts of one thread each."""
    flat, odd = x.flatten(), x.numel() % LANES
    if odd:
        flat = F.pad(flat, (0, LANES - odd))
    parts = [activate(part) for part in flat.split(ELEMENTS)]
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found[: x.numel()].view(x.shape)
