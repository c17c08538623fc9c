"""What a decoder computes, as data: the same record for every model type that it serves.

With x the numbers of a token, one layer is, where norms stand before its two parts,

    x = x + r * after(attention(before(x)))
    x = x + r * after(mlp(before(x)))

and each of the four norms may be missing.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tgi.worker.layers.rotary import Rope


class Unsupported(Exception):
    """The decoder does not do what this config asks for. The text names it."""


class LayerConfig(NamedTuple):
    """What may differ from layer to layer."""

    window: int | None = None  # a token sees the last `window` tokens, itself included; None: all before it
    rope: int | None = 0  # which of DecoderConfig.ropes turns queries and keys; None: they are not turned
    routed: bool = False  # the MLP is a mixture of experts


@dataclass(frozen=True)
class ExpertsConfig:
    """A router gives each token p = softmax(router(x)) over `count` MLPs; y = sum of w_e * mlp_e(x) over the `chosen`
    with the largest p, where w is p, or, if `normalized`, p / sum of the chosen p."""

    count: int
    chosen: int
    intermediate: int  # width of one expert
    normalized: bool


@dataclass(frozen=True)
class Names:
    """What the checkpoint calls the tensors of a layer, below `model.layers.N.`.

    Where several matrices have one name, its tensor holds them one above the other.
    """

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    # Of expert E, with "{}" for E.
    expert_gate: str = "mlp.experts.{}.gate_proj"
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"
    # The norms before and after each part; None: there is none.
    attention_before: str | None = "input_layernorm"
    attention_after: str | None = None
    mlp_before: str | None = "post_attention_layernorm"
    mlp_after: str | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of layers of attention with rotary positions and grouped queries, each followed by an MLP."""

    vocab_size: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # the most tokens that a sequence may have
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...]
    tied: bool  # the output layer is the embedding
    names: Names

    # Norms. See layers/norm.py.
    norm_epsilon: float
    norm_centred: bool = False  # layer norm instead of root mean square norm
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to the scales that the checkpoint stores
    # Norms of queries and keys before they are turned. "head": of each head alone, with the same scales for all query
    # heads, and for all key heads; "each": with scales of each head's own; "all": over all query, and all key heads.
    query_key_norm: str | None = None

    # Attention: softmax(cap(attention_scale * q k)) v, where cap(s) = c * tanh(s / c) with c = attention_cap, if set.
    attention_scale: float = 1.0
    attention_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection

    # MLP: down(f(gate(x)) * up(x)), or, where not gated, down(f(up(x))). f is a name that linear.py knows.
    activation: str = "silu"
    gated: bool = True
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None  # of the layers that are routed

    # Between the parts.
    parallel: bool = False  # x + attention(n) + mlp(n), both of the same n = before(x)
    embedding_scale: float = 1.0  # x of the first layer is this times the embedding
    residual_scale: float = 1.0  # r above
    logit_scale: float = 1.0  # logits are this times head(norm(x)),
    logit_cap: float | None = None  # and then c * tanh(logits / c), if set
