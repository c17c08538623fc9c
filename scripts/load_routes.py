"""Requests of each route, and parsing of its responses and events: tokens, errors, end."""

from dataclasses import dataclass
from typing import Any, NamedTuple

DONE = b"[DONE]"


class Event(NamedTuple):
    """One event of a stream."""

    token: bool = False  # has text of a new token
    generated: int | None = None  # tokens of the whole response; known at its end
    error: str = ""
    last: bool = False  # the last event of a complete stream


@dataclass(frozen=True)
class Native:
    """TGI's own routes."""

    path: str

    def body(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        """The request (`stream` counts on / alone, the others ignore it)."""
        return {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "details": True}, "stream": stream}

    def generated(self, answer: Any) -> int:
        """The number of tokens of a response. Raises KeyError and similar if it is missing."""
        first = answer[0] if isinstance(answer, list) else answer
        return int(first["details"]["generated_tokens"])

    def event(self, event: dict[str, Any]) -> Event:
        """Parses an event."""
        if "error" in event:
            return Event(error=str(event["error"]))
        details = event.get("details")
        if event["generated_text"] is None or details is None:
            return Event(token=True)
        return Event(token=True, generated=int(details["generated_tokens"]), last=True)


@dataclass(frozen=True)
class OpenAI:
    """The OpenAI routes. Their streams end with DONE, after an event with the usage."""

    path: str

    def body(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        """The request."""
        chat = self.path.endswith("/chat/completions")
        asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return {"model": "tgi", "max_tokens": tokens, "stream": stream} | asked | usage

    def generated(self, answer: Any) -> int:
        """The number of tokens of a response. Raises KeyError and similar if it is missing."""
        return int(answer["usage"]["completion_tokens"])

    def event(self, event: dict[str, Any]) -> Event:
        """Parses an event."""
        if "error" in event:
            return Event(error=str(event["error"]["message"]))
        usage = event.get("usage")
        generated = int(usage["completion_tokens"]) if usage else None
        return Event(token=any(_text(choice) for choice in event["choices"]), generated=generated)


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice in a chunk; the first chunk of a chat may have only a role, the last one only the end."""
    return choice["delta"].get("content") or "" if "delta" in choice else choice["text"]


GENERATE = Native("/generate")
GENERATE_STREAM = Native("/generate_stream")
ROOT = Native("/")
CHAT = OpenAI("/v1/chat/completions")
COMPLETIONS = OpenAI("/v1/completions")
