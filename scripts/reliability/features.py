"""The requests of a chaos run: every route with every feature, and the part of an answer that is compared.

Ids, times and the division of a chat's stream into events may differ between two correct answers; everything else is
equal, bit for bit.
"""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from scripts.reliability.client import Answer, events

NATIVE, NATIVE_STREAM = "/generate", "/generate_stream"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ("river", "mountain", "city", "answer", "question", "evening", "water", "light", "number", "theory", "music")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("register", "look_up")]
# Members of an answer that differ from one run to the next.
VOLATILE = {"id", "created", "system_fingerprint", "prompt_tokens_details"}  # the last: what the cache has


class Asked(NamedTuple):
    """One request: its feature for the report, its route and its body."""

    feature: str
    path: str
    body: bytes

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events, unless it is an error."""
        return self.path == NATIVE_STREAM or b'"stream": true' in self.body


def requests(count: int, seed: int, adapters: list[str], tokens: int) -> list[Asked]:
    """`count` different requests that use all features in turn, with answers of about `tokens` tokens."""
    rng = random.Random(seed)
    kinds = list(_kinds(adapters))
    found = []
    for number in range(count):
        feature, path, make = kinds[number % len(kinds)]
        text = f"{number}: " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 60)))
        body = make(text, rng.randint(max(1, tokens // 4), 2 * tokens), rng)
        found.append(Asked(feature, path, json.dumps(body).encode()))
    return found


Maker = Callable[[str, int, random.Random], dict[str, Any]]


def _kinds(adapters: list[str]) -> Iterator[tuple[str, str, Maker]]:
    """Name, route and maker of each feature."""
    for path in (NATIVE_STREAM, NATIVE):
        yield "greedy", path, lambda text, tokens, rng: _native(text, tokens)
        yield "sampling", path, lambda text, tokens, rng: _native(text, tokens, **_sampling(rng))
        yield "top logprobs", path, lambda text, tokens, rng: _native(text, tokens, top_n_tokens=3)
        yield "stop", path, lambda text, tokens, rng: _native(text, tokens, stop=["Q", "river", "xy"])
        yield (
            "grammar",
            path,
            lambda text, tokens, rng: _native(text, tokens, grammar={"type": "json", "value": SCHEMA}),
        )
        yield (
            "regex",
            path,
            lambda text, tokens, rng: _native(text, tokens, grammar={"type": "regex", "value": "[a-f]+"}),
        )
        for adapter in adapters:
            yield "adapter", path, lambda text, tokens, rng, a=adapter: _native(text, tokens, adapter_id=a)  # type: ignore[misc]
    yield "prompt logprobs", NATIVE, lambda text, tokens, rng: _native(text, tokens, decoder_input_details=True)
    yield "best_of", NATIVE, lambda text, tokens, rng: _native(text, tokens, best_of=2, **_sampling(rng))
    for stream in (True, False):
        for feature, more in (
            ("chat", {}),
            ("n", {"n": 3, "temperature": 0.9}),
            ("logprobs", {"logprobs": True, "top_logprobs": 2}),
            ("tools", {"tools": TOOLS, "tool_choice": "required"}),
            ("response_format", {"response_format": {"type": "json_object", "value": SCHEMA}}),
        ):
            yield feature, CHAT, lambda text, tokens, rng, m=more, s=stream: _chat(text, tokens, rng, s) | m  # type: ignore[misc]
        yield (
            "completions",
            COMPLETIONS,
            lambda text, tokens, rng, s=stream: {  # type: ignore[misc]
                "model": "tgi", "prompt": text, "max_tokens": tokens, "seed": rng.randrange(1 << 32), "stream": s,
            },
        )  # fmt: skip


def _sampling(rng: random.Random) -> dict[str, Any]:
    return {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": rng.randrange(1 << 32)}


def _native(text: str, tokens: int, **parameters: Any) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": tokens, "details": True, **parameters}}


def _chat(text: str, tokens: int, rng: random.Random, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": tokens, "seed": rng.randrange(1 << 32), "stream": stream}


def comparable(asked: Asked, answer: Answer) -> Any:
    """What of an answer is compared. Raises ValueError if it is not what the route promises."""
    if not asked.streams or answer.body.startswith(b"{"):
        return answer.status, _without_volatile(json.loads(answer.body))
    found = events(answer.body)
    if asked.path == NATIVE_STREAM:
        return answer.status, found
    if not answer.body.rstrip().endswith(b"data: [DONE]"):
        raise ValueError("no [DONE]")
    return answer.status, _joined(found)


def is_close(expected: Any, got: Any, tolerance: float, is_logprob: bool = False) -> bool:
    """Whether two results of `comparable` are equal but for logprobs, which may differ by `tolerance`."""
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(
            is_close(one, got[name], tolerance, is_logprob or "logprob" in name) for name, one in expected.items()
        )
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        return len(expected) == len(got) and all(
            is_close(one, other, tolerance, is_logprob) for one, other in zip(expected, got, strict=True)
        )
    if is_logprob and isinstance(expected, float | int) and isinstance(got, float | int):
        return abs(expected - got) <= tolerance
    return bool(expected == got)


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(one) for key, one in value.items() if key not in VOLATILE}
    return [_without_volatile(one) for one in value] if isinstance(value, list) else value


def _joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """A chat's or completion's stream as one value: texts are joined, lists are concatenated, per choice."""
    joined: dict[str, Any] = defaultdict(str)
    for event in found:
        if "error" in event:
            joined["error"] = event["error"]
        if event.get("usage"):
            joined["usage"] = _without_volatile(event["usage"])
        for choice in event.get("choices", []):
            _join(joined, f"choices.{choice['index']}", _without_volatile(choice))
    return dict(joined)


def _join(joined: dict[str, Any], path: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, one in value.items():
            _join(joined, f"{path}.{key}", one)
    elif isinstance(value, list) and path.endswith("tool_calls"):
        for one in value:
            _join(joined, f"{path}.{one.get('index', 0)}", one)
    elif isinstance(value, list):
        joined[path] = (joined.get(path) or []) + value
    elif isinstance(value, str) and not path.endswith((".role", ".type", ".finish_reason")):
        joined[path] = (joined.get(path) or "") + value
    elif value is not None:
        joined[path] = value
