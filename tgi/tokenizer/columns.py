"""The tokens of one turn for one api, gathered row by row into the columns of a Texts."""

from array import array
from itertools import accumulate

from tgi.kernel.messages import Texts, Tokens
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
    """Rows are added one by one, each with `row` and then `tops` if it has any."""

    __slots__ = (
        "_counts", "_held", "_ids", "_logprobs", "_rids", "_special", "_texts", "_top_counts", "_top_ids",
        "_top_logprobs", "_top_special", "_top_texts", "_vocabulary",
    )  # fmt: skip

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._rids = array(UINT32)
        self._counts = array(UINT32)
        self._ids = bytearray()
        self._logprobs = bytearray()
        self._special = bytearray()
        self._texts: list[str] = []
        # These may be shorter than the others: nothing is held, or on top, behind their end.
        self._held = array(UINT32)
        self._top_counts = array(UINT32)
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()
        self._top_special = bytearray()
        self._top_texts: list[str] = []

    def row(self, rid: int, ids: bytes, logprobs: bytes, texts: list[str], held: list[int]) -> None:
        """The tokens of a request: columns of ids and logprobs; per token its text and how much is held behind it."""
        self._rids.append(rid)
        self._counts.append(len(texts))
        self._ids += ids
        self._logprobs += logprobs
        self._special += bytes(map(self._vocabulary.is_special, ints(ids)))
        if any(held):
            _pad(self._held, len(self._texts))
            self._held.extend(held)
        self._texts += texts

    def tops(self, tops: Tops, first: int, end: int) -> None:
        """The likeliest tokens beside the last ones, which were tokens `first` to `end` of their Tokens."""
        _pad(self._top_counts, len(self._texts) - (end - first))
        self._top_counts.extend(tops.counts[first:end])
        begin, stop = 4 * tops.ends[first], 4 * tops.ends[end]
        self._top_ids += tops.ids[begin:stop]
        self._top_logprobs += tops.logprobs[begin:stop]
        for number in ints(tops.ids[begin:stop]):
            self._top_special.append(self._vocabulary.is_special(number))
            self._top_texts.append(self._vocabulary.text(number))

    def message(self) -> Texts:
        """All rows as one message."""
        for column in (self._held, self._top_counts):
            if column:
                _pad(column, len(self._texts))
        return Texts(
            self._rids.tobytes(),
            self._counts.tobytes(),
            bytes(self._ids),
            bytes(self._logprobs),
            bytes(self._special),
            self._texts,
            self._held.tobytes(),
            self._top_counts.tobytes() if self._top_ids else b"",
            bytes(self._top_ids),
            bytes(self._top_logprobs),
            bytes(self._top_special),
            self._top_texts,
        )


def _pad(column: "array[int]", length: int) -> None:
    column.frombytes(bytes(column.itemsize * (length - len(column))))
