"""The model families whose images are served, as data: what a process has to know of a vision part without torch.

To add a family whose tower transformers has, add a row to VISION_FAMILIES. Its text part is a family of
`worker/models/families/`.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

# Files of the model's own processor, which makes tensors of pixels. Without any, a model is served for text alone.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class MultiAxisRope(NamedTuple):
    """Rotary positions with three axes (mrope; Qwen2-VL, 2024, section 2.1): frame, row and column. Each pair of a
    head's elements turns by the position on one of them. `sections` are the pairs of each axis, if config.json does not
    tell. The pairs of an axis are neighbours or, if `interleaved`, every third one as long as its section lasts."""

    sections: tuple[int, int, int]
    interleaved: bool = False


class Bidirectional(StrEnum):
    """Which tokens of a prompt with images see later ones."""

    NONE = ""
    IMAGES = "images"  # those of an image see all of it
    WINDOWED_IMAGES = "windowed images"  # the same, in layers with a sliding window alone
    PROMPT = "prompt"  # all of them: a prefix language model


class VisionFamily(NamedTuple):
    """A model_type with a vision tower.

    `tensors` are those of the processor that the tower takes, by name, with their number of dimensions; `optional` are
    those of them that not every version of the processor returns. With `rope`, they include the grid of patches.
    """

    tensors: dict[str, int]
    optional: tuple[str, ...] = ()
    projected: bool = True  # by transformers' get_image_features
    rope: MultiAxisRope | None = None
    bidirectional: Bidirectional = Bidirectional.NONE
    crosses: bool = False  # layers of the text part attend to what the tower computes; an image is one token


_GRID = {"pixel_values": 2, "image_grid_thw": 2}

_TILES = {"pixel_values": 5, "image_sizes": 2}
_MASKED_TILES = {"pixel_values": 5, "pixel_attention_mask": 4}
_QWEN2_ROPE, _QWEN3_ROPE = MultiAxisRope((16, 24, 24)), MultiAxisRope((24, 20, 20), interleaved=True)
_QWEN3_5_ROPE, _GLM_ROPE = MultiAxisRope((11, 11, 10), interleaved=True), MultiAxisRope((8, 12, 12))

VISION_FAMILIES: dict[str, VisionFamily] = {
    "gemma3": VisionFamily({"pixel_values": 4}, bidirectional=Bidirectional.IMAGES),
    "gemma4": VisionFamily({"pixel_values": 3, "image_position_ids": 3}, bidirectional=Bidirectional.WINDOWED_IMAGES),
    "gemma4_unified": VisionFamily(
        {"pixel_values": 3, "image_position_ids": 3}, bidirectional=Bidirectional.WINDOWED_IMAGES
    ),
    "glm4v": VisionFamily(_GRID, rope=_GLM_ROPE),
    "glm4v_moe": VisionFamily(_GRID, rope=_GLM_ROPE),
    "idefics2": VisionFamily(_MASKED_TILES, ("pixel_attention_mask",)),
    "idefics3": VisionFamily(_MASKED_TILES, ("pixel_attention_mask",)),
    "internvl": VisionFamily({"pixel_values": 4}),
    "lfm2_vl": VisionFamily({"pixel_values": 3, "pixel_attention_mask": 2, "spatial_shapes": 2}),
    "llama4": VisionFamily({"pixel_values": 4}, projected=False),
    "llava": VisionFamily({"pixel_values": 4, "image_sizes": 2}, ("image_sizes",)),
    "llava_next": VisionFamily(_TILES),
    "llava_onevision": VisionFamily({**_TILES, "batch_num_images": 1}, ("batch_num_images",)),
    "mistral3": VisionFamily({"pixel_values": 4, "image_sizes": 2}),
    "mllama": VisionFamily({"pixel_values": 6, "aspect_ratio_ids": 2, "aspect_ratio_mask": 3}, crosses=True),
    "paligemma": VisionFamily({"pixel_values": 4}, bidirectional=Bidirectional.PROMPT),
    "qwen2_5_vl": VisionFamily(_GRID, rope=_QWEN2_ROPE),
    "qwen2_vl": VisionFamily(_GRID, rope=_QWEN2_ROPE),
    "qwen3_5": VisionFamily(_GRID, rope=_QWEN3_5_ROPE),
    "qwen3_5_moe": VisionFamily(_GRID, rope=_QWEN3_5_ROPE),
    "qwen3_vl": VisionFamily(_GRID, rope=_QWEN3_ROPE),
    "qwen3_vl_moe": VisionFamily(_GRID, rope=_QWEN3_ROPE),
    "smolvlm": VisionFamily(_MASKED_TILES, ("pixel_attention_mask",)),
}


def vision_family(directory: Path) -> VisionFamily | None:
    """The family of a model directory whose images are served; None: the model takes text alone."""
    try:
        config = json.loads((directory / "config.json").read_text())
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError):
        return None  # told to the user where the model is loaded
    has_processor = any((directory / name).is_file() for name in PROCESSOR_FILES)
    family = VISION_FAMILIES.get(kind) if has_processor and isinstance(kind, str) else None
    if family is not None and family.bidirectional is Bidirectional.WINDOWED_IMAGES:
        text = config.get("text_config")
        if not isinstance(text, dict) or text.get("use_bidirectional_attention") != "vision":
            return family._replace(bidirectional=Bidirectional.NONE)
    return family


def rope_axes(rope: MultiAxisRope, parameters: dict[str, Any], pairs: int) -> tuple[int, ...] | None:
    """The axis of each of the pairs. `parameters` are those of the rotary embedding in config.json. None: the sections
    do not add up to the pairs."""
    sections = tuple(parameters.get("mrope_section") or rope.sections)
    if len(sections) != 3 or sum(sections) != pairs:
        return None
    if not rope.interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs))
