"""The answer of one generation as the routes below /v1 write it: parts (text, reasoning, tool calls with their
arguments) by token or as a whole, and why it has ended. A route formats what it reads here."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import repeat
from json.encoder import encode_basestring as quote

import msgspec

from tgi.api import errors
from tgi.api.errors import ApiError
from tgi.api.json_body import describe_syntax_error
from tgi.api.requests import Generation
from tgi.api.token_columns import TokenColumns
from tgi.microkernel.messages.protocol import AnswerPart, End, FinishReason, PartKind


class Outcome(StrEnum):
    """Why an answer has ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # there are tool calls, and all are complete


class GeneratedCall:
    """A tool call, whose arguments may be incomplete."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._pieces: list[str] = []

    def add_arguments(self, piece: str) -> None:
        """Appends the next piece of JSON text."""
        self._pieces.append(piece)

    @property
    def arguments(self) -> str:
        """JSON text."""
        return "".join(self._pieces)


class VisibleText:
    """The text of a generation that a client may see, token by token: without special tokens, and without what may be
    the beginning of a stop string until that is decided."""

    def __init__(self) -> None:
        self._shown = 0  # characters
        self._pending = ""

    def pieces(self, columns: TokenColumns, end: End | None) -> list[str]:
        """The text that each token makes visible. With the `end`, the last one includes all the rest."""
        pieces = []
        for text, special, held in zip(columns.texts, columns.special, columns.held or repeat(0), strict=False):
            if not special:
                self._pending += text
            visible = max(0, len(self._pending) - held)
            pieces.append(self._pending[:visible])
            self._pending = self._pending[visible:]
            self._shown += visible
        if end is not None:
            before = self._shown - len(pieces[-1])
            pieces[-1] = end.text[before:]
            self._shown, self._pending = len(end.text), ""
        return pieces


class StopStringMatch:
    """Finds which stop string has ended a text that excludes it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._texts: list[str] = []

    def add(self, columns: TokenColumns) -> None:
        if self._stops:
            self._texts += [text for text, special in zip(columns.texts, columns.special, strict=True) if not special]

    def find(self, end: End) -> str | None:
        """The stop string; None if the text has ended otherwise."""
        if end.reason != FinishReason.STOP:
            return None
        rest = "".join(self._texts)[len(end.text) :]
        return next((stop for stop in self._stops if stop and rest.startswith(stop)), None)


class Answer:
    """What has been read of one answer: complete at its end, or from the beginning with `whole`."""

    def __init__(self) -> None:
        self._visible = VisibleText()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[GeneratedCall] = []
        self.reasoning_tokens = 0  # the delimiters of the reasoning do not count
        self._undecided_tokens = 0  # within it or behind it, without a part: count if more reasoning follows

    @classmethod
    def whole(cls, generation: Generation, end: End) -> "Answer":
        """The answer of a generation none of whose tokens were taken."""
        answer = cls()
        if generation.has_parts:
            for parts in answer.read(generation.unread_tokens, end) if generation.unread_tokens.parts else [end.parts]:
                answer.add(parts)
        else:
            answer._text.append(end.text)
        return answer

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def read(self, columns: TokenColumns, end: End | None) -> list[list[AnswerPart]]:
        """The parts that each token adds, which may be none; with the `end`, the last one includes all remaining parts.
        They are not counted as read until `add`."""
        if not columns.parts:
            return [[AnswerPart(0, PartKind.TEXT, piece)] for piece in self._visible.pieces(columns, end)]
        parts = columns.parts
        return [*parts[:-1], [*parts[-1], *end.parts]] if end is not None and end.parts else parts

    def add(self, parts: list[AnswerPart]) -> None:
        self._undecided_tokens += 1
        for part in parts:
            if part.kind == PartKind.REASONING:
                self.reasoning_tokens += self._undecided_tokens
            self._undecided_tokens = 0
            match part.kind:
                case PartKind.TEXT:
                    self._text.append(part.text)
                case PartKind.REASONING:
                    self._reasoning.append(part.text)
                case PartKind.CALL:
                    self.calls.append(GeneratedCall(part.text))
                case _:
                    self.calls[-1].add_arguments(part.text)
        if not self.reasoning_tokens:
            self._undecided_tokens = 0

    def outcome(self, end: End) -> Outcome:
        """Why the answer has ended."""
        if end.reason == FinishReason.LENGTH:
            return Outcome.LENGTH
        return Outcome.TOOL_CALLS if self.calls and self.argument_error() is None else Outcome.STOP

    def argument_error(self) -> str | None:
        """Why the arguments of the last tool call are not JSON, or None. Those of the earlier ones are complete."""
        if not self.calls:
            return None
        arguments = self.calls[-1].arguments.encode()
        try:
            msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            return describe_syntax_error(arguments, error)
        return None


def incomplete_tool_call(generation: Generation, end: End) -> ApiError | None:
    """The error that answers a request whose last tool call was cut off; not used in streams."""
    if not generation.has_parts:
        return None
    reason = Answer.whole(generation, end).argument_error()
    return None if reason is None else errors.tool_error(f"Failed to parse generated text: {reason} {quote(end.text)}")
