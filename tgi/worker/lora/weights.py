"""What an adapter is to those who compute with it: two thin matrices for each projection that it changes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.linear import TILE, Rows
from tgi.worker.models.config import DecoderConfig

# The projections of a layer, as models/config.py's Names calls them. Those of one place have the same input, and those
# in one pair of brackets are one matrix.
PLACES = {
    "attention": (("query", "key", "value"),),
    "output": (("output",),),
    "inner": (("gate",), ("up",)),
    "down": (("down",),),
}
PROJECTIONS = tuple(name for place in PLACES.values() for matrix in place for name in matrix)
# Numbers of rows that a product may have. Fewer than 4 take other ways through some libraries, and other sums.
SIZES = (4, 8, 16, TILE, 64, 128)


class Shape(NamedTuple):
    """Of a projection."""

    inputs: int
    outputs: int


Shapes = dict[str, Shape]  # of those of PROJECTIONS that a model has


class Pair(NamedTuple):
    """The change of one projection: x @ a @ b. The adapter's scale is part of b."""

    a: Tensor  # [inputs, rank]
    b: Tensor  # [rank, outputs]


class LoraWeights:
    """An adapter in memory. `layers` has for each layer a Pair, or None, for each of PROJECTIONS."""

    def __init__(self, layers: Sequence[Sequence[Pair | None]]) -> None:
        self.layers = layers
        changed = {name for pairs in layers for name, pair in zip(PROJECTIONS, pairs, strict=True) if pair is not None}
        self.places = {place for place, matrices in PLACES.items() if any(changed & set(matrix) for matrix in matrices)}
        self.rows = choose_rows(pair for pairs in layers for pair in pairs if pair is not None)


def shapes(config: DecoderConfig) -> Shapes:
    """The projections of a model with this config."""
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden, config.intermediate
    found = {
        "query": Shape(hidden, heads),
        "key": Shape(hidden, kv_heads),
        "value": Shape(hidden, kv_heads),
        "output": Shape(heads, hidden),
        "gate": Shape(hidden, inner),
        "up": Shape(hidden, inner),
        "down": Shape(inner, hidden),
    }
    return found if config.gated else {name: shape for name, shape in found.items() if name != "gate"}


def number_format(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What adapters of a model with this dtype compute in. On CPU float32, which is quicker in small products."""
    return torch.float32 if device.type == "cpu" else dtype


def choose_rows(pairs: Iterable[Pair]) -> Rows:
    """The numbers of rows for which products with these matrices agree bit for bit, found by trying each shape."""
    matrices = {matrix.shape: matrix for pair in pairs for matrix in pair}
    if any(matrix.device.type != "cpu" for matrix in matrices.values()):
        return Rows(())
    torch.get_num_threads()  # gives a new thread as many as the one that computes has, before anything is tried
    agreed = set(SIZES)
    for matrix in matrices.values():
        generator = torch.Generator().manual_seed(matrix.shape[0])
        x = torch.randn(SIZES[-1], matrix.shape[0], generator=generator)
        expected = torch.cat([torch.mm(tile, matrix) for tile in x.split(TILE)])
        for size in SIZES:
            if not torch.equal(torch.cat([torch.mm(tile, matrix) for tile in x.split(size)]), expected):
                agreed.discard(size)
    return Rows(tuple(sorted({TILE, *agreed})))
