"""The tokens of one turn for one api, gathered row by row into the columns of a Texts."""

from array import array
from collections.abc import Iterable, MutableSequence
from itertools import accumulate
from typing import Any

from tgi.kernel.answer import Part, Texts
from tgi.kernel.messages import Tokens
from tgi.kernel.pack import UINT32, ints, uints
from tgi.tokenizer.vocabulary import Vocabulary


class Tops:
    """The top columns of a Tokens, to be cut by token."""

    def __init__(self, tokens: Tokens) -> None:
        self.counts = uints(tokens.top_counts)
        self.ends = [0, *accumulate(self.counts)]  # entries before each token
        self.ids = tokens.top_ids
        self.logprobs = tokens.top_logprobs


class Columns:
    """Whoever adds a row appends to the public columns, then calls `hold`, `divide` or `tops` where there is
    something to say.

    `held` and the columns of top tokens may be shorter than the others: behind their end there is nothing.
    """

    __slots__ = (
        "_top_counts", "_top_ids", "_top_logprobs", "_top_special", "_top_texts", "_vocabulary", "counts", "held",
        "ids", "logprobs", "parts", "rids", "special", "texts",
    )  # fmt: skip

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.rids = array(UINT32)
        self.counts = array(UINT32)
        self.ids = bytearray()
        self.logprobs = bytearray()
        self.special = bytearray()
        self.texts: list[str] = []
        self.held = array(UINT32)
        self.parts: list[Part] = []
        self._vocabulary = vocabulary
        self._top_counts = array(UINT32)
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()
        self._top_special = bytearray()
        self._top_texts: list[str] = []

    def hold(self, characters: int) -> None:
        """So many characters must not be shown yet behind the last token."""
        _pad(self.held, len(self.texts) - 1)
        self.held.append(characters)

    def divide(self, found: Iterable[tuple[str, str]]) -> None:
        """The last token lets these parts of an answer be shown: (kind, text)."""
        token = len(self.texts) - 1
        self.parts += (Part(token, kind, text) for kind, text in found)

    def split(self) -> "Columns":
        """The last row, to which no top tokens have been added, as columns of its own."""
        last = Columns(self._vocabulary)
        begin = len(self.texts) - self.counts[-1]
        _move(self.rids, last.rids, -1)
        _move(self.counts, last.counts, -1)
        _move(self.ids, last.ids, 4 * begin)
        _move(self.logprobs, last.logprobs, 4 * begin)
        _move(self.special, last.special, begin)
        _move(self.texts, last.texts, begin)
        _move(self.held, last.held, begin)
        last.parts = [part._replace(token=part.token - begin) for part in self.parts if part.token >= begin]
        del self.parts[len(self.parts) - len(last.parts) :]
        return last

    def tops(self, tops: Tops, first: int, end: int) -> None:
        """The likeliest tokens beside the last ones, which were tokens `first` to `end` of their Tokens."""
        _pad(self._top_counts, len(self.texts) - (end - first))
        self._top_counts.extend(tops.counts[first:end])
        begin, stop = 4 * tops.ends[first], 4 * tops.ends[end]
        self._top_ids += tops.ids[begin:stop]
        self._top_logprobs += tops.logprobs[begin:stop]
        for number in ints(tops.ids[begin:stop]):
            self._top_special.append(number in self._vocabulary.special)
            self._top_texts.append(self._vocabulary.text(number))

    def message(self) -> Texts:
        """All rows as one message."""
        for column in (self.held, self._top_counts):
            if column:
                _pad(column, len(self.texts))
        return Texts(
            self.rids.tobytes(),
            self.counts.tobytes(),
            bytes(self.ids),
            bytes(self.logprobs),
            bytes(self.special),
            self.texts,
            self.held.tobytes(),
            self._top_counts.tobytes() if self._top_ids else b"",
            bytes(self._top_ids),
            bytes(self._top_logprobs),
            bytes(self._top_special),
            self._top_texts,
            self.parts,
        )


def _move(source: MutableSequence[Any], target: MutableSequence[Any], begin: int) -> None:
    """What stands at `begin` and behind it."""
    target.extend(source[begin:])
    del source[begin:]


def _pad(column: "array[int]", length: int) -> None:
    column.frombytes(bytes(column.itemsize * (length - len(column))))
