"""Reads a DecoderConfig from a config.json of Hugging Face's format, without torch."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tgi.hub.model_config import require_directory, scaled_context
from tgi.hub.pooling import BIDIRECTIONAL, is_bidirectional
from tgi.hub.vision_towers import VISION_FAMILIES, rope_axes
from tgi.microkernel.errors import UserError
from tgi.worker.decoder_config import (
    QUERY_SCALE,
    ROPE_TYPES,
    DecoderConfig,
    LayerConfig,
    Mixer,
    RopeConfig,
    UnsupportedConfig,
    rope_type,
)
from tgi.worker.models.families import COMMON_KEYS, FAMILIES, VARIANTS, WITH_TEXT_PART, ModelFamily, Values, Variant
from tgi.worker.models.families.experts import expert_count, is_routed, read_experts
from tgi.worker.models.families.latent import latent_scale
from tgi.worker.models.families.readings import SLIDING, attends_in_chunks, has_no_rope, has_sliding_window
from tgi.worker.models.families.recurrent import one_part_kinds

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
FULL = ("full_attention", "attention")  # names of a layer's kind
# Names of the same numbers in the families.
NORM_EPSILON = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
ATTENTION_BIAS = ("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias")


def read_config_file(directory: Path) -> Values:
    """The directory's config.json. Raises UserError if it is missing or invalid."""
    require_directory(directory)
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{directory} has no config.json, so it is not a model directory.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. Fetch the model again.") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a model's configuration. Fetch the model again.")
    return config


def read_config(directory: Path) -> Values:
    """The directory's config.json, of a multimodal model that of its text part (with IS_PART), if the built-in decoder
    has its family. Raises UserError if it is missing, invalid or names no model_type."""
    config = read_config_file(directory)
    if not isinstance(config.get("model_type"), str):
        path = directory / "config.json"
        raise UserError(f"{path} names no model_type. A model directory as transformers writes it is expected.")
    return _text_part(config)


def _text_part(config: Values) -> Values:
    """The configuration of a multimodal model's text part, if the built-in decoder has its family; of a text model the
    whole. The model_type is one of FAMILIES, if it has another name."""
    text, whole = config.get("text_config"), config["model_type"]
    if whole not in WITH_TEXT_PART or not isinstance(text, dict):
        return config | {"model_type": VARIANTS.get(whole, Variant(whole)).family, WHOLE_TYPE: whole}
    name = text.get("model_type", "")
    variant = VARIANTS.get(name, Variant(name))
    if variant.family not in FAMILIES:
        return config
    others = {key: value for key, value in config.items() if key != "text_config"}
    added = {"model_type": variant.family, IS_PART: True, TEXT_TYPE: name, WHOLE_TYPE: whole}
    return others | variant.keys | text | added


def stored_dtype(config: Mapping[str, Any]) -> Any:
    """The name of the dtype of the saved weights: what config.json says, else "float32"."""
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def read_decoder_config(config: Values) -> DecoderConfig:
    """The DecoderConfig of a parsed config.json.

    Raises KeyError if a required key is missing, and UnsupportedConfig if the model_type is not in FAMILIES or the
    config requires something that DecoderModel does not implement.
    """
    kind: str = config["model_type"]
    if kind not in FAMILIES:
        raise UnsupportedConfig(f"model_type {kind!r}")
    family = FAMILIES[kind]
    for key in family.inner_configs:
        config = config | (config.get(key) or {})
    config = config | {name: config[own] for name, own in family.key_names.items() if config.get(own) is not None}
    values: Values = {key: config.get(key, missing) for key, missing in (COMMON_KEYS | family.keys).items()}
    sees_later = values.get("use_bidirectional_attention")
    # Of images, and of PaliGemma's prompts with images: see Bidirectional in hub/vision_towers.py.
    if sees_later not in (None, False, "vision") and config.get(WHOLE_TYPE) != "paligemma":
        raise UnsupportedConfig("use_bidirectional_attention")
    heads = config["num_attention_heads"] if family.attention else 1
    latent = family.latent(values, config) if family.latent else None
    head_dim = latent.key_dim if latent else values["head_dim"] or config["hidden_size"] // heads
    if not family.attention:  # sizes of what no layer has
        head_dim = 2
        values["num_key_value_heads"] = 1
    kinds = one_part_kinds(config) if family.one_part else None
    count = len(kinds) if kinds is not None else config["num_hidden_layers"]
    sizes = family.layer_sizes(values, config) if family.layer_sizes else [{}] * count
    ropes = _ropes(family, values, latent.rope_dim if latent else head_dim, sizes)
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
    names = VARIANTS.get(config.get(TEXT_TYPE, kind), Variant(kind)).names or family.names
    one_norm = parallel and not (family.parallel_norms or two_norms)
    layers = tuple(
        _layer(family, values, number, context, scale, kinds)._replace(**own) for number, own in enumerate(sizes)
    )
    fields: Values = {
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
        "attention_scale": _attention_scale(values, head_dim) if latent is None else latent_scale(latent, scaling),
        "latent": latent,
        "attention_cap": values.get("attn_logit_softcapping"),
        "qkv_bias": bias,
        "qkv_clip": values.get("clip_qkv"),
        "output_bias": bool(values.get("attention_out_bias", bias)),
        "activation": _activation(family, values),
        "mlp_bias": bool(values.get("mlp_bias") or values.get("use_bias")),
        "experts": read_experts(family, config, values),
        "recurrent": family.mixer(values, config) if family.mixer and any(layer.recurs for layer in layers) else None,
        "parallel": parallel,
        "head_bias": bool(values.get("lm_head_bias")),
        "learned_positions": values["max_position_embeddings"] if family.positions == "learned" else 0,
        "embedding_scale": _embedding_scale(family, config, values),
        "residual_scale": float(values.get("residual_multiplier", 1.0)),
        "logit_scale": float(values.get("logit_scale", 1.0)) / float(values.get("logits_scaling", 1.0)),
        "logit_cap": values.get("final_logit_softcapping"),
    }
    for key, required in family.required.items():
        if config.get(key, required) != required:
            raise UnsupportedConfig(f"{key} {config[key]!r}")
    if config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]:
        raise UnsupportedConfig("word_embed_proj_dim")
    for key in ("qk_layernorm", "clip_qkv", "moe_latent_size"):
        if config.get(key) and key not in values and key not in family.key_names.values():
            raise UnsupportedConfig(key)
    computed = family.computed(values, config) if family.computed else {}
    return DecoderConfig(**fields | family.fixed | computed)


def sees_both_sides(config: Values) -> bool:
    """Whether every token of a model that ends in a vector sees the whole text."""
    return is_bidirectional(config) or config.get("is_causal") is False


def read_pooled_config(config: Values) -> DecoderConfig:
    """read_decoder_config of a decoder that ends in a vector. Raises UnsupportedConfig also for what `PooledDecoder`
    does not compute."""
    own = config | {BIDIRECTIONAL: None}
    if sees_both_sides(config) and (window := config.get("sliding_window")):
        own["sliding_window"] = window // 2 + 1  # on each side, with the own position
    decoder = read_decoder_config(own)
    needed = {
        "heads of several sizes": len(set(decoder.head_shapes)) > 1,
        "keys of earlier layers": any(layer.shares is not None for layer in decoder.layers),
        "per-layer embeddings": decoder.layer_inputs is not None,
        "attention in chunks": any(layer.chunked for layer in decoder.layers),
        "ALiBi": bool(decoder.alibi),
        "learned positions": bool(decoder.learned_positions),
        "attention sinks": decoder.sinks,
        "recurrent layers": decoder.recurrent is not None,
    }
    for what, there in needed.items():
        if there:
            raise UnsupportedConfig(what)
    return decoder


def require_sizes(config: DecoderConfig) -> DecoderConfig:
    """The config. Raises ValueError unless its sizes are numbers above 0."""
    names = ["vocab_size", "hidden", "heads", "kv_heads", "head_dim", "context_length"]
    for name in [*names, *["intermediate"] * any(layer.has_mlp for layer in config.layers)]:
        size = getattr(config, name)
        if not isinstance(size, int) or size <= 0:
            raise ValueError(f"{name} is {size!r}, but a whole number above 0 is expected")
    return config


def _query_scale(values: Values, rope: Values) -> Values | None:
    """The parameters of a QUERY_SCALE, if the queries of some layers have one."""
    if rope.get("llama_4_scaling_beta"):
        return rope | {"rope_type": QUERY_SCALE}
    if not values.get("attn_temperature_tuning"):
        return None
    factors = {"llama_4_scaling_beta": values["attn_scale"], "original_max_position_embeddings": values["floor_scale"]}
    return {"rope_type": QUERY_SCALE, "rope_theta": 1.0, "counted_from": 1, **factors}


def _kv_heads(values: Values, heads: int) -> int:
    if "multi_query" in values and not values.get("new_decoder_architecture"):
        return 1 if values["multi_query"] else heads
    return values["num_key_value_heads"] or heads


def _activation(family: ModelFamily, values: Values) -> str:
    if "activation" in family.fixed:
        return str(family.fixed["activation"])
    name = values.get("hidden_activation") or values["hidden_act"]
    name = family.aliases.get(name, name)
    if name not in EPILOGUES:
        raise UnsupportedConfig(f"hidden_act {name!r}")
    return EPILOGUES[name]


def _attention_scale(values: Values, head_dim: int) -> float:
    if "attention_multiplier" in values:
        return float(values["attention_multiplier"])
    return float(values.get("query_pre_attn_scalar", head_dim) ** -0.5)


def _embedding_scale(family: ModelFamily, config: Values, values: Values) -> float:
    if family.scale_embedding_by_width:
        return float(config["hidden_size"] ** 0.5)
    return float(values.get("embedding_multiplier", 1.0))


def _intermediate(family: ModelFamily, config: Values, values: Values) -> int:
    """The width of a dense MLP."""
    if "shared_intermediate_size" in values and not expert_count(values):  # what else is the shared expert
        return int(values["shared_intermediate_size"])
    if not family.has_mlp:
        return 0
    if "intermediate_size" in values:  # not required
        return int(values["intermediate_size"] or 4 * config["hidden_size"])
    if isinstance(config.get("intermediate_size"), list):  # one for each layer: family.layer_sizes
        return int(max(config["intermediate_size"]))
    if "intermediate_size" not in config and "moe_intermediate_size" in values:
        return int(values["moe_intermediate_size"])  # no layer is dense
    return int(config["intermediate_size"])


def _mixer(family: ModelFamily, values: Values, number: int) -> Mixer:
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


def _layer(
    family: ModelFamily,
    values: Values,
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
    slides, chunked = has_sliding_window(values, number), attends_in_chunks(values, number)
    window = values.get("sliding_window") if slides else None
    if chunked:
        window = values["attention_chunk_size"]
    unwindowed = family.rope_in_windows_only and values["sliding_window"] is not None and not slides
    unrotated = unwindowed or family.positions != "rotary" or has_no_rope(values, number)
    unrotated = unrotated or values.get("position_embedding_type", "rope") != "rope" or bool(values.get("alibi"))
    if family.positions_optional:
        unrotated = unrotated or (values["rope_parameters"] or {}).get("rope_theta") is None
    return LayerConfig(
        mixer=_mixer(family, values, number),
        has_mlp=family.has_mlp,
        window=window if window and window < context else None,
        # Llama 4 scales the queries of those layers that are not rotated.
        query_scale=scale if unrotated == ("attn_temperature_tuning" in values) else None,
        rope=None if unrotated else int(slides and "rope_local_base_freq" in values),
        routed=is_routed(values, number),
        chunked=chunked and bool(window and window < context),
    )


def _ropes(family: ModelFamily, values: Values, head_dim: int, sizes: list[Values]) -> tuple[RopeConfig, ...]:
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
        kinds = {
            own["head_dim"]
            for at, own in enumerate(sizes)
            if "head_dim" in own and has_sliding_window(values, at) == slides
        }
        if len(kinds) > 1:
            raise UnsupportedConfig("different head_dim of layers of one kind")
        dims.append(kinds.pop() if kinds else head_dim)
    return (
        _rope(family, values, whole, values["rope_theta"], dims[0]),
        _rope(family, values, local, values["rope_local_base_freq"] or values["rope_theta"], dims[1]),
    )


def _rope(family: ModelFamily, values: Values, rope_values: Values, theta: float, head_dim: int) -> RopeConfig:
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


def _context_length(config: Values, values: Values, ropes: tuple[RopeConfig, ...]) -> int:
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
