"""Dense models with the layers of a llama, with other norms, biases, rotations or activations."""

from dataclasses import replace

from tgi.worker.decoder_config import Mixer, TensorNames
from tgi.worker.models.families.family import BIASES, RMS, RMS5, ModelFamily, Values, Variant

# Each fourth layer attends to all tokens.
EVERY_FOURTH: Values = {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None}
QWEN_WINDOWS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GLM = {"rms_norm_eps": 1.5625e-7, "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5}
_COHERE = {"layer_norm_eps": 1e-5, "attention_bias": False, "tie_word_embeddings": True, "logit_scale": 0.0625}
GRANITE = {"attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
MLLAMA_IMAGE_IDS = 8
HUNYUAN_NAMES = TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
_FUSED_GATE = TensorNames(gate="mlp.gate_up_proj", up="mlp.gate_up_proj")
NORMS_AFTER = TensorNames(
    attention_before=None,
    attention_after="post_attention_layernorm",
    mlp_before=None,
    mlp_after="post_feedforward_layernorm",
)


def _cross_layers(values: Values, config: Values) -> list[Values]:
    """ModelFamily.layer_sizes: the layers that attend to images."""
    crosses: Values = {"mixer": Mixer.IMAGES, "rope": None}
    numbers = values["cross_attention_layers"] or ()
    return [crosses if number in numbers else {} for number in range(config["num_hidden_layers"])]


def _cross_attention(values: Values, config: Values) -> Values:
    """ModelFamily.computed. In Llama 3.2 Vision, the embedding has eight more rows than the head, which are for images,
    and an image has a state for each patch of its tiles, and one more for each tile."""
    if not values["cross_attention_layers"]:
        return {}
    tower = config.get("vision_config") or {}
    patches = (tower.get("image_size", 448) // tower.get("patch_size", 14)) ** 2 + 1
    return {
        "vocab_size": config["vocab_size"] + MLLAMA_IMAGE_IDS,
        "unscored": MLLAMA_IMAGE_IDS,
        "tied": False,
        "image_states": patches * tower.get("max_num_tiles", 4),
    }


FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(
        RMS | BIASES | {"cross_attention_layers": None}, computed=_cross_attention, layer_sizes=_cross_layers
    ),
    "mistral": ModelFamily({**RMS, "sliding_window": 4096}),
    "ministral3": ModelFamily({**RMS5, "head_dim": 128, "rope_theta": 1000000.0, "sliding_window": None}),
    "qwen2": ModelFamily(RMS | QWEN_WINDOWS, {"qkv_bias": True}),
    "qwen3": ModelFamily({**RMS, **QWEN_WINDOWS, "attention_bias": False, "head_dim": 128}, {"query_key_norm": "head"}),
    "phi3": ModelFamily(
        {**RMS5, "sliding_window": None, "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
        names=TensorNames(
            query="self_attn.qkv_proj",
            key="self_attn.qkv_proj",
            value="self_attn.qkv_proj",
            gate="mlp.gate_up_proj",
            up="mlp.gate_up_proj",
        ),
        aliases={"su": "longrope", "yarn": "longrope"},
    ),
    "granite": ModelFamily(RMS | BIASES | GRANITE),
    "olmo2": ModelFamily({**RMS5, "attention_bias": False}, {"query_key_norm": "all"}, NORMS_AFTER),
    "olmo3": ModelFamily(
        {**RMS5, "attention_bias": False, **EVERY_FOURTH, "rope_local_base_freq": None},
        {"query_key_norm": "all"},
        NORMS_AFTER,
    ),
    "exaone4": ModelFamily(
        {**RMS5, **EVERY_FOURTH},
        {"query_key_norm": "head"},
        NORMS_AFTER,
        rope_in_windows_only=True,
    ),
    "seed_oss": ModelFamily(
        {**RMS, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 128}
    ),
    "ernie4_5": ModelFamily(
        {**RMS5, "use_bias": False, "head_dim": 128, "tie_word_embeddings": True, "rope_theta": 500000.0},
        interleaved_rope=True,
    ),
    "helium": ModelFamily(
        {"rms_norm_eps": 1e-8, **BIASES, "head_dim": 128, "rope_theta": 100000.0},
        {"output_bias": False},
        interleaved_rope=True,
    ),
    "hunyuan_v1_dense": ModelFamily(
        {**RMS5, "attention_bias": False},
        {"query_key_norm": "head", "query_key_norm_last": True},
        HUNYUAN_NAMES,
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
            "use_qk_norm": False,
        },
        {"norm_centred": True, "norm_bias": True, "output_bias": False},
        TensorNames(query_norm="self_attn.q_layernorm.norms.{}", key_norm="self_attn.k_layernorm.norms.{}"),
        key_names={"use_qk_norm": "qk_layernorm"},
    ),
    "smollm3": ModelFamily(
        {
            **RMS,
            **BIASES,
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
        {**_COHERE, "rope_theta": 10000.0, **EVERY_FOURTH},
        {"norm_centred": True, "parallel": True},
        TensorNames(mlp_before=None),
        interleaved_rope=True,
        rope_in_windows_only=True,
    ),
    "apertus": ModelFamily(
        {
            **RMS5,
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
    "arcee": ModelFamily({**RMS5, **BIASES, "hidden_act": "relu2"}, {"gated": False}),
    "nemotron": ModelFamily(
        {"norm_eps": 1e-5, **BIASES, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
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
}

VARIANTS = {
    "glm4v_text": Variant("glm4", {"head_dim": None, "rms_norm_eps": 1e-5}),
    "mimo": Variant("qwen2"),  # with a layer for multi-token prediction
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), Variant("qwen2")),  # as first published, with no text_config
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_vl_text"), Variant("qwen2", {**RMS5, "rope_theta": 1000000.0})),
    "mllama_text_model": Variant(
        "llama",
        {
            **RMS5,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        },
    ),
    "qwen3_vl_text": Variant("qwen3", {"rope_theta": 500000.0}),
}
