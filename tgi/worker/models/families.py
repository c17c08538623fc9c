"""The supported model families as data: what config.json leaves implicit for each model_type.

To add a family that DecoderConfig can express, add an entry to FAMILIES; models of other types run through transformers
(transformers_model.py).
"""

from dataclasses import dataclass, field, replace
from typing import Any

from tgi.hub.model_config import UNLIMITED_CONTEXT
from tgi.worker.decoder_config import ALPHA, LIMIT, CheckpointLayout, StackedExperts, TensorNames
from tgi.worker.mixers.gated_delta import DeltaTensors

# Keys that config.json may have in every family, with the defaults of transformers.
COMMON_KEYS: dict[str, Any] = {
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

# Multimodal models whose text part computes what a model of text alone does. Their images: hub/vision_towers.py.
WITH_TEXT_PART = (
    "gemma3", "gemma4", "gemma4_unified", "glm4v", "glm4v_moe", "idefics2", "idefics3", "internvl", "kimi_k25",
    "lfm2_vl", "llama4", "llava", "llava_next", "llava_onevision", "mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl",
    "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
)  # fmt: skip

# Names under which models of a family are published, too. Those of Qwen2-VL have their text part in no part of its own.
SAME_FAMILY = {
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
# Of these the keys that have other defaults than in the family.
OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4v_moe_text": {"head_dim": None, "attention_bias": True},
    "glm4v_text": {"head_dim": None, "rms_norm_eps": 1e-5},
    "qwen2_5_vl_text": {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
    "qwen2_vl_text": {"rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
    "qwen3_vl_moe_text": {"rope_theta": 500000.0},
    "qwen3_vl_text": {"rope_theta": 500000.0},
}

LLAMA = TensorNames()


@dataclass(frozen=True)
class ModelFamily:
    """A model_type. The defaults describe llama."""

    # Keys of config.json that the family reads in addition to COMMON_KEYS, or with other defaults.
    keys: dict[str, Any] = field(default_factory=dict)
    # Fields of DecoderConfig that are constant in the family.
    fixed: dict[str, Any] = field(default_factory=dict)
    names: TensorNames = LLAMA
    # Keys of config.json, by the names that other families have for them.
    key_names: dict[str, str] = field(default_factory=dict)
    inner_configs: tuple[str, ...] = ()  # keys of config.json whose values have further keys
    # Values of config.json that early releases of the family have -> their current names.
    aliases: dict[str, str] = field(default_factory=dict)
    scale_embedding_by_width: bool = False  # the embedding is multiplied by sqrt(hidden)
    interleaved_rope: bool = False  # see RopeConfig.interleaved
    router_score: str = "softmax"  # see RouterConfig
    router_biased: bool = False
    router_logit_bias: bool = False
    optional_query_key_norm: str = "each"  # the kind of norm that `use_qk_norm` asks for
    router_group_best: int = 2
    latent: bool = False  # latent attention, see LatentConfig
    # Keys that must have this value, if config.json has them.
    required: dict[str, Any] = field(default_factory=dict)
    parallel_norms: bool = False  # in a parallel layer the MLP has a norm of its own
    attention: bool = True  # some layers have it
    has_mlp: bool = True  # so have all layers
    one_part: bool = False  # a layer is attention, a recurrent mixer or an MLP, as config.json says
    # The mixer of recurrent layers, a module of `mixers`; None: there are none.
    mixer: str | None = None
    mixes_both: bool = False  # each layer has the mixer next to attention
    delta_tensors: str = DeltaTensors.BY_KIND  # see GatedDeltaConfig
    delta_norm_epsilon: float | None = None
    # "learned": a vector for each position is added to the embedding, and nothing is rotated; "alibi": scores are
    # reduced by distance; see DecoderConfig. "none": nothing is rotated.
    positions: str = "rotary"
    positions_optional: bool = False  # without a rope_theta in config.json, nothing is rotated
    router: dict[str, Any] = field(default_factory=dict)  # fields of RouterConfig that are constant in the family
    parallel_experts: bool = False  # see ExpertsConfig.parallel
    rope_in_windows_only: bool = False  # where some layers have a sliding window, the others have no rotary embedding


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
_GEMMA4 = {
    **_GEMMA,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "layer_types": None,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {},
    },
    "per_layer_config": None,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "pad_token_id": 0,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "norm_topk_prob": True,
}
_GEMMA4_FIXED = {"query_key_norm": "head", "value_norm": True, "attention_scale": 1.0, "layer_scales": True}
_GLM = {
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
}
_COHERE = {
    "layer_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}
_QWEN_EXPERTS = {
    "num_local_experts": None,  # the name under which transformers saves num_experts
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
_LFM2 = {
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128000,
    "layer_types": None,
    "conv_L_cache": 3,
    "conv_bias": False,
}
_QWEN_DELTA = {
    **_RMS,
    "attention_bias": False,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN_DELTA_FIXED = {"norm_offset": 1.0, "query_key_norm": "head", "output_gate": True}
_QWEN_DELTA_NAMES = TensorNames(shared_expert="mlp.shared_expert", mixer="linear_attn")
_DEEPSEEK_EXPERTS = {
    "n_routed_experts": None,
    "n_shared_experts": None,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "attention_bias": False,
    "partial_rotary_factor": None,
}
_DEEPSEEK_V3 = {
    **_RMS,
    **_LATENT,
    **_DEEPSEEK_EXPERTS,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
_MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    router_bias="block_sparse_moe.e_score_correction_bias",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)
_GRANITE = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_HUNYUAN_NAMES = TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
_LAYER_NORMS = {"norm_centred": True, "norm_bias": True, "gated": False}
_ALL_BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_JOINT_QKV = TensorNames(query="self_attn.qkv_proj", key="self_attn.qkv_proj", value="self_attn.qkv_proj")
# GPT-2 and its kin.
_GPT_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
_GPT_RENAMES = (
    (r"^(transformer\.)?h\.", "model.layers."),
    (r"^(transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(transformer\.)?wpe\.", "model.embed_positions."),
    (r"^(transformer\.)?ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
)
_LFM2_NAMES = TensorNames(
    output="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    router="feed_forward.gate",
    router_bias="feed_forward.expert_bias",
    expert_gate="feed_forward.experts.{}.w1",
    expert_up="feed_forward.experts.{}.w3",
    expert_down="feed_forward.experts.{}.w2",
    attention_before="operator_norm",
    mlp_before="ffn_norm",
    last_norm="model.embedding_norm",
)
_MAMBA2 = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
}
# Of Mamba2 and Nemotron-H.
_MAMBA2_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
_MAMBA2_NAMES = TensorNames(
    mixer="mixer",
    attention_before="norm",
    mlp_before="norm",
    last_norm="model.norm_f",
    layout=CheckpointLayout(
        ((r"^backbone\.", "model."), (r"^model\.embeddings?\.", "model.embed_tokens.")),
    ),
)
_BAMBA_NAMES = TensorNames(
    mixer="mamba",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    mlp_before="pre_ff_layernorm",
    last_norm="model.final_layernorm",
)
_OLMO_HYBRID_LAYOUT = CheckpointLayout(
    (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    )
)
_FUSED_GATE = TensorNames(gate="mlp.gate_up_proj", up="mlp.gate_up_proj")
_NORMS_AFTER = TensorNames(
    attention_before=None,
    attention_after="post_attention_layernorm",
    mlp_before=None,
    mlp_after="post_feedforward_layernorm",
)
_FOUR_NORMS = TensorNames(
    attention_after="post_attention_layernorm",
    mlp_before="pre_feedforward_layernorm",
    mlp_after="post_feedforward_layernorm",
)

FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(_RMS | _BIASES),
    "mistral": ModelFamily({**_RMS, "sliding_window": 4096}),
    "ministral3": ModelFamily({**_RMS5, "head_dim": 128, "rope_theta": 1000000.0, "sliding_window": None}),
    "qwen2": ModelFamily(_RMS | _QWEN_WINDOWS, {"qkv_bias": True}),
    "qwen3": ModelFamily(
        {**_RMS, **_QWEN_WINDOWS, "attention_bias": False, "head_dim": 128}, {"query_key_norm": "head"}
    ),
    "phi3": ModelFamily(
        {
            **_RMS5,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        names=TensorNames(
            query="self_attn.qkv_proj",
            key="self_attn.qkv_proj",
            value="self_attn.qkv_proj",
            gate="mlp.gate_up_proj",
            up="mlp.gate_up_proj",
        ),
        aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "granite": ModelFamily(_RMS | _BIASES | _GRANITE),
    "granitemoe": ModelFamily(
        {
            **_RMS,
            **_GRANITE,
            "attention_bias": False,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        names=TensorNames(
            router="block_sparse_moe.router.layer",
            stacked=StackedExperts("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
        ),
    ),
    "gemma": ModelFamily(
        _GEMMA, {"norm_offset": 1.0}, aliases={"gelu": "gelu_pytorch_tanh"}, scale_embedding_by_width=True
    ),
    "gemma2": ModelFamily(
        {**_GEMMA2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window_pattern": 2},
        {"norm_offset": 1.0},
        _FOUR_NORMS,
        scale_embedding_by_width=True,
    ),
    "gemma3_text": ModelFamily(
        {**_GEMMA2, "sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        {"norm_offset": 1.0, "query_key_norm": "head"},
        _FOUR_NORMS,
        scale_embedding_by_width=True,
    ),
    "gemma4_text": ModelFamily(
        _GEMMA4,
        _GEMMA4_FIXED,
        replace(
            _FOUR_NORMS,
            router="router.proj",
            expert_gate="experts.{}.gate_proj",
            expert_up="experts.{}.up_proj",
            expert_down="experts.{}.down_proj",
            stacked=StackedExperts("experts.gate_up_proj", "experts.down_proj"),
        ),
        scale_embedding_by_width=True,
        router={"expert_scaled": True},
        parallel_experts=True,
    ),
    "gemma4_unified_text": ModelFamily(
        {
            **_GEMMA4,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
            "hidden_size_per_layer_input": 0,
        },
        _GEMMA4_FIXED,
        _FOUR_NORMS,
        scale_embedding_by_width=True,
    ),
    "olmo2": ModelFamily({**_RMS5, "attention_bias": False}, {"query_key_norm": "all"}, _NORMS_AFTER),
    "olmo3": ModelFamily(
        {
            **_RMS5,
            "attention_bias": False,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
            "rope_local_base_freq": None,
        },
        {"query_key_norm": "all"},
        _NORMS_AFTER,
    ),
    "exaone4": ModelFamily(
        {**_RMS5, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        {"query_key_norm": "head"},
        _NORMS_AFTER,
        rope_in_windows_only=True,
    ),
    "seed_oss": ModelFamily(
        {**_RMS, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 128}
    ),
    "ernie4_5": ModelFamily(
        {**_RMS5, "use_bias": False, "head_dim": 128, "tie_word_embeddings": True, "rope_theta": 500000.0},
        interleaved_rope=True,
    ),
    "helium": ModelFamily(
        {"rms_norm_eps": 1e-8, **_BIASES, "head_dim": 128, "rope_theta": 100000.0},
        {"output_bias": False},
        interleaved_rope=True,
    ),
    "hunyuan_v1_dense": ModelFamily(
        {**_RMS5, "attention_bias": False},
        {"query_key_norm": "head", "query_key_norm_last": True},
        _HUNYUAN_NAMES,
    ),
    "hunyuan_v1_moe": ModelFamily(
        {
            **_RMS5,
            "attention_bias": False,
            "num_experts": 1,
            "moe_topk": 1,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
        },
        {"query_key_norm": "head", "query_key_norm_last": True},
        replace(_HUNYUAN_NAMES, router="mlp.gate.wg", shared_expert="mlp.shared_mlp"),
    ),
    "glm": ModelFamily(_GLM, {"output_bias": False}, _FUSED_GATE, interleaved_rope=True),
    "glm4": ModelFamily(
        _GLM,
        {"output_bias": False},
        replace(
            _FUSED_GATE,
            attention_after="post_self_attn_layernorm",
            mlp_before="post_attention_layernorm",
            mlp_after="post_mlp_layernorm",
        ),
        interleaved_rope=True,
    ),
    "stablelm": ModelFamily(
        {
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            "partial_rotary_factor": 0.25,
        },
        {"norm_centred": True, "norm_bias": True, "output_bias": False},
    ),
    "smollm3": ModelFamily(
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
    "cohere": ModelFamily(
        {**_COHERE, "rope_theta": 500000.0, "use_qk_norm": False},
        {"norm_centred": True, "parallel": True},
        TensorNames(mlp_before=None),
        interleaved_rope=True,
    ),
    "cohere2": ModelFamily(
        {
            **_COHERE,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
        },
        {"norm_centred": True, "parallel": True},
        TensorNames(mlp_before=None),
        interleaved_rope=True,
        rope_in_windows_only=True,
    ),
    "apertus": ModelFamily(
        {
            **_RMS5,
            "attention_bias": False,
            "max_position_embeddings": 65536,
            "hidden_act": "xielu",
            "rope_theta": 12000000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        {"query_key_norm": "head", "gated": False, "activation": "xielu"},
        TensorNames(attention_before="attention_layernorm", mlp_before="feedforward_layernorm"),
        required={"hidden_act": "xielu"},
    ),
    "arcee": ModelFamily({**_RMS5, **_BIASES, "hidden_act": "relu2"}, {"gated": False}),
    "nemotron": ModelFamily(
        {"norm_eps": 1e-5, **_BIASES, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        {"norm_centred": True, "norm_bias": True, "norm_offset": 1.0, "gated": False},
    ),
    "starcoder2": ModelFamily(
        {
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
        {"norm_centred": True, "norm_bias": True, "gated": False},
        TensorNames(up="mlp.c_fc", down="mlp.c_proj"),
    ),
    "phi": ModelFamily(
        {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        {**_LAYER_NORMS, **_ALL_BIASES, "parallel": True, "head_bias": True},
        TensorNames(
            output="self_attn.dense",
            up="mlp.fc1",
            down="mlp.fc2",
            mlp_before=None,
            layout=CheckpointLayout(((r"^model\.final_layernorm\.", "model.norm."),)),
        ),
    ),
    "gpt_neox": ModelFamily(
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
        {**_LAYER_NORMS, "mlp_bias": True},
        replace(
            _JOINT_QKV,
            layout=CheckpointLayout(
                (
                    (r"^gpt_neox\.", "model."),
                    (r"^model\.embed_in\.", "model.embed_tokens."),
                    (r"^model\.final_layer_norm\.", "model.norm."),
                    (r"^embed_out\.", "lm_head."),
                    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
                    (r"\.attention\.dense\.", ".self_attn.o_proj."),
                    (r"\.dense_h_to_4h\.", ".up_proj."),
                    (r"\.dense_4h_to_h\.", ".down_proj."),
                ),
                "heads",
            ),
        ),
        key_names={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        parallel_norms=True,
    ),
    "gptj": ModelFamily(
        {
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": None,
            "rotary_dim": 64,
        },
        {**_LAYER_NORMS, "parallel": True, "mlp_bias": True, "head_bias": True},
        TensorNames(
            mlp_before=None,
            layout=CheckpointLayout(
                (
                    *_GPT_RENAMES,
                    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
                    (r"\.attn\.", ".self_attn."),
                    (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
                    (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
                )
            ),
        ),
        key_names=_GPT_KEYS,
        interleaved_rope=True,
    ),
    "falcon": ModelFamily(
        {
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "use_parallel_residual": True,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_ln_in_parallel_attn": None,
        },
        {**_LAYER_NORMS},
        replace(
            _JOINT_QKV,
            layout=CheckpointLayout(
                (
                    (r"^transformer\.h\.", "model.layers."),
                    (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
                    (r"^transformer\.ln_f\.", "model.norm."),
                    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
                    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
                    (r"\.ln_attn\.", ".input_layernorm."),
                    (r"\.ln_mlp\.", ".post_attention_layernorm."),
                    (r"\.dense_h_to_4h\.", ".up_proj."),
                    (r"\.dense_4h_to_h\.", ".down_proj."),
                ),
                "heads",
            ),
        ),
        key_names={
            "num_key_value_heads": "num_kv_heads",
            "hidden_act": "activation",
            "intermediate_size": "ffn_hidden_size",
            "use_parallel_residual": "parallel_attn",
            "attention_bias": "bias",
            "mlp_bias": "bias",
        },
        required={"alibi": False},
    ),
    "bloom": ModelFamily(
        {
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
        {**_LAYER_NORMS, **_ALL_BIASES, "embedding_norm": True},
        replace(
            _JOINT_QKV,
            layout=CheckpointLayout(
                (
                    (r"^(transformer\.)?h\.", "model.layers."),
                    (r"^(transformer\.)?word_embeddings\.", "model.embed_tokens."),
                    (r"^(transformer\.)?word_embeddings_layernorm\.", "model.embed_norm."),
                    (r"^(transformer\.)?ln_f\.", "model.norm."),
                    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
                    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
                    (r"\.dense_h_to_4h\.", ".up_proj."),
                    (r"\.dense_4h_to_h\.", ".down_proj."),
                ),
                "heads",
            ),
        ),
        key_names={
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
        },
        required={"apply_residual_connection_post_layernorm": False},
        positions="alibi",
    ),
    "mpt": ModelFamily(
        {
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "alibi_bias_max": 8,
        },
        {"norm_centred": True, "gated": False},
        replace(
            _JOINT_QKV,
            layout=CheckpointLayout(
                (
                    (r"^transformer\.blocks\.", "model.layers."),
                    (r"^transformer\.wte\.", "model.embed_tokens."),
                    (r"^transformer\.norm_f\.", "model.norm."),
                    (r"\.norm_1\.", ".input_layernorm."),
                    (r"\.norm_2\.", ".post_attention_layernorm."),
                    (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
                    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
                    (r"\.ffn\.", ".mlp."),
                )
            ),
        ),
        key_names={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        inner_configs=("attn_config",),
        required={
            "alibi": True,
            "prefix_lm": False,
            "qk_ln": False,
            "attn_type": "multihead_attention",
            "softmax_scale": None,
            "expansion_ratio": 4,
            "logit_scale": None,
            "no_bias": True,
        },
        positions="alibi",
    ),
    "gpt_bigcode": ModelFamily(
        {
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "multi_query": True,
            "tie_word_embeddings": True,
        },
        {**_LAYER_NORMS, **_ALL_BIASES},
        replace(
            _JOINT_QKV,
            layout=CheckpointLayout(
                (
                    *_GPT_RENAMES,
                    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
                    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
                    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
                    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
                ),
                "heads",
            ),
        ),
        key_names=_GPT_KEYS,
        required={"scale_attn_weights": True},
        positions="learned",
    ),
    "opt": ModelFamily(
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu",
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        {**_LAYER_NORMS},
        TensorNames(
            output="self_attn.out_proj",
            up="fc1",
            down="fc2",
            layout=CheckpointLayout(
                (
                    (r"^(model\.)?decoder\.", "model."),
                    (r"^model\.final_layer_norm\.", "model.norm."),
                    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
                    (r"\.final_layer_norm\.", ".post_attention_layernorm."),
                ),
                positions_offset=2,
            ),
        ),
        key_names={
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
            "attention_bias": "enable_bias",
            "mlp_bias": "enable_bias",
        },
        required={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        positions="learned",
    ),
    "mixtral": ModelFamily(
        {
            **_RMS5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        names=_MIXTRAL_NAMES,
    ),
    "phimoe": ModelFamily(
        {
            **_RMS5,
            "rope_theta": 1000000.0,
            "attention_bias": False,
            "sliding_window": None,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
            "norm_topk_prob": False,
            "lm_head_bias": False,
        },
        {"norm_centred": True, "norm_bias": True},
        _MIXTRAL_NAMES,
        router={"score": "sparsemixer"},
    ),
    "llama4_text": ModelFamily(
        {
            **_RMS5,
            "attention_bias": False,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
            "use_qk_norm": True,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "num_shared_experts": 1,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "norm_topk_prob": False,
        },
        {"query_key_norm_last": True, "query_key_norm_scaled": False},
        TensorNames(
            gate="feed_forward.gate_proj",
            up="feed_forward.up_proj",
            down="feed_forward.down_proj",
            router="feed_forward.router",
            shared_expert="feed_forward.shared_expert",
            expert_gate="feed_forward.experts.{}.gate_proj",
            expert_up="feed_forward.experts.{}.up_proj",
            expert_down="feed_forward.experts.{}.down_proj",
            stacked=StackedExperts(
                "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", inputs_first=True
            ),
        ),
        interleaved_rope=True,
        optional_query_key_norm="head",
        router={"score": "sigmoid", "scales_inputs": True},
    ),
    "minimax_m2": ModelFamily(
        {
            **_RMS,
            "head_dim": 128,
            "rope_theta": 5000000.0,
            "partial_rotary_factor": None,
            "rotary_dim": None,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        {"query_key_norm": "all"},
        _MIXTRAL_NAMES,
        router_score="sigmoid",
        router_biased=True,
    ),
    "qwen2_moe": ModelFamily(
        {
            **_RMS,
            **_QWEN_WINDOWS,
            **_QWEN_EXPERTS,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        {"output_bias": False},
        TensorNames(shared_expert="mlp.shared_expert"),
    ),
    "olmoe": ModelFamily(
        {
            **_RMS5,
            "attention_bias": False,
            "num_local_experts": None,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        {"query_key_norm": "all"},
    ),
    "glm4_moe": ModelFamily(
        {
            **_RMS5,
            **_DEEPSEEK_EXPERTS,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
        {"output_bias": False},
        router_score="sigmoid",
        router_biased=True,
        optional_query_key_norm="head",
    ),
    "dots1": ModelFamily(
        {
            **_RMS,
            **_DEEPSEEK_EXPERTS,
            "attention_bias": False,
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "layer_types": None,
        },
        {"query_key_norm": "head"},
        router_score="sigmoid",
        router_biased=True,
    ),
    "exaone_moe": ModelFamily(
        {
            **_RMS5,
            **_DEEPSEEK_EXPERTS,
            "n_routed_experts": None,
            "n_shared_experts": None,
            "num_experts": 64,
            "num_shared_experts": 1,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
        },
        {"query_key_norm": "head"},
        TensorNames(router_bias="mlp.e_score_correction_bias"),
        router_score="sigmoid",
        router_biased=True,
        rope_in_windows_only=True,
    ),
    "ernie4_5_moe": ModelFamily(
        {
            **_RMS5,
            "use_bias": False,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "num_experts_per_tok": None,
            "num_experts": None,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "norm_topk_prob": True,
        },
        names=TensorNames(router_bias="mlp.moe_statics.e_score_correction_bias", router_bias_is_row=True),
        interleaved_rope=True,
        router_biased=True,
    ),
    "deepseek_v2": ModelFamily(
        {
            **_RMS,
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "num_experts_per_tok": None,
            "norm_topk_prob": False,
            "topk_method": "greedy",
        },
        latent=True,
        router_group_best=1,
    ),
    "deepseek_v3": ModelFamily(_DEEPSEEK_V3, latent=True, router_score="sigmoid", router_biased=True),
    "glm4_moe_lite": ModelFamily(
        {
            **_DEEPSEEK_V3,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
        },
        latent=True,
        router_score="sigmoid",
        router_biased=True,
    ),
    "mistral4": ModelFamily(
        {
            **_DEEPSEEK_V3,
            "max_position_embeddings": 1048576,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        names=TensorNames(stacked=StackedExperts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
        latent=True,
    ),
    "gpt_oss": ModelFamily(
        {
            **_RMS5,
            "attention_bias": True,
            "head_dim": 64,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
        fixed={"sinks": True, "mlp_bias": True, "activation": "clamped_silu"},
        required={"swiglu_alpha": ALPHA, "swiglu_limit": LIMIT},
        names=TensorNames(
            router="mlp.router",
            stacked=StackedExperts(
                "mlp.experts.gate_up_proj", "mlp.experts.down_proj", interleaved=True, inputs_first=True
            ),
        ),
        router_logit_bias=True,
    ),
    "lfm2": ModelFamily(
        {
            **_LFM2,
            "full_attn_idxs": None,
            "block_ff_dim": None,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        {"query_key_norm": "head"},
        _LFM2_NAMES,
        mixer="short_conv",
    ),
    "lfm2_moe": ModelFamily(
        {
            **_LFM2,
            "num_local_experts": None,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        {"query_key_norm": "head"},
        _LFM2_NAMES,
        router_score="sigmoid",
        router_biased=True,
        mixer="short_conv",
    ),
    "qwen3_next": ModelFamily(
        {
            **_QWEN_DELTA,
            **_QWEN_EXPERTS,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        _QWEN_DELTA_FIXED,
        _QWEN_DELTA_NAMES,
        mixer="gated_delta",
        delta_tensors=DeltaTensors.BY_KEY_HEAD,
    ),
    "qwen3_5_text": ModelFamily(_QWEN_DELTA, _QWEN_DELTA_FIXED, _QWEN_DELTA_NAMES, mixer="gated_delta"),
    "qwen3_5_moe_text": ModelFamily(
        {
            **_QWEN_DELTA,
            "norm_topk_prob": True,
            "num_local_experts": None,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        _QWEN_DELTA_FIXED,
        replace(_QWEN_DELTA_NAMES, stacked=StackedExperts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
        mixer="gated_delta",
    ),
    "olmo_hybrid": ModelFamily(
        {
            **_RMS,
            "attention_bias": False,
            "max_position_embeddings": 65536,
            "layer_types": None,
            "linear_num_key_heads": 30,
            "linear_num_value_heads": 30,
            "linear_key_head_dim": 96,
            "linear_value_head_dim": 192,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        {"query_key_norm": "all", "recurrent_names": TensorNames(mixer="linear_attn")},
        replace(_NORMS_AFTER, mixer="linear_attn", layout=_OLMO_HYBRID_LAYOUT),
        positions_optional=True,
        mixer="gated_delta",
        delta_tensors=DeltaTensors.SEPARATE,
        delta_norm_epsilon=1e-5,
    ),
    "mamba2": ModelFamily(
        {"layer_norm_epsilon": 1e-5, **_MAMBA2, "max_position_embeddings": UNLIMITED_CONTEXT},
        names=_MAMBA2_NAMES,
        key_names={
            "mamba_n_heads": "num_heads",
            "mamba_d_head": "head_dim",
            "mamba_d_state": "state_size",
            **_MAMBA2_KEYS,
        },
        attention=False,
        has_mlp=False,
        positions="none",
        mixer="mamba2",
    ),
    "nemotron_h": ModelFamily(
        {
            "layer_norm_epsilon": 1e-5,
            **_MAMBA2,
            **_DEEPSEEK_EXPERTS,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_hidden_act": "silu",
            "time_step_min": 0.001,
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "mlp_bias": False,
            "head_dim": 128,
            "hidden_act": "relu2",
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
        },
        {"gated": False, "tied": False},
        replace(
            _MAMBA2_NAMES,
            query="mixer.q_proj",
            key="mixer.k_proj",
            value="mixer.v_proj",
            output="mixer.o_proj",
            up="mixer.up_proj",
            down="mixer.down_proj",
            router="mixer.gate",
            router_bias="mixer.gate.e_score_correction_bias",
            shared_expert="mixer.shared_experts",
            expert_up="mixer.experts.{}.up_proj",
            expert_down="mixer.experts.{}.down_proj",
        ),
        key_names={
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
            "hidden_act": "mlp_hidden_act",
            **_MAMBA2_KEYS,
        },
        router_score="sigmoid",
        router_biased=True,
        one_part=True,
        positions="none",
        mixer="mamba2",
    ),
    "bamba": ModelFamily(
        {
            **_RMS5,
            **_MAMBA2,
            **_BIASES,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
            "attn_layer_indices": None,
        },
        names=_BAMBA_NAMES,
        mixer="mamba2",
    ),
    "falcon_h1": ModelFamily(
        {
            **_RMS5,
            **_MAMBA2,
            **_BIASES,
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "projectors_bias": False,
            "lm_head_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "mlp_multipliers": None,
            "key_multiplier": 1.0,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
            "ssm_multipliers": None,
        },
        names=_BAMBA_NAMES,
        mixer="mamba2",
        mixes_both=True,
    ),
    "granitemoehybrid": ModelFamily(
        {
            **_RMS,
            **_MAMBA2,
            **_GRANITE,
            "attention_bias": False,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "layer_types": None,
        },
        names=TensorNames(
            gate="shared_mlp.input_linear",
            up="shared_mlp.input_linear",
            down="shared_mlp.output_linear",
            shared_mlp=("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear"),
            router="block_sparse_moe.router.layer",
            stacked=StackedExperts("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
            mixer="mamba",
        ),
        mixer="mamba2",
    ),
    "qwen3_moe": ModelFamily(
        {
            **_RMS,
            **_QWEN_EXPERTS,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        {"query_key_norm": "head"},
    ),
}

# Tensor names of text parts that differ from those of their family.
OTHER_NAMES: dict[str, TensorNames] = {
    "qwen3_vl_moe_text": TensorNames(
        stacked=StackedExperts("mlp.experts.gate_up_proj", "mlp.experts.down_proj", inputs_first=True)
    ),
}
