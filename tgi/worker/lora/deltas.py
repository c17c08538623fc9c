"""LoRA deltas by torch: what adapters add to the projections of one step.

The tokens of a step are sorted by adapter, and those of one adapter are computed in tiles of a few different row
counts, which agree bit for bit (weights.py). So the result of a token depends on nothing but the token and its adapter.
Each projection is computed for all tokens as if there were no adapters, and then the deltas are added: a token without
an adapter gets the same bits as in a step without any.

A linear layer that ends in an activation would apply it before the delta is added. So for tokens whose adapter changes
the inner projections of MLPs, the first of these is computed without its activation, which is applied after the delta.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.device_copies import copy_to_device
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import Mlp
from tgi.worker.lora.projections import PROJECTION_GROUPS, PROJECTIONS, ProjectionShapes
from tgi.worker.lora.weights import LoraWeights

# A multiple of torch's vector width, and fewer elements than torch divides among threads.
LANES = 64
ELEMENTS = (1 << 15) - LANES


class AdapterSpan(NamedTuple):
    """A range of tokens in a step that has an adapter."""

    adapter: Any  # as Model.load_adapter returned it
    first: int
    stop: int


class AdapterTile(NamedTuple):
    """A tile of tokens of one adapter."""

    adapter: Any  # as Model.load_adapter returned it
    x: Tensor  # [rows, inputs]
    parts: list[tuple[int, Tensor]]  # index into PROJECTIONS, and the output [rows, outputs]


class GroupDeltas(NamedTuple):
    """The deltas of one projection group (see PROJECTION_GROUPS) in a step; the buffers are reused by each layer.

    S rows: tokens with an adapter, sorted by adapter, with padding between adapters.
    """

    tokens: Tensor  # int64 [S] the token of each row
    back: Tensor  # int64 [rows of the step] the row of each token among the S; S: none
    choice: Tensor  # int64 [rows of the step] index into the S rows followed by all rows of the step
    all_adapted: bool  # each token is among the S
    x: Tensor  # [S, inputs]
    deltas: list[Tensor]  # [S + 1, outputs] for each matrix of the group; the last row is zero
    tiles: list[AdapterTile]

    def compute(self, layer: int, x: Tensor) -> Tensor:
        """Fills `deltas` for the step's input x [rows, inputs]. Returns the input of the S rows."""
        mine = x.index_select(0, self.tokens)
        self.x.copy_(mine)
        for tile in self.tiles:
            pairs = tile.adapter.layers[layer]
            for projection, part in tile.parts:
                pair = pairs[projection]
                if pair is None:
                    part.zero_()
                else:
                    torch.mm(torch.mm(tile.x, pair.a), pair.b, out=part)
        return mine


class LoraDeltas:
    """The deltas of one step with `count` tokens, padded to `rows`, computed in `dtype`.

    `bare` is, for each layer, the first linear layer of its MLP without the activation; None for experts.
    """

    def __init__(
        self,
        spans: Sequence[AdapterSpan],
        count: int,
        rows: int,
        shapes: ProjectionShapes,
        bare: Sequence[Linear | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._bare = bare
        self._groups: dict[str, GroupDeltas] = {}
        for name in PROJECTION_GROUPS:
            changing = [span for span in spans if name in span.adapter.groups]
            if changing:
                self._groups[name] = _build_group(name, changing, count, rows, shapes, dtype, device)

    def layer_deltas(self, layer: int) -> "LayerLoraDeltas":
        return LayerLoraDeltas(self._groups, layer, self._bare[layer])


class LayerLoraDeltas(NamedTuple):
    """The deltas of one layer of a step."""

    groups: dict[str, GroupDeltas]
    layer: int
    bare: Linear | None

    def apply_linear(self, group: str, linear: Linear, x: Tensor, other: Tensor | None = None) -> Tensor:
        """linear(x, other) with the deltas of a group, for a linear layer without an activation."""
        y = linear(x, other)
        group_deltas = self.groups.get(group)
        if group_deltas is not None:
            group_deltas.compute(self.layer, x)
            y.add_(group_deltas.deltas[0].index_select(0, group_deltas.back))
        return y

    def apply_mlp_inner(self, mlp: Mlp, x: Tensor) -> Tensor:
        """Mlp.gate_up with the deltas of the group "inner"."""
        group_deltas = self.groups.get("inner")
        if group_deltas is None or self.bare is None:
            return mlp.gate_up(x)
        mine = group_deltas.compute(self.layer, x)
        if mlp.gate is None and len(group_deltas.deltas) > 1:  # one layer with both weights, on a GPU
            sums = self.bare(x)
            return mlp.up.apply_gate(sums.add_(torch.cat(group_deltas.deltas, 1).index_select(0, group_deltas.back)))
        first = mlp.gate or mlp.up
        active = _activated(self.bare(mine) + group_deltas.deltas[0][:-1], first.activate)
        found = active.to(x.dtype)
        if not group_deltas.all_adapted:
            found = torch.cat([found, first(x)])
        found = found.index_select(0, group_deltas.choice)
        if mlp.gate is None:
            return found
        y = mlp.up(x, found)
        group_deltas.deltas[1][:-1].mul_(active)
        return y.add_(group_deltas.deltas[1].index_select(0, group_deltas.back))


def _build_group(
    name: str,
    spans: Sequence[AdapterSpan],
    count: int,
    rows: int,
    shapes: ProjectionShapes,
    dtype: torch.dtype,
    device: torch.device,
) -> GroupDeltas:
    mine: dict[LoraWeights, list[range]] = {}
    for adapter, first, stop in spans:
        mine.setdefault(adapter, []).append(range(first, stop))
    tokens, cuts = [], []
    back = np.full(rows, -1)
    size = 0
    for adapter, ranges in mine.items():
        own = np.concatenate([np.arange(one.start, one.stop) for one in ranges])
        padded = adapter.rows.padded(len(own))
        back[own] = np.arange(size, size + len(own))
        tokens.append(np.pad(own, (0, padded - len(own))))
        cuts += [(adapter, size + start, size + stop) for start, stop in adapter.rows.split(padded)]
        size += padded
    all_adapted = bool((back[:count] >= 0).all())
    choice = np.where(back < 0, 0 if all_adapted else size + np.arange(rows), back)
    packed = copy_to_device(np.concatenate([*tokens, np.where(back < 0, size, back), choice]), device)
    matrices = [[projection for projection in matrix if projection in shapes] for matrix in PROJECTION_GROUPS[name]]
    matrices = [matrix for matrix in matrices if matrix]
    x = torch.empty(size, shapes[matrices[0][0]].inputs, dtype=dtype, device=device)
    deltas, parts = [], []
    for matrix in matrices:
        bounds = np.cumsum([0, *(shapes[projection].outputs for projection in matrix)]).tolist()
        delta = torch.empty(size + 1, bounds[-1], dtype=dtype, device=device)
        delta[size].zero_()
        deltas.append(delta)
        parts += [
            (PROJECTIONS.index(projection), delta[:, start:stop])
            for projection, (start, stop) in zip(matrix, pairwise(bounds), strict=True)
        ]
    tiles = [
        AdapterTile(adapter, x[start:stop], [(projection, part[start:stop]) for projection, part in parts])
        for adapter, start, stop in cuts
    ]
    sorted_tokens, there, own_rows = packed.split([size, rows, rows])
    return GroupDeltas(sorted_tokens, there, own_rows, all_adapted, x, deltas, tiles)


def _activated(x: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """The activation of x, with bits that do not depend on an element's position. torch computes the elements after the
    last full vector of each thread's share by another exp(), so x is padded and split into parts of one thread each."""
    flat, odd = x.flatten(), x.numel() % LANES
    if odd:
        flat = F.pad(flat, (0, LANES - odd))
    parts = [activate(part) for part in flat.split(ELEMENTS)]
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found[: x.numel()].view(x.shape)
