"""Tokens in columns, as they travel and as they wait to be written: one entry per token in each."""

from array import array
from itertools import islice
from typing import NamedTuple

from tgi.kernel.answer import Part, PromptTokens, Texts
from tgi.kernel.pack import floats, ints, uints


class Top(NamedTuple):
    """One of the likeliest tokens beside a drawn one."""

    id: int
    text: str
    logprob: float
    special: int


class Columns(NamedTuple):
    """Tokens as they came, one entry per token in each column; `held`, `tops` and `parts` are empty where there is no
    use for them."""

    ids: "array[int]"
    logprobs: "array[float]"
    special: bytearray
    texts: list[str]
    held: "array[int]" = array("I")  # characters at the end of the visible text so far that must not be shown yet
    tops: list[list[Top]] = []
    parts: list[list[Part]] = []  # what each token lets be shown of a divided answer

    def part(self, of: slice) -> "Columns":
        """Some of the tokens."""
        return Columns._make(column[of] for column in self)


# No tokens. Whoever has it makes columns of its own for the first that come.
NOTHING = Columns(array("i"), array("f"), bytearray(), [])


class Arrivals(NamedTuple):
    """The tokens of a Texts, for many requests, each of which cuts out its own."""

    ids: bytes
    logprobs: bytes
    special: bytes
    texts: list[str]
    held: bytes
    tops: list[list[Top]]
    parts: list[list[Part]]

    @classmethod
    def of(cls, message: Texts) -> "Arrivals":
        """What of a message is said token by token."""
        tops = tops_of(message) if message.top_counts else []
        parts = parts_of(message) if message.parts else []
        return cls(message.ids, message.logprobs, message.special, message.texts, message.held, tops, parts)


def parts_of(message: Texts) -> list[list[Part]]:
    """The parts of each token of a message."""
    parts: list[list[Part]] = [[] for _ in message.texts]
    for part in message.parts:
        parts[part.token].append(part)
    return parts


def tops_of(message: Texts) -> list[list[Top]]:
    """The top tokens of each token of a message."""
    columns = (ints(message.top_ids), message.top_texts, floats(message.top_logprobs), message.top_special)
    tops = map(Top, *columns)
    return [list(islice(tops, count)) for count in uints(message.top_counts)]


class PromptColumns(NamedTuple):
    """The tokens of a prompt, one entry per token in each column; empty where not asked for."""

    ids: "array[int]"
    logprobs: "array[float]"  # NaN for the first
    starts: "array[int]"  # characters of the prompt before each token
    texts: list[str]
    tops: list[dict[str, float]]  # the likeliest in its place, the likeliest last; empty for the first

    @classmethod
    def empty(cls) -> "PromptColumns":
        """No tokens yet."""
        return cls(array("i"), array("f"), array("i"), [], [])

    def extend(self, more: PromptTokens) -> None:
        """Takes the tokens that follow."""
        self.ids.frombytes(more.ids)
        self.logprobs.frombytes(more.logprobs)
        self.starts.frombytes(more.starts)
        self.texts.extend(more.texts)
        width = len(more.top_texts) // max(1, len(more.texts))
        logprobs = array("f", more.top_logprobs)
        for begin in range(0, width * len(more.texts), width or 1):
            # The first of several that share a text is the likeliest.
            named = zip(more.top_texts[begin : begin + width], logprobs[begin : begin + width], strict=True)
            self.tops.append(dict(reversed([*named])))
        if not width:
            self.tops.extend({} for _ in more.texts)
