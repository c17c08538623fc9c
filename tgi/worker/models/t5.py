"""T5 and its kin (flan-t5, T5 v1.1, mT5): an encoder, and a decoder that attends to what the encoder makes of an input.

A prompt is the ids of the input and the id that the decoder starts with. At the positions of the input the pages hold
keys and values for cross-attention, projections of the encoder's result; from the decoder's start on, those of
self-attention. See attention/encoder_decoder.py.

Scores are not scaled. A bias is added to those of self-attention, by head and by the distance of key and query, which
is counted in buckets: each short distance has one of its own, longer ones share one (Raffel et al., 2020, section 2.1).
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.hub.model_config import T5_CONTEXT
from tgi.microkernel.errors import UserError
from tgi.worker.attention.encoder_decoder import EncoderDecoderAttention
from tgi.worker.attention.interface import AttentionBackend, ForwardBatch, KVCacheSpec
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.greedy import FindGreedyTokens, GreedyTokens, find_greedy_tokens
from tgi.worker.head_logits import HeadLogits
from tgi.worker.layers.linear import Linear, choose_row_counts
from tgi.worker.layers.norm import Norm
from tgi.worker.models.interface import LogitsReader, PreparedDecode, WeightFootprint
from tgi.worker.models.t5_config import T5Config, read_t5_config

# Queries of the encoder that attend together: bounds the memory of their biases and scores.
QUERY_BLOCK = 256


class T5Mlp(NamedTuple):
    """The weights of an MLP. `down` adds the residual in its epilogue."""

    norm: Norm
    gate: Linear | None
    up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        inner = self.up(normed) if self.gate is None else self.up(normed, self.gate(normed))
        return self.down(inner, x)


class T5EncoderLayer(NamedTuple):
    """The weights of a layer of the encoder. `output` adds the residual in its epilogue."""

    norm: Norm
    qkv: Linear
    output: Linear
    mlp: T5Mlp


class T5DecoderLayer(NamedTuple):
    """The weights of a layer of the decoder. `output` and `cross_output` add the residual in their epilogue."""

    norm: Norm
    qkv: Linear
    output: Linear
    cross_norm: Norm
    cross_query: Linear
    cross_pairs: Linear  # keys and values of the encoder's result
    cross_output: Linear
    mlp: T5Mlp


def distance_buckets(distances: Tensor, buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance >= 0, of this many: half of them for one distance each, the others for spans that
    grow logarithmically up to `max_distance`."""
    exact = buckets // 2
    spans = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    return torch.where(distances < exact, distances, (exact + spans.long()).clamp(max=buckets - 1))


class T5Model:
    """Implements Model. `encode` is the encoder, the other methods are of the decoder: its batches have EncoderRows."""

    cuda_graph_obstacle: str | None = "an encoder-decoder model attends sequence by sequence"
    context_length = T5_CONTEXT

    def __init__(
        self,
        config: T5Config,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int], None],
        gpu: GpuKernels | None = None,
    ) -> None:
        """Loads the weights. `gpu`: our GPU kernels, for sampling. Raises UserError naming a tensor that is missing or
        has another shape."""
        self.vocab_size, self.device = config.vocab_size, device
        self.find_greedy_tokens: FindGreedyTokens = find_greedy_tokens
        self._config, self._dtype, self._checkpoint = config, dtype, checkpoint
        self._bytes = self._numbers = 0
        hidden = config.hidden
        # In checkpoints of older libraries the embedding has its name in the encoder alone.
        name = next((one for one in ("shared", "encoder.embed_tokens") if f"{one}.weight" in checkpoint), "shared")
        self._embedding = self._tensor(f"{name}.weight", config.vocab_size, hidden)
        tied = "lm_head.weight" not in checkpoint
        head = self._embedding if tied else self._tensor("lm_head.weight", config.vocab_size, hidden)
        self._head = Linear(head.to(dtype))
        layers = config.encoder_layers + config.decoder_layers
        self._encoder, self._decoder = [], []
        for number in range(config.encoder_layers):
            self._encoder.append(self._encoder_layer(f"encoder.block.{number}.layer."))
            progress(100 * (number + 1) // layers)
        for number in range(config.decoder_layers):
            self._decoder.append(self._decoder_layer(f"decoder.block.{number}.layer."))
            progress(100 * (config.encoder_layers + number + 1) // layers)
        self._encoder_norm = self._norm("encoder.final_layer_norm")
        self._decoder_norm = self._norm("decoder.final_layer_norm")
        # [heads, 2 * longest - 1] by position of the key - that of the query + longest - 1
        self._encoder_bias = self._encoder_biases()
        self.kv = KVCacheSpec(
            layers=config.decoder_layers,
            heads=config.heads,
            kv_heads=config.heads,
            head_dim=config.head_dim,
            dtype=dtype,
            gpu_kernels=gpu,
            position_bias=self._decoder_biases(),
        )
        self.footprint = WeightFootprint(self._bytes, self._numbers)
        every: list[T5EncoderLayer | T5DecoderLayer] = [*self._encoder, *self._decoder]
        choose_row_counts([self._head, *(linear for layer in every for linear in _linears(layer))])

    @torch.inference_mode()
    def encode(self, ids: Tensor) -> Tensor:
        """What the encoder makes of an input: [n, hidden] for ids int64 [n]."""
        config, count = self._config, len(ids)
        x = self._embedding.index_select(0, ids).to(self._dtype)
        for layer in self._encoder:
            qkv = layer.qkv(layer.norm(x)).view(1, count, 3, config.heads, config.head_dim)
            query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
            blocks = []
            for first in range(0, count, QUERY_BLOCK):
                part = query[:, :, first : first + QUERY_BLOCK]
                positions = torch.arange(count, device=ids.device)
                distances = positions - positions[first : first + QUERY_BLOCK, None]
                bias = self._encoder_bias[:, distances + self.context_length - 1]
                blocks.append(F.scaled_dot_product_attention(part, key, value, attn_mask=bias[None], scale=1.0))
            mixed = torch.cat(blocks, 2).transpose(1, 2).reshape(count, -1)
            x = layer.mlp(layer.output(mixed, x))
        return self._encoder_norm(x)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None) -> Tensor:
        """See Model. Tokens of the encoder have no logits: those that a reader asks for are zero."""
        x = self._hidden_states(batch, attention)
        if reader is not None:
            for block in reader.blocks:
                reader.read_logits(self._head.logits(x.index_select(0, block)))
        return self._head.logits(x.index_select(0, batch.logits_indices))

    def forward_head(
        self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None
    ) -> HeadLogits:
        return HeadLogits(self.forward(batch, attention, reader))

    def forward_greedy(
        self, batch: ForwardBatch, attention: AttentionBackend, reader: LogitsReader | None = None
    ) -> GreedyTokens:
        return find_greedy_tokens(self.forward(batch, attention, reader))

    def prepare_decode(self, batch: ForwardBatch, attention: AttentionBackend) -> PreparedDecode | None:
        return None

    def load_adapter(self, directory: Path) -> Any:
        """See Model. Always raises UserError: there are no LoRA layers."""
        raise UserError(
            f"The adapter in {directory} cannot be served: LoRA adapters are for decoder-only models, and this is an "
            "encoder-decoder model. Merge the adapter into the model's weights instead."
        )

    def _hidden_states(self, batch: ForwardBatch, attention: AttentionBackend) -> Tensor:
        """The hidden states [T, hidden] that the head gets; zeros at the positions of the encoder."""
        assert isinstance(attention, EncoderDecoderAttention)
        assert batch.encoder is not None
        config, plan, encoded = self._config, attention.plan(batch), batch.encoder.hidden
        heads, dim = config.heads, config.head_dim
        x = self._embedding.index_select(0, batch.tokens[plan.decoder_tokens]).to(self._dtype)
        for number, layer in enumerate(self._decoder):
            if encoded is not None:
                attention.write_encoded(plan, number, layer.cross_pairs(encoded).view(-1, 2 * heads, dim))
            if not len(x):
                continue
            qkv = layer.qkv(layer.norm(x)).view(-1, 3 * heads, dim)
            mixed = attention.write_and_attend(plan, number, qkv, 1.0)
            x = layer.output(mixed.reshape(len(x), -1), x)
            query = layer.cross_query(layer.cross_norm(x)).view(-1, heads, dim)
            mixed = attention.attend_encoded(plan, number, query, 1.0)
            x = layer.mlp(layer.cross_output(mixed.reshape(len(x), -1), x))
        result = x.new_zeros(len(batch.tokens), config.hidden)
        return result.index_copy_(0, plan.decoder_tokens, self._decoder_norm(x) * config.output_scale)

    # --- loading ------------------------------------------------------------------------------------------------------

    def _encoder_layer(self, prefix: str) -> T5EncoderLayer:
        own = f"{prefix}0.SelfAttention."
        return T5EncoderLayer(
            norm=self._norm(f"{prefix}0.layer_norm"),
            qkv=self._projections(own, "qkv"),
            output=self._output(own),
            mlp=self._mlp(f"{prefix}1."),
        )

    def _decoder_layer(self, prefix: str) -> T5DecoderLayer:
        own, cross = f"{prefix}0.SelfAttention.", f"{prefix}1.EncDecAttention."
        return T5DecoderLayer(
            norm=self._norm(f"{prefix}0.layer_norm"),
            qkv=self._projections(own, "qkv"),
            output=self._output(own),
            cross_norm=self._norm(f"{prefix}1.layer_norm"),
            cross_query=self._projections(cross, "q"),
            cross_pairs=self._projections(cross, "kv"),
            cross_output=self._output(cross),
            mlp=self._mlp(f"{prefix}2."),
        )

    def _mlp(self, prefix: str) -> T5Mlp:
        config, own = self._config, f"{prefix}DenseReluDense."
        sizes = config.intermediate, config.hidden
        down = Linear(self._weight(f"{own}wo", config.hidden, config.intermediate), epilogue="add")
        norm = self._norm(f"{prefix}layer_norm")
        if not config.gated:
            return T5Mlp(norm, None, Linear(self._weight(f"{own}wi", *sizes), epilogue=config.activation), down)
        gate = Linear(self._weight(f"{own}wi_0", *sizes), epilogue=config.activation)
        return T5Mlp(norm, gate, Linear(self._weight(f"{own}wi_1", *sizes), epilogue="mul"), down)

    def _projections(self, prefix: str, names: str) -> Linear:
        """One layer of the projections of these names, one letter each."""
        inner = self._config.heads * self._config.head_dim
        return Linear(torch.cat([self._weight(f"{prefix}{name}", inner, self._config.hidden) for name in names]))

    def _output(self, prefix: str) -> Linear:
        inner = self._config.heads * self._config.head_dim
        return Linear(self._weight(f"{prefix}o", self._config.hidden, inner), epilogue="add")

    def _norm(self, name: str) -> Norm:
        weight = self._tensor(f"{name}.weight", self._config.hidden).to(torch.float32)
        return Norm(weight, None, self._config.epsilon, False)

    def _weight(self, name: str, outputs: int, inputs: int) -> Tensor:
        return self._tensor(f"{name}.weight", outputs, inputs).to(self._dtype)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._checkpoint.tensor(name, *shape).to(self.device)
        self._bytes += tensor.numel() * self._dtype.itemsize
        self._numbers += tensor.numel()
        return tensor

    def _bias_table(self, part: str) -> Tensor:
        """The biases [heads, buckets] of one part, which its first layer has."""
        name = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return self._tensor(name, self._config.buckets, self._config.heads).t().to(self._dtype)

    def _encoder_biases(self) -> Tensor:
        """Half of the buckets are for keys after the query."""
        half = self._config.buckets // 2
        relative = torch.arange(1 - self.context_length, self.context_length, device=self.device)
        found = distance_buckets(relative.abs(), half, self._config.max_distance) + half * (relative > 0)
        return self._bias_table("encoder")[:, found]

    def _decoder_biases(self) -> Tensor:
        """KVCacheSpec.position_bias."""
        distances = torch.arange(self.context_length - 1, -1, -1, device=self.device)
        found = distance_buckets(distances, self._config.buckets, self._config.max_distance)
        return self._bias_table("decoder")[:, found]


def _linears(layer: T5EncoderLayer | T5DecoderLayer) -> list[Linear]:
    return [part for part in (*layer, *layer.mlp) if isinstance(part, Linear)]


def build_t5_model(
    directory: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int], None],
    gpu: GpuKernels | None = None,
) -> T5Model:
    """Loads the model of a directory with this parsed config.json; the rest as in `loader.build_model`. Raises
    UserError if it cannot be served."""
    if dtype is torch.float16:
        raise UserError(
            f"The model in {directory} cannot be computed in float16, where hidden states of T5 overflow. Start with "
            "--dtype bfloat16 or float32."
        )
    try:
        numbers = read_t5_config(config)
    except KeyError as error:
        raise UserError(f"{directory}/config.json has no {error}, which {config['model_type']} needs.") from error
    progress("loading weights", 0)
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        return T5Model(
            numbers, checkpoint, dtype, device, lambda percent: progress("loading weights", percent * 9 // 10), gpu
        )
