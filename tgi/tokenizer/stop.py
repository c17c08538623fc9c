"""Stop strings: found across and inside tokens, each character looked at once however long the strings are."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from tgi.kernel.pack import UINT32


class Match(NamedTuple):
    """Where a stop string lies, in characters from the beginning of the piece that completed it.

    `start` is negative when the string began in an earlier piece. Whoever shows the string cuts at `end`; whoever
    leaves it out cuts at `start` (and must not have shown what lies before the piece).
    """

    start: int
    end: int


class StopMatcher:
    """Watches one request's text for the first stop string to be complete. Empty strings never match."""

    __slots__ = ("_needles",)

    def __init__(self, stops: Iterable[str]) -> None:
        self._needles = [_Needle(stop) for stop in dict.fromkeys(stops) if stop]

    @property
    def open(self) -> int:
        """How many characters at the end of the text may still belong to a stop string."""
        return max((needle.matched for needle in self._needles), default=0)

    def feed(self, piece: str, counts: bool = True) -> Match | None:
        """Takes the next piece of text; the match that ends first in it, the longest of those that end there.

        If it does not count, what is complete in it is passed over; what only begins there counts later.
        """
        if not counts:
            for needle in self._needles:
                needle.pass_over(piece)
            return None
        best: Match | None = None
        for needle in self._needles:
            if not needle.matched and needle.first not in piece:
                continue
            end = needle.feed(piece)
            if end is not None:
                match = Match(end - len(needle.text), end)
                if best is None or (match.end, match.start) < (best.end, best.start):
                    best = match
        return best


class _Needle:
    """Looks for one string after Knuth, Morris and Pratt. `matched` characters of it stand at the end of the text.

    The table of borders (the longest beginning of the string that also ends its first n characters) grows as far as
    the string has been seen, so a long one that never comes costs nothing.
    """

    __slots__ = ("_borders", "first", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.first = text[0]
        self.matched = 0
        self._borders = array(UINT32, [0, 0])

    def feed(self, piece: str) -> int | None:
        """Takes the next piece; where in it the string is complete for the first time, None if it is not."""
        text, borders, matched = self.text, self._borders, self.matched
        at = 0
        while at < len(piece):
            if matched:
                while matched and text[matched] != piece[at]:
                    matched = borders[matched]
                if not matched:
                    continue
            else:
                at = piece.find(self.first, at)
                if at < 0:
                    break
            matched += 1
            at += 1
            if matched == len(borders):
                self._grow()
            if matched == len(text):
                self.matched = borders[matched]
                return at
        self.matched = matched
        return None

    def pass_over(self, piece: str) -> None:
        """Takes the next piece, wherever the string is complete in it."""
        at: int | None = 0
        while at is not None:
            piece = piece[at:]
            at = self.feed(piece)

    def _grow(self) -> None:
        text, borders = self.text, self._borders
        last = text[len(borders) - 1]
        border = borders[-1]
        while border and text[border] != last:
            border = borders[border]
        borders.append(border + 1 if text[border] == last else 0)


class Curtain:
    """Hides the stop strings of one request: what may be the beginning of one is not shown before it is none.

    The strings are looked for in the text with its special tokens, since a client may name one; what is shown, and
    all that is counted here, is the visible text, which leaves them out.
    """

    __slots__ = ("_before", "_length", "_matcher", "_sizes", "_starts", "held")

    def __init__(self, stops: Iterable[str]) -> None:
        self.held = 0  # characters at the end of the visible text that must not be shown yet
        self._matcher = StopMatcher(stops)
        self._length = 0  # of the text with special tokens, as are the positions below
        self._starts: list[int] = []  # of the special tokens
        self._sizes: list[int] = []
        self._before: list[int] = []  # how many characters of special tokens stand before each

    def feed(self, piece: str, special: bool, counts: bool = True) -> int | None:
        """Takes the text of the next token. How long the visible text is in the end, if a stop string is complete, and
        counts there."""
        match = self._matcher.feed(piece, counts)
        begin = self._length
        self._length += len(piece)
        if special and piece:
            self._before.append(self._before[-1] + self._sizes[-1] if self._sizes else 0)
            self._starts.append(begin)
            self._sizes.append(len(piece))
        start = self._length - self._matcher.open if match is None else begin + match.start
        shown = self._visible(start)
        self.held = self._visible(self._length) - shown
        return None if match is None else shown

    def _visible(self, position: int) -> int:
        """How many visible characters stand before a position."""
        last = bisect_right(self._starts, position) - 1
        if last < 0:
            return position
        return position - self._before[last] - min(position - self._starts[last], self._sizes[last])
