"""Models with recurrent layers: short convolutions, the gated delta rule, Mamba2."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from tgi.hub.model_config import UNLIMITED_CONTEXT
from tgi.worker.decoder_config import CheckpointLayout, TensorNames, UnsupportedConfig
from tgi.worker.mixers.gated_delta import DeltaTensors, GatedDeltaConfig
from tgi.worker.mixers.interface import MixerConfig
from tgi.worker.mixers.mamba2 import GatedNormKind, Mamba2Config
from tgi.worker.mixers.short_conv import ShortConvConfig
from tgi.worker.models.families.experts import (
    DEEPSEEK_EXPERTS,
    GRANITE_EXPERT_NAMES,
    GRANITE_EXPERTS,
    JOINT_EXPERTS,
    QWEN_EXPERTS,
    SIGMOID_BIASED,
)
from tgi.worker.models.families.family import BIASES, RMS, RMS5, ModelFamily, Values
from tgi.worker.models.families.llama import NORMS_AFTER

# The kinds of one-part layers by their letters, and their former names.
LAYER_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe", "mamba": "linear_attention"}
LAYER_KINDS |= {"attention": "full_attention"}

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
    **RMS,
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


def one_part_kinds(config: Values) -> list[str]:
    """The kinds of layers that are one part each: linear_attention, full_attention, mlp or moe."""
    found = config.get("layers_block_type") or config.get("layer_types") or config["hybrid_override_pattern"]
    kinds = [LAYER_KINDS.get(kind, kind) for kind in found]
    if others := set(kinds) - set(LAYER_KINDS.values()):
        raise UnsupportedConfig(f"layers of kind {min(others)!r}")
    return kinds


def _short_conv(values: Values, config: Values) -> MixerConfig:
    return ShortConvConfig(config["hidden_size"], values["conv_L_cache"], bool(values["conv_bias"]))


def _gated_delta(
    values: Values, config: Values, tensors: str = DeltaTensors.BY_KIND, norm_epsilon: float | None = None
) -> MixerConfig:
    if values["attention_bias"]:
        raise UnsupportedConfig("attention_bias")
    return GatedDeltaConfig(
        key_heads=values["linear_num_key_heads"],
        value_heads=values["linear_num_value_heads"],
        key_dim=values["linear_key_head_dim"],
        value_dim=values["linear_value_head_dim"],
        kernel=values["linear_conv_kernel_dim"],
        tensors=tensors,
        negative=bool(values.get("linear_allow_neg_eigval")),
        norm_epsilon=norm_epsilon,
    )


def _mamba2(values: Values, config: Values) -> MixerConfig:
    heads, head_dim = values["mamba_n_heads"], values["mamba_d_head"]
    if head_dim in (None, "auto"):
        head_dim = (values.get("mamba_d_ssm") or values["mamba_expand"] * config["hidden_size"]) // heads
    if values.get("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedConfig(f"mamba_hidden_act {values['mamba_hidden_act']!r}")
    bias = bool(values["mamba_proj_bias"])
    if bool(values.get("projectors_bias", bias)) != bias:
        raise UnsupportedConfig("projectors_bias different from mamba_proj_bias")
    into, parts = float(values.get("ssm_in_multiplier", 1.0)), values.get("ssm_multipliers") or [1.0] * 5
    z, x, b, c, dt = (into * float(part) for part in parts)
    scales, output = (z, x, b, c, dt), float(values.get("ssm_out_multiplier", 1.0))
    if bias and {*scales, output} != {1.0}:
        raise UnsupportedConfig("ssm_multipliers with mamba_proj_bias")
    norm = GatedNormKind.GATE_FIRST
    if "mamba_rms_norm" in values:
        norm = GatedNormKind.GATE_LAST if values["mamba_norm_before_gate"] else norm
        norm = norm if values["mamba_rms_norm"] else GatedNormKind.NONE
    least, most = values.get("time_step_limit") or (0.0, math.inf)
    if "time_step_min" in values:  # Nemotron-H has no upper limit
        least, most = values["time_step_min"], math.inf
    return Mamba2Config(
        heads=heads,
        groups=values["mamba_n_groups"],
        head_dim=head_dim,
        state_dim=values["mamba_d_state"],
        kernel=values["mamba_d_conv"],
        conv_bias=bool(values["mamba_conv_bias"]),
        bias=bias,
        limits=(_number(least), _number(most)),
        norm=norm,
        scales=scales,
        output_scale=output,
    )


def _number(value: Any) -> float:
    """A number of config.json, which transformers writes in an object if it is infinite."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _lfm2_width(values: Values, config: Values) -> Values:
    """LFM2 states a width of which its MLPs take two thirds, in whole blocks."""
    width = int(config["intermediate_size"])
    if values["block_auto_adjust_ff_dim"]:
        width, multiple = int(2 * width / 3), values["block_multiple_of"]
        if values["block_ffn_dim_multiplier"] is not None:
            width = -(-int(values["block_ffn_dim_multiplier"] * width) // multiple) * multiple
    return {"intermediate": width}


def _falcon_h1_scales(values: Values, config: Values) -> Values:
    """Factors of the scores and of the result of attention, whose input and keys have some, of the MLP and the
    logits."""
    into = float(values["attention_in_multiplier"])
    if into != 1.0 and values["attention_bias"]:
        raise UnsupportedConfig("attention_in_multiplier with attention_bias")
    dim = values["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    return {
        "attention_scale": into**2 * float(values["key_multiplier"]) * dim**-0.5,
        "attention_output_scale": into * float(values["attention_out_multiplier"]),
        "mlp_scales": tuple(values["mlp_multipliers"] or (1.0, 1.0)),
        "logit_scale": float(values["lm_head_multiplier"]),
    }


FAMILIES: dict[str, ModelFamily] = {
    "lfm2": ModelFamily(
        {
            **_LFM2,
            "full_attn_idxs": None,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        {"query_key_norm": "head"},
        _LFM2_NAMES,
        computed=_lfm2_width,
        key_names={"intermediate_size": "block_ff_dim"},
        mixer=_short_conv,
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
        router=SIGMOID_BIASED,
        mixer=_short_conv,
    ),
    "qwen3_next": ModelFamily(
        {
            **_QWEN_DELTA,
            **QWEN_EXPERTS,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        _QWEN_DELTA_FIXED,
        _QWEN_DELTA_NAMES,
        mixer=partial(_gated_delta, tensors=DeltaTensors.BY_KEY_HEAD),
    ),
    "qwen3_5_text": ModelFamily(_QWEN_DELTA, _QWEN_DELTA_FIXED, _QWEN_DELTA_NAMES, mixer=_gated_delta),
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
        replace(_QWEN_DELTA_NAMES, stacked=JOINT_EXPERTS),
        mixer=_gated_delta,
    ),
    "olmo_hybrid": ModelFamily(
        {
            **RMS,
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
        replace(NORMS_AFTER, mixer="linear_attn", layout=_OLMO_HYBRID_LAYOUT),
        positions_optional=True,
        mixer=partial(_gated_delta, tensors=DeltaTensors.SEPARATE, norm_epsilon=1e-5),
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
        mixer=_mamba2,
    ),
    "nemotron_h": ModelFamily(
        {
            "layer_norm_epsilon": 1e-5,
            **_MAMBA2,
            **DEEPSEEK_EXPERTS,
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
        router=SIGMOID_BIASED,
        one_part=True,
        positions="none",
        mixer=_mamba2,
    ),
    "bamba": ModelFamily(
        {
            **RMS5,
            **_MAMBA2,
            **BIASES,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
            "attn_layer_indices": None,
        },
        names=_BAMBA_NAMES,
        mixer=_mamba2,
    ),
    "falcon_h1": ModelFamily(
        {
            **RMS5,
            **_MAMBA2,
            **BIASES,
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
        computed=_falcon_h1_scales,
        mixer=_mamba2,
        mixes_both=True,
    ),
    "granitemoehybrid": ModelFamily(
        {
            **RMS,
            **_MAMBA2,
            **GRANITE_EXPERTS,
            "attention_bias": False,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "layer_types": None,
        },
        names=replace(
            GRANITE_EXPERT_NAMES,
            gate="shared_mlp.input_linear",
            up="shared_mlp.input_linear",
            down="shared_mlp.output_linear",
            shared_mlp=("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear"),
            mixer="mamba",
        ),
        mixer=_mamba2,
    ),
}
