"""The APIs that can be measured, as data: path and body of a streamed request, and what its events hold."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tgi.bench.stream import Event


class Message(NamedTuple):
    """A message of a conversation."""

    role: str
    text: str


class Answer(NamedTuple):
    """What a streamed response has brought."""

    text: str
    times: list[float]  # of the events with text, in seconds
    output_tokens: int  # as the server counts, else the number of these events
    input_tokens: int | None  # None: not told
    cached_tokens: int | None


class Api(NamedTuple):
    """One API. `body` makes a request of the model's name, the messages and the number of tokens; `read` an Answer."""

    path: str
    body: Callable[[str, Sequence[Message], int], dict[str, Any]]
    read: Callable[[list[Event]], Answer]
    held: dict[str, Any]  # members that hold the length of answers, which not every server knows


def _chat_body(model: str, messages: Sequence[Message], tokens: int) -> dict[str, Any]:
    told = [{"role": one.role, "content": one.text} for one in messages]
    return _openai(model, tokens) | {"messages": told}


def _completion_body(model: str, messages: Sequence[Message], tokens: int) -> dict[str, Any]:
    return _openai(model, tokens) | {"prompt": _joined(messages)}


def _openai(model: str, tokens: int) -> dict[str, Any]:
    options = {"include_usage": True}
    return {"model": model, "max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": options}


def _native_body(model: str, messages: Sequence[Message], tokens: int) -> dict[str, Any]:
    return {"inputs": _joined(messages), "parameters": {"max_new_tokens": tokens}}


def _joined(messages: Sequence[Message]) -> str:
    return "\n".join(one.text for one in messages)


def _read_openai(events: list[Event], text_of: Callable[[dict[str, Any]], str]) -> Answer:
    parts: list[str] = []
    times: list[float] = []
    usage: dict[str, Any] = {}
    for event in events:
        usage = event.data.get("usage") or usage
        for choice in event.data.get("choices") or ():
            if text := text_of(choice):
                parts.append(text)
                times.append(event.time)
    details = usage.get("prompt_tokens_details") or {}
    tokens = usage.get("completion_tokens") or len(times)
    return Answer("".join(parts), times, tokens, usage.get("prompt_tokens"), details.get("cached_tokens"))


def _text_of_delta(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _read_chat(events: list[Event]) -> Answer:
    return _read_openai(events, _text_of_delta)


def _read_completion(events: list[Event]) -> Answer:
    return _read_openai(events, lambda choice: choice.get("text") or "")


def _read_native(events: list[Event]) -> Answer:
    tokens = [event for event in events if "token" in event.data]
    text = "".join(event.data["token"]["text"] for event in tokens)
    details = (tokens[-1].data.get("details") or {}) if tokens else {}
    return Answer(text, [event.time for event in tokens], len(tokens), details.get("input_length"), None)


# By the name on the command line.
APIS = {
    "chat": Api("/v1/chat/completions", _chat_body, _read_chat, {"ignore_eos": True}),
    "completions": Api("/v1/completions", _completion_body, _read_completion, {"ignore_eos": True}),
    "tgi": Api("/generate_stream", _native_body, _read_native, {}),
}
