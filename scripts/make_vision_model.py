#!/usr/bin/env python
"""Makes a small multimodal model with random weights, a tokenizer and a chat template: an ordinary model directory.

    scripts/make_vision_model.py llava DIR

As scripts/make_model.py, of whose models it takes the text part.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.make_model import fill, make_config, make_tokenizer, write_json
from scripts.vision_processors import tokenizer_entries, write_processor

VOCAB = 512
# Added to the tokenizer, with the last ids.
IMAGE_TOKENS = (
    "<image>", "<|vision_start|>", "<|vision_end|>", "<|video|>", "<fake_token_around_image>", "<end_of_utterance>",
    "<global-img>", "<row>",
)  # fmt: skip
# Those of kinds whose processors have names of their own, in place of the first ones.
OWN_TOKENS = {
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "llama4": (
        *("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    ),
}
IMAGE_TOKEN_ID = VOCAB - len(IMAGE_TOKENS)
SMALL_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
DEEP_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 14}
MERGED_TOWER = {**DEEP_TOWER, "out_hidden_size": 64, "num_position_embeddings": 64}
STACKED_TOWER = {**MERGED_TOWER, "depth": 3, "deepstack_visual_indexes": [0, 2]}
TILE_TOWER = SMALL_TOWER | {"patch_size": 14}
PERCEIVER = {
    "hidden_size": 64,
    "rms_norm_eps": 1e-6,
    "resampler_n_latents": 6,
    "resampler_depth": 2,
    "resampler_n_heads": 4,
    "resampler_head_dim": 16,
    "num_key_value_heads": 2,
}
IMAGE_TOKEN, IMAGE_INDEX = {"image_token_id": IMAGE_TOKEN_ID}, {"image_token_index": IMAGE_TOKEN_ID}
GRID_TOKENS = IMAGE_TOKEN | {
    "vision_start_token_id": IMAGE_TOKEN_ID + 1,
    "vision_end_token_id": IMAGE_TOKEN_ID + 2,
    "video_token_id": IMAGE_TOKEN_ID + 3,
}
GEMMA4_TOKENS = IMAGE_TOKEN | {
    "boi_token_id": IMAGE_TOKEN_ID + 1,
    "eoi_token_id": IMAGE_TOKEN_ID + 2,
    "video_token_id": IMAGE_TOKEN_ID + 3,
    "audio_token_id": IMAGE_TOKEN_ID + 4,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|eos|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _sections(*sections: int) -> dict[str, Any]:
    """The rotary parameters of a text part whose positions have three axes."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections]}}


class Kind(NamedTuple):
    """A multimodal model."""

    text: str  # of make_model
    tower: dict[str, Any]  # settings of its vision_config
    more: dict[str, Any] = {}  # of its own configuration
    text_more: dict[str, Any] = {}  # of the text part


KINDS: dict[str, Kind] = {
    "gemma3": Kind(
        "gemma3_text",
        SMALL_TOWER | {"image_size": 84},
        {
            **IMAGE_INDEX,
            "boi_token_index": IMAGE_TOKEN_ID + 1,
            "eoi_token_index": IMAGE_TOKEN_ID + 2,
            "mm_tokens_per_image": 9,
        },
    ),
    "gemma4": Kind(
        "gemma4_text",
        {
            **SMALL_TOWER,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        GEMMA4_TOKENS,
        {"use_bidirectional_attention": "vision", "pad_token_id": 5},
    ),
    "gemma4_unified": Kind(
        "gemma4_unified_text",
        {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64},
        GEMMA4_TOKENS | {"audio_config": None},
        {"use_bidirectional_attention": "vision", "pad_token_id": 5},
    ),
    "glm4v": Kind(
        "glm4",
        {**DEEP_TOWER, "out_hidden_size": 64, "image_size": 56},
        {**GRID_TOKENS, "text_type": "glm4v_text"},
        {"head_dim": 16, **_sections(1, 2, 1)},
    ),
    "glm4v_moe": Kind(
        "glm4_moe",
        {**DEEP_TOWER, "out_hidden_size": 64, "image_size": 56},
        {**GRID_TOKENS, "text_type": "glm4v_moe_text"},
        {"head_dim": 16, "use_qk_norm": False, **_sections(1, 2, 1)},
    ),
    "idefics2": Kind("mistral", TILE_TOWER, {**IMAGE_TOKEN, "perceiver_config": PERCEIVER}, {"head_dim": 16}),
    "idefics3": Kind("llama", TILE_TOWER, IMAGE_TOKEN),
    "internvl": Kind("qwen2", SMALL_TOWER | {"image_size": [56, 56], "patch_size": [14, 14]}, IMAGE_TOKEN),
    "lfm2_vl": Kind(
        "lfm2",
        {
            "model_type": "siglip2_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_patches": 16,
            "patch_size": 4,
        },
        {**IMAGE_TOKEN, "projector_hidden_size": 48},
    ),
    "llama4": Kind(
        "llama4_text",
        {
            **SMALL_TOWER,
            "pixel_shuffle_ratio": 0.5,
            "intermediate_size": 128,
            "vision_output_dim": 48,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
        },
        IMAGE_INDEX,
    ),
    "llava": Kind("llama", SMALL_TOWER, IMAGE_INDEX),
    "llava_next": Kind("llama", SMALL_TOWER, {**IMAGE_INDEX, "image_grid_pinpoints": [[56, 112], [112, 56]]}),
    "llava_onevision": Kind("qwen2", SMALL_TOWER, {**IMAGE_INDEX, "image_grid_pinpoints": [[56, 112], [112, 56]]}),
    "mistral3": Kind("mistral", SMALL_TOWER | {"head_dim": 16}, {**IMAGE_INDEX, "vision_feature_layer": -1}),
    # The ids of images are in the embedding alone.
    "mllama": Kind(
        "llama",
        {
            **SMALL_TOWER,
            "num_global_layers": 1,
            "max_num_tiles": 4,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
        },
        {**IMAGE_INDEX, "text_type": "mllama_text_model"},
        {"vocab_size": IMAGE_TOKEN_ID, "cross_attention_layers": [0, 2]},
    ),
    "paligemma": Kind("gemma", SMALL_TOWER | {"projection_dim": 64}, {**IMAGE_INDEX, "projection_dim": 64}),
    # Pixtral-12B, whose model_type is llava.
    "pixtral": Kind(
        "mistral",
        {**SMALL_TOWER, "model_type": "pixtral", "head_dim": 16},
        {**IMAGE_INDEX, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "qwen2_5_vl": Kind(
        "qwen2",
        {**DEEP_TOWER, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]},
        {**GRID_TOKENS, "text_type": "qwen2_5_vl_text"},
        _sections(2, 3, 3),
    ),
    "qwen2_vl": Kind(
        "qwen2",
        {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64, "patch_size": 14},
        {**GRID_TOKENS, "text_type": "qwen2_vl_text"},
        _sections(2, 3, 3),
    ),
    "qwen3_5": Kind("qwen3_5_text", MERGED_TOWER, GRID_TOKENS, _sections(2, 1, 1)),
    "qwen3_5_moe": Kind("qwen3_5_moe_text", MERGED_TOWER, GRID_TOKENS, _sections(2, 1, 1)),
    "qwen3_vl": Kind("qwen3", STACKED_TOWER, {**GRID_TOKENS, "text_type": "qwen3_vl_text"}, _sections(6, 5, 5)),
    "qwen3_vl_moe": Kind(
        "qwen3_moe",
        STACKED_TOWER,
        {**GRID_TOKENS, "text_type": "qwen3_vl_moe_text"},
        {**_sections(6, 5, 5), "moe_intermediate_size": 24},
    ),
    "smolvlm": Kind("llama", TILE_TOWER, IMAGE_TOKEN),
}


PLACEHOLDERS = {"gemma3": 1, "llama4": 1}  # in the image tokens, where it is not the first of them
MODEL_TYPES = {"pixtral": "llava"}  # of kinds that are named otherwise


TINY = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": None, "intermediate": 128}


class Larger(NamedTuple):
    """Sizes that differ from those of KINDS."""

    shape: dict[str, Any]  # of the text part
    tower: dict[str, Any]
    more: dict[str, Any]  # of the model's own configuration
    processor: tuple[dict[str, Any], dict[str, Any]]  # preprocessor_config.json, processor_config.json


# About 100 million parameters in SigLIP's base shape, which see 448 * 448 pixels as 1,024 patches and 256 tokens; the
# text part has the layers of SmolLM2-135M.
GEMMA3_448 = Larger(
    {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate": 1536},
    {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 448,
        "vision_use_head": False,
    },
    {"mm_tokens_per_image": 256},
    ({"size": {"height": 448, "width": 448}, "image_seq_length": 256}, {"image_seq_length": 256}),
)


def make_vision_model(
    kind: str,
    directory: Path | str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    text_part: tuple[tuple[str, Any], ...] = (),
    larger: Larger | None = None,
) -> Path:
    """Writes a model of `kind` (one of KINDS) to `directory` and returns it. `text_part` are further settings of its
    text part."""
    import torch
    import transformers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text, tower, more, text_more = KINDS[kind]
    shape = TINY
    if larger is not None:
        shape, tower, more = larger.shape, tower | larger.tower, more | larger.more
    made = make_config(text, shape | {"vocab": VOCAB, "context": 2048, "tie": False}, text_more | dict(text_part))
    part = made.to_dict()
    if name := more.get("text_type"):
        part["model_type"] = name
    more = {key: value for key, value in more.items() if key != "text_type"}
    config = transformers.CONFIG_MAPPING[MODEL_TYPES.get(kind, kind)](text_config=part, vision_config=tower, **more)
    config.dtype = getattr(torch, dtype)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=config.dtype)
    fill(model, seed)
    with torch.no_grad():
        model.get_output_embeddings().weight[IMAGE_TOKEN_ID:] = 0  # never the likeliest
    model.generation_config.do_sample = False
    model.save_pretrained(directory)
    if kind == "qwen3_vl_moe":
        _transpose_experts(directory / "model.safetensors")
    make_tokenizer(text, directory, VOCAB - len(IMAGE_TOKENS), 2048)
    _add_image_tokens(kind, directory)
    write_processor(kind, directory, *(() if larger is None else larger.processor))
    return directory


def _transpose_experts(path: Path) -> None:
    """As published: transformers reads the matrices of experts in both orders, and writes the other one."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    turned = {name: one.transpose(1, 2).contiguous() if ".experts." in name else one for name, one in tensors.items()}
    save_file(turned, path, {"format": "pt"})


def _add_image_tokens(kind: str, directory: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    own_tokens = OWN_TOKENS.get(kind, ())
    tokens = (*own_tokens, *IMAGE_TOKENS[len(own_tokens) :])
    tokenizer.add_special_tokens([*tokens])
    assert tokenizer.token_to_id(tokens[0]) == IMAGE_TOKEN_ID
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    template = CHAT_TEMPLATE.replace("<image>", tokens[PLACEHOLDERS.get(kind, 0)])
    own = {"image_token": tokens[0], "video_token": tokens[3], "chat_template": template}
    write_json(path, json.loads(path.read_text()) | own | tokenizer_entries(kind))


def main() -> None:
    """Parses the command line and makes the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    arguments = parser.parse_args()
    make_vision_model(arguments.kind, arguments.directory, seed=arguments.seed, dtype=arguments.dtype)


if __name__ == "__main__":
    main()
