"""Reads the tokenizer of a model directory and marks every special token as special."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tgi.hub.model_config import ModelConfig, read_added_tokens, read_tokenizer_config
from tgi.microkernel.errors import UserError

# Keys of tokenizer_config.json and special_tokens_map.json whose value is a special token or a list of them.
SPECIAL_KEYS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "additional_special_tokens", "extra_special_tokens",
)  # fmt: skip


def read_tokenizer(card: ModelConfig) -> Tokenizer:
    """The tokenizer of a model directory. Raises UserError if it has none or it cannot be read."""
    if card.tokenizer_json is None:
        raise UserError(
            f"{card.directory} has no tokenizer.json. Save the model's tokenizer there with "
            "transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)."
        )
    try:
        tokenizer = Tokenizer.from_file(str(card.tokenizer_json))
    except Exception as error:  # the package raises plain Exception
        raise UserError(f"{card.tokenizer_json} is damaged: {error}. Download the model again.") from error
    for content, (number, special) in sorted(read_added_tokens(card.directory).items(), key=lambda item: item[1]):
        # tokenizer.json may lack tokens of the older files. An added token gets the next id.
        if number == tokenizer.get_vocab_size() and tokenizer.token_to_id(content) is None:
            tokenizer.add_tokens([AddedToken(content, special=special, normalized=False)])
    mark_special(tokenizer, special_tokens(card.directory).values())
    return tokenizer


def mark_special(tokenizer: Tokenizer, special: Iterable[str]) -> None:
    """Marks these tokens as special if the tokenizer contains them and does not mark them itself."""
    known = [token for token in special if tokenizer.token_to_id(token) is not None]
    flagged = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    tokenizer.add_special_tokens([token for token in known if token not in flagged])


def special_tokens(directory: Path) -> dict[str, str]:
    """The special tokens in tokenizer_config.json or special_tokens_map.json: "bos_token" → "<s>", …; those of lists
    under their own text."""
    config = read_tokenizer_config(directory)
    found: dict[str, str] = {}
    for key in SPECIAL_KEYS:
        value = config.get(key)
        if isinstance(value, dict) and "content" not in value:  # newer files map names to the tokens of a list
            value = list(value.values())
        for entry in value if isinstance(value, list) else [value]:
            content = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(content, str) and content:
                found[content if isinstance(value, list) else key] = content
    return found
