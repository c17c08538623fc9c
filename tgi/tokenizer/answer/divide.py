"""An answer to its parts, piece by piece as it is written: text, reasoning, calls and their arguments."""

import json
import re
from collections.abc import Callable, Generator

from tgi.kernel.answer import Kind
from tgi.tokenizer.answer.formats import WHITE, Answer, Format, Slot, beginning
from tgi.tokenizer.answer.marks import MARK, Marks

Found = tuple[Kind, str]


class Divider:
    """Divides one answer. A grammar holds calls to their format; what does not fit it after all is text.

    What is found does not depend on how the answer is cut into pieces, and nothing is given out that could still be
    the beginning of a marker or a tag, or white space before one.
    """

    __slots__ = ("_answer", "_found", "_over", "_rest", "_run", "_written")

    def __init__(self, answer: Answer, marks: Marks) -> None:
        self._answer = answer
        self._written: Callable[[str], str] = marks.written
        self._rest = ""  # what has come and is not divided yet
        self._over = False
        self._found: list[Found] = []
        self._run = self._divide()
        next(self._run)

    def feed(self, text: str) -> list[Found]:
        """Takes the next piece, with `Marks.character` in it for special tokens; what it lets be shown."""
        self._rest += text
        return self._next()

    def end(self) -> list[Found]:
        """Nothing more comes: what was held back."""
        self._over = True
        return self._next()

    def _next(self) -> list[Found]:
        self._found = []
        next(self._run, None)
        return self._found

    def _say(self, kind: Kind, text: str) -> None:
        text = MARK.sub("", text)
        if self._found and self._found[-1][0] is kind is not Kind.CALL:
            self._found[-1] = (kind, self._found[-1][1] + text)
        elif text:
            self._found.append((kind, text))

    # Each of these goes on until it needs more of the answer than there is, and yields then.

    def _divide(self) -> Generator[None]:
        try:
            yield from self._reason()
            yield from self._call_at_once()
            while (format := (yield from self._plain())) is not None:
                yield from self._calls(format)
        except _Stray:
            while True:
                self._say(Kind.TEXT, self._take(len(self._rest)))
                yield

    def _reason(self) -> Generator[None]:
        """Reasoning, if the answer begins with it; drops its tags and the newlines around them."""
        tags = self._answer.tags
        if tags is None:
            return
        if not self._answer.inside:
            opening = self._written(tags.open)
            if not (yield from self._begins((opening,))):
                return
            self._skip(WHITE)
            self._take(len(opening))
        yield from self._skip_all("\n")
        close = self._written(tags.close)
        while (at := self._rest.find(close)) < 0 and not self._over:
            shown = self._rest[: len(self._rest) - _open(self._rest, close)].rstrip("\n")
            self._say(Kind.REASONING, self._take(len(shown)))
            yield
        self._say(Kind.REASONING, self._take(at if at >= 0 else len(self._rest)).rstrip("\n"))
        if at >= 0:
            self._take(len(close))
            yield from self._skip_all("\n")

    def _call_at_once(self) -> Generator[None]:
        """Calls without a marker, if they are the first thing."""
        for format in self._answer.formats:
            if format.bare and (yield from self._begins(beginning(format))):
                yield from self._calls(format)
                return

    def _plain(self) -> Generator[None, None, Format | None]:
        """Text up to a marker; whose it was, None if the answer is over."""
        markers = {self._written(format.marker): format for format in self._answer.formats if format.marker}
        while True:
            places = [(at, marker) for marker in markers if (at := self._rest.find(marker)) >= 0]
            if places:
                at, marker = min(places)
                self._say(Kind.TEXT, self._take(at).rstrip(WHITE))
                self._take(len(marker))
                return markers[marker]
            if self._over:
                self._say(Kind.TEXT, self._take(len(self._rest)))
                return None
            if markers:
                shown = self._rest[: len(self._rest) - max(_open(self._rest, marker) for marker in markers)]
                self._say(Kind.TEXT, self._take(len(shown.rstrip(WHITE))))
            else:
                self._say(Kind.TEXT, self._take(len(self._rest)))
            yield

    def _calls(self, format: Format) -> Generator[None]:
        """Calls, from behind the marker to their end."""
        for piece in format.before:
            yield from self._expect(piece)
        again = [piece for piece in (*format.between, format.marker if format.each else "") if piece.strip(WHITE)]
        while True:
            for at, piece in enumerate(format.call):
                yield from self._piece(piece, format.call[at + 1 : at + 2])
            following = self._written((again or format.call)[0])
            if not (yield from self._begins((following,))):
                if self._over and begins(self._rest, (following,)) is None:
                    self._rest = ""  # another call, that was cut
                break
            for piece in again:
                yield from self._expect(piece)
        for piece in format.after:
            yield from self._expect(piece)
        yield from self._skip_all(WHITE)

    def _piece(self, piece: str, following: tuple[str, ...]) -> Generator[None]:
        if piece is Slot.NAME:
            yield from self._expect('"')
            while (match := _STRING_END.match(self._rest)) is None:
                yield from self._more()
            self._say(Kind.CALL, _string('"' + self._take(match.end())))
        elif piece is Slot.WORD:
            end = self._written(following[0])
            while (at := self._rest.find(end)) < 0:
                yield from self._more()
            self._say(Kind.CALL, self._take(at).strip(WHITE))
        elif piece is Slot.ARGUMENTS:
            yield from self._expect("{")
            yield from self._object()
        elif piece is Slot.FIELDS:
            yield from self._skip_all(WHITE)
            self._skip(",")
            yield from self._skip_all(WHITE)
            yield from self._object()
        else:
            yield from self._expect(piece)

    def _object(self) -> Generator[None]:
        """The rest of an object whose brace has come, as arguments."""
        depth, string = 1, False
        self._say(Kind.ARGUMENTS, "{")
        while True:
            at = 0
            for match in _NOTABLE.finditer(self._rest):
                mark, at = match[0], match.end()
                if mark == '"':
                    string = not string
                elif not string:
                    depth += 1 if mark in "{[" else -1 if mark in "}]" else 0
                if depth == 0:
                    self._say(Kind.ARGUMENTS, self._take(at))
                    return
            # A backslash stands at the end if what it escapes has not come.
            whole = len(self._rest) - (string and self._rest.endswith("\\", at))
            self._say(Kind.ARGUMENTS, self._take(whole))
            yield from self._more()

    def _expect(self, piece: str) -> Generator[None]:
        """Takes this piece, and white space before it."""
        written = self._written(piece)
        yield from self._skip_all(WHITE)
        while not self._rest.startswith(written):
            if not written.startswith(self._rest):
                raise _Stray
            yield from self._more()
        self._take(len(written))

    def _begins(self, pieces: tuple[str, ...]) -> Generator[None, None, bool]:
        """Whether these pieces come next, with white space between them; takes nothing."""
        while (answer := begins(self._rest, pieces)) is None and not self._over:
            yield
        return bool(answer)

    def _more(self) -> Generator[None]:
        """Waits for more. What is cut within a call was never text."""
        if self._over:
            self._rest = ""
            raise _Stray
        yield

    def _skip_all(self, characters: str) -> Generator[None]:
        self._skip(characters)
        while not self._rest and not self._over:
            yield
            self._skip(characters)

    def _skip(self, characters: str) -> None:
        self._rest = self._rest.lstrip(characters)

    def _take(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken


class _Stray(Exception):
    """The answer does not go on as its format says."""


# The rest of a JSON string, and what matters in an object: a character behind a backslash does not.
_STRING_END = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)
_NOTABLE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def _string(text: str) -> str:
    """What a JSON string stands for."""
    try:
        value = json.loads(text)
    except ValueError:
        raise _Stray from None
    assert isinstance(value, str)
    return value


def begins(text: str, pieces: tuple[str, ...]) -> bool | None:
    """Whether a text begins with these pieces, with white space before each; None if it may yet."""
    for piece in pieces:
        text = text.lstrip(WHITE)
        if not text.startswith(piece):
            return None if piece.startswith(text) else False
        text = text[len(piece) :]
    return True


def _open(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    most = min(len(text), len(marker) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)
