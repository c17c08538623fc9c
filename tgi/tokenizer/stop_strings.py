"""Stop strings, found within tokens and across them. Each character is examined once, however long the strings are."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from tgi.microkernel.messages.codec import UINT32
from tgi.tokenizer.answers.formats import WHITESPACE


class StopStringMatch(NamedTuple):
    """Position of a stop string, in characters from the beginning of the piece that completed it.

    `start` is negative if the string began in an earlier piece. To keep the string in the text, cut at `end`; to leave
    it out, cut at `start`.
    """

    start: int
    end: int


class StopStringMatcher:
    """Finds the first complete stop string in the text of one request. Empty strings never match."""

    __slots__ = ("_searchers",)

    def __init__(self, stops: Iterable[str]) -> None:
        self._searchers = [_StringSearcher(stop) for stop in dict.fromkeys(stops) if stop]

    def reset(self) -> None:
        """Forgets the text so far: a stop string that has begun in it cannot match."""
        for searcher in self._searchers:
            searcher.matched = 0

    @property
    def partial_match_length(self) -> int:
        """Length of the longest beginning of a stop string that ends the text, in characters."""
        return max((searcher.matched for searcher in self._searchers), default=0)

    def match_piece(self, piece: str, enabled: bool = True) -> StopStringMatch | None:
        """Searches the next piece of text. Returns the match that ends first; of those with equal end, the longest.

        With `enabled` false (before `min_new_tokens`), strings that this piece completes are skipped; a string that
        only begins in it can still match later.
        """
        if not enabled:
            for searcher in self._searchers:
                searcher.skip_piece(piece)
            return None
        best: StopStringMatch | None = None
        for searcher in self._searchers:
            if not searcher.matched and searcher.first not in piece:
                continue
            end = searcher.search_piece(piece)
            if end is not None:
                match = StopStringMatch(end - len(searcher.text), end)
                if best is None or (match.end, match.start) < (best.end, best.start):
                    best = match
        return best


class StopStringFilter:
    """Hides the stop strings of one request: holds back characters that may be the beginning of a stop string.

    The search runs over the text with its special tokens, since a stop string may name one. Held and visible
    characters are counted in the visible text, which leaves special tokens out.
    """

    __slots__ = ("_length", "_matcher", "_special_before", "_special_sizes", "_special_starts", "held_characters")

    def __init__(self, stops: Iterable[str]) -> None:
        self.held_characters = 0  # at the end of the visible text
        self._matcher = StopStringMatcher(stops)
        # In characters of the text with special tokens; one list entry per special token:
        self._length = 0
        self._special_starts: list[int] = []
        self._special_sizes: list[int] = []
        self._special_before: list[int] = []  # sum of the sizes of the special tokens before this one

    def filter_piece(self, piece: str, special: bool, enabled: bool = True) -> int | None:
        """Searches the text of the next token and updates `held_characters`.

        Returns the length of the final visible text if a stop string is complete, else None. `enabled` as in
        StopStringMatcher.match_piece.
        """
        match = self._matcher.match_piece(piece, enabled)
        piece_start = self._length
        self._count(piece, special)
        cut = self._length - self._matcher.partial_match_length if match is None else piece_start + match.start
        visible = self._visible_length(cut)
        self.held_characters = self._visible_length(self._length) - visible
        return None if match is None else visible

    def pass_over(self, piece: str, special: bool) -> None:
        """Counts text in which stop strings have no meaning. Nothing is held back."""
        self._matcher.reset()
        self._count(piece, special)
        self.held_characters = 0

    def _count(self, piece: str, special: bool) -> None:
        piece_start = self._length
        self._length += len(piece)
        if special and piece:
            self._special_before.append(
                self._special_before[-1] + self._special_sizes[-1] if self._special_sizes else 0
            )
            self._special_starts.append(piece_start)
            self._special_sizes.append(len(piece))

    def _visible_length(self, position: int) -> int:
        """Number of visible characters before a position."""
        last = bisect_right(self._special_starts, position) - 1
        if last < 0:
            return position
        inside = min(position - self._special_starts[last], self._special_sizes[last])
        return position - self._special_before[last] - inside


class ReasoningSpan:
    """Finds the reasoning at the beginning of an answer, in which stop strings have no meaning.

    It includes the tags and the newlines behind the closing one: none of them is content.
    """

    __slots__ = ("_close", "_closed", "_inside", "_open", "_rest", "ended")

    def __init__(self, opening: str, close: str, inside: bool) -> None:
        """`inside`: the answer begins within the reasoning."""
        self.ended = False  # content has begun
        self._open, self._close = opening, close
        self._inside = inside
        self._closed = False
        self._rest = ""  # the end of the text so far, which may be the beginning of a tag

    def take_piece(self, piece: str) -> int:
        """Returns how many characters at the beginning of the next piece belong to the reasoning."""
        text = self._rest + piece
        if not self._inside:
            self._rest = text = text.lstrip(WHITESPACE)
            if not text.startswith(self._open):
                self.ended = not self._open.startswith(text)
                return 0
            self._inside = True
            text = text[len(self._open) :]
        if not self._closed:
            at = text.find(self._close)
            if at < 0:
                self._rest = text[-len(self._close) :]
                return len(piece)
            self._closed = True
            text = text[at + len(self._close) :]
        self._rest = ""
        content = text.lstrip("\n")
        self.ended = bool(content)
        return len(piece) - len(content)


class _StringSearcher:
    """Incremental Knuth-Morris-Pratt search for one string.

    `matched` characters of the string are at the end of the text. `_borders[n]` is the length of the longest proper
    prefix of the string that is also a suffix of its first n characters. The table grows with the longest partial
    match, so a long string that never occurs costs nothing.
    """

    __slots__ = ("_borders", "first", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.first = text[0]
        self.matched = 0
        self._borders = array(UINT32, [0, 0])

    def search_piece(self, piece: str) -> int | None:
        """Returns the position behind the first complete occurrence in this piece, or None."""
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
                self._add_border()
            if matched == len(text):
                self.matched = borders[matched]
                return at
        self.matched = matched
        return None

    def skip_piece(self, piece: str) -> None:
        """Advances over a piece and ignores every complete occurrence in it."""
        at: int | None = 0
        while at is not None:
            piece = piece[at:]
            at = self.search_piece(piece)

    def _add_border(self) -> None:
        text, borders = self.text, self._borders
        last = text[len(borders) - 1]
        border = borders[-1]
        while border and text[border] != last:
            border = borders[border]
        borders.append(border + 1 if text[border] == last else 0)
