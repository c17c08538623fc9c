"""What stands for an image in the prompts of vision models (vision_towers.py says which are served)."""

import json
from typing import NamedTuple

from tgi.hub.model_config import ModelConfig
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.errors import UserError

# By model_type: the key of config.json with the id of the token that a prompt has for each image, or the token. The
# processors of most models put further tokens in its place.
IMAGE_TOKENS = {
    "gemma3": "boi_token_index",
    "gemma4": "image_token_id",
    "gemma4_unified": "image_token_id",
    "glm4v": "image_token_id",
    "glm4v_moe": "image_token_id",
    "idefics2": "image_token_id",
    "idefics3": "image_token_id",
    "internvl": "image_token_id",
    "lfm2_vl": "image_token_id",
    "llama4": "<|image|>",
    "llava": "image_token_index",
    "llava_next": "image_token_index",
    "llava_onevision": "image_token_index",
    "mistral3": "image_token_index",
    "mllama": "image_token_index",
    "paligemma": "image_token_index",
    "qwen2_5_vl": "image_token_id",
    "qwen2_vl": "image_token_id",
    "qwen3_5": "image_token_id",
    "qwen3_5_moe": "image_token_id",
    "qwen3_vl": "image_token_id",
    "qwen3_vl_moe": "image_token_id",
    "smolvlm": "image_token_id",
}


# Models whose prompts are their images, the token that begins a text, the text and a newline.
IMAGES_FIRST = frozenset(("paligemma",))


class VisionConfig(NamedTuple):
    """A model that sees images."""

    model_type: str
    image_token: str  # a prompt has one for each image

    @property
    def images_first(self) -> bool:
        """Whether the text of a prompt begins after its last image, and ends in a newline."""
        return self.model_type in IMAGES_FIRST


def read_vision_config(config: ModelConfig) -> VisionConfig:
    """What stands for images in the prompts of a vision model. Raises UserError if its files do not tell."""
    source = IMAGE_TOKENS[config.model_type]
    path = config.directory / "config.json"
    found = json.loads(path.read_text()).get(source) if source.endswith(("_id", "_index")) else source
    tokenizer = read_tokenizer(config)
    token = tokenizer.id_to_token(found) if isinstance(found, int) else found
    if not isinstance(token, str) or tokenizer.token_to_id(token) is None:
        raise UserError(
            f"{path}: {source} is {found!r}; the id of the token that stands for an image was expected. Correct it, or "
            "start with --media-workers 0, which serves the model without images."
        )
    return VisionConfig(config.model_type, token)
