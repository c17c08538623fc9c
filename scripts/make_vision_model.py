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
from scripts.vision_processors import write_processor

VOCAB = 512
# Added to the tokenizer, with the last ids.
IMAGE_TOKENS = ("<image>", "<|vision_start|>", "<|vision_end|>", "<|video|>")
IMAGE_TOKEN_ID = VOCAB - len(IMAGE_TOKENS)
SMALL_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|eos|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


class Kind(NamedTuple):
    """A multimodal model."""

    text: str  # of make_model
    tower: dict[str, Any]  # settings of its vision_config
    more: dict[str, Any] = {}  # of its own configuration
    text_more: dict[str, Any] = {}  # of the text part


KINDS: dict[str, Kind] = {
    "llava": Kind("llama", SMALL_TOWER, {"image_token_index": IMAGE_TOKEN_ID}),
}


def make_vision_model(kind: str, directory: Path | str, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Writes a model of `kind` (one of KINDS) to `directory` and returns it."""
    import torch
    import transformers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text, tower, more, text_more = KINDS[kind]
    shape = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": None, "intermediate": 128}
    made = make_config(text, shape | {"vocab": VOCAB, "context": 2048, "tie": False}, text_more)
    config = transformers.CONFIG_MAPPING[kind](text_config=made.to_dict(), vision_config=tower, **more)
    config.dtype = getattr(torch, dtype)
    model = transformers.AutoModelForImageTextToText.from_config(config).to(config.dtype)
    fill(model, seed)
    model.generation_config.do_sample = False
    model.save_pretrained(directory)
    make_tokenizer(text, directory, VOCAB - len(IMAGE_TOKENS), 2048)
    _add_image_tokens(directory)
    write_processor(kind, directory)
    return directory


def _add_image_tokens(directory: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([*IMAGE_TOKENS])
    assert tokenizer.token_to_id(IMAGE_TOKENS[0]) == IMAGE_TOKEN_ID
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    write_json(path, json.loads(path.read_text()) | {"image_token": IMAGE_TOKENS[0], "chat_template": CHAT_TEMPLATE})


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
