"""What sets each model type apart, as data: all that its config.json does not say."""

from dataclasses import dataclass, field
from typing import Any

from tgi.worker.models.config import Names

# Every config.json may have these, or leave them to what transformers takes: most of them for all types the same.
COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}


LLAMA = Names()


@dataclass(frozen=True)
class Family:
    """A model type. Without anything set, it is a llama."""

    # Keys of config.json that it heeds beside the common ones, or takes differently where they are missing.
    keys: dict[str, Any] = field(default_factory=dict)
    # Fields of DecoderConfig that are the same for all models of the type.
    fixed: dict[str, Any] = field(default_factory=dict)
    names: Names = LLAMA
    # Values of config.json that its early releases have, and what they mean.
    aliases: dict[str, str] = field(default_factory=dict)
    embedding_by_width: bool = False  # the embedding is multiplied by sqrt(hidden)
    turns_neighbours: bool = False  # see Rope.neighbours


_RMS = {"rms_norm_eps": 1e-6}
_RMS5 = {"rms_norm_eps": 1e-5}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
_GEMMA = {
    **_RMS,
    "head_dim": 256,
    "attention_bias": False,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
}
_GEMMA2 = {
    **_GEMMA,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": None,
    "sliding_window": 4096,
    "layer_types": None,
}
_FOUR_NORMS = Names(
    attention_after="post_attention_layernorm",
    mlp_before="pre_feedforward_layernorm",
    mlp_after="post_feedforward_layernorm",
)

FAMILIES: dict[str, Family] = {
    "llama": Family(_RMS | _BIASES),
    "mistral": Family({**_RMS, "sliding_window": 4096}),
    "qwen2": Family(_RMS | _QWEN_WINDOWS, {"qkv_bias": True}),
    "qwen3": Family({**_RMS, **_QWEN_WINDOWS, "attention_bias": False, "head_dim": 128}, {"query_key_norm": "head"}),
    "phi3": Family(
        {
            **_RMS5,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        names=Names(
            query="self_attn.qkv_proj",
            key="self_attn.qkv_proj",
            value="self_attn.qkv_proj",
            gate="mlp.gate_up_proj",
            up="mlp.gate_up_proj",
        ),
        aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "granite": Family(
        {
            **_RMS,
            **_BIASES,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        }
    ),
    "gemma": Family(_GEMMA, {"norm_offset": 1.0}, aliases={"gelu": "gelu_pytorch_tanh"}, embedding_by_width=True),
    "gemma2": Family(
        {**_GEMMA2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window_pattern": 2},
        {"norm_offset": 1.0},
        _FOUR_NORMS,
        embedding_by_width=True,
    ),
    "gemma3_text": Family(
        {**_GEMMA2, "sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        {"norm_offset": 1.0, "query_key_norm": "head"},
        _FOUR_NORMS,
        embedding_by_width=True,
    ),
    "olmo2": Family(
        {**_RMS5, "attention_bias": False},
        {"query_key_norm": "all"},
        Names(
            attention_before=None,
            attention_after="post_attention_layernorm",
            mlp_before=None,
            mlp_after="post_feedforward_layernorm",
        ),
    ),
    "smollm3": Family(
        {
            **_RMS,
            **_BIASES,
            "tie_word_embeddings": True,
            "rope_theta": 2000000.0,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
        }
    ),
    "cohere": Family(
        {
            "layer_norm_eps": 1e-5,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "logit_scale": 0.0625,
            "use_qk_norm": False,
        },
        {"norm_centred": True, "parallel": True},
        Names(mlp_before=None),
        turns_neighbours=True,
    ),
    "starcoder2": Family(
        {
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
        {"norm_centred": True, "norm_bias": True, "gated": False},
        Names(up="mlp.c_fc", down="mlp.c_proj"),
    ),
    "mixtral": Family(
        {
            **_RMS5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        names=Names(
            router="block_sparse_moe.gate",
            expert_gate="block_sparse_moe.experts.{}.w1",
            expert_up="block_sparse_moe.experts.{}.w3",
            expert_down="block_sparse_moe.experts.{}.w2",
        ),
    ),
    "qwen3_moe": Family(
        {
            **_RMS,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_local_experts": None,  # what transformers calls the same when it saves a model
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        {"query_key_norm": "head"},
    ),
}
