"""Pieces of formats that are special tokens of a vocabulary: in grammars they are ids, in answers no text."""

import re

from tgi.tokenizer.answer.formats import FORMATS, TAGS, Slot
from tgi.tokenizer.vocabulary import Vocabulary

# A token whose text is not shown, as a rule a special one, stands in an answer that is divided as one lone surrogate:
# no decoded text holds one. The last of them is for those that are no piece of any format: an answer that begins with
# one does not begin with a call.
_FIRST = 0xD800
_OTHER = "\udfff"
MARK = re.compile("[\ud800-\udfff]")


class Marks:
    """Which pieces of formats this vocabulary writes as special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        known = {piece for tags in TAGS for piece in tags}
        pieces = (piece for format in FORMATS for piece in (format.marker, *format.call))
        known |= {piece for piece in pieces if not isinstance(piece, Slot)}
        found = ((piece, vocabulary.tokenizer.token_to_id(piece)) for piece in sorted(known))
        self._ids = {piece: id for piece, id in found if id is not None and id in vocabulary.special}
        self._characters = {piece: chr(_FIRST + at) for at, piece in enumerate(self._ids)}
        self._by_id = {id: self._characters[piece] for piece, id in self._ids.items()}
        self.ids = frozenset(self._by_id)
        self.others = sorted(vocabulary.special - self._by_id.keys() - vocabulary.eos_ids)

    def id(self, piece: str) -> int | None:
        """The special token that this piece is; None if it is text."""
        return self._ids.get(piece)

    def written(self, piece: str) -> str:
        """How a piece stands in an answer that is to be divided."""
        return self._characters.get(piece, piece)

    def character(self, id: int) -> str:
        """What stands in such an answer for a token whose text is not shown."""
        return self._by_id.get(id, _OTHER)
