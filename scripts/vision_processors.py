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
_SIZE = {"height": 56, "width": 56}
_CLIP_STRATEGY = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
_TILES = {"size": {"shortest_edge": 56}, "crop_size": _SIZE, "image_grid_pinpoints": [[56, 112], [112, 56]]}
_SPLIT = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 112},
    "max_image_size": {"longest_edge": 56},
}
_MERGED = _QWEN | {"patch_size": 14}
_PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 56}, "patch_size": 14}
_PIXTRAL_MARKS = {
    "patch_size": 14,
    "image_token": "<image>",
    "image_break_token": "<row>",
    "image_end_token": "<|vision_end|>",
}
_GEMMA4 = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
_LFM2 = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "encoder_patch_size": 4,
    "tile_size": 16,
    "min_image_tokens": 2,
    "max_image_tokens": 4,
    "max_tiles": 4,
}
# By kind: preprocessor_config.json, then the class of the processor and what processor_config.json has besides.
PROCESSORS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "gemma3": (
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 84, "width": 84}, "image_seq_length": 9},
        "Gemma3Processor",
        {"image_seq_length": 9},
    ),
    "gemma4": (
        _GEMMA4 | {"image_processor_type": "Gemma4ImageProcessor"},
        "Gemma4Processor",
        {"image_seq_length": 70},
    ),
    "gemma4_unified": (
        _GEMMA4 | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
        "Gemma4UnifiedProcessor",
        {"image_seq_length": 70},
    ),
    "glm4v": (_QWEN | {"image_processor_type": "Glm4vImageProcessor"}, "Glm4vProcessor", {}),
    "glm4v_moe": (_QWEN | {"image_processor_type": "Glm4vImageProcessor"}, "Glm4vProcessor", {}),
    "idefics2": (
        {
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"shortest_edge": 28, "longest_edge": 56},
            "do_image_splitting": False,
        },
        "Idefics2Processor",
        {"image_seq_len": 6},
    ),
    "idefics3": (_SPLIT, "Idefics3Processor", {"image_seq_len": 4}),
    "internvl": (
        {"image_processor_type": "GotOcr2ImageProcessor", "size": _SIZE, "crop_to_patches": True, "max_patches": 3},
        "InternVLProcessor",
        {"image_seq_length": 4},
    ),
    "lfm2_vl": (_LFM2, "Lfm2VlProcessor", {}),
    "llama4": (
        {"image_processor_type": "Llama4ImageProcessorFast", "size": _SIZE, "max_patches": 4},
        "Llama4Processor",
        {"patch_size": 14},
    ),
    "llava": (_CLIP, "LlavaProcessor", _CLIP_STRATEGY),
    "llava_next": (_TILES | {"image_processor_type": "LlavaNextImageProcessor"}, "LlavaNextProcessor", _CLIP_STRATEGY),
    "llava_onevision": (
        _TILES | {"image_processor_type": "LlavaOnevisionImageProcessor", "size": _SIZE},
        "LlavaOnevisionProcessor",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
    ),
    "mistral3": (_PIXTRAL, "PixtralProcessor", {**_PIXTRAL_MARKS, "spatial_merge_size": 2}),
    "mllama": (
        {"image_processor_type": "MllamaImageProcessor", "size": _SIZE, "max_image_tiles": 4},
        "MllamaProcessor",
        {},
    ),
    "paligemma": (
        {"image_processor_type": "SiglipImageProcessor", "size": _SIZE, "image_seq_length": 16},
        "PaliGemmaProcessor",
        {},
    ),
    "pixtral": (_PIXTRAL, "PixtralProcessor", _PIXTRAL_MARKS),
    "qwen2_5_vl": (_QWEN, "Qwen2_5_VLProcessor", {}),
    "qwen2_vl": (_QWEN, "Qwen2VLProcessor", {}),
    "qwen3_5": (_MERGED, "Qwen3VLProcessor", {}),
    "qwen3_5_moe": (_MERGED, "Qwen3VLProcessor", {}),
    "qwen3_vl": (_MERGED, "Qwen3VLProcessor", {}),
    "qwen3_vl_moe": (_MERGED, "Qwen3VLProcessor", {}),
    "smolvlm": (_SPLIT | {"image_processor_type": "SmolVLMImageProcessor"}, "SmolVLMProcessor", {"image_seq_len": 4}),
}
_GEMMA4_TOKENS = {
    "boi_token": "<|vision_start|>",
    "eoi_token": "<|vision_end|>",
    "audio_token": "<row>",
    "boa_token": "<fake_token_around_image>",
    "eoa_token": "<global-img>",
}
# What a kind's tokenizer_config.json has besides.
TOKENIZERS = {
    "gemma4": _GEMMA4_TOKENS,
    "gemma4_unified": _GEMMA4_TOKENS,
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "idefics2": {"image_boundary_token": "<fake_token_around_image>"},
    "internvl": {
        "start_image_token": "<|vision_start|>",
        "end_image_token": "<|vision_end|>",
        "context_image_token": "<image>",
    },
    "lfm2_vl": {
        "image_start_token": "<|vision_start|>",
        "image_end_token": "<|vision_end|>",
        "image_thumbnail_token": "<global-img>",
    },
    "qwen3": {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"},
}


def tokenizer_entries(kind: str) -> dict[str, Any]:
    """What tokenizer_config.json of a kind has besides the entries of all."""
    return TOKENIZERS.get("qwen3" if kind.startswith("qwen3") else kind, {})


def write_processor(
    kind: str, directory: Path, images: dict[str, Any] | None = None, more: dict[str, Any] | None = None
) -> None:
    """Writes the files of a kind's processor: preprocessor_config.json with `images` and processor_config.json with
    `more` besides."""
    image_processor, name, own = PROCESSORS[kind]
    whole = {"processor_class": name} | own | (more or {})
    for file, values in {"preprocessor": image_processor | (images or {}), "processor": whole}.items():
        (directory / f"{file}_config.json").write_text(json.dumps(values, indent=2) + "\n")
