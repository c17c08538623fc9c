"""From a config.json to the decoder's record."""

import logging
from typing import Any

from tgi.worker.layers.rotary import TYPES, Rope, rope_type
from tgi.worker.models.config import DecoderConfig, ExpertsConfig, LayerConfig, Unsupported
from tgi.worker.models.families import COMMON, FAMILIES, Family

log = logging.getLogger(__name__)

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
SLIDING = "sliding_attention"


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads a config.json whose model_type is one of FAMILIES.

    Raises KeyError where a necessary value is missing and Unsupported where the model asks for what is not built.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise Unsupported(f"model_type {kind!r}")
    family = FAMILIES[kind]
    values = {key: config.get(key, missing) for key, missing in (COMMON | family.keys).items()}
    if values.get("use_bidirectional_attention"):
        raise Unsupported("use_bidirectional_attention")
    heads = config["num_attention_heads"]
    head_dim = values["head_dim"] or config["hidden_size"] // heads
    ropes = _ropes(family, values, head_dim)
    context = _context(values, ropes)
    bias = bool(values.get("attention_bias") or values.get("use_bias"))
    fields: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "heads": heads,
        "kv_heads": values["num_key_value_heads"] or heads,
        "head_dim": head_dim,
        "context": context,
        "layers": tuple(_layer(values, number, len(ropes), context) for number in range(config["num_hidden_layers"])),
        "ropes": ropes,
        "tied": bool(values["tie_word_embeddings"]),
        "names": family.names,
        "norm_epsilon": values.get("rms_norm_eps") or values.get("layer_norm_eps") or values["norm_epsilon"],
        "query_key_norm": "each" if values.get("use_qk_norm") else None,
        "attention_scale": _attention_scale(values, head_dim),
        "attention_cap": values.get("attn_logit_softcapping"),
        "qkv_bias": bias,
        "output_bias": bias,
        "activation": _activation(family, values),
        "mlp_bias": bool(values.get("mlp_bias") or values.get("use_bias")),
        "experts": _experts(config, values),
        "embedding_scale": _embedding_scale(family, config, values),
        "residual_scale": float(values.get("residual_multiplier", 1.0)),
        "logit_scale": float(values.get("logit_scale", 1.0)) / float(values.get("logits_scaling", 1.0)),
        "logit_cap": values.get("final_logit_softcapping"),
    }
    return DecoderConfig(**fields | family.fixed)


def _activation(family: Family, values: dict[str, Any]) -> str:
    name = values.get("hidden_activation") or values["hidden_act"]
    name = family.aliases.get(name, name)
    if name not in ACTIVATIONS:
        raise Unsupported(f"hidden_act {name!r}")
    return ACTIVATIONS[name]


def _attention_scale(values: dict[str, Any], head_dim: int) -> float:
    if "attention_multiplier" in values:
        return float(values["attention_multiplier"])
    return float(values.get("query_pre_attn_scalar", head_dim) ** -0.5)


def _embedding_scale(family: Family, config: dict[str, Any], values: dict[str, Any]) -> float:
    if family.embedding_by_width:
        return float(config["hidden_size"] ** 0.5)
    return float(values.get("embedding_multiplier", 1.0))


def _experts(config: dict[str, Any], values: dict[str, Any]) -> ExpertsConfig | None:
    count = values.get("num_local_experts") or values.get("num_experts")
    if not count:
        return None
    width = values.get("moe_intermediate_size") or config["intermediate_size"]
    return ExpertsConfig(count, values["num_experts_per_tok"], width, bool(values["norm_topk_prob"]))


def _layer(values: dict[str, Any], number: int, ropes: int, context: int) -> LayerConfig:
    """What sets layer `number`, counted from 0, apart. A window as long as the context is none."""
    slides = _slides(values, number)
    window = values.get("sliding_window") if slides else None
    routed = bool(values.get("num_local_experts") or values.get("num_experts"))
    routed = routed and number not in (values.get("mlp_only_layers") or [])
    return LayerConfig(
        window=window if window and window < context else None,
        rope=None if _unturned(values, number) else int(slides and ropes > 1),
        routed=routed and (number + 1) % values.get("decoder_sparse_step", 1) == 0,
    )


def _slides(values: dict[str, Any], number: int) -> bool:
    """Whether the layer is one of those that a window is for."""
    if not values.get("use_sliding_window", True):
        return False
    if values.get("layer_types"):
        return bool(values["layer_types"][number] == SLIDING)
    if "sliding_window_pattern" in values:
        return (number + 1) % values["sliding_window_pattern"] != 0
    if "no_rope_layers" in values:
        return _unturned(values, number)
    return number >= values.get("max_window_layers", 0)


def _unturned(values: dict[str, Any], number: int) -> bool:
    """Whether the layer has no rotary positions."""
    if "no_rope_layers" not in values:
        return False
    if values["no_rope_layers"]:
        return not values["no_rope_layers"][number]
    return (number + 1) % values["no_rope_layer_interval"] == 0


def _ropes(family: Family, values: dict[str, Any], head_dim: int) -> tuple[Rope, ...]:
    """The rotary parameters, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`. Where sliding
    layers have their own (gemma3_text), theirs are the second."""
    found = values["rope_parameters"] or values["rope_scaling"] or {}
    if "rope_local_base_freq" not in values:
        return (_rope(family, values, found, values["rope_theta"], head_dim),)
    whole = found.get("full_attention", {} if SLIDING in found else found) or {}
    local = found.get(SLIDING) or {}
    return (
        _rope(family, values, whole, values["rope_theta"], head_dim),
        _rope(family, values, local, values["rope_local_base_freq"], head_dim),
    )


def _rope(family: Family, values: dict[str, Any], found: dict[str, Any], theta: float, head_dim: int) -> Rope:
    parameters = {"rope_theta": theta} | found
    partial = parameters.get("partial_rotary_factor") or values["partial_rotary_factor"] or 1.0
    if partial != 1.0 and "partial_rotary_factor" not in family.keys:
        raise Unsupported("partial_rotary_factor")
    form = rope_type(parameters)
    form = family.aliases.get(form, form)
    if form not in TYPES:
        raise Unsupported(f"rope_type {form!r}")
    parameters["rope_type"] = form
    if form in ("llama3", "yarn", "longrope"):
        longest = values["max_position_embeddings"]
        original = values["original_max_position_embeddings"]
        original = original or parameters.get("original_max_position_embeddings") or longest
        parameters["original_max_position_embeddings"] = original
        if parameters.get("factor") is None:
            parameters["factor"] = longest / original
    return Rope(int(head_dim * partial), parameters, neighbours=family.turns_neighbours)


def _context(values: dict[str, Any], ropes: tuple[Rope, ...]) -> int:
    """The longest sequence. Longrope turns all of a longer one by other angles, which stored keys cannot follow."""
    longest: int = values["max_position_embeddings"]
    short = [
        rope.parameters["original_max_position_embeddings"]
        for rope in ropes
        if rope.parameters["rope_type"] == "longrope"
    ]
    limit = min([longest, *short])
    if limit < longest:
        log.warning(
            "sequences are limited to %d tokens instead of %d: beyond, longrope is another model", limit, longest
        )
    return int(limit)
