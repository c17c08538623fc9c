"""A decoder's layers computed operation by operation, by whatever its parts compute with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from tgi.worker.batch import Attention, KVShape
from tgi.worker.layers.mlp import Experts, Mlp
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.rotary import Rotary
from tgi.worker.linear import Linear
from tgi.worker.lora.deltas import Deltas, LayerDeltas
from tgi.worker.lora.packed import PackedDeltas, PackedLayerDeltas
from tgi.worker.models.config import DecoderConfig


class Step(NamedTuple):
    """What the layers of a step share."""

    config: DecoderConfig
    kv: KVShape
    rotaries: Sequence[Rotary]
    angles: Sequence[tuple[Tensor, Tensor]]  # of each of them
    tokens: int  # so many rows; those behind them are padding
    attention: Attention
    plan: Any  # of `attention`
    deltas: Deltas | PackedDeltas | None

    def layer(self, number: int) -> "TensorOperations":
        """What computes a layer."""
        return TensorOperations(self, number, None if self.deltas is None else self.deltas.of(number))


class TensorOperations(NamedTuple):
    """Operations on tensors."""

    step: Step
    number: int  # of the layer
    lora: LayerDeltas | PackedLayerDeltas | None

    def norm(self, norm: Norm, x: Tensor) -> Tensor:
        return norm(x)

    def linear(self, place: str, linear: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return linear(x, residual) if self.lora is None else self.lora.through(place, linear, x, residual)

    def norm_part(self, norm: Norm, qkv: Tensor, start: int) -> None:
        norm.in_place(qkv[:, start : start + norm.weight.numel()].unflatten(1, norm.weight.shape))

    def attend(self, qkv: Tensor) -> Tensor:
        config, kv, rotaries, angles, tokens, attention, plan, _ = self.step
        rows = len(qkv)
        qkv = qkv.view(rows, kv.heads + 2 * kv.kv_heads, kv.head_dim)
        rope = config.layers[self.number].rope
        if rope is not None:
            rotaries[rope].rotate(qkv, kv.heads + kv.kv_heads, angles[rope])
        found = attention.write_and_attend(plan, self.number, qkv[:tokens], config.attention_scale)
        found = found.reshape(tokens, kv.heads * kv.head_dim)
        return found if tokens == rows else F.pad(found, (0, 0, 0, rows - tokens))

    def inner(self, mlp: Mlp, x: Tensor) -> Tensor:
        return mlp.inner(x) if self.lora is None else self.lora.inner(mlp, x)

    def experts(self, experts: Experts, x: Tensor) -> Tensor:
        return experts(x, self.step.tokens)

    def add(self, found: Tensor, hidden: Tensor) -> Tensor:
        scale = self.step.config.residual_scale
        return hidden + (found if scale == 1.0 else found * scale)
