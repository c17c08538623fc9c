"""DecoderConfig: the architecture of a decoder as data, one record for all model families.

With x the hidden state of a token and r the residual scale, a layer computes

    x = x + r * attention_after(attention(attention_before(x)))
    x = x + r * mlp_after(mlp(mlp_before(x)))

Each of the four norms may be absent, and so may either part. In a recurrent layer another mixer stands in the place of
attention, or next to it: their results are added.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from tgi.worker.mixers.interface import MixerConfig

# Not a rotation but a factor of queries (Llama 4, Ministral 3), 1 + beta ln(1 + floor(position / original)). beta is
# llama_4_scaling_beta, original is original_max_position_embeddings, and the first position is counted_from, or 0.
QUERY_SCALE = "query_scale"
# Of the activation clamped_silu of gpt-oss: a gate is at most LIMIT, and what it multiplies within -LIMIT and LIMIT.
ALPHA, LIMIT = 1.702, 7.0
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


class UnsupportedConfig(Exception):
    """DecoderModel does not implement something that this config.json requires; the message names it."""


@dataclass(frozen=True)
class RopeConfig:
    """Which elements of a head are rotated, and with which frequencies.

    `parameters` are those of config.json: rope_theta, rope_type (one of ROPE_TYPES) and what that type needs.
    """

    dim: int  # `dim` elements of a head, from `start` on, are rotated, the others kept
    parameters: dict[str, Any]
    # A pair is elements 2 i and 2 i + 1 if interleaved (GPT-J style), else i and i + dim / 2 (GPT-NeoX style).
    interleaved: bool = False
    start: int = 0  # elements of a head before the rotated ones
    axes: tuple[int, ...] | None = None  # for each pair, which of a token's positions turns it; None: it has one


def rope_type(parameters: dict[str, Any]) -> str:
    """The scaling type that config.json names; "default" = none. layers/rotary.py computes those in ROPE_TYPES."""
    return parameters.get("rope_type", parameters.get("type")) or "default"


class Mixer(StrEnum):
    """What mixes the tokens of a sequence in a layer."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"  # DecoderConfig.recurrent
    BOTH = "both"  # of the same input
    IMAGES = "images"  # cross-attention to images: see CrossAttention in models/decoder_layer.py
    NONE = "none"


class LayerConfig(NamedTuple):
    """What may differ between layers."""

    mixer: str = Mixer.ATTENTION  # a Mixer
    has_mlp: bool = True
    window: int | None = None  # sliding window in tokens, including the query's own; None = full attention
    rope: int | None = 0  # index into DecoderConfig.ropes; None = no rotary embedding
    query_scale: int | None = None  # index of a rope of QUERY_SCALE, which applies to the queries alone, at last
    routed: bool = False  # the MLP is a mixture of experts
    chunked: bool = False  # a query sees its own chunk of `window` tokens instead
    # Where they are not those of DecoderConfig.
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    keys_as_values: bool = False  # values are the keys, before these are normed and rotated
    sparse_above: float | None = None  # see Mlp.sparse_above
    shares: int | None = None  # number of the earlier layer whose keys and values it attends to, in place of its own
    # Attention reads a further input next to attention_before(x), which comes first: the first layer of an EAGLE-3 head
    # (see models/draft_head.py).
    joins_embedding: bool = False

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.mixer in (Mixer.ATTENTION, Mixer.BOTH)

    @property
    def recurs(self) -> bool:
        """Whether it has a recurrent mixer."""
        return self.mixer in (Mixer.RECURRENT, Mixer.BOTH)

    @property
    def sees_images(self) -> bool:
        """Whether it has cross-attention to images. Tokens that see no image skip it, its MLP included."""
        return self.mixer == Mixer.IMAGES


class HeadShape(NamedTuple):
    """The sizes of a layer's keys and values."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen, and what they count. With p = score(router(x)), the experts with the largest
    p + b are chosen, b being a bias of the checkpoint, if there is one. An expert's weight is scale * p or, if
    `normalized`, scale * p / (sum of the chosen p).

    With several groups, which are equal parts of the experts in order, only experts of the `top_groups` groups are
    chosen whose `group_best` largest p + b have the largest sums (DeepSeek-V3, 2024, section 2.1.2).
    """

    # "softmax" over the experts, "sigmoid" of each, or "sparsemixer" (Phi-3.5-MoE): experts are chosen one after the
    # other, and p is a softmax over those logits l, of experts not chosen before, with (largest - l) / max(|l|,
    # largest) <= 2 * jitter.
    score: str = "softmax"
    normalized: bool = False
    biased: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    group_best: int = 2  # 1 or 2
    logit_bias: bool = False  # the router's linear layer has a bias
    jitter: float = 0.0
    scales_inputs: bool = False  # a weight multiplies the input of its expert, not the output
    expert_scaled: bool = False  # the checkpoint has a factor of each expert's weight


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts: y = sum of w_e * mlp_e(x) over the `top_k` of `count` MLPs that the router chooses, plus the
    shared expert, an MLP for every token, if there is one; if it is gated, times sigmoid(gate(x))."""

    count: int
    top_k: int
    intermediate: int  # width of one expert
    router: RouterConfig
    shared_intermediate: int = 0  # width of the shared expert; 0: there is none
    shared_gated: bool = False
    # Next to the dense MLP of the layer, with norms of their own before and after them: see ParallelExperts in
    # models/decoder_layer.py.
    parallel: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention, MLA (DeepSeek-V2, 2024, section 2.1), computed with absorbed matrices.

    A layer keeps for each position one key of `rank` + `rope_dim` elements: the normed latent c = norm(down(x)), and a
    part that is rotated. A head of the checkpoint has a key [K c, rotated] and a value V c, with matrices K and V of
    its own. Since q K c = (q K) c, all heads share the stored key: their queries are [q K, rotated], and V is applied
    to the weighted sum of the latents. So DecoderConfig.kv_heads is 1, head_dim is `key_dim`, and the value is the
    first `rank` elements of the key.
    """

    rank: int  # of the latent
    nope_dim: int  # elements of a head's query that K multiplies
    rope_dim: int
    value_dim: int  # elements of V c
    query_rank: int | None = None  # queries are up(norm(down(x))) with this inner width; None: one matrix
    norm_epsilon: float = 1e-6

    @property
    def key_dim(self) -> int:
        """Elements of the stored key."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Elements of a head's query in the checkpoint."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class LayerInputConfig:
    """Per-layer embeddings (Gemma 3n and 4): each layer has an input e of `width` numbers of each token, its part of
    (norm(project(embedding)) + further embedding of the token) / sqrt(2), and ends in x + norm(up(f(down(x)) * e))."""

    width: int
    vocab_size: int  # of the further embedding
    image_id: int = 0  # whose further embedding the tokens of images have


@dataclass(frozen=True)
class StreamsConfig:
    """The hidden states of a token are several streams of `hidden` numbers (AltUp, Baykal et al., 2023, in Gemma 3n):
    see layers/streams.py. A layer computes the stream `active`, and corrects all by the result."""

    count: int
    active: int = 0
    scaled: bool = True  # before the layer's input comes in, the active stream is multiplied by a vector


@dataclass(frozen=True)
class StackedExperts:
    """Names of the tensors, after the prefix `model.layers.N.`, that hold one kind of matrix of all experts:
    [experts, outputs, inputs]. The names of their biases and of the columns of quantized weights begin alike."""

    gate_up: str  # the gate's outputs and those of the up projection
    down: str
    up: str | None = None  # the outputs of the up projection, where `gate_up` has those of the gate alone
    interleaved: bool = False  # the outputs alternate between gate and up; otherwise those of the gate come first
    inputs_first: bool = False  # plain matrices are [experts, inputs, outputs]
    down_inputs_first: bool = False  # the same of `down` alone
    flat: bool = False  # the experts' rows follow each other in a tensor of two dimensions


@dataclass(frozen=True)
class CheckpointLayout:
    """How a checkpoint differs from one with TensorNames' names."""

    renames: tuple[tuple[str, str], ...]  # patterns of stored names, and their replacements, applied in this order
    # Rows of the joint matrix of queries, keys and values. "heads": of each key head its queries, its key and its
    # value; None: all queries, then all keys, then all values.
    qkv_rows: str | None = None
    positions_offset: int = 0  # the learned vector of position p is in row p + positions_offset
    transposed: bool = False  # the matrices of layers are [inputs, outputs]


@dataclass(frozen=True)
class TensorNames:
    """Names of a layer's tensors in the checkpoint, after the prefix `model.layers.N.`.

    Matrices of the same name are fused: its tensor holds them one after the other along the outputs.
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"  # "{}": each head has a tensor, of this number
    key_norm: str = "self_attn.k_norm"
    # Of latent attention; the up projection of the latent has for each head K, then V.
    query_down: str = "self_attn.q_a_proj"
    query_down_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latent_down: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"
    sinks: str = "self_attn.sinks"
    # Of cross-attention to images.
    cross_query: str = "cross_attn.q_proj"
    cross_key: str = "cross_attn.k_proj"
    cross_value: str = "cross_attn.v_proj"
    cross_output: str = "cross_attn.o_proj"
    cross_query_norm: str = "cross_attn.q_norm"
    cross_key_norm: str = "cross_attn.k_norm"
    cross_gate: str = "cross_attn_attn_gate"
    cross_mlp_gate: str = "cross_attn_mlp_gate"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"  # of the factors of xielu
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    router_bias_is_row: bool = False  # it is stored as a matrix of one row
    shared_expert: str = "mlp.shared_experts"
    shared_mlp: tuple[str, str, str] | None = None  # gate, up and down of the shared expert, if named otherwise
    shared_gate: str = "mlp.shared_expert_gate"
    mixer: str = "conv"  # prefix of the tensors of a recurrent mixer
    # "{}" stands for the number of the expert.
    expert_gate: str = "mlp.experts.{}.gate_proj"
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"
    stacked: StackedExperts | None = None  # the tensors that these experts are parts of
    layout: CheckpointLayout | None = None
    # Norms before and after each part; None = absent.
    attention_before: str | None = "input_layernorm"
    attention_after: str | None = None
    mlp_before: str | None = "post_attention_layernorm"
    mlp_after: str | None = None
    last_norm: str = "model.norm"  # the whole name
    embedding_norm: str = "model.embed_norm"  # the whole name
    # Of experts next to a dense MLP.
    dense_after: str = "post_feedforward_layernorm_1"
    experts_before: str = "pre_feedforward_layernorm_2"
    experts_after: str = "post_feedforward_layernorm_2"
    router_input_scale: str = "router.scale"
    router_expert_scale: str = "router.per_expert_scale"
    # Of per-layer embeddings; the first three are whole names.
    input_embedding: str = "model.embed_tokens_per_layer"
    input_projection: str = "model.per_layer_model_projection"
    input_norm: str = "model.per_layer_projection_norm"
    input_down: str = "per_layer_input_gate"
    input_up: str = "per_layer_projection"
    input_after: str = "post_per_layer_input_norm"
    scale: str = "layer_scalar"
    # Of streams; the first two are whole names, with the number of the stream, less one.
    stream_split: str = "model.altup_projections.{}"
    stream_merge: str = "model.altup_unembed_projections.{}"
    stream_norm: str = "altup.router_norm"
    stream_router: str = "altup.modality_router"
    stream_prediction: str = "altup.prediction_coefs"
    stream_correction: str = "altup.correction_coefs"
    stream_scale: str = "altup.correct_output_scale"
    # Of a low-rank residual.
    residual_left: str = "laurel.linear_left"
    residual_right: str = "laurel.linear_right"
    residual_after: str = "laurel.post_laurel_norm"

    @property
    def shared_parts(self) -> tuple[str, str, str]:
        """Gate, up and down of the shared expert."""
        name = self.shared_expert
        return self.shared_mlp or (f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer: layers of grouped-query attention with rotary positions, each followed by an MLP."""

    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int  # maximal tokens of a sequence
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    tied: bool  # the output head shares the weight of the embedding
    names: TensorNames

    # Norms; see layers/norm.py.
    norm_epsilon: float
    norm_centred: bool = False  # layer norm instead of RMS norm
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to the norm weights of the checkpoint
    # Norms of queries and keys before the rotary embedding. "head": per head, with one weight for all query heads and
    # one for all key heads; "each": per head, with a weight per head; "all": over all query heads, and all key heads.
    query_key_norm: str | None = None
    query_key_norm_last: bool = False  # the rotary embedding comes first
    query_key_norm_scaled: bool = True  # False: without weights, in the layers with a rotary embedding
    value_norm: bool = False  # values are normed per head, without a weight

    # Attention: softmax(cap(attention_scale * q k)) v, where cap(s) = c * tanh(s / c) with c = attention_cap, if set.
    attention_scale: float = 1.0
    attention_cap: float | None = None
    qkv_bias: bool = False
    qkv_clip: float | None = None  # queries, keys and values are clamped to -qkv_clip and qkv_clip, if set
    output_bias: bool = False  # of the output projection
    latent: LatentConfig | None = None  # with qkv_bias, the down projections have biases
    sinks: bool = False  # each head has a score without a value: see KVCacheSpec.sinks
    alibi: tuple[float, ...] = ()  # slopes of the heads: a score is reduced by slope * distance
    # The result is multiplied by sigmoid(g): of each head, the query projection has the query, then g.
    output_gate: bool = False

    # MLP: down(f(gate(x)) * up(x)) or, if not gated, down(f(up(x))). f is an activation of activations.ACTIVATIONS, by
    # which the product may be another: activations.gated. Without a gate it may be xielu.
    activation: str = "silu"
    gated: bool = True
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None  # of the routed layers

    # Of layers with cross-attention: the states of the largest image, each with a key and a value in each such layer.
    image_states: int = 0

    recurrent: MixerConfig | None = None  # the mixer of recurrent layers; None: there are none
    recurrent_names: TensorNames | None = None  # of recurrent layers, where not `names`
    joining_names: TensorNames | None = None  # the same of layers with joins_embedding

    # Residual stream and logits.
    # x + attention(attention_before(x)) + mlp(mlp_before(x)); without mlp_before, mlp(attention_before(x))
    parallel: bool = False
    layer_inputs: LayerInputConfig | None = None
    streams: StreamsConfig | None = None  # with layer_inputs
    # The rank of LAuReL (Menghani et al., 2024): with n = attention_before(x), attention leaves
    # (x + attention_after(attention(n)) + n + norm(right(left(n)))) / sqrt(2). 0: without it.
    residual_rank: int = 0
    layer_scales: bool = False  # the hidden states after a layer are multiplied by a number of the checkpoint
    learned_positions: int = 0  # for this many positions a vector is added to the embedding
    head_bias: bool = False
    unscored: int = 0  # the last ids of the vocabulary, for which the head has no rows: they are never sampled
    embedding_scale: float = 1.0  # the embedding is multiplied by this
    embedding_norm: bool = False  # it is normed
    residual_scale: float = 1.0  # r above, of both parts
    attention_output_scale: float = 1.0  # of the result of attention, besides r
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # of the gate before its activation, and of the result, besides r
    logit_scale: float = 1.0  # logits = logit_scale * head(norm(x)),
    logit_cap: float | None = None  # then c * tanh(logits / c), if set

    def attention_inputs(self, layer: int) -> int:
        """Columns of the matrices of queries, keys and values."""
        return 2 * self.hidden if self.layers[layer].joins_embedding else self.hidden

    @property
    def joins_embedding(self) -> bool:
        """Whether a layer has a further input: LayerConfig.joins_embedding."""
        return any(layer.joins_embedding for layer in self.layers)

    @property
    def attention_layers(self) -> list[int]:
        """The numbers of the layers that have attention with keys and values of their own. The KV cache counts these
        alone."""
        return [number for number, layer in enumerate(self.layers) if layer.attends and layer.shares is None]

    @property
    def recurrent_layers(self) -> int:
        """How many layers are recurrent."""
        return sum(layer.recurs for layer in self.layers)

    @property
    def image_layers(self) -> int:
        """How many layers have cross-attention to images."""
        return sum(layer.sees_images for layer in self.layers)

    def image_number(self, layer: int) -> int:
        """The number of a layer among those that have cross-attention to images."""
        return sum(one.sees_images for one in self.layers[:layer])

    def image_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values of the largest image, in numbers of `itemsize` bytes."""
        return self.image_layers * self.image_states * 2 * self.kv_heads * self.head_dim * itemsize

    @property
    def attention_windows(self) -> list[int | None]:
        """The sliding windows of these layers."""
        return [self.layers[number].window for number in self.attention_layers]

    def layer_names(self, layer: int) -> TensorNames:
        """The names of a layer's tensors."""
        found = self.layers[layer]
        own = self.recurrent_names if found.recurs else self.joining_names if found.joins_embedding else None
        return own or self.names

    def cache_number(self, layer: int) -> int:
        """The number of a layer among those that have attention with keys of their own. One without has that of the
        layer whose keys it reads."""
        shared = self.layers[layer].shares
        return sum(one.attends and one.shares is None for one in self.layers[: layer if shared is None else shared])

    def state_number(self, layer: int) -> int:
        """The number of a layer among the recurrent ones."""
        return sum(one.recurs for one in self.layers[:layer])

    def head_shape(self, layer: int) -> HeadShape:
        """The sizes of the keys and values that a layer attends to."""
        one = self.layers[layer]
        return HeadShape(one.kv_heads or self.kv_heads, one.head_dim or self.head_dim)

    @property
    def head_shapes(self) -> list[HeadShape]:
        """Those of the layers that the KV cache counts."""
        return [self.head_shape(number) for number in self.attention_layers]

    @property
    def widest_head(self) -> int:
        """The elements of the largest key."""
        return max((shape.head_dim for shape in self.head_shapes), default=0)

    def inner(self, layer: int) -> int:
        """The width of a layer's dense MLP."""
        return self.layers[layer].intermediate or self.intermediate
