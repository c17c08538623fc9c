"""One decoder for llama, mistral, qwen2 and qwen3: what differs between them is data in DecoderConfig."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.batch import Attention, Batch, KVShape, Reader
from tgi.worker.layers.norm import rms_norm
from tgi.worker.layers.rotary import Rotary, rotate
from tgi.worker.linear import Linear, choose_rows
from tgi.worker.models.config import DecoderConfig


class Layer(NamedTuple):
    """The weights of one layer. Projections of the same input that are used together are one matrix."""

    attention_norm: Tensor
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    head_norm: Tensor | None  # [heads + kv_heads, head_dim]: scales of the query heads, then of the key heads
    output: Linear  # adds the residual
    mlp_norm: Tensor
    gate: Linear  # silu
    up: Linear  # times the gate
    down: Linear  # adds the residual


class Weights(NamedTuple):
    """All weights of a model. Norms are float32. The embedding may have another dtype than the rest: its rows are
    converted when they are looked up."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[Layer]
    norm: Tensor
    head: Linear  # [vocab, hidden]


class Decoder:
    """A Model."""

    def __init__(self, config: DecoderConfig, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self.vocab_size = config.vocab_size
        self.context = config.context
        self.kv = KVShape(config.layers, config.heads, config.kv_heads, config.head_dim, dtype)
        self.device = device
        self._config = config
        self._weights = weights
        self._rotary = Rotary(config.head_dim, config.rope, device)
        self._scale = config.head_dim**-0.5
        linears = [linear for layer in weights.layers for linear in layer if isinstance(linear, Linear)]
        self._rows = choose_rows([*linears, weights.head])

    @torch.inference_mode()
    def forward(self, batch: Batch, attention: Attention, reader: Reader | None = None) -> Tensor:
        """See Model. Tokens are padded once here to a number of rows that the linear layers take as it is."""
        count = batch.tokens.shape[0]
        pad = (0, self._rows.padded(count) - count)
        tokens, positions = F.pad(batch.tokens, pad), F.pad(batch.positions, pad)
        cos, sin = self._rotary.angles(positions, max(batch.context_lengths), self.kv.heads + self.kv.kv_heads)
        hidden = self._weights.embedding.index_select(0, tokens).to(self.kv.dtype)
        plan = attention.plan(batch)
        for number, layer in enumerate(self._weights.layers):
            mixed = self._mix(number, layer, hidden, cos, sin, count, attention, plan)
            hidden = layer.output(mixed, hidden)
            normed = rms_norm(hidden, layer.mlp_norm, self._config.norm_epsilon)
            hidden = layer.down(layer.up(normed, layer.gate(normed)), hidden)
        if reader is not None:
            for block in reader.blocks:
                reader.read(self._logits(hidden, block))
        return self._logits(hidden, batch.draw_at)

    def _logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Of some rows of `hidden`, float32 [n, vocab]."""
        normed = rms_norm(hidden.index_select(0, at), self._weights.norm, self._config.norm_epsilon)
        return self._weights.head(normed).to(torch.float32)

    def _mix(
        self,
        number: int,
        layer: Layer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        count: int,
        attention: Attention,
        plan: Any,
    ) -> Tensor:
        """What the layer's attention finds for each row of `hidden` [rows, hidden]: [rows, heads * head_dim].

        The first `count` rows are tokens, the others padding.
        """
        heads, kv_heads, head_dim = self.kv.heads, self.kv.kv_heads, self.kv.head_dim
        normed = rms_norm(hidden, layer.attention_norm, self._config.norm_epsilon)
        qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, head_dim)
        query_key = qkv[:, : heads + kv_heads]
        if layer.head_norm is not None:
            query_key = rms_norm(query_key, layer.head_norm, self._config.norm_epsilon)
        query_key = rotate(query_key, cos, sin)[:count]
        query, key, value = query_key[:, :heads], query_key[:, heads:], qkv[:count, heads + kv_heads :]
        found = attention.write_and_attend(plan, number, query, key, value, self._scale)
        return F.pad(found.reshape(count, heads * head_dim), (0, 0, 0, hidden.shape[0] - count))
