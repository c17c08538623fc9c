"""A divided answer as JSON: what it says in text, what it reasons, and which tools it calls, whole or part by part."""

import uuid
from collections.abc import Iterable, Sequence
from itertools import repeat
from json.encoder import encode_basestring as quote

import msgspec

from tgi.api import errors, openai
from tgi.api.calls import Generation
from tgi.api.columns import Columns
from tgi.api.errors import ApiError
from tgi.api.serde import complaint
from tgi.kernel.answer import Kind, Part
from tgi.kernel.messages import End, Reason


class _Call:
    """A call of a tool, of whose arguments there may be more to come."""

    def __init__(self, name: str) -> None:
        self.id = f"call_{uuid.uuid4().hex}"
        self.name = name
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        """Takes more of the arguments."""
        self._pieces.append(piece)

    @property
    def arguments(self) -> str:
        """All of them, as JSON text."""
        return "".join(self._pieces)

    def render(self, arguments: str) -> str:
        """The members of its JSON object that come first in a delta, or stand alone in a message."""
        return (
            f'"id":"{self.id}","type":"function",'
            f'"function":{{"name":{quote(self.name)},"arguments":{quote(arguments)}}}'
        )


class Reply:
    """One choice of a divided answer. It takes the parts in their order."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    @classmethod
    def of(cls, call: Generation, end: End) -> "Reply":
        """The whole answer of a generation whose tokens nobody has taken."""
        reply = cls()
        for part in _all(call, end):
            reply._take(part)
        return reply

    def deltas(self, columns: Columns, end: End | None, logprobs: Sequence[str]) -> tuple[list[str], list[str]]:
        """The members of each delta that these tokens bring, and the logprobs beside it (JSON, one per token, if they
        are wanted). There is one delta for each part, and an empty one for a token without parts: with its first delta
        each token's logprobs are told. With the `end`, the last token brings all that is missing."""
        deltas: list[str] = []
        beside: list[str] = []
        for parts, logprob in zip(columns.parts, logprobs or repeat("null"), strict=False):
            said = [self._take(part) for part in parts] or [""]
            deltas += said
            beside += [logprob, *["null"] * (len(said) - 1)]
        if end is not None and end.parts:
            said = [self._take(part) for part in end.parts]
            if not deltas[-1]:
                deltas[-1] = said.pop(0)
            deltas += said
            beside += ["null"] * len(said)
        return deltas, beside

    def message(self) -> str:
        """The members of the whole message. Its content is null if there are calls alone, as OpenAI's."""
        text = "".join(self._text)
        members = [f'"content":{quote(text) if text or not self._calls else "null"}']
        if self._reasoning:
            members.append(f'"reasoning_content":{quote("".join(self._reasoning))}')
        if self._calls:
            members.append(f'"tool_calls":[{",".join(f"{{{call.render(call.arguments)}}}" for call in self._calls)}]')
        return ",".join(members)

    def finish_reason(self, end: End | None) -> str:
        """As JSON; null before the end. Calls are the reason if they are whole."""
        if end is None or end.reason == Reason.LENGTH or not self._calls or self.cut() is not None:
            return openai.finish_reason(end)
        return '"tool_calls"'

    def cut(self) -> str | None:
        """Why the arguments of the latest call are no JSON, which all before it must be; None if they are."""
        if not self._calls:
            return None
        arguments = self._calls[-1].arguments.encode()
        try:
            msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            return complaint(arguments, error)
        return None

    def _take(self, part: Part) -> str:
        """What a delta says of the next part: the members of a JSON object."""
        match part.kind:
            case Kind.TEXT:
                self._text.append(part.text)
                return f'"content":{quote(part.text)}'
            case Kind.REASONING:
                self._reasoning.append(part.text)
                return f'"reasoning_content":{quote(part.text)}'
            case Kind.CALL:
                self._calls.append(_Call(part.text))
                return f'"tool_calls":[{{"index":{len(self._calls) - 1},{self._calls[-1].render("")}}}]'
            case _:
                self._calls[-1].add(part.text)
                arguments = f'"function":{{"arguments":{quote(part.text)}}}'
                return f'"tool_calls":[{{"index":{len(self._calls) - 1},{arguments}}}]'


def unreadable(call: Generation, end: End) -> ApiError | None:
    """What the client is told instead of a whole answer whose last call was cut off."""
    why = Reply.of(call, end).cut() if call.divided else None
    return None if why is None else errors.tool(f"Failed to parse generated text: {why} {quote(end.text)}")


def _all(call: Generation, end: End) -> Iterable[Part]:
    for parts in call.fresh.parts:
        yield from parts
    yield from end.parts
