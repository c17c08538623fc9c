"""Readings of keys that families of several modules have."""

from tgi.worker.decoder_config import UnsupportedConfig
from tgi.worker.models.families.family import Values

SLIDING = "sliding_attention"


def first(values: Values, keys: tuple[str, ...], default: int) -> int:
    """The first value of these keys that is set. One for each layer (hunyuan) must be the same for all."""
    for key in keys:
        if found := values.get(key):
            if len(set(found if isinstance(found, list) else [found])) > 1:
                raise UnsupportedConfig(f"different {key} of layers")
            return int(found[0] if isinstance(found, list) else found)
    return default


def has_sliding_window(values: Values, number: int) -> bool:
    """Whether the config's sliding window applies to the layer."""
    if not values.get("use_sliding_window", True):
        return False
    if values.get("layer_types"):
        return bool(values["layer_types"][number] == SLIDING)
    if values.get("sliding_window_pattern"):
        return _pattern_slides(values["sliding_window_pattern"], number)
    if "no_rope_layers" in values:
        return has_no_rope(values, number)
    return number >= values.get("max_window_layers", 0)


def _pattern_slides(pattern: int | str, number: int) -> bool:
    """Whether a layer is local: all but each pattern-th, or, if the pattern is a text, those with its letter L."""
    return pattern[number % len(pattern)] == "L" if isinstance(pattern, str) else (number + 1) % pattern != 0


def has_no_rope(values: Values, number: int) -> bool:
    """Whether the layer has no rotary embedding."""
    if "no_rope_layers" not in values:
        return False
    if values["no_rope_layers"]:
        return not values["no_rope_layers"][number]
    return (number + 1) % values["no_rope_layer_interval"] == 0


def attends_in_chunks(values: Values, number: int) -> bool:
    """Whether a query of the layer sees the tokens of its own chunk."""
    if not values.get("attention_chunk_size"):
        return False
    if values.get("layer_types"):
        return bool(values["layer_types"][number] == "chunked_attention")
    return not has_no_rope(values, number)
