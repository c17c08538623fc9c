"""Ids to text as they come: each id costs the same however long the text is, and no character is ever split."""

from codecs import utf_8_decode
from typing import Protocol

from tgi.tokenizer.vocabulary import Vocabulary

# Ids in a window of which none completes a character, after which their text is taken as it is.
PATIENCE = 8
# Prompt ids that the first generated one is decoded behind.
CONTEXT = 5


class Decoder(Protocol):
    """The decode state of one request."""

    def feed(self, number: int) -> str:
        """The text that this id completes: "" while a character is incomplete.

        A special token gives its own text and stands beside the others: what it interrupts goes on behind it. Bytes
        that can no longer become a character give U+FFFD; an id that the vocabulary does not have gives "".
        """
        ...


def decoder(vocabulary: Vocabulary, context: list[int]) -> Decoder:
    """The decoder that suits the vocabulary. `context` are the last ids of the prompt (CONTEXT of them are enough)."""
    if vocabulary.byte_level:
        return ByteDecoder(vocabulary)
    return WindowDecoder(vocabulary, context)


class ByteDecoder:
    """For byte-level vocabularies: ids are bytes, and only an unfinished character is remembered."""

    __slots__ = ("_pending", "_pieces", "_special")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces
        self._special = vocabulary.special
        self._pending = b""

    def feed(self, number: int) -> str:
        """See Decoder."""
        if number >= len(self._pieces):
            return ""
        piece = self._pieces[number]
        if isinstance(piece, str):
            if not self._pending or number in self._special:
                return piece
            piece = piece.encode()
        data = self._pending + (piece or b"")
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text


class WindowDecoder:
    """For vocabularies whose tokens depend on what stands before them (sentencepiece, WordPiece, …).

    The text of an id is what decoding it behind the ids before it adds to decoding those alone. Two ids or so are
    decoded per token, never the whole text. Byte tokens are put together here, without the package: its decoder turns
    a whole run of byte tokens into U+FFFD as long as the last of them is incomplete.
    """

    __slots__ = ("_context", "_fresh", "_pending", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, context: list[int]) -> None:
        self._vocabulary = vocabulary
        self._context = [number for number in context[-CONTEXT:] if self._counts(number)]
        self._fresh: list[int] = []  # ids whose text is not out yet
        self._pending = b""  # bytes of byte tokens that are no character yet

    def feed(self, number: int) -> str:
        """See Decoder."""
        vocabulary = self._vocabulary
        if number >= len(vocabulary.pieces):
            return ""
        piece = vocabulary.pieces[number]
        if isinstance(piece, str):
            return piece
        if piece is not None:
            data = self._pending + piece
            text, used = utf_8_decode(data, "replace", False)
            self._pending = data[used:]
            self._context = [number]
            return text
        broken, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return broken + self._window(number)

    def _window(self, number: int) -> str:
        self._fresh.append(number)
        decode = self._vocabulary.tokenizer.decode
        before = decode(self._context, skip_special_tokens=False)
        text = decode(self._context + self._fresh, skip_special_tokens=False)
        unfinished = text.endswith("\ufffd") and not self._vocabulary.byte_fallback
        if unfinished and len(self._fresh) < PATIENCE:
            return ""
        self._context, self._fresh = self._fresh, []
        return text[len(before) :]

    def _counts(self, number: int) -> bool:
        """Whether an id adds to the text: special ones do not, nor do those outside the vocabulary."""
        return number < len(self._vocabulary.pieces) and number not in self._vocabulary.special
