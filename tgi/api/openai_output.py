"""What the responses of chats and completions consist of, as JSON text: the members that responses and chunks share,
usage, finish reasons, and chat messages with reasoning and tool calls."""

from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from json.encoder import encode_basestring as quote
from typing import NamedTuple

import tgi
from tgi.api.answer import Answer
from tgi.api.custom_tools import InputReader
from tgi.api.errors import ApiError
from tgi.api.requests import Generation
from tgi.api.resumption import ResponseKey
from tgi.api.service import Service
from tgi.api.token_columns import TokenColumns, TopToken
from tgi.microkernel.messages.protocol import AnswerPart, End, FinishReason, PartKind

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

    def members_json(self, kind: str) -> str:
        """The members that each response or chunk of this kind begins with."""
        return (
            f'"object":"{kind}","id":{self.id},"created":{self.created},"model":{self.model},'
            f'"system_fingerprint":{self.fingerprint}'
        )

    def response_json(self, kind: str, choices: Sequence[str], usage: "TokenUsage") -> str:
        """The response that is sent as a whole."""
        return f'{{{self.members_json(kind)},"choices":[{",".join(choices)}],"usage":{usage.to_json()}}}'

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
        prompt = index // self._choices
        self._prompt_tokens[prompt] = end.prompt_tokens
        self._cached_tokens[prompt] = min(end.cached_tokens, self._cached_tokens.get(prompt, end.cached_tokens))
        self._completion_tokens += generated_count
        if self._reasoning_tokens is not None:
            self._reasoning_tokens += reasoning_tokens

    def to_json(self) -> str:
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


class AssistantMessage:
    """The JSON of the chat message of a generation that consists of parts, whole or as deltas."""

    def __init__(
        self, call_id: Callable[[int], str], answer: Answer | None = None, custom_tools: Collection[str] = ()
    ) -> None:
        """`call_id` returns the id of the tool call with a number. Calls of `custom_tools` have a text as their
        input."""
        self._call_id = call_id
        self._answer = Answer() if answer is None else answer
        self._custom_tools = custom_tools
        self._input = InputReader()  # of the latest call

    def deltas(self, columns: TokenColumns, end: End | None, logprobs: Sequence[str]) -> tuple[list[str], list[str]]:
        """The members of the deltas that these tokens add, and the logprobs of each delta. `logprobs` are JSON, one per
        token, or empty.

        A token has a delta for each of its parts, or an empty one; its logprobs go with the first. With the `end`, the
        last token includes all remaining parts.
        """
        deltas: list[str] = []
        delta_logprobs: list[str] = []
        for parts, logprob in zip(self._answer.read(columns, end), logprobs or repeat("null"), strict=False):
            added = self._added_deltas(parts) or [""]
            deltas += added
            delta_logprobs += [logprob, *["null"] * (len(added) - 1)]
        return deltas, delta_logprobs

    def members_json(self) -> str:
        """The members of the whole message. The content is null if there are tool calls only, as OpenAI's."""
        answer = self._answer
        text, reasoning = answer.text, answer.reasoning
        members = [f'"content":{quote(text) if text or not answer.calls else "null"}']
        if reasoning:
            members.append(f'"reasoning_content":{quote(reasoning)}')
        if answer.calls:
            calls = (f"{{{self._call_json(number, call.arguments)}}}" for number, call in enumerate(answer.calls))
            members.append(f'"tool_calls":[{",".join(calls)}]')
        return ",".join(members)

    def finish_reason_json(self, end: End | None) -> str:
        """`tool_calls` if there are tool calls and all are complete; null before the end."""
        return "null" if end is None else f'"{self._answer.outcome(end)}"'

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far."""
        return self._answer.reasoning_tokens

    def _added_deltas(self, parts: list[AnswerPart]) -> list[str]:
        """Adds the parts of the next token. Returns the members of their deltas."""
        number = len(self._answer.calls) - 1  # of the latest call
        self._answer.add(parts)
        deltas = []
        for part in parts:
            match part.kind:
                case PartKind.TEXT:
                    deltas.append(f'"content":{quote(part.text)}')
                case PartKind.REASONING:
                    deltas.append(f'"reasoning_content":{quote(part.text)}')
                case PartKind.CALL:
                    number += 1
                    self._input = InputReader()
                    deltas.append(f'"tool_calls":[{{"index":{number},{self._call_json(number, "")}}}]')
                case _ if self._answer.calls[number].name in self._custom_tools:
                    if text := self._input.read(part.text):
                        deltas.append(f'"tool_calls":[{{"index":{number},"custom":{{"input":{quote(text)}}}}}]')
                case _:
                    arguments = f'"function":{{"arguments":{quote(part.text)}}}'
                    deltas.append(f'"tool_calls":[{{"index":{number},{arguments}}}]')
        return deltas

    def _call_json(self, number: int, arguments: str) -> str:
        """The members of a call: in a message with all arguments, in its first delta with none."""
        name = self._answer.calls[number].name
        kind, member = "function", f'"arguments":{quote(arguments)}'
        if name in self._custom_tools:
            kind, member = "custom", f'"input":{quote(InputReader().read(arguments))}'
        return f'"id":"{self._call_id(number)}","type":"{kind}","{kind}":{{"name":{quote(name)},{member}}}'
