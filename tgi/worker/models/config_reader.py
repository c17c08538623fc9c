"""Reads a DecoderConfig from a config.json of Hugging Face's format, without torch."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tgi.hub.model_config import scaled_context
from tgi.hub.vision_towers import VISION_FAMILIES, rope_axes
from tgi.microkernel.errors import UserError
from tgi.worker.decoder_config import (
    QUERY_SCALE,
    ROPE_TYPES,
    DecoderConfig,
    ExpertsConfig,
    HeadShape,
    LatentConfig,
    LayerConfig,
    LayerInputConfig,
    Mixer,
    RopeConfig,
    RouterConfig,
    UnsupportedConfig,
    rope_type,
)
from tgi.worker.mixers.gated_delta import GatedDeltaConfig
from tgi.worker.mixers.interface import MixerConfig
from tgi.worker.mixers.mamba2 import GatedNormKind, Mamba2Config
from tgi.worker.mixers.short_conv import ShortConvConfig
from tgi.worker.models.families import (
    COMMON_KEYS,
    FAMILIES,
    OTHER_DEFAULTS,
    OTHER_NAMES,
    SAME_FAMILY,
    WITH_TEXT_PART,
    ModelFamily,
)

log = logging.getLogger(__name__)

# hidden_act of config.json -> epilogue of layers.linear.Linear.
EPILOGUES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
# Keys that read_config adds: of the text part of a multimodal model, and the model types that config.json names.
IS_PART, TEXT_TYPE, WHOLE_TYPE = "is_text_part", "text_model_type", "whole_model_type"
SLIDING = "sliding_attention"
FULL = ("full_attention", "attention")  # names of a layer's kind
# The kinds of one-part layers by their letters, and their former names.
LAYER_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe", "mamba": "linear_attention"}
LAYER_KINDS |= {"attention": "full_attention"}
# Names of the same numbers in the families.
NORM_EPSILON = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
ATTENTION_BIAS = ("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
DENSE_LAYERS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")  # before those with experts
EXPERTS_EVERY = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")  # so many layers
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# The width of all shared experts together.
SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's config.json, of a multimodal model that of its text part (with IS_PART), if the built-in decoder
    has its family. Raises UserError if it is missing, invalid or names no model_type."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{directory} has no config.json, so it is not a model directory.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. Fetch the model again.") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{path} names no model_type. A model directory as transformers writes it is expected.")
    return _text_part(config)


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a multimodal model's text part, if the built-in decoder has its family; of a text model the
    whole. The model_type is one of FAMILIES, if it has another name."""
    text, whole = config.get("text_config"), config["model_type"]
    if whole not in WITH_TEXT_PART or not isinstance(text, dict):
        return config | {"model_type": SAME_FAMILY.get(whole, whole), WHOLE_TYPE: whole}
    name = text.get("model_type", "")
    kind = SAME_FAMILY.get(name, name)
    if kind not in FAMILIES:
        return config
    others = {key: value for key, value in config.items() if key != "text_config"}
    added = {"model_type": kind, IS_PART: True, TEXT_TYPE: name, WHOLE_TYPE: whole}
    return others | OTHER_DEFAULTS.get(name, {}) | text | added


def stored_dtype(config: Mapping[str, Any]) -> Any:
    """The name of the dtype of the saved weights: what config.json says, else "float32"."""
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def read_decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """The DecoderConfig of a parsed config.json.

    Raises KeyError if a required key is missing, and UnsupportedConfig if the model_type is not in FAMILIES or the
    config requires something that DecoderModel does not implement.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise UnsupportedConfig(f"model_type {kind!r}")
    family = FAMILIES[kind]
    for key in family.inner_configs:
        config = config | (config.get(key) or {})
    config = config | {name: config[own] for name, own in family.key_names.items() if config.get(own) is not None}
    values = {key: config.get(key, missing) for key, missing in (COMMON_KEYS | family.keys).items()}
    sees_later = values.get("use_bidirectional_attention")
    # Of images, and of PaliGemma's prompts with images: see Bidirectional in hub/vision_towers.py.
    if sees_later not in (None, False, "vision") and config.get(WHOLE_TYPE) != "paligemma":
        raise UnsupportedConfig("use_bidirectional_attention")
    heads = config["num_attention_heads"] if family.attention else 1
    latent = _latent(values, config) if family.latent else None
    head_dim = latent.key_dim if latent else values["head_dim"] or config["hidden_size"] // heads
    if not family.attention:  # sizes of what no layer has
        head_dim = 2
        values["num_key_value_heads"] = 1
    kinds = _one_part_kinds(config) if family.one_part else None
    count = len(kinds) if kinds is not None else config["num_hidden_layers"]
    shapes = [_head_shape(values, number, heads) for number in range(count)]
    ropes = _ropes(family, values, latent.rope_dim if latent else head_dim, shapes)
    if latent:
        ropes = tuple(replace(rope, start=latent.rank) for rope in ropes)
    vision = VISION_FAMILIES.get(config.get(WHOLE_TYPE, kind))
    if vision is not None and vision.rope is not None:
        ropes = tuple(replace(one, axes=rope_axes(vision.rope, one.parameters, one.dim // 2)) for one in ropes)
    context = _context_length(config, values, ropes)
    scaling, scale = ropes[0].parameters, None
    if factors := _query_scale(values, scaling):
        ropes, scale = (*ropes, RopeConfig(head_dim, factors)), len(ropes)
    bias = any(values.get(key) for key in ATTENTION_BIAS)
    parallel = bool(values.get("use_parallel_residual"))
    two_norms = values.get("new_decoder_architecture") and values.get("num_ln_in_parallel_attn") != 1
    names = OTHER_NAMES.get(config.get(TEXT_TYPE, kind), family.names)
    one_norm = parallel and not (family.parallel_norms or two_norms)
    layers = tuple(
        _layer(family, values, number, context, scale, kinds)._replace(**_own_sizes(config, values, number, shapes))
        for number in range(count)
    )
    scores, mixed = _attention_factors(values)
    fields: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden": config["hidden_size"],
        "intermediate": _intermediate(family, config, values),
        "heads": heads,
        "kv_heads": 1 if latent else _kv_heads(values, heads),
        "head_dim": head_dim,
        "context_length": context,
        "layers": layers,
        "ropes": ropes if any(layer.rope is not None or layer.query_scale is not None for layer in layers) else (),
        "tied": bool(config.get("tie_embedding", values["tie_word_embeddings"])),
        "names": replace(names, mlp_before=None) if one_norm else names,
        "norm_epsilon": next(values[key] for key in NORM_EPSILON if key in values),
        "query_key_norm": family.optional_query_key_norm if values.get("use_qk_norm") else None,
        "attention_scale": scores
        * (_attention_scale(values, head_dim) if latent is None else _latent_scale(latent, scaling)),
        "attention_output_scale": mixed,
        "latent": latent,
        "attention_cap": values.get("attn_logit_softcapping"),
        "qkv_bias": bias,
        "output_bias": bool(values.get("attention_out_bias", bias)),
        "activation": _activation(family, values),
        "mlp_bias": bool(values.get("mlp_bias") or values.get("use_bias")),
        "experts": _experts(family, config, values),
        "mlp_scales": tuple(values.get("mlp_multipliers") or (1.0, 1.0)),
        "recurrent": _recurrent(family, config, values) if any(layer.recurs for layer in layers) else None,
        "parallel": parallel,
        "layer_inputs": _layer_inputs(values),
        "head_bias": bool(values.get("lm_head_bias")),
        "alibi": _alibi_slopes(heads, values.get("alibi_bias_max", 8)) if family.positions == "alibi" else (),
        "learned_positions": values["max_position_embeddings"] if family.positions == "learned" else 0,
        "embedding_scale": _embedding_scale(family, config, values),
        "residual_scale": float(values.get("residual_multiplier", 1.0)),
        "logit_scale": _first_number(values, "logit_scale", "lm_head_multiplier")
        / float(values.get("logits_scaling", 1.0)),
        "logit_cap": values.get("final_logit_softcapping"),
    }
    for key, required in family.required.items():
        if config.get(key, required) != required:
            raise UnsupportedConfig(f"{key} {config[key]!r}")
    if config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]:
        raise UnsupportedConfig("word_embed_proj_dim")
    for key in ("qk_layernorm", "clip_qkv", "moe_latent_size"):
        if config.get(key):
            raise UnsupportedConfig(key)
    return DecoderConfig(**fields | family.fixed)


def _head_shape(values: dict[str, Any], number: int, heads: int) -> HeadShape | None:
    """The sizes of a layer's keys and values where a family has several; None: those of the model."""
    if "per_layer_config" not in values:
        return None
    usual = {"head_dim": values["head_dim"], "num_key_value_heads": values["num_key_value_heads"] or heads}
    own: dict[str, Any] = {}
    if values["per_layer_config"] is not None:
        own = values["per_layer_config"].get(str(number), {})
    elif not _has_sliding_window(values, number):
        own = {"head_dim": values["global_head_dim"]}
        if values["attention_k_eq_v"] and values["num_global_key_value_heads"] is not None:
            own["num_key_value_heads"] = values["num_global_key_value_heads"]
    if unknown := own.keys() - usual.keys():
        raise UnsupportedConfig(f"{', '.join(sorted(unknown))} of single layers")
    sizes = usual | own
    return HeadShape(sizes["num_key_value_heads"], sizes["head_dim"])


def _own_sizes(
    config: dict[str, Any], values: dict[str, Any], number: int, shapes: list[HeadShape | None]
) -> dict[str, Any]:
    """The fields of a LayerConfig that say what is its own, and what belongs to an earlier layer."""
    shape = shapes[number]
    if shape is None:
        return {}
    slides = [_has_sliding_window(values, other) for other in range(len(shapes))]
    if slides[-1]:  # transformers would leave out that window
        raise UnsupportedConfig("a last layer with a sliding window")
    first = len(shapes) - values["num_kv_shared_layers"]  # of those that share
    shares = None
    if number >= first:
        shares = max((other for other in range(first) if slides[other] == slides[number]), default=None)
        if shares is None or shapes[shares] != shape:
            raise UnsupportedConfig("num_kv_shared_layers")
    wide = number >= first and values["use_double_wide_mlp"]
    return {
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "keys_as_values": bool(values["attention_k_eq_v"]) and not slides[number],
        "shares": shares,
        "intermediate": 2 * config["intermediate_size"] if wide else None,
    }


def _layer_inputs(values: dict[str, Any]) -> LayerInputConfig | None:
    width = values.get("hidden_size_per_layer_input")
    if not width:
        return None
    return LayerInputConfig(width, values["vocab_size_per_layer_input"], values.get("pad_token_id") or 0)


def _query_scale(values: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any] | None:
    """The parameters of a QUERY_SCALE, if the queries of some layers have one."""
    if rope.get("llama_4_scaling_beta"):
        return rope | {"rope_type": QUERY_SCALE}
    if not values.get("attn_temperature_tuning"):
        return None
    factors = {"llama_4_scaling_beta": values["attn_scale"], "original_max_position_embeddings": values["floor_scale"]}
    return {"rope_type": QUERY_SCALE, "rope_theta": 1.0, "counted_from": 1, **factors}


def _alibi_slopes(heads: int, most: float) -> tuple[float, ...]:
    """The slopes of ALiBi (Press et al., 2022): 2^-(most n / heads) for head n, counted from 1; where the number of
    heads is no power of two, every other one of the next power of two first, then those in between."""
    powers = 1 << (heads - 1).bit_length()
    slopes = tuple(2.0 ** -(most * n / powers) for n in range(1, powers + 1))
    return slopes if powers == heads else (*slopes[1::2], *slopes[::2])[:heads]


def _kv_heads(values: dict[str, Any], heads: int) -> int:
    if "multi_query" in values and not values.get("new_decoder_architecture"):
        return 1 if values["multi_query"] else heads
    return values["num_key_value_heads"] or heads


def _activation(family: ModelFamily, values: dict[str, Any]) -> str:
    if "activation" in family.fixed:
        return str(family.fixed["activation"])
    name = values.get("hidden_activation") or values["hidden_act"]
    name = family.aliases.get(name, name)
    if name not in EPILOGUES:
        raise UnsupportedConfig(f"hidden_act {name!r}")
    return EPILOGUES[name]


def _attention_scale(values: dict[str, Any], head_dim: int) -> float:
    if "attention_multiplier" in values:
        return float(values["attention_multiplier"])
    return float(values.get("query_pre_attn_scalar", head_dim) ** -0.5)


def _attention_factors(values: dict[str, Any]) -> tuple[float, float]:
    """Factors of the scores and of the result of attention (Falcon-H1): its input and the keys have some."""
    into = float(values.get("attention_in_multiplier", 1.0))
    if into != 1.0 and values.get("attention_bias"):
        raise UnsupportedConfig("attention_in_multiplier with attention_bias")
    return into**2 * float(values.get("key_multiplier", 1.0)), into * float(values.get("attention_out_multiplier", 1.0))


def _first_number(values: dict[str, Any], *keys: str) -> float:
    """The value of the first of these keys that the family has; 1: of none."""
    return float(next((values[key] for key in keys if key in values), 1.0))


def _latent(values: dict[str, Any], config: dict[str, Any]) -> LatentConfig:
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


def _latent_scale(latent: LatentConfig, rope: dict[str, Any]) -> float:
    """The attention scale, with YaRN's factor of the scores, which DeepSeek's models take to the square here instead of
    scaling cos and sin."""
    over = float(rope.get("mscale_all_dim") or 0.0) if rope["rope_type"] != "default" else 0.0
    growth = 0.1 * over * math.log(max(float(rope.get("factor") or 1.0), 1.0)) + 1.0
    return float(latent.query_dim**-0.5 * growth**2)


def _embedding_scale(family: ModelFamily, config: dict[str, Any], values: dict[str, Any]) -> float:
    if family.scale_embedding_by_width:
        return float(config["hidden_size"] ** 0.5)
    return float(values.get("embedding_multiplier", 1.0))


def _experts(family: ModelFamily, config: dict[str, Any], values: dict[str, Any]) -> ExpertsConfig | None:
    count = _expert_count(values)
    if not count:
        return None
    width = values.get("moe_intermediate_size") or config["intermediate_size"]
    shared = _first(values, SHARED_WIDTH, 0) or width * _first(values, SHARED_EXPERTS, 0)
    if family.router.get("score") == "sparsemixer" and _first(values, EXPERTS_PER_TOKEN, 0) != 2:
        raise UnsupportedConfig("num_experts_per_tok of sparsemixer other than 2")
    router = RouterConfig(
        score=family.router_score,
        logit_bias=family.router_logit_bias,
        normalized=bool(values["norm_topk_prob"]),
        biased=family.router_biased and bool(values.get("use_expert_bias", True)),
        groups=1 if values.get("topk_method") == "greedy" else values.get("n_group") or 1,
        top_groups=values.get("topk_group") or 1,
        scale=float(values.get("routed_scaling_factor", 1.0)),
        group_best=family.router_group_best,
        jitter=float(values.get("router_jitter_noise", 0.0)),
    )
    return ExpertsConfig(
        count,
        _first(values, EXPERTS_PER_TOKEN, 0),
        width,
        replace(router, **family.router),
        shared,
        "shared_expert_intermediate_size" in values,
        family.parallel_experts,
    )


def _intermediate(family: ModelFamily, config: dict[str, Any], values: dict[str, Any]) -> int:
    """The width of a dense MLP. LFM2 states a width of which it takes two thirds, in whole blocks."""
    if "intermediate_size_mlp" in values:  # the other one is that of experts
        return int(values["intermediate_size_mlp"])
    if "shared_intermediate_size" in values and not _expert_count(values):  # what else is the shared expert
        return int(values["shared_intermediate_size"])
    if not family.has_mlp:
        return 0
    if "intermediate_size" in values:  # not required
        return int(values["intermediate_size"] or 4 * config["hidden_size"])
    if "intermediate_size" not in config and "moe_intermediate_size" in values:
        return int(values["moe_intermediate_size"])  # no layer is dense
    width = int(values.get("block_ff_dim") or config["intermediate_size"])
    if not values.get("block_auto_adjust_ff_dim"):
        return width
    width, multiple = int(2 * width / 3), values["block_multiple_of"]
    if values["block_ffn_dim_multiplier"] is None:
        return width
    return -(-int(values["block_ffn_dim_multiplier"] * width) // multiple) * multiple


def _recurrent(family: ModelFamily, config: dict[str, Any], values: dict[str, Any]) -> MixerConfig:
    """The mixer of the recurrent layers."""
    if family.mixer == "short_conv":
        return ShortConvConfig(config["hidden_size"], values["conv_L_cache"], bool(values["conv_bias"]))
    if family.mixer == "mamba2":
        return _mamba2(config, values)
    if values["attention_bias"]:
        raise UnsupportedConfig("attention_bias")
    return GatedDeltaConfig(
        key_heads=values["linear_num_key_heads"],
        value_heads=values["linear_num_value_heads"],
        key_dim=values["linear_key_head_dim"],
        value_dim=values["linear_value_head_dim"],
        kernel=values["linear_conv_kernel_dim"],
        tensors=family.delta_tensors,
        negative=bool(values.get("linear_allow_neg_eigval")),
        norm_epsilon=family.delta_norm_epsilon,
    )


def _mamba2(config: dict[str, Any], values: dict[str, Any]) -> Mamba2Config:
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


def _one_part_kinds(config: dict[str, Any]) -> list[str]:
    """The kinds of layers that are one part each: linear_attention, full_attention, mlp or moe."""
    found = config.get("layers_block_type") or config.get("layer_types") or config["hybrid_override_pattern"]
    kinds = [LAYER_KINDS.get(kind, kind) for kind in found]
    if others := set(kinds) - set(LAYER_KINDS.values()):
        raise UnsupportedConfig(f"layers of kind {min(others)!r}")
    return kinds


def _mixer(family: ModelFamily, values: dict[str, Any], number: int) -> Mixer:
    """What mixes the tokens in the layer."""
    if family.mixer is None:
        return Mixer.ATTENTION
    if family.mixes_both:
        return Mixer.BOTH
    attending = values.get("full_attn_idxs") or values.get("attn_layer_indices")
    if not family.attention:
        attends = False
    elif values.get("layer_types"):
        attends = values["layer_types"][number] in FULL
    elif "full_attention_interval" in values:
        attends = (number + 1) % values["full_attention_interval"] == 0
    else:
        attends = "full_attn_idxs" in values if attending is None else number in attending
    return Mixer.ATTENTION if attends else Mixer.RECURRENT


def _expert_count(values: dict[str, Any]) -> int:
    """The number of routed experts; 0: none."""
    if not values.get("enable_moe_block", True):
        return 0
    return _first(values, EXPERTS, 0)


def _first(values: dict[str, Any], keys: tuple[str, ...], default: int) -> int:
    """The first value of these keys that is set. One for each layer (hunyuan) must be the same for all."""
    for key in keys:
        if found := values.get(key):
            if len(set(found if isinstance(found, list) else [found])) > 1:
                raise UnsupportedConfig(f"different {key} of layers")
            return int(found[0] if isinstance(found, list) else found)
    return default


def _layer(
    family: ModelFamily,
    values: dict[str, Any],
    number: int,
    context: int,
    scale: int | None,
    kinds: list[str] | None = None,
) -> LayerConfig:
    """The LayerConfig of layer `number`, counted from 0. A window of the whole context counts as full attention.
    `kinds`: of layers that are one part each."""
    if kinds is not None:
        mixer = {"linear_attention": Mixer.RECURRENT, "full_attention": Mixer.ATTENTION}.get(kinds[number], Mixer.NONE)
        return LayerConfig(mixer, mixer == Mixer.NONE, rope=None, routed=kinds[number] == "moe")
    slides, chunked = _has_sliding_window(values, number), _attends_in_chunks(values, number)
    window = values.get("sliding_window") if slides else None
    if chunked:
        window = values["attention_chunk_size"]
    unwindowed = family.rope_in_windows_only and values["sliding_window"] is not None and not slides
    unrotated = unwindowed or family.positions != "rotary" or _has_no_rope(values, number)
    unrotated = unrotated or values.get("position_embedding_type", "rope") != "rope"
    if family.positions_optional:
        unrotated = unrotated or (values["rope_parameters"] or {}).get("rope_theta") is None
    return LayerConfig(
        mixer=_mixer(family, values, number),
        has_mlp=family.has_mlp,
        window=window if window and window < context else None,
        # Llama 4 scales the queries of those layers that are not rotated.
        query_scale=scale if unrotated == ("attn_temperature_tuning" in values) else None,
        rope=None if unrotated else int(slides and "rope_local_base_freq" in values),
        routed=_is_routed(values, number),
        chunked=chunked and bool(window and window < context),
    )


def _attends_in_chunks(values: dict[str, Any], number: int) -> bool:
    """Whether a query of the layer sees the tokens of its own chunk."""
    if not values.get("attention_chunk_size"):
        return False
    if values.get("layer_types"):
        return bool(values["layer_types"][number] == "chunked_attention")
    return not _has_no_rope(values, number)


def _is_routed(values: dict[str, Any], number: int) -> bool:
    """Whether the MLP of the layer is a mixture of experts."""
    if not _expert_count(values):
        return False
    if values.get("mlp_layer_types"):
        return bool(values["mlp_layer_types"][number] == "sparse")
    first, last = _first(values, DENSE_LAYERS, 0), number
    if values.get("moe_layer_end_index", -1) != -1:
        last = values["moe_layer_end_index"]
    if values.get("moe_layers") is not None:
        return number in values["moe_layers"]
    step = next((values[key] for key in EXPERTS_EVERY if values.get(key)), 1)
    return first <= number <= last and (number + 1) % step == 0 and number not in (values.get("mlp_only_layers") or [])


def _has_sliding_window(values: dict[str, Any], number: int) -> bool:
    """Whether the config's sliding window applies to the layer."""
    if not values.get("use_sliding_window", True):
        return False
    if values.get("layer_types"):
        return bool(values["layer_types"][number] == SLIDING)
    if values.get("sliding_window_pattern"):
        return _pattern_slides(values["sliding_window_pattern"], number)
    if "no_rope_layers" in values:
        return _has_no_rope(values, number)
    return number >= values.get("max_window_layers", 0)


def _pattern_slides(pattern: int | str, number: int) -> bool:
    """Whether a layer is local: all but each pattern-th, or, if the pattern is a text, those with its letter L."""
    return pattern[number % len(pattern)] == "L" if isinstance(pattern, str) else (number + 1) % pattern != 0


def _has_no_rope(values: dict[str, Any], number: int) -> bool:
    """Whether the layer has no rotary embedding."""
    if "no_rope_layers" not in values:
        return False
    if values["no_rope_layers"]:
        return not values["no_rope_layers"][number]
    return (number + 1) % values["no_rope_layer_interval"] == 0


def _ropes(
    family: ModelFamily, values: dict[str, Any], head_dim: int, shapes: list[HeadShape | None]
) -> tuple[RopeConfig, ...]:
    """The rotary parameters, from `rope_parameters` or the older keys `rope_theta` and `rope_scaling`.

    If layers with a sliding window have parameters of their own (gemma3_text, olmo3), these come second.
    """
    rope_values = values["rope_parameters"] or values["rope_scaling"] or {}
    if "rope_local_base_freq" not in values:
        return (_rope(family, values, rope_values, values["rope_theta"], head_dim),)
    whole = rope_values.get("full_attention", {} if SLIDING in rope_values else rope_values) or {}
    local = rope_values.get(SLIDING) or {}
    dims = []
    for slides in (False, True):
        kinds = {one.head_dim for at, one in enumerate(shapes) if one and _has_sliding_window(values, at) == slides}
        if len(kinds) > 1:
            raise UnsupportedConfig("different head_dim of layers of one kind")
        dims.append(kinds.pop() if kinds else head_dim)
    return (
        _rope(family, values, whole, values["rope_theta"], dims[0]),
        _rope(family, values, local, values["rope_local_base_freq"] or values["rope_theta"], dims[1]),
    )


def _rope(
    family: ModelFamily, values: dict[str, Any], rope_values: dict[str, Any], theta: float, head_dim: int
) -> RopeConfig:
    parameters = {"rope_theta": theta} | {key: value for key, value in rope_values.items() if value is not None}
    partial = parameters.get("partial_rotary_factor") or values["partial_rotary_factor"] or 1.0
    if family.latent:  # the factor is that of a head of the checkpoint, and head_dim what is rotated
        partial = 1.0
    if values.get("rotary_dim"):
        partial = values["rotary_dim"] / head_dim
    scaling = rope_type(parameters)
    scaling = "default" if scaling == "mrope" else scaling  # whose positions have axes: RopeConfig.axes
    scaling = family.aliases.get(scaling, scaling)
    if scaling == "proportional":  # all of a head is rotated, some of it by nothing
        parameters["partial_rotary_factor"], partial = partial, 1.0
    if partial != 1.0 and "partial_rotary_factor" not in family.keys:
        raise UnsupportedConfig("partial_rotary_factor")
    if scaling not in ROPE_TYPES:
        raise UnsupportedConfig(f"rope_type {scaling!r}")
    parameters["rope_type"] = scaling
    if scaling in ("llama3", "yarn", "longrope", "dynamic"):
        longest = values["max_position_embeddings"]
        original = values["original_max_position_embeddings"]
        original = original or parameters.get("original_max_position_embeddings") or longest
        parameters["original_max_position_embeddings"] = original
        if parameters.get("factor") is None:
            parameters["factor"] = longest / original
    interleaved = bool(values.get("rope_interleave", family.interleaved_rope))
    return RopeConfig(int(head_dim * partial), parameters, interleaved)


def _context_length(config: dict[str, Any], values: dict[str, Any], ropes: tuple[RopeConfig, ...]) -> int:
    """Maximal sequence length in tokens.

    LongRoPE rotates all keys of a sequence differently once it exceeds the original length. Keys in the KV cache are
    already rotated, so such models are limited to that length.
    """
    longest = scaled_context(values["max_position_embeddings"], config)
    short = [
        rope.parameters["original_max_position_embeddings"]
        for rope in ropes
        if rope.parameters["rope_type"] == "longrope"
    ]
    limit = min([longest, *short])
    if limit < longest:
        log.warning(
            "sequences are limited to %d tokens instead of %d: LongRoPE rotates longer ones differently", limit, longest
        )
    return int(limit)
