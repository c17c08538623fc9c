"""A layer of a decoder, said once: its weights, and what is done with them in which order.

Who does it decides what comes of it: models/tensors.py computes, models/program.py writes down a program for our own
kernels.
"""

from typing import NamedTuple, Protocol, TypeVar

from tgi.worker.batch import Footprint
from tgi.worker.layers.embedding import Embedding
from tgi.worker.layers.mlp import Experts, Mlp
from tgi.worker.layers.norm import Norm
from tgi.worker.linear import Linear


class Layer(NamedTuple):
    """The weights of one layer. Projections of the same input that are used together are one matrix.

    The last matrix of each part adds the residual, where nothing comes between.
    """

    attention_before: Norm | None
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    # Of queries and keys: each norms what lies behind that of the one before, as many numbers as it has scales.
    inner_norms: tuple[Norm, ...]
    output: Linear
    attention_after: Norm | None
    mlp_before: Norm | None
    mlp: Mlp | Experts
    mlp_after: Norm | None


class Weights(NamedTuple):
    """All weights of a model. Norms are float32."""

    embedding: Embedding  # [vocab, hidden]
    layers: list[Layer]
    norm: Norm
    head: Linear  # [vocab, hidden]
    footprint: Footprint


X = TypeVar("X")  # rows of a step: their numbers [rows, width], or the buffer that will hold them


class Operations(Protocol[X]):
    """What a layer is made of. `place` is one of lora/weights.py's, and adapters add to the products there."""

    def norm(self, norm: Norm, x: X) -> X:
        """norm(x)."""

    def linear(self, place: str, linear: Linear, x: X, residual: X | None = None) -> X:
        """linear(x), which adds a residual where one is given."""

    def norm_part(self, norm: Norm, qkv: X, start: int) -> None:
        """norm, in place, of the numbers of each row from `start` on, as many as it has scales."""

    def attend(self, qkv: X) -> X:
        """What attention finds with these queries, keys and values, once the former two are turned."""

    def inner(self, mlp: Mlp, x: X) -> X:
        """All of an MLP but its last matrix."""

    def experts(self, experts: Experts, x: X) -> X:
        """experts(x)."""

    def add(self, found: X, hidden: X) -> X:
        """hidden + residual_scale * found."""


def run_layer(layer: Layer, parallel: bool, do: Operations[X], hidden: X) -> X:
    """What the layer leaves of `hidden`. Where it is `parallel`, its MLP takes what its attention takes."""
    normed = _normed(layer.attention_before, do, hidden)
    qkv, start = do.linear("attention", layer.qkv, normed), 0
    for norm in layer.inner_norms:
        do.norm_part(norm, qkv, start)
        start += norm.weight.numel()
    hidden = _joined("output", layer.output, layer.attention_after, do, do.attend(qkv), hidden)
    if not parallel:
        normed = _normed(layer.mlp_before, do, hidden)
    if isinstance(layer.mlp, Mlp):
        return _joined("down", layer.mlp.down, layer.mlp_after, do, do.inner(layer.mlp, normed), hidden)
    return do.add(_normed(layer.mlp_after, do, do.experts(layer.mlp, normed)), hidden)


def _joined(place: str, linear: Linear, after: Norm | None, do: Operations[X], x: X, hidden: X) -> X:
    """hidden + residual_scale * after(linear(x))."""
    if linear.then == "add":
        return do.linear(place, linear, x, hidden)
    return do.add(_normed(after, do, do.linear(place, linear, x)), hidden)


def _normed(norm: Norm | None, do: Operations[X], x: X) -> X:
    return x if norm is None else do.norm(norm, x)
