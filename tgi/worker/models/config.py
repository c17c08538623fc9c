"""What the decoder needs to know of a config.json, the same for every model type it serves."""

import logging
from dataclasses import dataclass
from typing import Any

from tgi.worker.layers.rotary import TYPES, rope_type

log = logging.getLogger(__name__)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class Unsupported(Exception):
    """The decoder does not do what this config asks for. The text names it."""


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of pre-normed layers: attention with rotary positions and grouped queries, then a gated MLP."""

    vocab_size: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # the most tokens that a sequence may have
    norm_epsilon: float
    rope: dict[str, Any]  # rope_theta, rope_type and the parameters of that type
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    head_norm: bool  # norms over each query and key head (qwen3)


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Reads a config.json of one of MODEL_TYPES.

    Raises KeyError where a necessary value is missing and Unsupported where the model asks for what is not built.
    """
    kind = config["model_type"]
    if kind not in MODEL_TYPES:
        raise Unsupported(f"model_type {kind!r}")
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise Unsupported(f"hidden_act {activation!r}")
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        context=_context(config),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rope=_rope(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias and kind != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)) and kind == "llama",
        head_norm=kind == "qwen3",
    )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters, from `rope_parameters` or from the older pair of `rope_theta` and `rope_scaling`."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if config.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise Unsupported("partial_rotary_factor")
    if rope_type(parameters) not in TYPES:
        raise Unsupported(f"rope_type {rope_type(parameters)!r}")
    return parameters


def _context(config: dict[str, Any]) -> int:
    """The longest sequence. A sliding window bounds it: up to the window's length, all layers attend to everything."""
    longest: int = config.get("max_position_embeddings", 2048)
    window = config.get("sliding_window")
    slides = "sliding_attention" in (config.get("layer_types") or [])
    if config["model_type"] == "mistral":
        slides = window is not None
    elif config.get("use_sliding_window"):
        slides = True
    if not slides or not window or window >= longest:
        return longest
    log.warning("sequences are limited to the model's sliding window, %d tokens instead of %d", window, longest)
    return int(window)
