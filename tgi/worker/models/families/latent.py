"""Mixtures of experts with latent attention."""

import math

from tgi.worker.decoder_config import LatentConfig, TensorNames, UnsupportedConfig
from tgi.worker.models.families.experts import DEEPSEEK_EXPERTS, JOINT_EXPERTS, SIGMOID_BIASED
from tgi.worker.models.families.family import RMS, ModelFamily, Values, Variant

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
    **RMS,
    **_LATENT,
    **DEEPSEEK_EXPERTS,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}


def latent_config(values: Values, config: Values) -> LatentConfig:
    """The sizes of latent attention."""
    if config.get("mlp_bias"):
        raise UnsupportedConfig("mlp_bias")
    if values.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
        raise UnsupportedConfig(f"topk_method {values['topk_method']!r}")
    if "topk_method" in values and values["norm_topk_prob"]:  # the normalized weights of deepseek_v2 are not scaled
        raise UnsupportedConfig("norm_topk_prob")
    return LatentConfig(
        rank=values["kv_lora_rank"],
        nope_dim=values["qk_nope_head_dim"],
        rope_dim=values["qk_rope_head_dim"],
        value_dim=values["v_head_dim"],
        query_rank=values["q_lora_rank"],
    )


def latent_scale(latent: LatentConfig, rope: Values) -> float:
    """The attention scale, with YaRN's factor of the scores, which DeepSeek's models take to the square here instead of
    scaling cos and sin."""
    over = float(rope.get("mscale_all_dim") or 0.0) if rope["rope_type"] != "default" else 0.0
    growth = 0.1 * over * math.log(max(float(rope.get("factor") or 1.0), 1.0)) + 1.0
    return float(latent.query_dim**-0.5 * growth**2)


FAMILIES: dict[str, ModelFamily] = {
    "deepseek_v2": ModelFamily(
        {
            **RMS,
            **_LATENT,
            **DEEPSEEK_EXPERTS,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "num_experts_per_tok": None,
            "norm_topk_prob": False,
            "topk_method": "greedy",
        },
        latent=latent_config,
        router={"group_best": 1},
    ),
    "deepseek_v3": ModelFamily(_DEEPSEEK_V3, latent=latent_config, router=SIGMOID_BIASED),
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
        latent=latent_config,
        router=SIGMOID_BIASED,
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
        names=TensorNames(stacked=JOINT_EXPERTS),
        latent=latent_config,
    ),
}

VARIANTS = {"kimi_k2": Variant("deepseek_v3")}
