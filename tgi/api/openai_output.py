"""What the responses of OpenAI's routes consist of, as JSON text: ids, usage, finish reasons, visible text, and chat
messages with reasoning and tool calls."""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from json.encoder import encode_basestring as quote
from typing import NamedTuple

import msgspec

import tgi
from tgi.api import errors
from tgi.api.errors import ApiError
from tgi.api.json_body import describe_syntax_error
from tgi.api.requests import Generation
from tgi.api.resumption import ResponseKey
from tgi.api.service import Service
from tgi.api.token_columns import TokenColumns, TopToken
from tgi.microkernel.protocol import AnswerPart, End, FinishReason, PartKind

DONE_EVENT = "data: [DONE]\n\n"
EVENT_END = "}\n\n"


class ResponseIdentity(NamedTuple):
    """The fields that all chunks of one response share. Strings are JSON already. `key` makes the ids of tool calls."""

    id: str
    created: int
    model: str
    fingerprint: str
    key: ResponseKey

    @classmethod
    def create(cls, service: Service, key: ResponseKey, prefix: str, adapter: str) -> "ResponseIdentity":
        """With the id and the time of `key`. `model` is the name of the adapter, or of the served model if `adapter` is
        empty, whatever model the request named."""
        return cls(
            id=f'"{prefix}-{key.response_id}"',
            created=key.created,
            model=quote(adapter or service.model_id),
            fingerprint=quote(f"{tgi.__version__}-{service.settings.docker_label or 'native'}"),
            key=key,
        )

    def call_id(self, choice: int, number: int) -> str:
        """The id of a tool call: `number` counts those of one choice."""
        return f"call_{self.key.hex_id(f'call {choice} {number}')}"


def finish_reason_json(end: End | None) -> str:
    """OpenAI's finish reason; null before the end."""
    if end is None:
        return "null"
    return '"length"' if end.reason == FinishReason.LENGTH else '"stop"'


def usage_json(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None, reasoning_tokens: int | None = None
) -> str:
    """Token counts. Of the prompt's tokens `cached_tokens` were in the prefix cache; None leaves details out."""
    details = ""
    if cached_tokens is not None:
        details += f',"prompt_tokens_details":{{"cached_tokens":{cached_tokens}}}'
    if reasoning_tokens is not None:
        details += f',"completion_tokens_details":{{"reasoning_tokens":{reasoning_tokens}}}'
    return (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
        f'"total_tokens":{prompt_tokens + completion_tokens}{details}}}'
    )


def with_running_usage(events: list[str], generation: Generation, new_tokens: int, no_usage: str = "") -> list[str]:
    """The events with the usage so far in the place of `no_usage`. They show the latest `new_tokens` tokens: one more
    each, the last one all."""
    before = generation.generated_count - len(generation.unread_tokens.texts) - new_tokens
    shown = [*(before + min(at, new_tokens) for at in range(1, len(events))), before + new_tokens]
    return [
        f'{event.removesuffix(no_usage + EVENT_END)},"usage":{usage_json(generation.prompt_tokens, tokens)}{EVENT_END}'
        for event, tokens in zip(events, shown, strict=True)
    ]


class TokenUsage:
    """Counts the tokens of a whole response: a prompt counts once for all of its choices."""

    def __init__(self, choices: int, *, details: bool = False, reasoning: bool = False) -> None:
        """With `details` as OpenAI, with `reasoning` for an answer that may have some; without as TGI."""
        self._choices = choices
        self._details = details
        self._prompt_tokens: dict[int, int] = {}  # by index of the prompt
        self._cached_tokens: dict[int, int] = {}  # before the first of a prompt's choices, whose pages the others find
        self._completion_tokens = 0
        self._reasoning_tokens = 0 if details and reasoning else None

    def add_generation(self, index: int, end: End, generated_count: int, reasoning_tokens: int = 0) -> None:
        """Adds a finished generation."""
        prompt = index // self._choices
        self._prompt_tokens[prompt] = end.prompt_tokens
        self._cached_tokens[prompt] = min(end.cached_tokens, self._cached_tokens.get(prompt, end.cached_tokens))
        self._completion_tokens += generated_count
        if self._reasoning_tokens is not None:
            self._reasoning_tokens += reasoning_tokens

    def to_json(self) -> str:
        """The sum."""
        return usage_json(
            sum(self._prompt_tokens.values()),
            self._completion_tokens,
            sum(self._cached_tokens.values()) if self._details else None,
            self._reasoning_tokens,
        )


def failure_events(error: ApiError, openai_errors: bool) -> str:
    """The events that end a stream after an error, with the error in OpenAI's format or in TGI's."""
    native = f'{{"error":{{"message":{quote(error.message)},"http_status_code":{error.status}}}}}'
    return f"data: {error.openai_event_data().decode() if openai_errors else native}\n\n{DONE_EVENT}"


def top_n_tokens(columns: TokenColumns, position: int, top_n: int) -> list[TopToken]:
    """The `top_n` likeliest tokens at a position, the lower id first among equals. Where several tie for the last
    place, the column has all of them, which native routes list."""
    return columns.tops[position][:top_n] if columns.tops else []


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


class _ToolCall:
    """A tool call, whose arguments may be incomplete."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self._pieces: list[str] = []

    def add_arguments(self, piece: str) -> None:
        self._pieces.append(piece)

    @property
    def arguments(self) -> str:
        """JSON text."""
        return "".join(self._pieces)

    def members_json(self, arguments: str) -> str:
        """The members of its JSON object: in a message with all arguments, in its first delta with none."""
        return (
            f'"id":"{self.id}","type":"function",'
            f'"function":{{"name":{quote(self.name)},"arguments":{quote(arguments)}}}'
        )


class AssistantMessage:
    """The chat message of a generation that consists of parts (text, reasoning, tool calls), whole or as deltas."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        """`call_id` returns the id of the tool call with a number."""
        self._call_id = call_id
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[_ToolCall] = []
        self.reasoning_tokens = 0  # the delimiters of the reasoning do not count
        self._undecided_tokens = 0  # within it or behind it, without a part: count if more reasoning follows

    @classmethod
    def from_generation(
        cls, generation: Generation, end: End, call_id: Callable[[int], str] = str
    ) -> "AssistantMessage":
        """The whole message of a generation none of whose tokens were taken."""
        message = cls(call_id)
        for parts in generation.unread_tokens.parts:
            message._add_token(parts)
        message._add_last(end.parts)
        return message

    def deltas(self, columns: TokenColumns, end: End | None, logprobs: Sequence[str]) -> tuple[list[str], list[str]]:
        """The members of the deltas that these tokens add, and the logprobs of each delta. `logprobs` are JSON, one per
        token, or empty.

        A token has a delta for each of its parts, or an empty one; its logprobs go with the first. With the `end`, the
        last token includes all remaining parts.
        """
        deltas: list[str] = []
        delta_logprobs: list[str] = []
        for parts, logprob in zip(columns.parts, logprobs or repeat("null"), strict=False):
            added = self._add_token(parts) or [""]
            deltas += added
            delta_logprobs += [logprob, *["null"] * (len(added) - 1)]
        if end is not None and end.parts:
            added = self._add_last(end.parts)
            if not deltas[-1]:
                deltas[-1] = added.pop(0)
            deltas += added
            delta_logprobs += ["null"] * len(added)
        return deltas, delta_logprobs

    def members_json(self) -> str:
        """The members of the whole message. The content is null if there are tool calls only, as OpenAI's."""
        text = "".join(self._text)
        members = [f'"content":{quote(text) if text or not self._tool_calls else "null"}']
        if self._reasoning:
            members.append(f'"reasoning_content":{quote("".join(self._reasoning))}')
        if self._tool_calls:
            calls = ",".join(f"{{{call.members_json(call.arguments)}}}" for call in self._tool_calls)
            members.append(f'"tool_calls":[{calls}]')
        return ",".join(members)

    def finish_reason_json(self, end: End | None) -> str:
        """`tool_calls` if there are tool calls and all are complete; null before the end."""
        if (
            end is None
            or end.reason == FinishReason.LENGTH
            or not self._tool_calls
            or self.argument_error() is not None
        ):
            return finish_reason_json(end)
        return '"tool_calls"'

    def argument_error(self) -> str | None:
        """Why the arguments of the last tool call are not JSON, or None. Those of the earlier ones are complete."""
        if not self._tool_calls:
            return None
        arguments = self._tool_calls[-1].arguments.encode()
        try:
            msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            return describe_syntax_error(arguments, error)
        return None

    def _add_token(self, parts: Iterable[AnswerPart]) -> list[str]:
        """Adds the parts of a token. Returns the members of their deltas."""
        self._undecided_tokens += 1
        deltas = self._add_last(parts)
        if not self.reasoning_tokens:
            self._undecided_tokens = 0
        return deltas

    def _add_last(self, parts: Iterable[AnswerPart]) -> list[str]:
        """Adds the parts that complete the last token."""
        deltas = []
        for part in parts:
            if part.kind == PartKind.REASONING:
                self.reasoning_tokens += self._undecided_tokens
            self._undecided_tokens = 0
            deltas.append(self._add_part(part))
        return deltas

    def _add_part(self, part: AnswerPart) -> str:
        """Adds the next part. Returns the members of its delta."""
        match part.kind:
            case PartKind.TEXT:
                self._text.append(part.text)
                return f'"content":{quote(part.text)}'
            case PartKind.REASONING:
                self._reasoning.append(part.text)
                return f'"reasoning_content":{quote(part.text)}'
            case PartKind.CALL:
                self._tool_calls.append(_ToolCall(self._call_id(len(self._tool_calls)), part.text))
                return f'"tool_calls":[{{"index":{len(self._tool_calls) - 1},{self._tool_calls[-1].members_json("")}}}]'
            case _:
                self._tool_calls[-1].add_arguments(part.text)
                arguments = f'"function":{{"arguments":{quote(part.text)}}}'
                return f'"tool_calls":[{{"index":{len(self._tool_calls) - 1},{arguments}}}]'


def incomplete_tool_call(generation: Generation, end: End) -> ApiError | None:
    """The error that answers a request whose last tool call was cut off; not used in streams."""
    if not generation.has_parts:
        return None
    reason = AssistantMessage.from_generation(generation, end).argument_error()
    return None if reason is None else errors.tool_error(f"Failed to parse generated text: {reason} {quote(end.text)}")
