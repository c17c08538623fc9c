"""Mixtures of experts with grouped-query attention, and the readings of all experts."""

from dataclasses import replace
from typing import Any

from tgi.worker.decoder_config import (
    ALPHA,
    LIMIT,
    CheckpointLayout,
    ExpertsConfig,
    RouterConfig,
    StackedExperts,
    TensorNames,
    UnsupportedConfig,
)
from tgi.worker.models.families.family import RMS, RMS5, ModelFamily, Values, Variant
from tgi.worker.models.families.llama import EVERY_FOURTH, GRANITE, HUNYUAN_NAMES, QWEN_WINDOWS
from tgi.worker.models.families.readings import first

# Names of the same numbers in the families.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
DENSE_LAYERS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")  # before those with experts
EXPERTS_EVERY = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")  # so many layers
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# The width of all shared experts together.
SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")

SIGMOID_BIASED = {"score": "sigmoid", "biased": True}  # as DeepSeek-V3's router
JOINT_EXPERTS = StackedExperts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
GRANITE_EXPERTS: Values = {**GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
GRANITE_EXPERT_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    stacked=StackedExperts("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
)
QWEN_EXPERTS = {
    "num_local_experts": None,  # the name under which transformers saves num_experts
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
DEEPSEEK_EXPERTS = {
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
_MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    router_bias="block_sparse_moe.e_score_correction_bias",
    expert_gate="block_sparse_moe.experts.{}.w1",
    expert_up="block_sparse_moe.experts.{}.w3",
    expert_down="block_sparse_moe.experts.{}.w2",
)

FAMILIES: dict[str, ModelFamily] = {
    "mixtral": ModelFamily(
        {
            **RMS5,
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
            **RMS5,
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
    "qwen2_moe": ModelFamily(
        {
            **RMS,
            **QWEN_WINDOWS,
            **QWEN_EXPERTS,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        {"output_bias": False},
        TensorNames(shared_expert="mlp.shared_expert"),
    ),
    "qwen3_moe": ModelFamily(
        {
            **RMS,
            **QWEN_EXPERTS,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        {"query_key_norm": "head"},
    ),
    "olmoe": ModelFamily(
        {
            **RMS5,
            "attention_bias": False,
            "num_local_experts": None,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        {"query_key_norm": "all"},
    ),
    "granitemoe": ModelFamily({**RMS, **GRANITE_EXPERTS, "attention_bias": False}, names=GRANITE_EXPERT_NAMES),
    "hunyuan_v1_moe": ModelFamily(
        {
            **RMS5,
            "attention_bias": False,
            "num_experts": 1,
            "moe_topk": 1,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
        },
        {"query_key_norm": "head", "query_key_norm_last": True},
        replace(HUNYUAN_NAMES, router="mlp.gate.wg", shared_expert="mlp.shared_mlp"),
    ),
    "llama4_text": ModelFamily(
        {
            **RMS5,
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
        computed=lambda values, config: {"intermediate": int(values["intermediate_size_mlp"])},
    ),
    "minimax_m2": ModelFamily(
        {
            **RMS,
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
        router=SIGMOID_BIASED,
    ),
    "glm4_moe": ModelFamily(
        {
            **RMS5,
            **DEEPSEEK_EXPERTS,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
        {"output_bias": False},
        router=SIGMOID_BIASED,
        optional_query_key_norm="head",
    ),
    "dots1": ModelFamily(
        {
            **RMS,
            **DEEPSEEK_EXPERTS,
            "attention_bias": False,
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "layer_types": None,
        },
        {"query_key_norm": "head"},
        router=SIGMOID_BIASED,
    ),
    "exaone_moe": ModelFamily(
        {
            **RMS5,
            **DEEPSEEK_EXPERTS,
            "n_routed_experts": None,
            "n_shared_experts": None,
            "num_experts": 64,
            "num_shared_experts": 1,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
            **EVERY_FOURTH,
        },
        {"query_key_norm": "head"},
        TensorNames(router_bias="mlp.e_score_correction_bias"),
        router=SIGMOID_BIASED,
        rope_in_windows_only=True,
    ),
    "ernie4_5_moe": ModelFamily(
        {
            **RMS5,
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
        router={"biased": True},
    ),
    "dbrx": ModelFamily(
        {
            "layer_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "clip_qkv": None,
            "moe_num_experts": 4,
            "moe_topk": 1,
            "norm_topk_prob": 1.0,
        },
        {"norm_centred": True},
        TensorNames(
            query="self_attn.Wqkv",
            key="self_attn.Wqkv",
            value="self_attn.Wqkv",
            output="self_attn.out_proj",
            router="mlp.router.layer",
            stacked=StackedExperts(
                "mlp.experts.mlp.w1", "mlp.experts.mlp.w2", "mlp.experts.mlp.v1", down_inputs_first=True, flat=True
            ),
            layout=CheckpointLayout(
                (
                    (r"^transformer\.blocks\.", "model.layers."),
                    (r"^transformer\.wte\.", "model.embed_tokens."),
                    (r"^transformer\.norm_f\.", "model.norm."),
                    (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
                    (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
                    (r"\.norm_attn_norm\.attn\.", ".self_attn."),
                    (r"\.ffn\.", ".mlp."),
                )
            ),
        ),
        key_names={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "kv_n_heads",
            "max_position_embeddings": "max_seq_len",
            "intermediate_size": "ffn_hidden_size",
            "moe_topk": "moe_top_k",
            "norm_topk_prob": "moe_normalize_expert_weights",
        },
        inner_configs=("attn_config", "ffn_config"),
        required={"norm_topk_prob": 1.0, "ffn_act_fn": {"name": "silu"}},
    ),
    "gpt_oss": ModelFamily(
        {
            **RMS5,
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
        router={"logit_bias": True},
    ),
}

VARIANTS = {
    "glm4v_moe_text": Variant("glm4_moe", {"head_dim": None, "attention_bias": True}),
    "qwen3_vl_moe_text": Variant(
        "qwen3_moe", {"rope_theta": 500000.0}, TensorNames(stacked=replace(JOINT_EXPERTS, inputs_first=True))
    ),
}


def read_experts(family: ModelFamily, config: Values, values: Values) -> ExpertsConfig | None:
    """The experts of the routed layers; None: there are none."""
    count = expert_count(values)
    if not count:
        return None
    width = values.get("moe_intermediate_size") or config["intermediate_size"]
    shared = first(values, SHARED_WIDTH, 0) or width * first(values, SHARED_EXPERTS, 0)
    if family.router.get("score") == "sparsemixer" and first(values, EXPERTS_PER_TOKEN, 0) != 2:
        raise UnsupportedConfig("num_experts_per_tok of sparsemixer other than 2")
    router: dict[str, Any] = {
        "normalized": bool(values["norm_topk_prob"]),
        "groups": 1 if values.get("topk_method") == "greedy" else values.get("n_group") or 1,
        "top_groups": values.get("topk_group") or 1,
        "scale": float(values.get("routed_scaling_factor", 1.0)),
        "jitter": float(values.get("router_jitter_noise", 0.0)),
        **family.router,
    }
    if not values.get("use_expert_bias", True):
        router["biased"] = False
    return ExpertsConfig(
        count,
        first(values, EXPERTS_PER_TOKEN, 0),
        width,
        RouterConfig(**router),
        shared,
        "shared_expert_intermediate_size" in values,
        family.parallel_experts,
    )


def expert_count(values: Values) -> int:
    """The number of routed experts; 0: none."""
    if not values.get("enable_moe_block", True):
        return 0
    return first(values, EXPERTS, 0)


def is_routed(values: Values, number: int) -> bool:
    """Whether the MLP of the layer is a mixture of experts."""
    if not expert_count(values):
        return False
    if values.get("mlp_layer_types"):
        return bool(values["mlp_layer_types"][number] == "sparse")
    start, last = first(values, DENSE_LAYERS, 0), number
    if values.get("moe_layer_end_index", -1) != -1:
        last = values["moe_layer_end_index"]
    if values.get("moe_layers") is not None:
        return number in values["moe_layers"]
    step = next((values[key] for key in EXPERTS_EVERY if values.get(key)), 1)
    return start <= number <= last and (number + 1) % step == 0 and number not in (values.get("mlp_only_layers") or [])
