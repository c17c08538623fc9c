"""The tokenizer of a model: tokenizer.json as the `tokenizers` package reads it, and a table from id to text."""

import json
import re
from collections.abc import Iterable

from tokenizers import Tokenizer

from tgi.hub.card import Card
from tgi.hub.tokens import mark_special, read_tokenizer
from tgi.tokenizer.stretches import Stretches

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Vocabulary:
    """A model's tokens, shared by all requests of this process.

    `pieces[id]` is what an id adds to the text where that does not depend on its neighbours: a string, or the bytes of
    an incomplete character. It is filled for byte-level tokenizers; for others `byte_level` is false, and only special
    tokens and the byte tokens of a fallback (`<0xE2>`) have a piece, the rest None. `special` are the ids that the
    final text leaves out; one outside the vocabulary (a padded embedding) is plain.
    """

    def __init__(self, tokenizer: Tokenizer, special: Iterable[str] = (), eos_ids: Iterable[int] = ()) -> None:
        tokenizer.no_truncation()  # both would change prompts behind our back
        tokenizer.no_padding()
        mark_special(tokenizer, special)
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        kinds = _decoder_kinds(tokenizer)
        self.byte_level = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}
        self.byte_fallback = "ByteFallback" in kinds
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        size = max(vocab.values(), default=-1) + 1
        self.pieces: list[str | bytes | None] = [""] * size
        self._texts: dict[int, str] = {}  # of tokens without a piece, as they have been asked for
        for token, number in vocab.items():
            self.pieces[number] = _byte_level_piece(token) if self.byte_level else self._fallback_piece(token)
        added = {number: one for number, one in tokenizer.get_added_tokens_decoder().items() if one.special}
        for number, one in added.items():
            self.pieces[number] = one.content
        self.special = frozenset(added)
        self.stretches = Stretches(tokenizer)

    @classmethod
    def load(cls, card: Card) -> "Vocabulary":
        """The vocabulary of a model directory. Raises UserError if it has none or it cannot be read."""
        return cls(read_tokenizer(card), eos_ids=card.eos_token_ids)

    def text(self, number: int) -> str:
        """A token decoded by itself: bytes that are no character give U+FFFD, an unknown id gives ""."""
        piece = self.pieces[number] if number < len(self.pieces) else ""
        if piece is None:
            known = self._texts.get(number)
            if known is None:
                known = self._texts[number] = self.tokenizer.decode([number], skip_special_tokens=False)
            return known
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def _fallback_piece(self, token: str) -> bytes | None:
        """The byte of a byte token such as `<0xE2>`; None for any other token."""
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return None


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """The types of the tokenizer's decoders, as tokenizer.json names them."""
    if tokenizer.decoder is None:
        return set()
    spec = json.loads(tokenizer.decoder.__getstate__())
    return {member["type"] for member in spec.get("decoders", [spec])}


def _byte_characters() -> dict[int, int | None]:
    """For str.translate: the character that stands for a byte in byte-level vocabularies (GPT-2), to that byte.

    Printable Latin-1 stands for itself, the other 68 bytes for U+0100 and on. Characters below 256 that stand for no
    byte become one that Latin-1 cannot encode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    table: dict[int, int | None] = dict.fromkeys(others, 0x10FFFF)
    return table | {byte: byte for byte in printable} | {0x100 + k: byte for k, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()


def _byte_level_piece(token: str) -> str | bytes:
    """What a byte-level token stands for: a string, or bytes if they are no whole characters.

    A token that is not written in byte characters stands for itself, as in the package's own decoder.
    """
    try:
        data = token.translate(_BYTE_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:
        return token
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
