"""What adapters add to the projections of one step.

The tokens of a step are sorted by adapter, and those of one adapter are computed in tiles of few different numbers of
rows, which agree bit for bit (weights.py). So what a token gets depends on nothing but itself and its adapter. Each
projection is computed for all tokens as if there were no adapters, and then what adapters add is added: a token
without one has the bits that it has in a step without any.

Where an activation is part of a linear layer, it would come too early. So tokens whose adapter changes the inner
projections of MLPs get the first of these without the activation, which is applied behind what the adapter adds.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.layers.mlp import Mlp
from tgi.worker.linear import ACTIVATIONS, Linear
from tgi.worker.lora.weights import PLACES, PROJECTIONS, LoraWeights, Shapes
from tgi.worker.staging import sent

# A multiple of what torch computes at once, and fewer elements than it divides among threads.
LANES = 64
ELEMENTS = (1 << 15) - LANES


class Span(NamedTuple):
    """These tokens of a step have an adapter."""

    adapter: Any  # as Model.adapter made it
    first: int
    stop: int


class Tile(NamedTuple):
    """Some tokens of one adapter."""

    adapter: Any  # as Model.adapter made it
    x: Tensor  # [rows, inputs]
    parts: list[tuple[int, Tensor]]  # which of PROJECTIONS, and where its results go [rows, outputs]


class Place(NamedTuple):
    """A step's work at one place of every layer. S tokens are sorted by adapter, with padding between."""

    tokens: Tensor  # int64 [S] which token of the step each is
    back: Tensor  # int64 [rows of the step] which of the S each token is; S: none
    choice: Tensor  # int64 [rows of the step] which row of the S, and then all rows of the step, is a token's own
    everywhere: bool  # every token is among the S
    x: Tensor  # [S, inputs]
    deltas: list[Tensor]  # [S + 1, outputs] for each matrix of the place; the last row is zero
    tiles: list[Tile]

    def compute(self, layer: int, x: Tensor) -> Tensor:
        """Fills `deltas` for the step's input x [rows, inputs]. Returns the input of the S tokens."""
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


class Deltas:
    """The adapters of one step with `count` tokens, padded to `rows`. They compute in `dtype`.

    `bare` is, for each layer, the first matrix of its MLP without the activation; None for experts.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        count: int,
        rows: int,
        shapes: Shapes,
        bare: Sequence[Linear | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._bare = bare
        self._places: dict[str, Place] = {}
        for name in PLACES:
            changing = [span for span in spans if name in span.adapter.places]
            if changing:
                self._places[name] = _place(name, changing, count, rows, shapes, dtype, device)

    def of(self, layer: int) -> "LayerDeltas":
        """Those of one layer."""
        return LayerDeltas(self._places, layer, self._bare[layer])


class LayerDeltas(NamedTuple):
    """What adapters add in one layer of a step."""

    places: dict[str, Place]
    layer: int
    bare: Linear | None

    def through(self, place: str, linear: Linear, x: Tensor, other: Tensor | None = None) -> Tensor:
        """linear(x, other) with adapters, where `linear` ends in no activation."""
        y = linear(x, other)
        here = self.places.get(place)
        if here is not None:
            here.compute(self.layer, x)
            y.add_(here.deltas[0].index_select(0, here.back))
        return y

    def inner(self, mlp: Mlp, x: Tensor) -> Tensor:
        """Mlp.inner with adapters."""
        here = self.places.get("inner")
        if here is None or self.bare is None:
            return mlp.inner(x)
        mine = here.compute(self.layer, x)
        if mlp.gate is None and len(here.deltas) > 1:  # one layer with both weights, on a GPU
            sums = self.bare(x)
            return mlp.up.gate(sums.add_(torch.cat(here.deltas, 1).index_select(0, here.back)))
        first = mlp.gate or mlp.up
        active = _activated(self.bare(mine) + here.deltas[0][:-1], first.then)
        found = active.to(x.dtype)
        if not here.everywhere:
            found = torch.cat([found, first(x)])
        found = found.index_select(0, here.choice)
        if mlp.gate is None:
            return found
        y = mlp.up(x, found)
        here.deltas[1][:-1].mul_(active)
        return y.add_(here.deltas[1].index_select(0, here.back))


def _place(
    name: str,
    spans: Sequence[Span],
    count: int,
    rows: int,
    shapes: Shapes,
    dtype: torch.dtype,
    device: torch.device,
) -> Place:
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
        cuts += [(adapter, size + start, size + stop) for start, stop in adapter.rows.tiles(padded)]
        size += padded
    everywhere = bool((back[:count] >= 0).all())
    choice = np.where(back < 0, 0 if everywhere else size + np.arange(rows), back)
    packed = sent(np.concatenate([*tokens, np.where(back < 0, size, back), choice]), device)
    matrices = [[projection for projection in matrix if projection in shapes] for matrix in PLACES[name]]
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
        Tile(adapter, x[start:stop], [(projection, part[start:stop]) for projection, part in parts])
        for adapter, start, stop in cuts
    ]
    sorted_tokens, there, own_rows = packed.split([size, rows, rows])
    return Place(sorted_tokens, there, own_rows, everywhere, x, deltas, tiles)


def _activated(x: Tensor, name: str) -> Tensor:
    """The activation of x. An element's bits do not depend on its place: torch takes another exp() for the odd elements
    at the end of each thread's share, so no call has any, and none is divided."""
    flat, odd = x.flatten(), x.numel() % LANES
    if odd:
        flat = F.pad(flat, (0, LANES - odd))
    parts = [ACTIVATIONS[name](part) for part in flat.split(ELEMENTS)]
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found[: x.numel()].view(x.shape)
