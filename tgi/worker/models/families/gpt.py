"""GPT-2 and its kin: layer norms, biases, no gate, and fused or parallel parts under names of their own."""

import math
from dataclasses import replace

from tgi.worker.decoder_config import CheckpointLayout, TensorNames
from tgi.worker.models.families.family import ModelFamily, Values

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
_STEM_RENAMES = (
    (r"^(transformer\.)?h\.", "model.layers."),
    (r"^(transformer\.)?(wte|word_embeddings)\.", "model.embed_tokens."),
    (r"^(transformer\.)?ln_f\.", "model.norm."),
)
_DENSE_RENAMES = (
    (r"\.(self_)?attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.(self_)?attention\.dense\.", ".self_attn.o_proj."),
    (r"\.dense_h_to_4h\.", ".up_proj."),
    (r"\.dense_4h_to_h\.", ".down_proj."),
)
_GPT_RENAMES = (
    *_STEM_RENAMES,
    (r"^(transformer\.)?wpe\.", "model.embed_positions."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
)
_GPT_LAYER_RENAMES = (
    *_GPT_RENAMES,
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
_GPT: Values = {"intermediate_size": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}


def _alibi(values: Values, config: Values) -> Values:
    """The slopes of ALiBi (Press et al., 2022): 2^-(most n / heads) for head n, counted from 1; where the number of
    heads is no power of two, every other one of the next power of two first, then those in between. `alibi`: whether
    the model has any (Falcon)."""
    if not values.get("alibi", True):
        return {}
    heads, most = config["num_attention_heads"], values.get("alibi_bias_max", 8)
    powers = 1 << (heads - 1).bit_length()
    slopes = tuple(2.0 ** -(most * n / powers) for n in range(1, powers + 1))
    return {"alibi": slopes if powers == heads else (*slopes[1::2], *slopes[::2])[:heads]}


def _falcon_alibi(values: Values, config: Values) -> Values:
    """Falcon rounds the slopes to bfloat16, and scales the scores after it has reduced them."""
    scale = (config["hidden_size"] // config["num_attention_heads"]) ** -0.5
    return {key: tuple(_bfloat16(slope) * scale for slope in slopes) for key, slopes in _alibi(values, config).items()}


def _bfloat16(number: float) -> float:
    """The nearest number of that type."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256), exponent - 8)


FAMILIES: dict[str, ModelFamily] = {
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
                    *_DENSE_RENAMES,
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
            "alibi": False,
        },
        {**_LAYER_NORMS},
        replace(
            _JOINT_QKV,
            layout=CheckpointLayout(
                (
                    *_STEM_RENAMES,
                    (r"\.ln_attn\.", ".input_layernorm."),
                    (r"\.ln_mlp\.", ".post_attention_layernorm."),
                    *_DENSE_RENAMES,
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
        computed=_falcon_alibi,
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
                    *_STEM_RENAMES,
                    (r"^(transformer\.)?word_embeddings_layernorm\.", "model.embed_norm."),
                    *_DENSE_RENAMES,
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
        computed=_alibi,
        positions="none",
    ),
    "mpt": ModelFamily(
        {
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "alibi_bias_max": 8,
            "clip_qkv": None,
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
        computed=_alibi,
        positions="none",
    ),
    "gpt2": ModelFamily(
        {**_GPT, "hidden_act": "gelu_new"},
        {**_LAYER_NORMS, **_ALL_BIASES},
        replace(_JOINT_QKV, layout=CheckpointLayout(_GPT_LAYER_RENAMES, transposed=True)),
        key_names=_GPT_KEYS,
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        positions="learned",
    ),
    "gpt_bigcode": ModelFamily(
        {**_GPT, "hidden_act": "gelu_pytorch_tanh", "multi_query": True},
        {**_LAYER_NORMS, **_ALL_BIASES},
        replace(_JOINT_QKV, layout=CheckpointLayout(_GPT_LAYER_RENAMES, "heads")),
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
}
