"""Stop strings: found across and inside tokens, looking at the tail of the text only."""

from collections.abc import Iterable
from typing import NamedTuple


class Match(NamedTuple):
    """Where a stop string lies, in characters from the beginning of the piece that completed it.

    `start` is negative when the string began in an earlier piece. Whoever shows the string cuts at `end`; whoever
    leaves it out cuts at `start` (and must not have shown what lies before the piece).
    """

    start: int
    end: int


class StopMatcher:
    """Watches one request's text for the first stop string to be complete. Empty strings never match.

    Keeps as many characters as the longest string has, less one: no more can belong to a match that is still open.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._keep = max(map(len, self._stops), default=1) - 1
        self._tail = ""

    def feed(self, piece: str) -> Match | None:
        """Takes the next piece of text; the match that ends first in it, the longest of those that end there."""
        known = len(self._tail)
        text = self._tail + piece
        best: Match | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                match = Match(start - known, start - known + len(stop))
                if best is None or (match.end, match.start) < (best.end, best.start):
                    best = match
        self._tail = text[-self._keep :] if self._keep else ""
        return best
