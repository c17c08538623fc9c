"""The files of the processors of small vision models: what make_vision_model.py writes for PIL's image processors."""

import json
from pathlib import Path
from typing import Any

_CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
}
_QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 3136, "longest_edge": 50176},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
# By kind: preprocessor_config.json, then what processor_config.json has besides the class.
PROCESSORS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "llava": (
        _CLIP,
        "LlavaProcessor",
        {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "qwen2_vl": (_QWEN, "Qwen2VLProcessor", {}),
    "qwen2_5_vl": (_QWEN, "Qwen2_5_VLProcessor", {}),
}


def write_processor(kind: str, directory: Path) -> None:
    """Writes the files of a kind's processor."""
    image_processor, name, more = PROCESSORS[kind]
    (directory / "preprocessor_config.json").write_text(json.dumps(image_processor, indent=2) + "\n")
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": name, **more}, indent=2) + "\n")
