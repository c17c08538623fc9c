"""A decoder's layers and head as a program for our own kernels: operations on buffers, written down at load."""

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import NamedTuple

from tgi.worker.batch import KVShape
from tgi.worker.layers.mlp import Experts, Mlp
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.rotary import Rotary
from tgi.worker.linear import Linear
from tgi.worker.lora.weights import PLACES
from tgi.worker.models.config import DecoderConfig
from tgi.worker.models.layer import Weights, run_layer
from tgi.worker.native.program import Delta, Program


class Buffer(IntEnum):
    """What a program keeps of each token."""

    HIDDEN = 0
    NORMED = auto()
    QKV = auto()
    MIXED = auto()  # what attention finds
    INNER = auto()  # of the MLP
    FOUND = auto()  # what a part finds, before it is added to HIDDEN


def write_program(config: DecoderConfig, weights: Weights, rotaries: Sequence[Rotary], kv: KVShape) -> Program | None:
    """The layers and the head as a program. None where it cannot be: without our kernels; with experts, since who
    computes what shows only as a step runs; and where the MLP takes what attention took, and that is HIDDEN itself."""
    layers = weights.layers
    dense = all(isinstance(layer.mlp, Mlp) for layer in layers)
    kept = not config.parallel or all(layer.attention_before is not None for layer in layers)
    if kv.kernels is None or not dense or not kept:
        return None
    mixed = kv.heads * kv.head_dim
    widths = {
        Buffer.HIDDEN: config.hidden,
        Buffer.NORMED: config.hidden,
        Buffer.QKV: mixed + 2 * kv.kv_heads * kv.head_dim,
        Buffer.MIXED: mixed,
        Buffer.INNER: config.intermediate,
        Buffer.FOUND: config.hidden,
    }
    program = Program(kv.kernels, [widths[buffer] for buffer in Buffer])
    for number, layer in enumerate(layers):
        run_layer(layer, config.parallel, WrittenOperations(program, config, rotaries, kv, number), Buffer.HIDDEN)
    scoring = config.logit_scale, config.logit_cap
    weights.head.write_best(program, Buffer.HIDDEN, Buffer.NORMED, weights.norm[:4], *scoring)
    return program


class WrittenOperations(NamedTuple):
    """Operations on buffers: what they are asked for they write down."""

    program: Program
    config: DecoderConfig
    rotaries: Sequence[Rotary]
    kv: KVShape
    number: int  # of the layer

    def norm(self, norm: Norm, x: Buffer) -> Buffer:
        y = Buffer.NORMED if x == Buffer.HIDDEN else x
        norm.write(self.program, x, y)
        return y

    def linear(self, place: str, linear: Linear, x: Buffer, residual: Buffer | None = None) -> Buffer:
        y = residual if residual is not None else Buffer.QKV if place == "attention" else Buffer.FOUND
        linear.write(self.program, x, y, y, self._delta(place, x))
        return y

    def norm_part(self, norm: Norm, qkv: Buffer, start: int) -> None:
        norm.write(self.program, qkv, qkv, start)

    def attend(self, qkv: Buffer) -> Buffer:
        kv, rope = self.kv, self.config.layers[self.number].rope
        if rope is not None:
            self.rotaries[rope].write(self.program, qkv, rope, kv.heads + kv.kv_heads, kv.head_dim)
        scale, heads, window = self.config.attention_scale, (kv.heads, kv.kv_heads), kv.window(self.number)
        self.program.attend(qkv, Buffer.MIXED, self.number, heads, kv.head_dim, scale, window, kv.softcap)
        return Buffer.MIXED

    def inner(self, mlp: Mlp, x: Buffer) -> Buffer:
        delta, y = self._delta("inner", x), Buffer.INNER
        if mlp.gate is None:
            mlp.up.write(self.program, x, y, delta=delta)
        else:
            mlp.gate.write(self.program, x, y, delta=delta)
            mlp.up.write(self.program, x, y, y, delta._replace(column=mlp.gate.outputs))
        return y

    def experts(self, experts: Experts, x: Buffer) -> Buffer:
        raise NotImplementedError("a model with experts has no program")

    def add(self, found: Buffer, hidden: Buffer) -> Buffer:
        self.program.add(found, hidden, self.config.residual_scale)
        return hidden

    def _delta(self, place: str, x: Buffer) -> Delta:
        """What adapters add at a place, in the order in which PackedDeltas lists them, once it is computed of x."""
        delta = Delta(list(PLACES).index(place))
        self.program.lora(x, delta.place, self.number)
        return delta
