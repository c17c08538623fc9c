"""Incremental detokenization of one request: constant cost per token, and no character is ever split."""

from codecs import utf_8_decode
from typing import Protocol

from tgi.tokenizer.vocabulary import Vocabulary

# WindowDetokenizer emits the text of a window after this many tokens, even if it ends in an incomplete character.
MAX_WINDOW_TOKENS = 8
# Number of prompt ids that provide the context for the first generated one.
CONTEXT_TOKENS = 5


class IncrementalDetokenizer(Protocol):
    """The detokenization state of one request."""

    def decode_token(self, token_id: int) -> str:
        """Returns the text that this id completes: "" while a character is incomplete.

        A special token returns its own text and leaves an incomplete character pending. Bytes that can no longer become
        a character return U+FFFD; an id outside the vocabulary returns "".
        """
        ...


def create_detokenizer(vocabulary: Vocabulary, context: list[int]) -> IncrementalDetokenizer:
    """Creates the detokenizer for this vocabulary. `context`: the last CONTEXT_TOKENS ids of the prompt."""
    if vocabulary.byte_level:
        return ByteLevelDetokenizer(vocabulary)
    return WindowDetokenizer(vocabulary, context)


class ByteLevelDetokenizer:
    """For byte-level vocabularies: each id stands for fixed bytes. The state is the incomplete character."""

    __slots__ = ("_pending", "_pieces", "_special_ids")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        self._special_ids = vocabulary.special_ids
        self._pending = b""

    def decode_token(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._pieces):
            return ""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._pending or token_id in self._special_ids:
                return piece
            piece = piece.encode()
        data = self._pending + (piece or b"")
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text


class WindowDetokenizer:
    """For vocabularies whose token texts depend on the tokens before them (sentencepiece, WordPiece, …).

    The text of a token is decode(context + token) without its prefix decode(context). About two ids are decoded per
    token, never the whole text. Byte tokens are joined here, because the decoder of the `tokenizers` package returns
    U+FFFD for a whole run of byte tokens while the last character is incomplete.
    """

    __slots__ = ("_context", "_pending_bytes", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary, context: list[int]) -> None:
        self._vocabulary = vocabulary
        self._context = [token_id for token_id in context[-CONTEXT_TOKENS:] if self._has_text(token_id)]
        self._window: list[int] = []  # ids whose text was not returned yet
        self._pending_bytes = b""  # of byte tokens: an incomplete character

    def decode_token(self, token_id: int) -> str:
        vocabulary = self._vocabulary
        if not 0 <= token_id < len(vocabulary.pieces):
            return ""
        piece = vocabulary.pieces[token_id]
        if isinstance(piece, str):
            return piece
        if piece is not None:
            data = self._pending_bytes + piece
            text, used = utf_8_decode(data, "replace", False)
            self._pending_bytes = data[used:]
            self._context = [token_id]
            return text
        incomplete, _ = utf_8_decode(self._pending_bytes, "replace", True)
        self._pending_bytes = b""
        return incomplete + self._decode_window(token_id)

    def _decode_window(self, token_id: int) -> str:
        self._window.append(token_id)
        decode = self._vocabulary.tokenizer.decode
        before = decode(self._context, skip_special_tokens=False)
        text = decode(self._context + self._window, skip_special_tokens=False)
        incomplete = text.endswith("\ufffd") and not self._vocabulary.byte_fallback
        if incomplete and len(self._window) < MAX_WINDOW_TOKENS:
            return ""
        self._context, self._window = self._window, []
        return text[len(before) :]

    def _has_text(self, token_id: int) -> bool:
        """False for special ids and for ids outside the vocabulary."""
        return 0 <= token_id < len(self._vocabulary.pieces) and token_id not in self._vocabulary.special_ids
