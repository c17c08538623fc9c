"""Adapters on our own kernels: what they add is computed first, and goes into the sums of the projections.

So an activation comes behind it, and a token without an adapter gets an exact zero: its bits are those of a step
without adapters. See native/lora.cpp.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.layers.mlp import Mlp
from tgi.worker.linear import Linear
from tgi.worker.lora.deltas import Span
from tgi.worker.lora.weights import PLACES, PROJECTIONS, LoraWeights, Pair, Shapes
from tgi.worker.native.kernels import DEPTH, MOST_ROWS, Kernels, Tiles
from tgi.worker.native.program import Adapted, adapted

FIELDS = 3  # of a Pair in native/lora.h


class PackedWeights:
    """An adapter of a model with these projections in memory, as the kernels take it."""

    def __init__(self, weights: LoraWeights, shapes: Shapes) -> None:
        self.places = weights.places
        self._kept: list[Tensor] = []
        # Of each place the pairs of each layer, [layers, parts, FIELDS].
        self.pairs = {
            place: torch.tensor(
                [[self._pair(pairs[PROJECTIONS.index(name)]) for name in names] for pairs in weights.layers]
            )
            for place, names in _parts(shapes).items()
        }

    def _pair(self, pair: Pair | None) -> tuple[int, int, int]:
        """Address of a, address of b, rank."""
        if pair is None:
            return (0, 0, 0)
        rank = -(-pair.a.shape[1] // DEPTH) * DEPTH
        more = rank - pair.a.shape[1]
        a, b = _in_pairs(F.pad(pair.a, (0, more))), _in_pairs(F.pad(pair.b, (0, 0, 0, more)))
        self._kept += (a, b)
        return (a.data_ptr(), b.data_ptr(), rank)


def _parts(shapes: Shapes) -> dict[str, list[str]]:
    """The projections of each place, side by side."""
    return {
        place: [name for matrix in matrices for name in matrix if name in shapes] for place, matrices in PLACES.items()
    }


def _in_pairs(matrix: Tensor) -> Tensor:
    """A matrix [depth, columns] as [columns / 32][depth / 2][32][2], bfloat16."""
    depth, columns = matrix.shape
    blocks = matrix.to(torch.bfloat16).view(depth // 2, 2, columns // DEPTH, DEPTH)
    return blocks.permute(2, 0, 3, 1).contiguous()


class Place(NamedTuple):
    """A step's work at one place of every layer."""

    adapters: Tensor  # int64 [layers, adapters] where the pairs of each stand
    bounds: Tensor  # int64 [parts + 1] columns of `plus` before each projection
    plus: Tensor  # float32 [rows, columns]


class PackedDeltas:
    """The adapters of one step of `rows` tokens."""

    def __init__(self, spans: Sequence[Span], rows: int, shapes: Shapes, kernels: Kernels) -> None:
        mine: dict[PackedWeights, list[range]] = {}
        for adapter, first, stop in spans:
            mine.setdefault(adapter, []).append(range(first, stop))
        self._kernels = kernels
        self._adapters = len(mine)
        self._tiles = _tiles(list(mine.values()))
        self._places = {
            place: _place([adapter.pairs[place] for adapter in mine], [shapes[name].outputs for name in names], rows)
            for place, names in _parts(shapes).items()
            if any(place in adapter.places for adapter in mine)
        }

    def of(self, layer: int) -> "PackedLayerDeltas":
        """Those of one layer."""
        return PackedLayerDeltas(self._kernels, self._tiles, self._places, layer)

    def adapted(self) -> Adapted:
        """All of them, for a program."""
        return adapted(self._tiles, self._adapters, [self._places.get(place) for place in PLACES])


class PackedLayerDeltas(NamedTuple):
    """What adapters add in one layer of a step."""

    kernels: Kernels
    tiles: Tiles
    places: dict[str, Place]
    layer: int

    def through(self, place: str, linear: Linear, x: Tensor, other: Tensor | None = None) -> Tensor:
        """linear(x, other) with adapters."""
        return linear(x, other, self._plus(place, x))

    def inner(self, mlp: Mlp, x: Tensor) -> Tensor:
        """Mlp.inner with adapters."""
        plus = self._plus("inner", x)
        if plus is None:
            return mlp.inner(x)
        if mlp.gate is None:
            return mlp.up(x, None, plus)
        width = mlp.gate.outputs
        return mlp.up(x, mlp.gate(x, None, plus[:, :width]), plus[:, width:])

    def _plus(self, place: str, x: Tensor) -> Tensor | None:
        here = self.places.get(place)
        if here is None:
            return None
        self.kernels.lora(x, here.plus, self.tiles, here.adapters[self.layer].data_ptr(), here.bounds)
        return here.plus


def _tiles(ranges: list[list[range]]) -> Tiles:
    """Of the tokens of each adapter."""
    tokens, bounds, owners = [], [0], []
    for owner, own in enumerate(ranges):
        mine = np.concatenate([np.arange(one.start, one.stop) for one in own])
        tokens.append(mine)
        for first in range(0, len(mine), MOST_ROWS):
            bounds.append(bounds[-1] + min(MOST_ROWS, len(mine) - first))
            owners.append(owner)
    return Tiles(torch.from_numpy(np.concatenate(tokens)), torch.tensor(bounds), torch.tensor(owners))


def _place(pairs: list[Tensor], outputs: list[int], rows: int) -> Place:
    layers = torch.arange(len(pairs[0]))[:, None] * pairs[0][0].nbytes
    bounds = torch.tensor([0, *outputs]).cumsum(0)
    return Place(layers + torch.tensor([one.data_ptr() for one in pairs]), bounds, torch.zeros(rows, int(bounds[-1])))
