"""Heads that draft: a layer that predicts further tokens from the hidden states of the served model.

With h_i a hidden state of the served model at position i, e the embedding and t_i the token at position i, a head for
multi-token prediction (MTP; DeepSeek-V3, 2024, section 2.2) computes, h_i being the output of the last norm,

    x_i = projection([embedding_norm(e(t_{i + 1})), hidden_norm(h_i)])
    o_i = norm(layer(x)_i)

and logits of t_{i + 2} = head(o_i), where embedding and head are those of the model. A further token is predicted from
o_i in the place of h_{i + 1}. In EAGLE-3 (Li et al., 2025) the head fuses the hidden states a, b and c of three layers,

    h_i = fusion([a_i, b_i, c_i])
    x_i = layer(h)_i, whose attention reads [embedding_norm(e(t_{i + 1})), hidden_norm(h_i)] in the place of h_i

and the logits are head(norm(x_i)), of the ids that the head scores, which may be some of the vocabulary. A further
token is predicted from x_i in the place of h_{i + 1}. Ordinary layers may follow the first one: x is then the output of
the last. What heads differ in is data: DraftHeadConfig.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tgi.worker.attention.interface import AttentionBackend, ForwardBatch
from tgi.worker.layers.embedding import Embedding
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.norm import Norm
from tgi.worker.models.decoder import DecoderModel
from tgi.worker.models.decoder_layer import DecoderLayer
from tgi.worker.models.draft_head_config import DraftHeadConfig
from tgi.worker.models.interface import WeightFootprint


class DraftHeadWeights(NamedTuple):
    """The weights of a head. None: it does not have that part, or the served model's is used."""

    embedding_norm: Norm
    hidden_norm: Norm | None
    projection: Linear | None  # [hidden, 2 * hidden]
    layers: list[DecoderLayer]
    norm: Norm
    fusion: Linear | None  # [hidden, taps * target_hidden]
    fusion_norms: tuple[Norm, ...]  # of all that is tapped, or of each tap
    embedding: Embedding | None
    head: Linear | None  # [scored, hidden]
    targets: Tensor | None  # int64 [scored]: ids of the served model; None: they are the same
    footprint: WeightFootprint


class DraftHead:
    """A head that drafts for `served`. On several ranks each has all of it, and parts of the embedding and the head
    that it shares with the served model."""

    def __init__(self, config: DraftHeadConfig, weights: DraftHeadWeights, served: DecoderModel) -> None:
        self.taps = config.taps
        self._config, self._weights, self._served = config, weights, served
        self._decoder = served.with_layers(config.decoder, weights.layers, weights.norm, weights.footprint)
        self.vocab_size, self.context_length = served.vocab_size, served.context_length
        self.hidden_size = config.decoder.hidden
        self.kv, self.device, self.footprint = self._decoder.kv, served.device, weights.footprint
        self.cuda_graph_obstacle = self._decoder.cuda_graph_obstacle
        embedding = weights.embedding
        self._embed: Callable[[Tensor], Tensor] = embedding if embedding is not None else served.embed
        if embedding is None and config.taps:  # the embedding of an EAGLE-3 head is not scaled
            self._embed = served.look_up

    def fuse(self, tapped: Tensor) -> Tensor:
        """h [T, hidden] of what the served model's DecoderModel.tap_hidden gives."""
        weights = self._weights
        if weights.fusion is None:
            return tapped
        if weights.fusion_norms:
            parts = tapped.chunk(len(weights.fusion_norms), 1)
            normed = [norm(part.contiguous()) for norm, part in zip(weights.fusion_norms, parts, strict=True)]
            tapped = torch.cat(normed, 1)
        return weights.fusion(tapped.contiguous())

    def forward(self, batch: ForwardBatch, hidden: Tensor, attention: AttentionBackend) -> Tensor:
        """What `logits` and further drafts need [T, hidden], from h [T, hidden], for a batch whose tokens are the next
        ones: t_{i + 1} at position i."""
        weights, config = self._weights, self._config
        embedded = weights.embedding_norm(self._embed(batch.tokens))
        normed = hidden if weights.hidden_norm is None else weights.hidden_norm(hidden)
        inputs = torch.cat((normed, embedded) if config.hidden_first else (embedded, normed), 1)
        if weights.projection is not None:
            inputs = weights.projection(inputs)
        outputs = self._decoder.run_inputs(batch, attention, inputs)
        return self._decoder.last_norm(outputs) if config.returns_normed else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits float32 [n, vocab] of outputs [n, hidden] of `forward`; -inf for ids that the head does not score."""
        weights = self._weights
        normed = outputs if self._config.returns_normed else self._decoder.last_norm(outputs)
        if weights.head is None:
            return self._served.head_logits(normed)
        logits = weights.head.logits(normed, self._config.decoder.logit_scale)
        if weights.targets is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return whole.index_copy_(1, weights.targets, logits)
