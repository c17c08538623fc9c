"""Decoder layers: their weights and the order of their operations.

`run_layer` is the only place that says which operations a layer consists of. It calls an implementation of
LayerOperations: TensorOperations computes on tensors at once; ProgramOperations appends each operation to a program,
which the CPU kernels run later without returning to Python in between.
"""

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tgi.worker.attention.interface import AttentionBackend, KVCacheSpec, SeenImages, TransformingBackend
from tgi.worker.cpu_kernels.experts import PackedExperts
from tgi.worker.cpu_kernels.kernels import WHOLE_VOCABULARY, VocabularyShards
from tgi.worker.cpu_kernels.program import LoraTarget, Program
from tgi.worker.cpu_kernels.recurrent import sigmoid_gate
from tgi.worker.decoder_config import DecoderConfig, LayerConfig
from tgi.worker.distributed.communicator import Communicator
from tgi.worker.distributed.shared_memory import SharedMemoryCommunicator
from tgi.worker.gpu_kernels.attention_arguments import HeadTransform, Rotation
from tgi.worker.layers.embedding import Embedding
from tgi.worker.layers.gated_delta import exactly
from tgi.worker.layers.head_products import HeadProducts
from tgi.worker.layers.linear import Linear
from tgi.worker.layers.mlp import Experts, MixtureOfExperts, Mlp
from tgi.worker.layers.norm import Norm
from tgi.worker.layers.recurrence import Recurrence, RecurrentMixer
from tgi.worker.layers.rotary import RotaryEmbedding
from tgi.worker.layers.streams import LayerStreams, Streams
from tgi.worker.lora.deltas import LayerLoraDeltas, LoraDeltas
from tgi.worker.lora.launched_deltas import LaunchedDeltas, LaunchedLayerDeltas
from tgi.worker.lora.packed_deltas import PackedDeltas, PackedLayerDeltas
from tgi.worker.lora.projections import PROJECTION_GROUPS
from tgi.worker.models.interface import WeightFootprint
from tgi.worker.state_cache import StateRows


class DecoderLayer(NamedTuple):
    """The weights of one layer. Projections of the same input are fused into one matrix.

    The last matrix of each part (`output`, `mlp.down`) adds the residual in its epilogue, where no norm follows it.
    """

    attention_before: Norm | None  # of the input of attention and of a recurrent mixer
    attention: "AttentionWeights | None"  # None: the layer has none
    recurrence: Recurrence | None  # None: the layer is not recurrent
    attention_after: Norm | None
    mlp_before: Norm | None
    mlp: Mlp | Experts | None  # None: the layer has none
    mlp_after: Norm | None
    experts: "ParallelExperts | None" = None  # next to `mlp`
    layer_input: "LayerInput | None" = None
    streams: LayerStreams | None = None
    residual: "LowRankResidual | None" = None
    cross: "CrossAttention | None" = None  # None: the layer attends to no images
    mlp_gate: float = 1.0  # multiplies the result of the MLP
    scale: float = 1.0  # multiplies the hidden states after the layer
    joins_embedding: bool = False  # see LayerConfig

    @property
    def mlps(self) -> list[Mlp | Experts]:
        """Its dense MLP, or its experts, or both."""
        both = self.mlp, self.experts and self.experts.experts
        return [mlp for mlp in both if mlp is not None]


class AttentionWeights(NamedTuple):
    """The weights of attention."""

    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]; of latent attention the key alone, [head_dim, hidden]
    output: Linear
    # Norms of queries and keys: each applies to the next weight.numel() columns of the qkv result.
    query_key_norms: tuple[Norm, ...] = ()
    latent: "LatentProjections | None" = None  # of latent attention
    sinks: Tensor | None = None  # float32 [heads], see KVCacheSpec.sinks
    output_gate: Linear | None = None  # the result is multiplied by sigmoid(output_gate(input))


class CrossAttention(NamedTuple):
    """The weights of attention to the states of images (Llama 3.2 Vision). Each token of a step skips the layer that
    sees no image, and the layers of a step in which no token does."""

    query: Linear
    query_norm: Norm  # with a weight [heads, head_dim]
    pairs: Linear  # [2 * kv_heads * head_dim, hidden]: keys, then values, of the states
    key_norm: Norm  # with a weight [kv_heads, head_dim]
    output: Linear
    gate: float  # multiplies the result


class ParallelExperts(NamedTuple):
    """A mixture of experts next to a dense MLP (Gemma 4), both in place of mlp(mlp_before(x)): dense_after(mlp(
    mlp_before(x))) + after(experts(before(x))), where the router sees router(x)."""

    dense_after: Norm
    before: Norm
    router: Norm
    experts: Experts
    after: Norm


class LayerInput(NamedTuple):
    """What a layer adds at its end; see LayerInputConfig."""

    down: Linear  # with the activation
    up: Linear
    after: Norm


class LowRankResidual(NamedTuple):
    """What a layer adds behind attention; see DecoderConfig.residual_rank."""

    left: Linear  # [rank, hidden]
    right: Linear
    after: Norm


class LatentProjections(NamedTuple):
    """What latent attention has besides its key; see LatentConfig."""

    query_down: Linear | None  # None: `query` has the hidden states as its input
    query_norm: Norm | None
    query: Linear  # [heads * query_dim, query_rank]
    key_norm: Norm  # of the latent, the first elements of the key
    absorb: HeadProducts  # with K: [heads, rank, nope_dim]
    project: HeadProducts  # with V: [heads, value_dim, rank]


class DecoderWeights(NamedTuple):
    """All weights of a model. Those of norms are float32."""

    embedding: Embedding  # [vocab, hidden]
    layers: list[DecoderLayer]
    norm: Norm
    head: Linear  # [vocab, hidden]
    positions: Tensor | None  # [DecoderConfig.learned_positions, hidden]
    embedding_norm: Norm | None
    layer_inputs: "InputWeights | None"
    streams: Streams | None
    footprint: WeightFootprint


class InputWeights(NamedTuple):
    """What per-layer embeddings are made of; see LayerInputConfig."""

    embedding: Embedding  # [vocab, layers * width]; never divided among ranks
    scale: float  # of the embedding
    projection: Linear  # [layers * width, hidden]
    norm: Norm  # with a weight [layers, width]
    image_id: int  # LayerInputConfig.image_id
    vocab_size: int  # ids from this one on count as 0

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The inputs of all layers [rows, layers * width] for ids [rows] with scaled embeddings [rows, hidden]."""
        layers, width = self.norm.weight.shape
        tokens = tokens.masked_fill(tokens >= self.vocab_size, 0)
        projected = self.norm(self.projection(hidden).view(-1, layers, width)).flatten(1)
        return (projected + self.embedding(tokens) * self.scale) * 2**-0.5


MIXER_INPUT, MIXER_OUTPUT = "mixer input", "mixer output"
INPUT_DOWN, INPUT_UP = "layer input down", "layer input up"  # of LayerInput
RESIDUAL_LEFT, RESIDUAL_RIGHT = "residual left", "residual right"  # of LowRankResidual
CROSS_QUERY, CROSS_OUTPUT = "cross query", "cross output"  # of CrossAttention

X = TypeVar("X")  # the rows of a step: a tensor [rows, width], or the program buffer that will hold it


class LayerOperations(Protocol[X]):
    """The operations of a layer. `group` is a key of lora.projections.PROJECTION_GROUPS, for the deltas of adapters, or
    of LATENT_GROUPS, or INPUT_DOWN, INPUT_UP, RESIDUAL_LEFT, RESIDUAL_RIGHT, CROSS_QUERY or CROSS_OUTPUT, or, in a
    recurrent layer, which has none, MIXER_INPUT or MIXER_OUTPUT."""

    def norm(self, norm: Norm, x: X) -> X:
        """norm(x)."""

    def norm_first(self, norm: Norm, x: X) -> X:
        """x with its first columns normed, as many as the norm has. Overwrites x."""

    def join(self, x: X) -> X:
        """The input of attention next to x; see LayerConfig.joins_embedding."""

    def head_products(self, products: HeadProducts, x: X, last: X | None = None) -> X:
        """products(x, last)."""

    def linear(self, group: str, linear: Linear, x: X, residual: X | None = None) -> X:
        """linear(x); with `residual`, the second operand of the epilogue "add"."""

    def attend(self, qkv: X, norms: tuple[Norm, ...]) -> X:
        """Applies the norms (DecoderLayer.query_key_norms) and the rotary embedding to queries and keys, in the order
        of DecoderConfig.query_key_norm_last, then attention."""

    def mix(self, mixer: RecurrentMixer, normed: X, projected: X) -> X:
        """The result of a recurrent layer's mixer, whose output projection follows. `normed` is the layer's input."""

    def attend_images(self, cross: CrossAttention, queries: X) -> X:
        """The attention of these queries to the images that their tokens see; anything for tokens that see none. May
        overwrite queries."""

    def gate(self, gate: Linear, normed: X, mixed: X) -> X:
        """mixed * sigmoid(gate(normed)). May overwrite mixed."""

    def gate_up(self, mlp: Mlp, x: X) -> X:
        """The input of mlp.down."""

    def norm_for_router(self, norm: Norm, x: X) -> X:
        """norm(x), to stand next to another norm of x."""

    def experts(self, experts: Experts, x: X, seen: X) -> X:
        """experts(x), chosen by what the router sees."""

    def times_layer_input(self, x: X) -> X:
        """x * e, with the e of LayerInputConfig. May overwrite x."""

    def scale(self, x: X, scale: float) -> X:
        """scale * x. May overwrite x."""

    def all_reduce(self, x: X) -> X:
        """The sum of x over all ranks. May overwrite x."""

    def add_residual(self, x: X, hidden: X, scale: float) -> X:
        """hidden + scale * x."""


def run_layer(layer: DecoderLayer, config: DecoderConfig, operations: LayerOperations[X], hidden: X) -> X:
    """The hidden states after the layer. In a parallel layer, attention and MLP have the same input, and so have
    attention and a recurrent mixer of one layer."""
    ahead, parallel, scale = None, config.parallel, config.residual_scale
    if parallel and layer.mlp_before is not None:  # computed first, since attention adds to `hidden`
        assert isinstance(layer.mlp, Mlp)
        ahead = operations.gate_up(layer.mlp, operations.norm(layer.mlp_before, hidden))
    normed = _norm(layer.attention_before, operations, hidden)
    if layer.joins_embedding:
        normed = operations.join(normed)
    if layer.recurrence is not None:
        first, mixer, last = layer.recurrence
        mixed = operations.mix(mixer, normed, operations.linear(MIXER_INPUT, first, normed))
        hidden = _project_and_add(MIXER_OUTPUT, last, layer.attention_after, operations, mixed, hidden, scale)
    if layer.attention is not None:
        mixed, factor = _attend(layer.attention, operations, normed), scale * config.attention_output_scale
        hidden = _project_and_add(
            "output", layer.attention.output, layer.attention_after, operations, mixed, hidden, factor
        )
    if layer.cross is not None:
        mixed = operations.attend_images(layer.cross, operations.linear(CROSS_QUERY, layer.cross.query, normed))
        factor = scale * layer.cross.gate
        hidden = _project_and_add(CROSS_OUTPUT, layer.cross.output, None, operations, mixed, hidden, factor)
    if layer.residual is not None:
        hidden = _add_residual(layer.residual, operations, normed, hidden)
    if layer.mlp is None:
        return hidden
    if not parallel:
        normed = _norm(layer.mlp_before, operations, hidden)
    scale = scale * config.mlp_scales[1] * layer.mlp_gate
    if isinstance(layer.mlp, Mlp):
        inner = operations.gate_up(layer.mlp, normed) if ahead is None else ahead
        if layer.experts is None:
            hidden = _project_and_add("down", layer.mlp.down, layer.mlp_after, operations, inner, hidden, scale)
        else:
            mixed = _add_experts(layer.mlp.down, layer.experts, operations, inner, hidden)
            hidden = operations.add_residual(_norm(layer.mlp_after, operations, mixed), hidden, scale)
    else:
        mixed = _mix_experts(layer.mlp, operations, normed, normed)
        hidden = operations.add_residual(_norm(layer.mlp_after, operations, mixed), hidden, scale)
    if layer.layer_input is not None and layer.streams is None:
        hidden = operations.add_residual(_make_of_input(layer.layer_input, operations, hidden), hidden, 1.0)
    return hidden if layer.scale == 1.0 else operations.scale(hidden, layer.scale)


def run_streams(
    layer: DecoderLayer, streams: LayerStreams, config: DecoderConfig, operations: "TensorOperations", hidden: Tensor
) -> Tensor:
    """The streams [rows, count, hidden] after the layer: see layers/streams.py. What the layer's input adds goes to all
    but the first."""
    predicted = streams.predict(hidden)
    computed = run_layer(layer, config, operations, predicted[:, streams.active].contiguous())
    corrected = streams.correct(predicted, computed)
    assert layer.layer_input is not None
    corrected[:, 1:] += _make_of_input(layer.layer_input, operations, streams.scaled_active(corrected))[:, None]
    return corrected


def _make_of_input(layer_input: LayerInput, operations: LayerOperations[X], x: X) -> X:
    down, up, after = layer_input
    inner = operations.times_layer_input(operations.linear(INPUT_DOWN, down, x))
    return operations.norm(after, operations.linear(INPUT_UP, up, inner))


def _add_residual(residual: LowRankResidual, operations: LayerOperations[X], normed: X, hidden: X) -> X:
    low = operations.linear(RESIDUAL_LEFT, residual.left, normed)
    added = operations.norm(residual.after, operations.linear(RESIDUAL_RIGHT, residual.right, low))
    hidden = operations.add_residual(added, operations.add_residual(normed, hidden, 1.0), 1.0)
    return operations.scale(hidden, 2**-0.5)


def _attend(attention: AttentionWeights, operations: LayerOperations[X], x: X) -> X:
    """The input of the output projection."""
    if attention.latent is not None:
        return _attend_latent(attention.latent, attention.qkv, operations, x)
    mixed = operations.attend(operations.linear("attention", attention.qkv, x), attention.query_key_norms)
    return mixed if attention.output_gate is None else operations.gate(attention.output_gate, x, mixed)


def _mix_experts(experts: Experts, operations: LayerOperations[X], x: X, seen: X) -> X:
    mixed = operations.experts(experts, x, seen)
    return operations.all_reduce(mixed) if experts.partial_sum else mixed


def _add_experts(down: Linear, parallel: ParallelExperts, operations: LayerOperations[X], inner: X, hidden: X) -> X:
    """The sum of a dense MLP, from the input of its last matrix, and of the experts next to it."""
    dense = operations.linear("down", down, inner)
    if down.partial_sum:
        dense = operations.all_reduce(dense)
    dense = operations.norm(parallel.dense_after, dense)
    seen = operations.norm_for_router(parallel.router, hidden)
    mixed = _mix_experts(parallel.experts, operations, operations.norm(parallel.before, hidden), seen)
    return operations.add_residual(operations.norm(parallel.after, mixed), dense, 1.0)


def _attend_latent(latent: LatentProjections, key: Linear, operations: LayerOperations[X], x: X) -> X:
    """The attention of all heads over the latents, with V applied: the input of the output projection."""
    low = x if latent.query_down is None else operations.linear("query_down", latent.query_down, x)
    query = operations.linear("query", latent.query, _norm(latent.query_norm, operations, low))
    own = operations.norm_first(latent.key_norm, operations.linear("key", key, x))
    mixed = operations.attend(operations.head_products(latent.absorb, query, own), ())
    return operations.head_products(latent.project, mixed)


def _project_and_add(
    group: str, linear: Linear, after: Norm | None, operations: LayerOperations[X], x: X, hidden: X, scale: float
) -> X:
    """hidden + scale * after(linear(x))."""
    if linear.epilogue == "add":
        return operations.linear(group, linear, x, hidden)
    projected = operations.linear(group, linear, x)
    if linear.partial_sum:
        projected = operations.all_reduce(projected)
    return operations.add_residual(_norm(after, operations, projected), hidden, scale)


def _norm(norm: Norm | None, operations: LayerOperations[X], x: X) -> X:
    return x if norm is None else operations.norm(norm, x)


class DecoderStep(NamedTuple):
    """What all layers of one step share."""

    config: DecoderConfig
    kv: KVCacheSpec
    rotaries: Sequence[RotaryEmbedding]
    angles: Sequence[tuple[Tensor, Tensor]]  # RotaryEmbedding.angles of each of them
    tokens: int  # rows from this one on are padding
    attention: AttentionBackend
    gpu_attention: TransformingBackend | None  # `attention`, if our GPU kernels compute it
    plan: Any  # of `attention`
    deltas: LoraDeltas | PackedDeltas | LaunchedDeltas | None
    communicator: Communicator | None  # None: the only rank
    state: StateRows | None = None  # of the recurrent layers
    layer_inputs: Tensor | None = None  # [rows, layers * width], see LayerInputConfig
    seen_images: SeenImages | None = None
    joined: Tensor | None = None  # [rows, hidden], see LayerConfig.joins_embedding

    def layer(self, number: int) -> "TensorOperations":
        """The operations of a layer."""
        lora = None if self.deltas is None else self.deltas.layer_deltas(number)
        return TensorOperations(self, number, self.config.layers[number], self.config.cache_number(number), lora)


class TensorOperations(NamedTuple):
    """LayerOperations that compute on tensors at once."""

    step: DecoderStep
    number: int  # of the layer
    layer: LayerConfig
    cache: int  # DecoderConfig.cache_number of the layer
    lora: LayerLoraDeltas | PackedLayerDeltas | LaunchedLayerDeltas | None

    def norm(self, norm: Norm, x: Tensor) -> Tensor:
        return norm(x)

    def norm_first(self, norm: Norm, x: Tensor) -> Tensor:
        _norm_heads((norm,), x)
        return x

    def join(self, x: Tensor) -> Tensor:
        assert self.step.joined is not None
        return torch.cat((self.step.joined, x), 1)

    def head_products(self, products: HeadProducts, x: Tensor, last: Tensor | None = None) -> Tensor:
        return products(x, last)

    def linear(self, group: str, linear: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return linear(x, residual) if self.lora is None else self.lora.apply_linear(group, linear, x, residual)

    def attend(self, qkv: Tensor, norms: tuple[Norm, ...]) -> Tensor:
        step, tokens, rows = self.step, self.step.tokens, len(qkv)
        if step.gpu_attention is None:
            mixed = self._transform_then_attend(qkv, norms, step.attention)
        else:
            mixed = self._transform_and_attend(qkv, norms, step.gpu_attention)
        return self._padded(mixed.reshape(tokens, -1), rows)

    def mix(self, mixer: RecurrentMixer, normed: Tensor, projected: Tensor) -> Tensor:
        assert self.step.state is not None
        return self._padded(mixer(normed, projected[: self.step.tokens], self.step.state), len(projected))

    def attend_images(self, cross: CrossAttention, queries: Tensor) -> Tensor:
        config, seen = self.step.config, self.step.seen_images
        assert seen is not None
        _norm_heads((cross.query_norm,), queries)
        heads = queries.view(len(queries), -1, config.head_dim)[: self.step.tokens]
        mixed = seen.states.attend(config.image_number(self.number), heads, seen, config.attention_scale)
        return self._padded(mixed, len(queries))

    def gate(self, gate: Linear, normed: Tensor, mixed: Tensor) -> Tensor:
        factors, kernels = gate(normed), self.step.kv.cpu_kernels
        if kernels is not None:
            return sigmoid_gate(kernels, factors, mixed)
        if self.step.kv.gpu_kernels is not None:
            return self.step.kv.gpu_kernels.sigmoid_gate(factors, mixed)
        return (mixed * exactly(torch.sigmoid, factors.to(torch.float32))).to(mixed.dtype)

    def _padded(self, mixed: Tensor, rows: int) -> Tensor:
        return mixed if len(mixed) == rows else F.pad(mixed, (0, 0, 0, rows - len(mixed)))

    def _transform_then_attend(self, qkv: Tensor, norms: tuple[Norm, ...], attention: AttentionBackend) -> Tensor:
        step, layer = self.step, self.layer
        rope, scale = layer.rope, layer.query_scale
        heads, last = self._by_head(qkv), step.config.query_key_norm_last
        if not last:
            _norm_heads(norms, qkv)
        if rope is not None:
            step.rotaries[rope].rotate(heads, self._rotated, step.angles[rope])
        if last:
            _norm_heads(norms, qkv)
        if scale is not None:
            step.rotaries[scale].rotate(heads, step.kv.heads, step.angles[scale])
        return attention.write_and_attend(step.plan, self.cache, heads[: step.tokens], step.config.attention_scale)

    def _transform_and_attend(self, qkv: Tensor, norms: tuple[Norm, ...], attention: TransformingBackend) -> Tensor:
        step, layer = self.step, self.layer
        rope, scale = layer.rope, layer.query_scale
        last = step.config.query_key_norm_last
        head_norm = norms[0].of_heads(last) if len(norms) == 1 else None
        if head_norm is None:
            assert not (last and norms)
            _norm_heads(norms, qkv)
        rotation = None
        if rope is not None:
            rotary = step.rotaries[rope]
            rotation = Rotation(*step.angles[rope], rotary.interleaved, rotary.start)
        transform = HeadTransform(rotation, head_norm)
        heads = self._by_head(qkv)
        if scale is not None:  # before the rotation, which comes to the same
            assert head_norm is None
            step.rotaries[scale].scale(heads[:, : step.kv.heads], step.angles[scale])
        factor = step.config.attention_scale
        return attention.transform_and_attend(step.plan, self.cache, heads, factor, transform)

    def _by_head(self, qkv: Tensor) -> Tensor:
        return qkv.view(len(qkv), -1, self.step.config.head_shape(self.number).head_dim)

    @property
    def _rotated(self) -> int:
        """The heads that are rotated: of queries and, where they belong to this layer, of keys."""
        own = 0 if self.layer.shares is not None else self.step.config.head_shape(self.number).kv_heads
        return self.step.kv.heads + own

    def gate_up(self, mlp: Mlp, x: Tensor) -> Tensor:
        return mlp.gate_up(x) if self.lora is None else self.lora.apply_mlp_inner(mlp, x)

    def norm_for_router(self, norm: Norm, x: Tensor) -> Tensor:
        return norm(x)

    def experts(self, experts: Experts, x: Tensor, seen: Tensor) -> Tensor:
        return experts(x, self.step.tokens, None if seen is x else seen)

    def times_layer_input(self, x: Tensor) -> Tensor:
        assert self.step.layer_inputs is not None
        return x * self.step.layer_inputs.unflatten(1, (-1, x.shape[1]))[:, self.number]

    def scale(self, x: Tensor, scale: float) -> Tensor:
        return x * scale

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks. Rows of padding, of which other ranks may have more, are left out."""
        assert self.step.communicator is not None
        self.step.communicator.all_reduce(x[: self.step.tokens])
        return x

    def add_residual(self, x: Tensor, hidden: Tensor, scale: float) -> Tensor:
        return hidden + (x if scale == 1.0 else x * scale)


def _norm_heads(norms: tuple[Norm, ...], qkv: Tensor) -> None:
    """Applies DecoderLayer.query_key_norms to the columns of qkv [rows, columns], in place."""
    start = 0
    for norm in norms:
        norm.normalize_in_place(qkv[:, start : start + norm.weight.numel()].unflatten(1, norm.weight.shape))
        start += norm.weight.numel()


class ProgramBuffer(IntEnum):
    """The buffers of a program, one row per token."""

    HIDDEN = 0
    SIDE = 1  # DecoderStep.layer_inputs, then the hidden states that are tapped
    NORMED = auto()
    QKV = auto()
    MIXED = auto()  # the result of attention
    INNER = auto()  # the input of mlp.down
    PROJECTED = auto()  # the result of a part, before it is added to HIDDEN
    EXPERTS = auto()  # the same of a mixture of experts
    ROUTED_BY = auto()  # the input of a router that has a norm of its own
    LAYER_INPUT = auto()
    MIXER_INPUT = auto()  # of a recurrent layer
    MIXER_OUTPUT = auto()
    MIXER_GATES = auto()
    OUTPUT_GATE = auto()  # of attention
    KEPT = auto()  # HIDDEN before a layer that attends to images
    CROSS_QUERY = auto()
    # Of latent attention alone.
    QUERY_DOWN = auto()
    QUERY = auto()  # of the heads, before K is absorbed
    KEY = auto()
    VALUES = auto()  # the result of attention with V applied


# Where the linear layers of an input write, in a program.
LATENT_GROUPS = {"query_down": ProgramBuffer.QUERY_DOWN, "query": ProgramBuffer.QUERY, "key": ProgramBuffer.KEY}
_PROJECTED = {
    "attention": ProgramBuffer.QKV,
    MIXER_INPUT: ProgramBuffer.MIXER_INPUT,
    CROSS_QUERY: ProgramBuffer.CROSS_QUERY,
    INPUT_DOWN: ProgramBuffer.LAYER_INPUT,
    **LATENT_GROUPS,
}


def write_program(
    config: DecoderConfig,
    weights: DecoderWeights,
    rotaries: Sequence[RotaryEmbedding],
    kv: KVCacheSpec,
    communicator: Communicator | None = None,
    shards: VocabularyShards = WHOLE_VOCABULARY,
    taps: Sequence[int] = (),
    images: bool = False,
) -> Program | None:
    """The layers and the output head, of several ranks the `shards`, as a program for our CPU kernels. `taps`: numbers
    of layers before which the hidden states are copied to SIDE. `images`: for steps with an ImageStep; one for other
    steps has no layers that attend to images.

    None if a program is impossible: without our CPU kernels; with several ranks that do not share memory; with experts
    of different formats; with streams or low-rank residuals; for the layer of a head that drafts, if it joins two
    inputs; and if a parallel layer has no norm, since its MLP would read HIDDEN after attention has changed it.
    """
    layers = weights.layers
    mixtures = [mlp for layer in layers for mlp in layer.mlps if not isinstance(mlp, Mlp)]
    recordable = all(_packed_experts(mixture) is not None for mixture in mixtures)
    normed = not config.parallel or all(layer.attention_before is not None for layer in layers)
    if kv.cpu_kernels is None or not recordable or not normed or config.streams is not None or config.residual_rank:
        return None
    if config.joins_embedding:
        return None
    mixer_widths = next((layer.recurrence.mixer.widths for layer in layers if layer.recurrence is not None), (0, 0, 0))
    widths = {
        ProgramBuffer.HIDDEN: config.hidden,
        ProgramBuffer.NORMED: config.hidden,
        ProgramBuffer.QKV: (kv.heads + kv.parts * kv.kv_heads) * kv.head_dim,
        ProgramBuffer.MIXED: kv.heads * kv.result_dim,
        ProgramBuffer.INNER: config.intermediate,
        ProgramBuffer.PROJECTED: config.hidden,
        ProgramBuffer.EXPERTS: config.hidden * bool(mixtures),
        ProgramBuffer.ROUTED_BY: config.hidden * any(layer.experts is not None for layer in layers),
        ProgramBuffer.MIXER_INPUT: mixer_widths[0],
        ProgramBuffer.MIXER_OUTPUT: mixer_widths[1],
        ProgramBuffer.MIXER_GATES: mixer_widths[2],
        ProgramBuffer.OUTPUT_GATE: kv.heads * kv.result_dim if config.output_gate else 0,
    }
    if images and config.image_layers:
        widths[ProgramBuffer.KEPT], widths[ProgramBuffer.CROSS_QUERY] = config.hidden, kv.heads * kv.head_dim
    inputs = 0
    if config.layer_inputs is not None:
        inputs = config.layer_inputs.width * len(layers)
        widths[ProgramBuffer.LAYER_INPUT] = config.layer_inputs.width
    widths[ProgramBuffer.SIDE] = inputs + len(taps) * config.hidden
    if config.latent is not None:
        widths[ProgramBuffer.QUERY_DOWN] = config.latent.query_rank or 0
        widths[ProgramBuffer.QUERY] = kv.heads * config.latent.query_dim
        widths[ProgramBuffer.KEY] = config.latent.key_dim
        widths[ProgramBuffer.VALUES] = kv.heads * config.latent.value_dim
    columns = [widths.get(buffer, 0) for buffer in ProgramBuffer]
    # Layers whose matrices have other sizes write to buffers of their own.
    others: dict[tuple[ProgramBuffer, int], int] = {}
    for layer in layers:
        for buffer, width in _layer_widths(layer):
            if width != widths[buffer] and (buffer, width) not in others:
                others[buffer, width] = len(columns)
                columns.append(width)
    program = Program(kv.cpu_kernels, columns)
    if communicator is not None and not isinstance(communicator, SharedMemoryCommunicator):
        return None

    def copy_tapped(number: int) -> None:
        for place, tap in enumerate(taps):
            if tap == number:
                program.copy(ProgramBuffer.HIDDEN, ProgramBuffer.SIDE, inputs + place * config.hidden)

    for number, layer in enumerate(layers):
        copy_tapped(number)
        if layer.cross is not None and not images:
            continue
        operations = ProgramOperations(program, config, rotaries, kv, number, communicator, others)
        if layer.cross is None:
            run_layer(layer, config, operations, ProgramBuffer.HIDDEN)
        else:
            program.copy_unseeing(ProgramBuffer.HIDDEN, ProgramBuffer.KEPT)
            run_layer(layer, config, operations, ProgramBuffer.HIDDEN)
            program.copy_unseeing(ProgramBuffer.KEPT, ProgramBuffer.HIDDEN)
        if images and not config.image_layers:
            program.add_features(ProgramBuffer.HIDDEN, number)
    copy_tapped(len(layers))
    scoring = config.logit_scale, config.logit_cap
    weights.head.append_greedy_to(program, ProgramBuffer.HIDDEN, ProgramBuffer.NORMED, weights.norm, *scoring, shards)
    return program


def _layer_widths(layer: DecoderLayer) -> list[tuple[ProgramBuffer, int]]:
    """The widths of a layer's buffers that other layers may have otherwise."""
    found = []
    if (attention := layer.attention) is not None and attention.latent is None:
        found += [(ProgramBuffer.QKV, attention.qkv.outputs), (ProgramBuffer.MIXED, attention.output.inputs)]
    if isinstance(layer.mlp, Mlp):
        found.append((ProgramBuffer.INNER, layer.mlp.down.inputs))
    return found


def _packed_experts(experts: Experts) -> PackedExperts | None:
    return experts.packed if isinstance(experts, MixtureOfExperts) else None


class ProgramOperations(NamedTuple):
    """LayerOperations that append to a program."""

    program: Program
    config: DecoderConfig
    rotaries: Sequence[RotaryEmbedding]
    kv: KVCacheSpec
    number: int  # of the layer
    communicator: SharedMemoryCommunicator | None
    others: dict[tuple[ProgramBuffer, int], int]  # the buffers of other widths than the usual one

    def _buffer(self, buffer: ProgramBuffer, width: int) -> ProgramBuffer:
        """The buffer for this use with this width."""
        return self.others.get((buffer, width), buffer)  # type: ignore[return-value]  # a number, too

    def norm(self, norm: Norm, x: ProgramBuffer) -> ProgramBuffer:
        y = ProgramBuffer.NORMED if x == ProgramBuffer.HIDDEN else x
        norm.append_to(self.program, x, y)
        return y

    def norm_first(self, norm: Norm, x: ProgramBuffer) -> ProgramBuffer:
        norm.append_to(self.program, x, x)
        return x

    def join(self, x: ProgramBuffer) -> ProgramBuffer:
        raise NotImplementedError("a program has no layers that join two inputs")

    def head_products(
        self, products: HeadProducts, x: ProgramBuffer, last: ProgramBuffer | None = None
    ) -> ProgramBuffer:
        y = ProgramBuffer.VALUES if last is None else ProgramBuffer.QKV
        products.append_to(self.program, x, y, last)
        return y

    def linear(
        self, group: str, linear: Linear, x: ProgramBuffer, residual: ProgramBuffer | None = None
    ) -> ProgramBuffer:
        place = _PROJECTED.get(group, ProgramBuffer.PROJECTED)
        y = self._buffer(place, linear.outputs) if residual is None else residual
        linear.append_to(self.program, x, y, y, None if group in LATENT_GROUPS else self._delta(group, x))
        return y

    def attend(self, qkv: ProgramBuffer, norms: tuple[Norm, ...]) -> ProgramBuffer:
        kv, layer, last = self.kv, self.config.layers[self.number], self.config.query_key_norm_last
        rope, query_scale, shared = layer.rope, layer.query_scale, layer.shares is not None
        kv_heads, dim = self.config.head_shape(self.number)
        if not last:
            self._norm_heads(norms, qkv)
        if rope is not None:
            self.rotaries[rope].append_to(self.program, qkv, rope, kv.heads + (0 if shared else kv_heads), dim)
        if last:
            self._norm_heads(norms, qkv)
        if query_scale is not None:
            self.rotaries[query_scale].append_to(self.program, qkv, query_scale, kv.heads, dim)
        cache = self.config.cache_number(self.number)
        scale, heads, window = self.config.attention_scale, (kv.heads, kv_heads), kv.sliding_window(cache)
        options = window, kv.softcap, kv.layer_sinks(cache), kv.value_dim, shared, cache in kv.chunked, kv.slopes
        mixed = self._buffer(ProgramBuffer.MIXED, kv.heads * (kv.value_dim or dim))
        self.program.attention(qkv, mixed, cache, heads, dim, scale, *options)
        return mixed

    def mix(self, mixer: RecurrentMixer, normed: ProgramBuffer, projected: ProgramBuffer) -> ProgramBuffer:
        mixer.append_to(self.program, normed, projected, ProgramBuffer.MIXER_GATES, ProgramBuffer.MIXER_OUTPUT)
        return ProgramBuffer.MIXER_OUTPUT

    def attend_images(self, cross: CrossAttention, queries: ProgramBuffer) -> ProgramBuffer:
        config, heads = self.config, (self.kv.heads, self.kv.kv_heads)
        self._norm_heads((cross.query_norm,), queries)
        number, scale = config.image_number(self.number), config.attention_scale
        self.program.attend_images(queries, ProgramBuffer.MIXED, number, heads, config.head_dim, scale)
        return ProgramBuffer.MIXED

    def gate(self, gate: Linear, normed: ProgramBuffer, mixed: ProgramBuffer) -> ProgramBuffer:
        gate.append_to(self.program, normed, ProgramBuffer.OUTPUT_GATE)
        self.program.sigmoid_gate(ProgramBuffer.OUTPUT_GATE, mixed)
        return mixed

    def _norm_heads(self, norms: tuple[Norm, ...], qkv: ProgramBuffer) -> None:
        start = 0
        for norm in norms:
            norm.append_to(self.program, qkv, qkv, start)
            start += norm.weight.numel()

    def gate_up(self, mlp: Mlp, x: ProgramBuffer) -> ProgramBuffer:
        delta, y = self._delta("inner", x), self._buffer(ProgramBuffer.INNER, mlp.down.inputs)
        if mlp.gate is None:
            mlp.up.append_to(self.program, x, y, delta=delta)
        else:
            mlp.gate.append_to(self.program, x, y, delta=delta)
            mlp.up.append_to(self.program, x, y, y, delta and delta._replace(column=mlp.gate.outputs))
        return y

    def norm_for_router(self, norm: Norm, x: ProgramBuffer) -> ProgramBuffer:
        norm.append_to(self.program, x, ProgramBuffer.ROUTED_BY)
        return ProgramBuffer.ROUTED_BY

    def experts(self, experts: Experts, x: ProgramBuffer, seen: ProgramBuffer) -> ProgramBuffer:
        packed = _packed_experts(experts)
        assert packed is not None
        self.program.experts(x, seen, ProgramBuffer.EXPERTS, packed)
        return ProgramBuffer.EXPERTS

    def times_layer_input(self, x: ProgramBuffer) -> ProgramBuffer:
        assert self.config.layer_inputs is not None
        self.program.multiply(ProgramBuffer.SIDE, x, self.number * self.config.layer_inputs.width)
        return x

    def scale(self, x: ProgramBuffer, scale: float) -> ProgramBuffer:
        self.program.scale(x, scale)
        return x

    def all_reduce(self, x: ProgramBuffer) -> ProgramBuffer:
        assert self.communicator is not None
        self.program.all_reduce(x, self.communicator.handle)
        return x

    def add_residual(self, x: ProgramBuffer, hidden: ProgramBuffer, scale: float) -> ProgramBuffer:
        self.program.add(x, hidden, scale)
        return hidden

    def _delta(self, group: str, x: ProgramBuffer) -> LoraTarget | None:
        """Appends the LoRA product of buffer x, and returns the reference to its result for Linear.append_to. None: no
        adapter changes these layers."""
        if group not in PROJECTION_GROUPS:
            return None
        delta = LoraTarget(list(PROJECTION_GROUPS).index(group))
        self.program.lora(x, delta.place, self.number)
        return delta
