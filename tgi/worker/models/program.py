"""Writes a decoder's layers and head down as a program for our own kernels: what Decoder does, in the same order."""

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import TYPE_CHECKING

from tgi.worker.batch import KVShape
from tgi.worker.layers.mlp import Mlp
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.rotary import Rotary
from tgi.worker.linear import Linear
from tgi.worker.lora.weights import PLACES
from tgi.worker.models.config import DecoderConfig
from tgi.worker.native.program import Delta, Program

if TYPE_CHECKING:
    from tgi.worker.models.decoder import Layer, Weights


class Buffer(IntEnum):
    """What a program keeps of each token."""

    HIDDEN = 0
    NORMED = auto()
    QKV = auto()
    MIXED = auto()  # what attention finds
    INNER = auto()  # of the MLP
    FOUND = auto()  # what a part finds, before it is added to HIDDEN


def write_program(config: DecoderConfig, weights: "Weights", rotaries: Sequence[Rotary], kv: KVShape) -> Program | None:
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
    writer = _Writer(program, config, rotaries, kv)
    for number, layer in enumerate(layers):
        writer.layer(number, layer)
    scoring = config.logit_scale, config.logit_cap
    weights.head.write_best(program, Buffer.HIDDEN, Buffer.NORMED, weights.norm[:4], *scoring)
    return program


class _Writer:
    """Writes layers down, one after the other."""

    def __init__(self, program: Program, config: DecoderConfig, rotaries: Sequence[Rotary], kv: KVShape) -> None:
        self._program = program
        self._config = config
        self._rotaries = rotaries
        self._kv = kv

    def layer(self, number: int, layer: "Layer") -> None:
        normed = self._normed(layer.attention_before)
        self._lora("attention", normed, number)
        layer.qkv.write(self._program, normed, Buffer.QKV, delta=_delta("attention"))
        self._mix(number, layer)
        self._join("output", number, layer.output, Buffer.MIXED, layer.attention_after)
        if not self._config.parallel:
            normed = self._normed(layer.mlp_before)
        assert isinstance(layer.mlp, Mlp)
        self._lora("inner", normed, number)
        self._inner(layer.mlp, normed)
        self._join("down", number, layer.mlp.down, Buffer.INNER, layer.mlp_after)

    def _normed(self, norm: Norm | None) -> Buffer:
        if norm is None:
            return Buffer.HIDDEN
        norm.write(self._program, Buffer.HIDDEN, Buffer.NORMED)
        return Buffer.NORMED

    def _mix(self, number: int, layer: "Layer") -> None:
        kv, rope = self._kv, self._config.layers[number].rope
        if layer.head_norm is not None:
            layer.head_norm.write(self._program, Buffer.QKV, Buffer.QKV)
        elif layer.query_norm is not None and layer.key_norm is not None:
            layer.query_norm.write(self._program, Buffer.QKV, Buffer.QKV)
            layer.key_norm.write(self._program, Buffer.QKV, Buffer.QKV, kv.heads * kv.head_dim)
        if rope is not None:
            self._rotaries[rope].write(self._program, Buffer.QKV, rope, kv.heads + kv.kv_heads, kv.head_dim)
        scale, heads = self._config.attention_scale, (kv.heads, kv.kv_heads)
        self._program.attend(Buffer.QKV, Buffer.MIXED, number, heads, kv.head_dim, scale, kv.window(number), kv.softcap)

    def _inner(self, mlp: Mlp, x: Buffer) -> None:
        if mlp.gate is None:
            mlp.up.write(self._program, x, Buffer.INNER, delta=_delta("inner"))
        else:
            mlp.gate.write(self._program, x, Buffer.INNER, delta=_delta("inner"))
            mlp.up.write(self._program, x, Buffer.INNER, Buffer.INNER, _delta("inner", mlp.gate.outputs))

    def _join(self, place: str, number: int, linear: Linear, x: Buffer, after: Norm | None) -> None:
        self._lora(place, x, number)
        if linear.then == "add":
            linear.write(self._program, x, Buffer.HIDDEN, Buffer.HIDDEN, _delta(place))
            return
        linear.write(self._program, x, Buffer.FOUND, delta=_delta(place))
        if after is not None:
            after.write(self._program, Buffer.FOUND, Buffer.FOUND)
        self._program.add(Buffer.FOUND, Buffer.HIDDEN, self._config.residual_scale)

    def _lora(self, place: str, x: Buffer, number: int) -> None:
        self._program.lora(x, _delta(place).place, number)


def _delta(place: str, column: int = 0) -> Delta:
    """What adapters add at a place, in the order in which PackedDeltas lists them."""
    return Delta(list(PLACES).index(place), column)
