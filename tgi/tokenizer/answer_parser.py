"""Tool parser and reasoning parser: divides a streamed answer into text, reasoning, tool calls and arguments."""

import json
import re
from collections import deque
from collections.abc import Callable, Generator

from tgi.microkernel.protocol import FinishReason, PartKind
from tgi.tokenizer.answer_formats import (
    STAND_IN,
    WHITESPACE,
    AnswerFormat,
    CallPlaceholder,
    FormatTokens,
    ToolCallFormat,
    call_prefix,
)

ParsedPart = tuple[PartKind, str]


class StreamingAnswerParser:
    """Parses the tokens of one request. Text that the stop-string filter holds back is not parsed yet."""

    __slots__ = ("_format_tokens", "_parser", "_unparsed", "_visible")

    def __init__(self, answer_format: AnswerFormat, format_tokens: FormatTokens) -> None:
        self._parser = AnswerParser(answer_format, format_tokens)
        self._format_tokens = format_tokens
        self._unparsed: deque[str] = deque()  # pieces of text, with stand-ins for hidden tokens
        self._visible = 0  # characters of `_unparsed` without stand-ins

    def parse_token(self, token_id: int, text: str, held_characters: int, hidden: bool) -> list[ParsedPart]:
        """Parses a token with its text, and returns the parts that may be shown now.

        The last `held_characters` of the visible text so far are not parsed yet.
        """
        piece = self._format_tokens.stand_in(token_id) if hidden else text
        if not held_characters and not self._unparsed:
            return self._parser.parse_piece(piece) if piece else []
        self._unparsed.append(piece)
        self._visible += _visible_length(piece)
        piece = self._release(held_characters)
        return self._parser.parse_piece(piece) if piece else []

    def _release(self, held_characters: int) -> str:
        """Takes what comes before the last `held_characters` visible ones."""
        unparsed, released = self._unparsed, []
        while unparsed:
            rest = self._visible - _visible_length(unparsed[0])
            if rest < held_characters:
                break
            self._visible = rest
            released.append(unparsed.popleft())
        if unparsed:
            first, at = unparsed[0], 0
            while self._visible > held_characters or STAND_IN.match(first, at):
                self._visible -= STAND_IN.match(first, at) is None
                at += 1
            released.append(first[:at])
            unparsed[0] = first[at:]
        return "".join(released)

    def finish(self, reason: str | None) -> list[ParsedPart]:
        """Returns the last parts. Held text is dropped with FinishReason.STOP: it is the stop string."""
        last = [] if reason == FinishReason.STOP else self._parser.parse_piece("".join(self._unparsed))
        return last + self._parser.finish()


class AnswerParser:
    """Parses the text of one answer. Its grammar makes the model write well-formed calls; anything else is text.

    The result does not depend on how the answer is cut into pieces. What may be the beginning of a marker or a tag is
    held back, and so is white space before it.

    The methods that are generators consume `_rest`, and yield when they need more of the answer. They leave in it only
    what the next piece may complete: what is searched for each piece does not grow with the answer.
    """

    __slots__ = ("_answer_format", "_finished", "_generator", "_held_space", "_parts", "_piece_text", "_rest")

    def __init__(self, answer_format: AnswerFormat, format_tokens: FormatTokens) -> None:
        self._answer_format = answer_format
        self._piece_text: Callable[[str], str] = format_tokens.piece_text
        self._rest = ""  # received, but not consumed yet
        self._held_space: list[str] = []  # white space that is a part of the text only if more text follows
        self._finished = False
        self._parts: list[ParsedPart] = []
        self._generator = self._parse_answer()
        next(self._generator)

    def parse_piece(self, text: str) -> list[ParsedPart]:
        """Parses the next piece of text, with stand-ins for hidden tokens. Returns the parts that may be shown now."""
        self._rest += text
        return self._resume()

    def finish(self) -> list[ParsedPart]:
        """Ends the answer. Returns the parts that were held back."""
        self._finished = True
        return self._resume()

    def _resume(self) -> list[ParsedPart]:
        self._parts = []
        next(self._generator, None)
        return self._parts

    def _emit(self, kind: PartKind, text: str) -> None:
        """Adds a part without its stand-ins. Adjacent parts of the same kind become one, except the names of calls."""
        text = STAND_IN.sub("", text)
        if self._parts and self._parts[-1][0] is kind is not PartKind.CALL:
            self._parts[-1] = (kind, self._parts[-1][1] + text)
        elif text:
            self._parts.append((kind, text))

    def _emit_text(self, kind: PartKind, text: str, space: str) -> None:
        """Emits a part, but holds these characters back where they end it."""
        shown = text.rstrip(space)
        if shown:
            self._emit(kind, "".join(self._held_space) + shown)
            self._held_space = [text[len(shown) :]]
        elif text:
            self._held_space.append(text)

    def _parse_answer(self) -> Generator[None]:
        try:
            yield from self._parse_reasoning()
            yield from self._parse_bare_calls()
            if self._answer_format.text_has_grammar:
                yield from self._parse_marked_calls()
                raise _FormatViolation  # the rest is text
            while (call_format := (yield from self._parse_text())) is not None:
                yield from self._parse_calls(call_format)
        except _FormatViolation:
            while True:
                self._emit(PartKind.TEXT, self._consume(len(self._rest)))
                yield

    def _parse_reasoning(self) -> Generator[None]:
        """Parses reasoning at the beginning of the answer; drops its tags and the newlines around them."""
        tags = self._answer_format.reasoning_tags
        if tags is None:
            return
        if not self._answer_format.starts_in_reasoning:
            opening = self._piece_text(tags.open)
            if not (yield from self._begins_with((opening,))):
                return
            self._strip_left(WHITESPACE)
            self._consume(len(opening))
        yield from self._skip("\n")
        close = self._piece_text(tags.close)
        while (at := self._rest.find(close)) < 0 and not self._finished:
            shown = len(self._rest) - _partial_marker_length(self._rest, close)
            self._emit_text(PartKind.REASONING, self._consume(shown), "\n")
            yield
        self._emit_text(PartKind.REASONING, self._consume(at if at >= 0 else len(self._rest)), "\n")
        self._held_space.clear()
        if at >= 0:
            self._consume(len(close))
            yield from self._skip("\n")

    def _parse_bare_calls(self) -> Generator[None]:
        """Parses calls without a marker at the beginning of the answer, or behind its reasoning."""
        for call_format in self._answer_format.call_formats:
            if call_format.bare and (yield from self._begins_with(call_prefix(call_format))):
                yield from self._parse_calls(call_format)
                return

    def _parse_marked_calls(self) -> Generator[None]:
        """Parses calls with a marker at the beginning of the answer, or behind its reasoning."""
        for call_format in self._answer_format.call_formats:
            marker = self._piece_text(call_format.marker)
            if marker and (yield from self._begins_with((marker,))):
                self._strip_left(WHITESPACE)
                self._consume(len(marker))
                yield from self._parse_calls(call_format)
                return

    def _parse_text(self) -> Generator[None, None, ToolCallFormat | None]:
        """Parses text up to and with a marker. Returns the marker's format; None at the end of the answer."""
        call_formats = self._answer_format.call_formats
        markers = {self._piece_text(known.marker): known for known in call_formats if known.marker}
        while True:
            positions = [(at, marker) for marker in markers if (at := self._rest.find(marker)) >= 0]
            if positions:
                at, marker = min(positions)
                self._emit_text(PartKind.TEXT, self._consume(at), WHITESPACE)
                self._held_space.clear()
                self._consume(len(marker))
                return markers[marker]
            if self._finished:
                self._emit(PartKind.TEXT, "".join(self._held_space) + self._consume(len(self._rest)))
                return None
            if markers:
                held = max(_partial_marker_length(self._rest, marker) for marker in markers)
                self._emit_text(PartKind.TEXT, self._consume(len(self._rest) - held), WHITESPACE)
            else:
                self._emit(PartKind.TEXT, self._consume(len(self._rest)))
            yield

    def _parse_calls(self, call_format: ToolCallFormat) -> Generator[None]:
        """Parses calls, from behind the first marker to the end of the last call."""
        for piece in call_format.before:
            yield from self._expect(piece)
        separators = (*call_format.between, call_format.marker if call_format.marker_repeats else "")
        separators = tuple(piece for piece in separators if piece.strip(WHITESPACE))
        while True:
            for at, piece in enumerate(call_format.call):
                yield from self._parse_call_piece(piece, call_format.call[at + 1 : at + 2])
            next_piece = self._piece_text((separators or call_format.call)[0])
            if not (yield from self._begins_with((next_piece,))):
                if self._finished and begins_with(self._rest, (next_piece,)) is None:
                    self._rest = ""  # the beginning of another call, which was cut off
                break
            for piece in separators:
                yield from self._expect(piece)
        for piece in call_format.after:
            yield from self._expect(piece)
        yield from self._skip(WHITESPACE)

    def _parse_call_piece(self, piece: str, following: tuple[str, ...]) -> Generator[None]:
        if piece is CallPlaceholder.NAME:
            yield from self._expect('"')
            name = ['"']
            while True:
                if (match := _STRING_CHARACTERS.match(self._rest)) is not None:
                    name.append(self._consume(match.end()))
                if self._rest.startswith('"'):
                    break
                yield from self._need_more()
            self._emit(PartKind.CALL, _load_string("".join(name) + self._consume(1)))
        elif piece is CallPlaceholder.WORD:
            end = self._piece_text(following[0])
            word = []
            while (at := self._rest.find(end)) < 0:
                word.append(self._consume(len(self._rest) - _partial_marker_length(self._rest, end)))
                yield from self._need_more()
            self._emit(PartKind.CALL, ("".join(word) + self._consume(at)).strip(WHITESPACE))
        elif piece is CallPlaceholder.ARGUMENTS:
            yield from self._expect("{")
            yield from self._parse_object()
        elif piece is CallPlaceholder.FIELDS:
            yield from self._skip(WHITESPACE)
            self._strip_left(",")
            yield from self._skip(WHITESPACE)
            yield from self._parse_object()
        else:
            yield from self._expect(piece)

    def _parse_object(self) -> Generator[None]:
        """Parses a JSON object from behind its opening brace, as arguments."""
        depth, in_string = 1, False
        self._emit(PartKind.ARGUMENTS, "{")
        while True:
            at = 0
            for match in _STRUCTURAL.finditer(self._rest):
                mark, at = match[0], match.end()
                if mark == '"':
                    in_string = not in_string
                elif not in_string:
                    depth += 1 if mark in "{[" else -1 if mark in "}]" else 0
                if depth == 0:
                    self._emit(PartKind.ARGUMENTS, self._consume(at))
                    return
            # Hold a backslash at the end until the character that it escapes arrives.
            complete = len(self._rest) - (in_string and self._rest.endswith("\\", at))
            self._emit(PartKind.ARGUMENTS, self._consume(complete))
            yield from self._need_more()

    def _expect(self, piece: str) -> Generator[None]:
        """Consumes this piece and white space before it. Raises _FormatViolation."""
        text = self._piece_text(piece)
        yield from self._skip(WHITESPACE)
        while not self._rest.startswith(text):
            if not text.startswith(self._rest):
                raise _FormatViolation
            yield from self._need_more()
        self._consume(len(text))

    def _begins_with(self, pieces: tuple[str, ...]) -> Generator[None, None, bool]:
        """Whether these pieces come next, with white space before each. Consumes nothing."""
        passed: list[str] = []
        answer = True
        for piece in pieces:
            while True:
                text = self._rest.lstrip(WHITESPACE)
                passed.append(self._consume(len(self._rest) - len(text)))
                if text.startswith(piece):
                    passed.append(self._consume(len(piece)))
                    break
                if self._finished or not piece.startswith(text):
                    answer = False
                    break
                yield
            if not answer:
                break
        self._rest = "".join(passed) + self._rest
        return answer

    def _need_more(self) -> Generator[None]:
        """Waits for more. Within a call, the end of the answer drops the rest: an incomplete call is not text."""
        if self._finished:
            self._rest = ""
            raise _FormatViolation
        yield

    def _skip(self, characters: str) -> Generator[None]:
        """Skips all of these characters that come next, also in later pieces."""
        self._strip_left(characters)
        while not self._rest and not self._finished:
            yield
            self._strip_left(characters)

    def _strip_left(self, characters: str) -> None:
        self._rest = self._rest.lstrip(characters)

    def _consume(self, length: int) -> str:
        consumed, self._rest = self._rest[:length], self._rest[length:]
        return consumed


class _FormatViolation(Exception):
    """The answer does not continue as its format requires."""


# Whole characters of a JSON string.
_STRING_CHARACTERS = re.compile(r'(?:[^"\\]|\\.)+', re.DOTALL)
# Characters that matter for the nesting of JSON. An escaped one is consumed with its backslash.
_STRUCTURAL = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def _load_string(text: str) -> str:
    """Decodes a JSON string. Raises _FormatViolation."""
    try:
        value = json.loads(text)
    except ValueError:
        raise _FormatViolation from None
    assert isinstance(value, str)
    return value


def begins_with(text: str, pieces: tuple[str, ...]) -> bool | None:
    """Whether a text begins with these pieces, with white space before each; None if more text is needed."""
    for piece in pieces:
        text = text.lstrip(WHITESPACE)
        if not text.startswith(piece):
            return None if piece.startswith(text) else False
        text = text[len(piece) :]
    return True


def _visible_length(piece: str) -> int:
    """Its characters without stand-ins."""
    return len(STAND_IN.sub("", piece))


def _partial_marker_length(text: str, marker: str) -> int:
    """Length of the longest proper prefix of the marker that ends the text."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
