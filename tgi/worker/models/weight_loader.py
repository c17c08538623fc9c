"""Loads the weights of a decoder from a checkpoint, layer by layer, so that memory holds few of them twice.

Also reads the scales of an 8-bit KV cache.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.microkernel.errors import UserError
from tgi.worker.activations import UP_EPILOGUES
from tgi.worker.checkpoint import Checkpoint
from tgi.worker.cpu_kernels.kernels import NO_FACTORS, CpuKernels, can_pack_together
from tgi.worker.decoder_config import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    LayerInputConfig,
    Mixer,
    RouterConfig,
    StreamsConfig,
)
from tgi.worker.device_copies import StagedCopies
from tgi.worker.distributed.sharding import Shard, layer_inner, layer_kv_heads
from tgi.worker.gpu_kernels.kernels import GpuKernels
from tgi.worker.layers import gated_delta, mamba2, short_conv
from tgi.worker.layers.embedding import Embedding
from tgi.worker.layers.head_products import HeadProducts
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import Experts, GroupedExperts, MixtureOfExperts, Mlp, Router, SharedExpert, pack_experts
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.recurrence import ChosenRows, Recurrence
from tgi.worker.layers.streams import LayerStreams, Streams
from tgi.worker.mixers.gated_delta import GatedDeltaConfig
from tgi.worker.mixers.mamba2 import Mamba2Config
from tgi.worker.mixers.short_conv import ShortConvConfig
from tgi.worker.models.decoder_layer import (
    AttentionWeights,
    CrossAttention,
    DecoderLayer,
    DecoderWeights,
    InputWeights,
    LatentProjections,
    LayerInput,
    LowRankResidual,
    ParallelExperts,
)
from tgi.worker.models.draft_head import DraftHeadWeights
from tgi.worker.models.draft_head_config import DraftHeadConfig
from tgi.worker.models.interface import WeightFootprint
from tgi.worker.quantization.weight import QuantizedWeight, Weight, scale_weight, select_part, stack_weights
from tgi.worker.quantization.weight_forms import EMBEDDING, HEAD, POSITIONS
from tgi.worker.quantization.weight_sources import WeightSource


class StoredMatrix(NamedTuple):
    """A matrix of the checkpoint."""

    name: str  # of its layer in the checkpoint; matrices of the same name are fused in one tensor
    outputs: int
    local: range  # the outputs that this rank computes


def stored_embedding(source: WeightSource, config: DecoderConfig, dtype: torch.dtype) -> Embedding:
    """The embedding as stored, of all tokens: a lookup reads from the mapped file."""
    return Embedding(_embedding_weight(source, config, range(config.vocab_size), dtype), dtype)


def _embedding_weight(source: WeightSource, config: DecoderConfig, tokens: range, dtype: torch.dtype) -> Weight:
    # Where the head shares it, some trainers keep it under the head's name alone.
    under_head = config.tied and f"{EMBEDDING}.weight" not in source and f"{HEAD}.weight" in source
    stored = source.weight(HEAD if under_head else EMBEDDING, config.vocab_size, config.hidden)
    return select_part(stored, tokens, range(config.hidden), dtype)


def _can_group(router: RouterConfig) -> bool:
    """Whether our GPU kernels choose experts and weigh their outputs so."""
    return router.score in ("softmax", "sigmoid") and not router.scales_inputs and not router.expert_scaled


def _head_columns(heads: range, dim: int) -> range:
    """The columns of these heads, of `dim` each."""
    return range(heads.start * dim, heads.stop * dim)


def _clipping(config: DecoderConfig) -> dict[str, Any]:
    """Options of the linear layer of queries, keys and values."""
    clip = config.qkv_clip
    return {} if clip is None else {"epilogue": "clip", "factors": (-clip, clip)}


class DecoderWeightLoader:
    """Loads the weights of a DecoderConfig, or the part that belongs to a shard. Raises UserError naming a tensor that
    is missing or has another shape."""

    def __init__(
        self,
        source: WeightSource,
        config: DecoderConfig,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels | None = None,
        gpu: GpuKernels | None = None,
    ) -> None:
        self._source = source
        self._config = config
        self._shard = shard
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._gpu = gpu
        self._own_kernels = kernels or gpu
        self._staged = StagedCopies(device) if device.type == "cuda" else None
        self._bytes = self._parameters = 0

    def load(self, progress: Callable[[int], None]) -> DecoderWeights:
        """Loads all weights. Calls `progress` with the percentage of layers loaded."""
        config = self._config
        layers = []
        for number in range(len(config.layers)):
            layers.append(self._layer(number))
            progress(100 * len(layers) // len(config.layers))
        # Each rank has the embedding of all tokens, so that they need not add it up, unless the head shares it.
        local = self._shard.vocabulary if config.tied else range(config.vocab_size)
        embedding_weight = self._upload(_embedding_weight(self._source, config, local, self._dtype))
        tied = config.tied or f"{HEAD}.weight" not in self._source
        if tied:
            head = self._build(self._to_device(embedding_weight), self._head_bias(), "none")
        else:
            head = self._untied_head()
        rows = head if tied and self._kernels is not None else embedding_weight
        embedding = Embedding(rows, self._dtype, local if len(local) < config.vocab_size else None)
        norm = self._norm(config.names.last_norm, config.hidden)
        if not tied and self._device.type != "cpu":  # on CPU the embedding stays in the mapped file
            self._count(embedding_weight)
        positions = self._positions() if config.learned_positions else None
        inputs = None if config.layer_inputs is None else self._inputs(config.layer_inputs)
        streams = None if config.streams is None else self._streams(config.streams)
        footprint = WeightFootprint(self._bytes, self._parameters)
        first = self._norm(config.names.embedding_norm, config.hidden) if config.embedding_norm else None
        return DecoderWeights(embedding, layers, norm, head, positions, first, inputs, streams, footprint)

    def _untied_head(self) -> Linear:
        config, local = self._config, self._shard.vocabulary
        if not config.unscored:
            return self._linear(config.head_bias, config.hidden, StoredMatrix(HEAD, config.vocab_size, local))
        scored, tokens = config.vocab_size - config.unscored, torch.arange(local.start, local.stop)
        bias = (tokens >= scored).to(self._dtype) * (torch.finfo(self._dtype).min / 2)
        return self._build(self._rows(HEAD, scored, tokens.clamp(max=scored - 1)), bias.to(self._device), "none")

    def _head_bias(self) -> Tensor | None:
        if not self._config.head_bias:
            return None
        local = self._shard.vocabulary
        stored = self._source.tensor(f"{HEAD}.bias", self._config.vocab_size)
        return stored[local.start : local.stop].to(self._device, self._dtype, copy=True)

    def _positions(self) -> Tensor:
        stored = self._source.tensor(f"{POSITIONS}.weight", self._config.learned_positions, self._config.hidden)
        weight = stored.to(self._device, self._dtype, copy=True)
        self._count(weight)
        return weight

    def _inputs(self, inputs: LayerInputConfig) -> InputWeights:
        config, names, layers = self._config, self._config.names, len(self._config.layers)
        columns = layers * inputs.width
        embedding = self._upload(self._source.weight(names.input_embedding, inputs.vocab_size, columns))
        if self._device.type != "cpu":  # on CPU it stays in the mapped file
            self._count(embedding)
        # The projection is multiplied by hidden^-0.5 before its norm, for which epsilon stands in.
        weight = self._norm_weight(names.input_norm, inputs.width).expand(layers, -1).contiguous()
        return InputWeights(
            Embedding(embedding, self._dtype),
            float(torch.tensor(inputs.width**0.5, dtype=self._dtype)),
            self._linear(False, config.hidden, StoredMatrix(names.input_projection, columns, range(columns))),
            Norm(weight, None, config.norm_epsilon * config.hidden, False, self._own_kernels),
            inputs.image_id,
            inputs.vocab_size,
        )

    def _streams(self, streams: StreamsConfig) -> Streams:
        names, size = self._config.names, self._config.hidden
        to, back = (
            tuple(
                self._linear(False, size, StoredMatrix(name.format(number), size, range(size)))
                for number in range(streams.count - 1)
            )
            for name in (names.stream_split, names.stream_merge)
        )
        return Streams(to, back)

    def _layer_streams(self, prefix: str, streams: StreamsConfig) -> LayerStreams:
        names, hidden, count = self._config.names, self._config.hidden, streams.count
        norm, scale = self._norm(prefix + names.stream_norm, hidden), None
        if streams.scaled:
            scale = self._source.tensor(prefix + names.stream_scale, hidden).to(self._device, torch.float32, copy=True)
        return LayerStreams(
            norm._replace(weight=norm.weight / hidden),
            self._unquantized(prefix + names.stream_router, count),
            self._unquantized(prefix + names.stream_prediction, count * count, inputs=count),
            self._unquantized(prefix + names.stream_correction, count, inputs=count),
            streams.active,
            scale,
        )

    def _residual(self, prefix: str, rank: int) -> LowRankResidual:
        names, hidden = self._config.names, self._config.hidden
        return LowRankResidual(
            self._linear(False, hidden, StoredMatrix(prefix + names.residual_left, rank, range(rank))),
            self._linear(False, rank, StoredMatrix(prefix + names.residual_right, hidden, range(hidden))),
            self._norm(prefix + names.residual_after, hidden),
        )

    def _layer_input(self, prefix: str, inputs: LayerInputConfig) -> LayerInput:
        config, names = self._config, self._config.names
        down = StoredMatrix(prefix + names.input_down, inputs.width, range(inputs.width))
        up = StoredMatrix(prefix + names.input_up, config.hidden, range(config.hidden))
        return LayerInput(
            self._linear(False, config.hidden, down, epilogue=config.activation),
            self._linear(False, inputs.width, up),
            self._norm(prefix + names.input_after, config.hidden),
        )

    def load_draft_head(self, head: DraftHeadConfig) -> DraftHeadWeights:
        """The head of this config, of whose decoder this loader is, without the targets. Embedding and output head are
        read if it has its own."""
        config, names, size = self._config, head.names, self._config.hidden
        fused, scored = len(head.taps) * head.target_hidden, head.scored
        each = fused // max(1, len(names.fusion_norms))
        embedding = own = None
        if head.taps and f"{EMBEDDING}.weight" in self._source:
            stored = self._upload(_embedding_weight(self._source, config, range(config.vocab_size), self._dtype))
            embedding = Embedding(stored, self._dtype)
            if self._device.type != "cpu":  # on CPU it stays in the mapped file
                self._count(stored)
        if scored and (scored < config.vocab_size or f"{HEAD}.weight" in self._source):
            own = self._linear(False, size, StoredMatrix(HEAD, scored, range(scored)))
        return DraftHeadWeights(
            embedding_norm=self._norm(names.embedding_norm, size),
            hidden_norm=None if names.hidden_norm is None else self._norm(names.hidden_norm, size),
            projection=None if names.projection is None else self._whole(names.projection, size, 2 * size),
            layers=[self._layer(number, names.layer) for number in range(len(config.layers))],
            norm=self._norm(names.norm, size),
            fusion=None if names.fusion is None else self._whole(names.fusion, size, fused),
            fusion_norms=tuple(self._norm(name, each) for name in names.fusion_norms),
            embedding=embedding,
            head=own,
            targets=None,
            footprint=WeightFootprint(self._bytes, self._parameters),
        )

    def _whole(self, name: str, outputs: int, inputs: int) -> Linear:
        """A layer that ranks do not divide. It has a bias if the checkpoint does."""
        return self._linear(f"{name}.bias" in self._source, inputs, StoredMatrix(name, outputs, range(outputs)))

    def _layer(self, number: int, prefix: str = "") -> DecoderLayer:
        config, names, prefix = self._config, self._config.layer_names(number), prefix or f"model.layers.{number}."
        layer = config.layers[number]
        parallel = config.experts is not None and config.experts.parallel

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self._norm(prefix + name, config.hidden)

        attention_after = norm(names.attention_after)
        more_follows = attention_after is not None
        mlp = None
        if layer.has_mlp:
            mlp = self._experts(prefix) if layer.routed and not parallel else self._dense(number, prefix)
        return DecoderLayer(
            attention_before=norm(names.attention_before) if layer.mixer != Mixer.NONE else None,
            attention=self._attention(number, prefix, more_follows) if layer.attends else None,
            recurrence=self._recurrence(prefix, number, more_follows) if layer.recurs else None,
            attention_after=attention_after,
            mlp_before=norm(names.mlp_before) if layer.has_mlp else None,
            mlp=mlp,
            mlp_after=norm(names.mlp_after),
            experts=self._parallel_experts(prefix) if layer.routed and parallel else None,
            layer_input=None if config.layer_inputs is None else self._layer_input(prefix, config.layer_inputs),
            streams=None if config.streams is None else self._layer_streams(prefix, config.streams),
            residual=self._residual(prefix, config.residual_rank) if config.residual_rank else None,
            cross=self._cross_attention(prefix) if layer.sees_images else None,
            mlp_gate=self._gate(prefix + names.cross_mlp_gate) if layer.sees_images else 1.0,
            scale=float(self._source.tensor(prefix + names.scale, 1)) if config.layer_scales else 1.0,
            joins_embedding=layer.joins_embedding,
        )

    def _recurrence(self, prefix: str, number: int, more_follows: bool) -> Recurrence:
        config, local = self._config.recurrent, self._shard.recurrent
        tensors = MixerWeights(self, prefix + self._config.names.mixer, more_follows)
        place = self._config.state_number(number)
        if isinstance(config, ShortConvConfig):
            return short_conv.load(tensors, config, local, place)
        if isinstance(config, GatedDeltaConfig):
            return gated_delta.load(tensors, config, local, place)
        assert isinstance(config, Mamba2Config)
        return mamba2.load(tensors, config, local, place)

    def _attention(self, number: int, prefix: str, more_follows: bool) -> AttentionWeights:
        config, names, layer = self._config, self._config.names, self._config.layers[number]
        if config.latent is not None:
            return self._latent_attention(config.latent, prefix, more_follows)
        shape, own = config.head_shape(number), layer_kv_heads(config, self._shard, number)
        heads, kv_heads = config.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        queries, keys = _head_columns(self._shard.heads, shape.head_dim), _head_columns(own, shape.head_dim)
        qkv = [
            StoredMatrix(prefix + names.query, heads, queries),
            StoredMatrix(prefix + names.key, kv_heads, keys),
            StoredMatrix(prefix + names.value, kv_heads, keys),
        ]
        if layer.shares is not None:
            qkv = qkv[:1]
        elif layer.keys_as_values:
            qkv[2] = qkv[1]
        output = StoredMatrix(prefix + names.output, config.hidden, range(config.hidden))
        gate = None
        if config.output_gate:
            assert not config.qkv_bias
            both = torch.arange(2 * heads).view(config.heads, 2, config.head_dim)  # each head's query, and its gate
            local = both[self._shard.heads.start : self._shard.heads.stop]
            query, gates = (self._rows(prefix + names.query, 2 * heads, local[:, n].flatten()) for n in range(2))
            pairs = [weight for weight, _ in self._matrices(False, config.hidden, *qkv[1:])]
            first, gate = (
                self._build(one, None, "none") for one in (stack_weights((query, *pairs), self._dtype), gates)
            )
        elif layer.keys_as_values:  # stored once, and held twice
            assert not config.qkv_bias
            pairs = [self._matrices(False, config.hidden, one)[0][0] for one in qkv]
            first = self._build(stack_weights(pairs, self._dtype), None, "none")
        else:
            first = self._linear(config.qkv_bias, config.attention_inputs(number), *qkv, **_clipping(config))
        return AttentionWeights(
            qkv=first,
            query_key_norms=self._query_key_norms(number, prefix + names.query_norm, prefix + names.key_norm),
            output=self._last_linear(
                config.output_bias, heads, queries, output, more_follows, config.attention_output_scale
            ),
            output_gate=gate,
            sinks=self._sinks(prefix + names.sinks) if config.sinks else None,
        )

    def _cross_attention(self, prefix: str) -> CrossAttention:
        config, names, dim = self._config, self._config.names, self._config.head_dim
        queries, keys = _head_columns(self._shard.heads, dim), _head_columns(self._shard.kv_heads, dim)
        heads, kv_heads = config.heads * dim, config.kv_heads * dim
        key, value = (StoredMatrix(prefix + name, kv_heads, keys) for name in (names.cross_key, names.cross_value))
        output = StoredMatrix(prefix + names.cross_output, config.hidden, range(config.hidden))
        return CrossAttention(
            query=self._linear(False, config.hidden, StoredMatrix(prefix + names.cross_query, heads, queries)),
            query_norm=self._head_norm(prefix + names.cross_query_norm, len(self._shard.heads)),
            pairs=self._linear(False, config.hidden, key, value),
            key_norm=self._head_norm(prefix + names.cross_key_norm, len(self._shard.kv_heads)),
            output=self._last_linear(False, heads, queries, output, more_follows=True),  # a factor
            gate=self._gate(prefix + names.cross_gate),
        )

    def _head_norm(self, name: str, heads: int) -> Norm:
        norm = self._norm(name, self._config.head_dim)
        return norm._replace(weight=norm.weight.expand(heads, -1).contiguous())

    def _gate(self, name: str) -> float:
        return float(self._source.tensor(name, 1).to(self._dtype).tanh())

    def _latent_attention(self, latent: LatentConfig, prefix: str, more_follows: bool) -> AttentionWeights:
        config, names, dim = self._config, self._config.names, self._config.head_dim
        values = _head_columns(self._shard.heads, latent.value_dim)
        output = StoredMatrix(prefix + names.output, config.hidden, range(config.hidden))
        return AttentionWeights(
            qkv=self._linear(config.qkv_bias, config.hidden, StoredMatrix(prefix + names.latent_down, dim, range(dim))),
            output=self._last_linear(config.output_bias, config.heads * latent.value_dim, values, output, more_follows),
            latent=self._latent(latent, prefix),
        )

    def _latent(self, latent: LatentConfig, prefix: str) -> LatentProjections:
        config, names, heads, inner = self._config, self._config.names, self._shard.heads, latent.query_rank
        down = norm = None
        if inner is not None:
            matrix = StoredMatrix(prefix + names.query_down, inner, range(inner))
            down = self._linear(config.qkv_bias, config.hidden, matrix)
            norm = self._latent_norm(prefix + names.query_down_norm, inner, latent)
        name = prefix + (names.query if inner is None else names.query_up)
        query = StoredMatrix(name, config.heads * latent.query_dim, _head_columns(heads, latent.query_dim))
        # Never quantized: K is used transposed.
        each = latent.nope_dim + latent.value_dim
        stored = self._source.tensor(f"{prefix}{names.latent_up}.weight", config.heads * each, latent.rank)
        own = self._to_device(stored.view(config.heads, each, latent.rank)[heads.start : heads.stop])
        assert isinstance(own, Tensor)
        self._bytes += own.nbytes
        self._parameters += own.numel()
        rest = self._kernels, self._device.type != "cpu" and not (self._gpu and self._gpu.batch_invariant)
        return LatentProjections(
            query_down=down,
            query_norm=norm,
            query=self._linear(False, inner or config.hidden, query),
            key_norm=self._latent_norm(prefix + names.latent_norm, latent.rank, latent),
            absorb=HeadProducts(own[:, : latent.nope_dim].transpose(1, 2), latent.rope_dim, *rest),
            project=HeadProducts(own[:, latent.nope_dim :], 0, *rest),
        )

    def _latent_norm(self, name: str, size: int, latent: LatentConfig) -> Norm:
        return self._norm(name, size)._replace(epsilon=latent.norm_epsilon)

    def _sinks(self, name: str) -> Tensor:
        """The sinks of this rank's heads."""
        heads = self._shard.heads
        stored = self._source.tensor(name, self._config.heads)[heads.start : heads.stop]
        return stored.to(self._device, torch.float32, copy=True)

    def _rows(self, name: str, outputs: int, chosen: Tensor) -> Weight:
        """The outputs `chosen` (int64 [n]) of a matrix of that many, which reads the hidden states."""
        weight = self._source.weight(name, outputs, self._config.hidden)
        return self._to_device(weight[chosen] if isinstance(weight, Tensor) else weight.rows(chosen))

    def _last_linear(
        self, bias: bool, inputs: int, local: range, matrix: StoredMatrix, more_follows: bool, scale: float = 1.0
    ) -> Linear:
        """The last layer of a part, with the inputs `local`, whose result is multiplied by `scale`. It adds the
        residual unless something comes between: a norm, the sum over all ranks, or a factor. One rank adds the bias."""
        is_partial = len(local) < inputs
        ((weight, found),) = self._matrices(bias, inputs, matrix, columns=local)
        adds = not more_follows and not is_partial and self._config.residual_scale * scale == 1.0
        return self._build(
            weight,
            found if self._shard.rank == 0 or not is_partial else None,
            "add" if adds else "none",
            partial_sum=is_partial,
        )

    def _dense(self, number: int, prefix: str) -> Mlp:
        config, names = self._config, self._config.names
        return self._mlp(
            prefix,
            (names.gate, names.up, names.down),
            config.inner(number),
            layer_inner(config, self._shard, number),
            names.mlp_after is not None or config.layers[number].sees_images,
            config.layers[number].sparse_above,
        )

    def _mlp(
        self,
        prefix: str,
        names: tuple[str, str, str],
        inner: int,
        local: range,
        more_follows: bool,
        sparse_above: float | None = None,
    ) -> Mlp:
        config = self._config
        sizes = (inner, local), (inner, local), (config.hidden, range(config.hidden))
        gate, up, down = (StoredMatrix(prefix + name, *size) for name, size in zip(names, sizes, strict=True))
        last = self._last_linear(config.mlp_bias, inner, local, down, more_follows, config.mlp_scales[1])
        if sparse_above is not None:
            first, second = (
                self._linear(config.mlp_bias, config.hidden, one, epilogue=epilogue)
                for one, epilogue in ((gate, "none"), (up, "mul"))
            )
            return Mlp(first, second, last, sparse_above, config.activation)
        return Mlp(*self._gate_and_up(gate, up, self._factors(prefix)), down=last)

    def _factors(self, prefix: str) -> tuple[float, float]:
        """The factors of a layer's activation: of xielu, softplus of one number and 0.5 + softplus of another."""
        if self._config.activation != "xielu":
            return NO_FACTORS
        name = prefix + self._config.names.activation
        first, second = (float(F.softplus(self._source.tensor(f"{name}.alpha_{end}", 1).float())) for end in "pn")
        return first, second + 0.5

    def _gate_and_up(
        self, gate: StoredMatrix, up: StoredMatrix, factors: tuple[float, float] = NO_FACTORS
    ) -> tuple[Linear | None, Linear]:
        """The first layers of an Mlp: on our own kernels one gated layer, if both weights have the same format."""
        config = self._config
        if not config.gated:
            return None, self._linear(config.mlp_bias, config.hidden, up, epilogue=config.activation, factors=factors)
        first, second = self._matrices(config.mlp_bias, config.hidden, gate, up)
        if config.mlp_scales[0] != 1.0:
            assert not config.mlp_bias
            first = scale_weight(first[0], config.mlp_scales[0]), None
        if self._own_kernels is None or not can_pack_together(first[0], second[0]):
            return self._build(*first, config.activation), self._build(
                *second, UP_EPILOGUES.get(config.activation, "mul")
            )
        biases = [bias for _, bias in (first, second) if bias is not None]
        return None, self._build(first[0], torch.cat(biases) if biases else None, config.activation, second[0])

    def _experts(self, prefix: str) -> Experts:
        names, experts = self._config.names, self._config.experts
        assert experts is not None
        each = (names.expert_gate, names.expert_up, names.expert_down)
        router, shared = self._router(prefix, experts), self._shared_expert(prefix, experts)
        if self._gpu is not None and _can_group(experts.router):
            return self._grouped_experts(prefix, each, experts, router, shared, self._gpu)

        def expert(number: int) -> Mlp:
            gate, up, down = (name.format(number) for name in each)
            return self._mlp(prefix, (gate, up, down), experts.intermediate, self._shard.expert_inner, True)

        each_mlp = [expert(number) for number in range(experts.count)]
        packed = None if self._kernels is None else pack_experts(self._kernels, router, each_mlp, shared)
        return MixtureOfExperts(router, each_mlp, shared, packed)

    def _parallel_experts(self, prefix: str) -> ParallelExperts:
        config, names = self._config, self._config.names
        dense_after, before, after = (
            self._norm(prefix + name, config.hidden)
            for name in (names.dense_after, names.experts_before, names.experts_after)
        )
        stored = self._source.tensor(prefix + names.router_input_scale, config.hidden)
        scale = stored.to(self._device, torch.float32) * config.hidden**-0.5
        return ParallelExperts(
            dense_after, before, before._replace(weight=scale, bias=None), self._experts(prefix), after
        )

    def _grouped_experts(
        self,
        prefix: str,
        names: tuple[str, str, str],
        experts: ExpertsConfig,
        router: Router,
        shared: SharedExpert | None,
        gpu: GpuKernels,
    ) -> GroupedExperts:
        config, inner, local = self._config, experts.intermediate, self._shard.expert_inner

        def stacked(
            inputs: int, columns: range, outputs: int, rows: range, names: tuple[str, ...], bias: bool
        ) -> tuple[Weight, Tensor | None]:
            """One weight, and one bias, of these matrices of all experts. They are not needed any more when it returns,
            so that memory holds no more than one layer twice."""
            parts: list[Weight] = []
            biases: list[Tensor] = []
            for number in range(experts.count):
                matrices = (StoredMatrix(prefix + name.format(number), outputs, rows) for name in names)
                for weight, found in self._matrices(bias, inputs, *matrices, columns=columns):
                    parts.append(weight)
                    biases += [] if found is None else [found]
            weight = stack_weights(parts, self._dtype)
            self._count(weight)
            return weight, torch.cat(biases) if biases else None

        hidden, partial_sum = range(config.hidden), len(local) < inner
        first = names[:2] if config.gated else names[1:2]
        up, up_bias = stacked(config.hidden, hidden, inner, local, first, config.mlp_bias)
        last_bias = config.mlp_bias and (self._shard.rank == 0 or not partial_sum)  # as in _last_linear
        down, down_bias = stacked(inner, local, config.hidden, hidden, names[2:], last_bias)
        return GroupedExperts(
            router=router,
            up=up,
            down=down,
            up_bias=up_bias,
            down_bias=down_bias,
            activation=config.activation,
            gated=config.gated,
            shared=shared,
            partial_sum=partial_sum,
            kernels=gpu,
        )

    def _router(self, prefix: str, experts: ExpertsConfig) -> Router:
        names, bias = self._config.names, None
        if experts.router.biased:
            shape = (1, experts.count) if names.router_bias_is_row else (experts.count,)
            stored = self._source.tensor(prefix + names.router_bias, *shape)
            bias = stored.flatten().to(self._device, torch.float32, copy=True)
        linear = self._unquantized(prefix + names.router, experts.count, experts.router.logit_bias)
        scales = None
        if experts.router.expert_scaled:
            found = self._source.tensor(prefix + names.router_expert_scale, experts.count)
            scales = found.to(self._device, torch.float32, copy=True)
        return Router(linear, bias, experts.router, experts.top_k, scales)

    def _shared_expert(self, prefix: str, experts: ExpertsConfig) -> SharedExpert | None:
        names, width = self._config.names, experts.shared_intermediate
        if not width:
            return None
        mlp = self._mlp(prefix, names.shared_parts, width, self._shard.shared_inner, True)
        return SharedExpert(mlp, self._unquantized(prefix + names.shared_gate, 1) if experts.shared_gated else None)

    def _unquantized(self, name: str, outputs: int, bias: bool = False, inputs: int | None = None) -> Linear:
        """A router or a gate is never quantized: it is small, and small errors would change the choice of experts."""
        weight = self._source.tensor(f"{name}.weight", outputs, inputs or self._config.hidden)
        offset = self._source.tensor(f"{name}.bias", outputs).to(self._device, self._dtype) if bias else None
        return self._build(self._to_device(weight), offset, "none")

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self._device)

    def _norm_weight(self, name: str, *shape: int) -> Tensor:
        weight = self._source.tensor(f"{name}.weight", *shape).to(self._device, torch.float32, copy=True)
        return weight + self._config.norm_offset if self._config.norm_offset else weight

    def _norm(self, name: str, size: int) -> Norm:
        config = self._config
        bias = None
        if config.norm_bias:
            bias = self._source.tensor(f"{name}.bias", size).to(self._device, torch.float32, copy=True)
        return Norm(self._norm_weight(name, size), bias, config.norm_epsilon, config.norm_centred, self._own_kernels)

    def _query_key_norms(self, number: int, query: str, key: str) -> tuple[Norm, ...]:
        """DecoderLayer.query_key_norms: none; one with a weight [heads + kv_heads, head_dim], or with another kv_heads
        rows for the values; or two, one over all query heads and one over all key heads."""
        config, layer = self._config, self._config.layers[number]
        kv_heads, dim = config.head_shape(number)
        local = layer_kv_heads(config, self._shard, number)
        kind, parts = config.query_key_norm, [(query, config.heads, self._shard.heads), (key, kv_heads, local)]
        if layer.shares is not None:
            parts.pop()
        if kind is None or (layer.rope is None and not config.query_key_norm_scaled):
            return ()
        if kind == "all":
            return tuple(self._norm(name, heads * dim) for name, heads, _ in parts)
        weights = []
        for name, heads, own in parts:
            stored = (heads, dim) if kind == "each" else (dim,)
            if "{}" in name:
                weight = torch.stack([self._norm_weight(name.format(head), dim) for head in range(heads)])
            else:
                weight = self._norm_weight(name, *stored) if config.query_key_norm_scaled else self._ones(dim)
            weights.append(weight.expand(heads, -1)[own.start : own.stop])
        if config.value_norm and layer.shares is None:
            weights.append(self._ones(dim).expand(len(local), -1))
        return (Norm(torch.cat(weights), None, config.norm_epsilon, config.norm_centred, self._own_kernels),)

    def _linear(
        self,
        bias: bool,
        inputs: int,
        *parts: StoredMatrix,
        epilogue: str = "none",
        factors: tuple[float, float] = NO_FACTORS,
    ) -> Linear:
        """One linear layer whose outputs are those of `parts`, one after the other."""
        weights, biases = zip(*self._matrices(bias, inputs, *parts), strict=True)
        joined = torch.cat(biases) if bias else None
        return self._build(stack_weights(weights, self._dtype), joined, epilogue, factors=factors)

    def _build(
        self,
        weight: Weight,
        bias: Tensor | None,
        epilogue: str,
        gated: Weight | None = None,
        partial_sum: bool = False,
        factors: tuple[float, float] = NO_FACTORS,
    ) -> Linear:
        for one in (weight, gated):
            if one is not None:
                self._count(one)
        return Linear(weight, bias, epilogue, self._kernels, self._dtype, gated, self._gpu, partial_sum, factors)

    def _count(self, weight: Weight) -> None:
        """Adds a matrix to the footprint. torch's CPU kernels take no quantized weights: these are dequantized."""
        outputs, inputs = weight.shape
        dequantized = isinstance(weight, QuantizedWeight) and self._device.type == "cpu" and self._kernels is None
        self._bytes += outputs * inputs * self._dtype.itemsize if dequantized else weight.nbytes
        self._parameters += outputs * inputs

    def _matrices(
        self, bias: bool, inputs: int, *parts: StoredMatrix, columns: range | None = None
    ) -> list[tuple[Weight, Tensor | None]]:
        """Weight and bias of each part, on the model's device, with the outputs of this rank and the inputs `columns`;
        splits fused tensors."""
        columns = columns or range(inputs)
        rows = [part.outputs for part in parts]
        fused = len({part.name for part in parts}) < len(parts)
        stored = [(parts[0].name, sum(rows))] if fused else [(part.name, part.outputs) for part in parts]
        loaded: list[Weight] = [self._source.weight(name, outputs, inputs) for name, outputs in stored]
        weights = loaded[0].split(rows) if fused else loaded
        biases: list[Tensor | None] = [None] * len(parts)
        if bias:
            vectors = [self._source.tensor(f"{name}.bias", outputs) for name, outputs in stored]
            biases = list(vectors[0].split(rows) if fused else vectors)
        return [
            (
                self._to_device(select_part(weight, part.local, columns, self._dtype)),
                None if one is None else one[part.local.start : part.local.stop].to(self._device, self._dtype),
            )
            for part, weight, one in zip(parts, weights, biases, strict=True)
        ]

    def _to_device(self, weight: Weight) -> Weight:
        """The weight on the model's device, in types that the kernels take; one that is not quantized, in the model's
        dtype on torch's kernels and on our GPU kernels."""
        if self._kernels is not None:
            return self._kernels.supported_weight(weight)
        if isinstance(weight, QuantizedWeight):
            return weight.to(self._device)
        return self._upload(weight).to(self._dtype)

    def _upload(self, weight: Weight) -> Weight:
        if self._staged is None or isinstance(weight, QuantizedWeight) or weight.device.type != "cpu":
            return weight.to(self._device)
        return self._staged.copy(weight)


class MixerWeights(NamedTuple):
    """Implements MixerTensors for a loader's layer."""

    loader: DecoderWeightLoader
    prefix: str
    more_follows: bool  # a norm comes after the output

    @property
    def kernels(self) -> CpuKernels | GpuKernels | None:
        return self.loader._own_kernels

    @property
    def norm_epsilon(self) -> float:
        return self.loader._config.norm_epsilon

    def input(self, parts: Sequence[ChosenRows], bias: bool = False) -> Linear:
        loader = self.loader
        weights = [loader._rows(f"{self.prefix}.{name}", outputs, chosen) for name, outputs, chosen in parts]
        weight = weights[0] if len(weights) == 1 else stack_weights(weights, loader._dtype)
        found = None
        if bias:
            vectors = [self.vector(f"{name}.bias", chosen, outputs) for name, outputs, chosen in parts]
            found = torch.cat(vectors).to(loader._dtype)
        return loader._build(weight, found, "none")

    def gates(self, parts: Sequence[ChosenRows]) -> Linear:
        loader = self.loader
        hidden = loader._config.hidden
        plain = [
            loader._source.tensor(f"{self.prefix}.{name}.weight", outputs, hidden)[chosen]
            for name, outputs, chosen in parts
        ]
        return loader._build(loader._to_device(torch.cat(plain)), None, "none")

    def output(self, name: str, inputs: int, local: range, bias: bool = False) -> Linear:
        hidden = self.loader._config.hidden
        matrix = StoredMatrix(f"{self.prefix}.{name}", hidden, range(hidden))
        return self.loader._last_linear(bias, inputs, local, matrix, self.more_follows)

    def vector(self, name: str, chosen: Tensor, *shape: int) -> Tensor:
        loader = self.loader
        stored = loader._source.tensor(f"{self.prefix}.{name}", *shape)[chosen]
        return stored.to(loader._device, torch.float32)


def read_targets(checkpoint: Checkpoint, name: str, scored: int, vocab_size: int) -> Tensor:
    """DraftHeadWeights.targets, of which the tensor of this name has the differences to 0, 1, 2 and so on. Raises
    UserError if it is not as expected."""
    targets = checkpoint.raw_tensor(name).to(torch.int64)
    if tuple(targets.shape) == (scored,):
        targets = targets + torch.arange(scored)
        if int(targets.min()) >= 0 and int(targets.max()) < vocab_size:
            return targets
    raise UserError(
        f"Tensor {name!r} in {checkpoint.file_of(name)} must give each of the {scored} ids that the head scores one of "
        f"the {vocab_size} of the model. Download the head again, or choose another --draft-model-id."
    )


def read_kv_scales(checkpoint: Checkpoint, layers: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """KVCacheSpec.cache_scales of a checkpoint: k_scale and v_scale of the attention of these layers, or kv_scale for
    both.

    1 where a layer has none; empty if no layer has any. Raises UserError if a scale is not a number above 0.
    """

    def read(layer: int, *names: str) -> float | None:
        candidates = (f"model.layers.{layer}.self_attn.{name}" for name in names)
        name = next((name for name in candidates if name in checkpoint), None)
        if name is None:
            return None
        stored = checkpoint.raw_tensor(name)
        if stored.numel() != 1 or not 0 < (scale := float(stored)) < math.inf:
            raise UserError(
                f"Tensor {name!r} in {checkpoint.file_of(name)} must be a scale of the KV cache, one "
                "number above 0. Remove the tensor from the checkpoint, or create it again."
            )
        return scale

    scales = [(read(layer, "k_scale", "kv_scale"), read(layer, "v_scale", "kv_scale")) for layer in layers]
    if all(pair == (None, None) for pair in scales):
        return ()
    return tuple((key or 1.0, value or 1.0) for key, value in scales)
