"""A model's vocabulary: tokenizer.json as the `tokenizers` package reads it, and a table from token id to text."""

import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from tgi.hub.model_config import ModelConfig
from tgi.hub.tokenizer_files import mark_special, read_tokenizer, special_tokens
from tgi.microkernel.messages.protocol import TokenBytes
from tgi.tokenizer.chat_template import ChatTemplates
from tgi.tokenizer.segment_cache import SegmentCache

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Vocabulary:
    """A model's tokens, shared by all requests of this process.

    `pieces[id]` is the text that an id adds if that does not depend on its neighbours: a string, or the bytes of an
    incomplete character; `partial` has the latter by id. With `byte_level` every id has a piece. Otherwise only special
    tokens and the byte tokens of a byte fallback (`<0xE2>`) have one, and the rest is None. `special_ids` are left out
    of the final text; an id outside the vocabulary (a padded embedding row) is not special.
    """

    def __init__(self, tokenizer: Tokenizer, special: Iterable[str] = (), eos_ids: Iterable[int] = ()) -> None:
        tokenizer.no_truncation()  # tokenizer.json may ask for both, which would change prompts
        tokenizer.no_padding()
        mark_special(tokenizer, special)
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        kinds = _decoder_types(tokenizer)
        self.byte_level = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
        self.byte_fallback = "ByteFallback" in kinds
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        size = max(vocab.values(), default=-1) + 1
        self.pieces: list[str | bytes | None] = [""] * size
        self._decoded_texts: dict[int, str] = {}  # filled by token_text, for tokens without a piece
        for token, token_id in vocab.items():
            self.pieces[token_id] = _byte_level_piece(token) if self.byte_level else self._byte_fallback_piece(token)
        added = {token_id: one for token_id, one in tokenizer.get_added_tokens_decoder().items() if one.special}
        for token_id, one in added.items():
            self.pieces[token_id] = one.content
        self.special_ids = frozenset(added)
        self.partial = {
            number: piece
            for number, piece in enumerate(self.pieces)
            if isinstance(piece, bytes) and not _is_text(piece)
        }
        self._max_token_bytes = _max_token_bytes(tokenizer, vocab) if self.byte_level else None
        self._missing = [character for character in map(chr, range(0x80)) if character not in self.pieces]
        self.segment_cache = SegmentCache(tokenizer)

    @classmethod
    def load(cls, config: ModelConfig) -> "Vocabulary":
        """Loads the vocabulary of a model directory. Raises UserError if it is missing or cannot be read.

        The token with which the chat template ends a turn is one of the `eos_ids`.
        """
        tokenizer = read_tokenizer(config)
        templates = ChatTemplates(config.chat_templates, special_tokens(config.directory))
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        end = added.get(templates.turn_end(added))
        return cls(tokenizer, eos_ids=[*config.eos_token_ids, *([] if end is None else [end])])

    def min_token_count(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, found without encoding it; 0 if none is known."""
        if self._max_token_bytes is None or not text.isascii() or any(one in text for one in self._missing):
            return 0
        return -(-len(text) // self._max_token_bytes)

    def token_text(self, token_id: int) -> str:
        """Decodes one token alone. An incomplete character returns U+FFFD, an unknown id ""."""
        piece = self.pieces[token_id] if 0 <= token_id < len(self.pieces) else ""
        if piece is None:
            text = self._decoded_texts.get(token_id)
            if text is None:
                text = self._decoded_texts[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
            return text
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def ids_of(self, text: str) -> list[int]:
        """The tokens whose text at the beginning of an answer is this word or character."""
        # Those of SentencePiece models: after a space, and as a byte.
        forms = (text, f"\u2581{text}", f"<0x{text.encode().hex().upper()}>")
        found = (self.tokenizer.token_to_id(form) for form in forms)
        return [token_id for token_id in found if token_id is not None and self.token_text(token_id) == text]

    def token_bytes(self, ids: Iterable[int]) -> list[TokenBytes]:
        """The bytes of these ids, of `partial`."""
        return [TokenBytes(token_id, self.partial[token_id]) for token_id in sorted(ids)]

    def _byte_fallback_piece(self, token: str) -> bytes | None:
        """The byte of a byte token such as `<0xE2>`; None for any other token."""
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return None


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decoder_types(tokenizer: Tokenizer) -> set[str]:
    """The types of the tokenizer's decoders, as tokenizer.json names them."""
    if tokenizer.decoder is None:
        return set()
    spec = json.loads(tokenizer.decoder.__getstate__())
    return {member["type"] for member in spec.get("decoders", [spec])}


# Behind these each character of an ASCII text belongs to a token, unless a pre-tokenizer removes it.
_COVERING_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Split"}
_COVERING_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}


def _max_token_bytes(tokenizer: Tokenizer, vocab: Iterable[str]) -> int | None:
    """The length of the longest token of a byte-level vocabulary; None if characters of an ASCII text that have a token
    may belong to none."""
    pre_tokenizers, normalizers = _components(tokenizer.pre_tokenizer), _components(tokenizer.normalizer)
    added = tokenizer.get_added_tokens_decoder().values()
    covers = (
        {one["type"] for one in pre_tokenizers} <= _COVERING_PRE_TOKENIZERS
        and any(one["type"] == "ByteLevel" for one in pre_tokenizers)
        and all(one.get("behavior") != "Removed" for one in pre_tokenizers)
        and {one["type"] for one in normalizers} <= _COVERING_NORMALIZERS
        and not any(one.lstrip or one.rstrip for one in added)
    )
    if not covers:
        return None
    # In byte characters a token is as long as the bytes that it stands for.
    return max(*map(len, vocab), *(len(one.content.encode()) for one in added), 1)


def _components(pipeline: Any) -> list[dict[str, Any]]:
    """The members of a normalizer or a pre-tokenizer, as tokenizer.json writes them."""
    if pipeline is None:
        return []
    spec = json.loads(pipeline.__getstate__())
    return list(spec.get("pretokenizers") or spec.get("normalizers") or [spec])


def _byte_characters() -> dict[int, int | None]:
    """Table for str.translate from the characters of byte-level vocabularies (GPT-2) to the bytes they stand for.

    Printable Latin-1 characters stand for themselves, U+0100 and following for the other 68 bytes. Characters below
    256 that stand for no byte map to one that Latin-1 cannot encode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table: dict[int, int | None] = dict.fromkeys(others, 0x10FFFF)
    return table | {byte: byte for byte in printable} | {0x100 + k: byte for k, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()


def _byte_level_piece(token: str) -> str | bytes:
    """Converts a byte-level token to text, or to bytes if it ends within a character.

    A token that is not written in byte characters stands for itself, as in the decoder of the `tokenizers` package.
    """
    try:
        data = token.translate(_BYTE_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:
        return token
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
