"""How the load asks each route, and what a route's answers and events say: tokens, errors, the end."""

from dataclasses import dataclass
from typing import Any, NamedTuple

DONE = b"[DONE]"


class Event(NamedTuple):
    """One event of a stream."""

    token: bool = False  # text of a new token has come
    generated: int | None = None  # tokens of the whole answer; known at its end
    error: str = ""
    last: bool = False  # nothing may be missing after this one


@dataclass(frozen=True)
class Native:
    """TGI's own routes."""

    path: str

    def body(self, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
        """The request (`stream` counts on / alone, the others ignore it)."""
        return {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "details": True}, "stream": stream}

    def generated(self, answer: Any) -> int:
        """How many tokens an answer without stream has. Raises KeyError and the like if it does not say."""
        first = answer[0] if isinstance(answer, list) else answer
        return int(first["details"]["generated_tokens"])

    def event(self, event: dict[str, Any]) -> Event:
        """What an event says."""
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
        """How many tokens an answer without stream has. Raises KeyError and the like if it does not say."""
        return int(answer["usage"]["completion_tokens"])

    def event(self, event: dict[str, Any]) -> Event:
        """What an event says."""
        if "error" in event:
            return Event(error=str(event["error"]["message"]))
        usage = event.get("usage")
        generated = int(usage["completion_tokens"]) if usage else None
        return Event(token=any(_text(choice) for choice in event["choices"]), generated=generated)


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice in a chunk: the first chunk of a chat may bring a role alone, the last one an ending."""
    return choice["delta"].get("content") or "" if "delta" in choice else choice["text"]


GENERATE = Native("/generate")
GENERATE_STREAM = Native("/generate_stream")
ROOT = Native("/")
CHAT = OpenAI("/v1/chat/completions")
COMPLETIONS = OpenAI("/v1/completions")
