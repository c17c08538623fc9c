"""What a started server says of itself: which model, in what form, with which kernels and limits, and how to ask it.

The worker knows most of it. It leaves a Served in the facts of its state file, and the tokenizer whether the model has
a chat template; the supervisor that serves the port reads both once all processes are ready. On a terminal it shows
`lines`; elsewhere the same is in the `fields` of a log record.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tgi.kernel.presence import Limits
from tgi.kernel.settings import Settings

CHAT_TEMPLATE = "chat_template"  # the tokenizer's fact
QUESTION = "Name three primary colors."  # which the demo model answers at any seed


class Served(NamedTuple):
    """The facts of a worker."""

    source: str  # where the model is from
    device: str  # "cpu", or the name of the GPU
    kernels: str  # whose compute, and why if not our own
    dtype: str  # of activations
    weight_bytes: int  # of matrices in memory
    weight_bits: float  # of each number in them, on average
    kv_cache_bytes: int  # at most
    kv_cache_tokens: int
    max_total_tokens: int  # of a request
    max_batch_size: int  # requests that run at once

    @classmethod
    def of(
        cls,
        settings: Settings,
        limits: Limits,
        device: str,
        kernels: str,
        weight_bytes: int = 0,
        weight_bits: float = 0.0,
        kv_cache_bytes: int = 0,
    ) -> "Served":
        """With what the settings and the limits say."""
        weights = settings.model_source, device, kernels, limits.dtype, weight_bytes, weight_bits
        tokens = limits.max_batch_total_tokens, limits.max_total_tokens, limits.max_batch_size
        return cls(*weights, kv_cache_bytes, *tokens)


def fields(settings: Settings, facts: dict[str, Any], url: str) -> dict[str, Any]:
    """The summary for programs. `facts` are those of all processes that are seen, `url` is "" for roles alone."""
    found = {"model": settings.model_id} | {name: facts[name] for name in Served._fields if name in facts}
    return found | ({"url": url, "docs": f"{url}/docs"} if url else {})


def lines(settings: Settings, facts: dict[str, Any], url: str) -> list[str]:
    """The summary for people: a line for each group of facts, and a command to paste."""
    rows = []
    if set(Served._fields) <= facts.keys():
        served = Served(**{name: facts[name] for name in Served._fields})
        bits = f", {served.weight_bits:.1f} bits each" if served.weight_bytes else ""
        rows += [
            ("from", served.source),
            ("weights", f"{_size(served.weight_bytes)}{bits}; computed in {served.dtype} on {served.device}"),
            ("kernels", served.kernels),
            ("context", f"{served.max_total_tokens:,} tokens a request, {served.max_batch_size:,} requests at once"),
            ("KV cache", f"{served.kv_cache_tokens:,} tokens, {_size(served.kv_cache_bytes)} at most"),
        ]
    if url:
        rows += [("docs", f"{url}/docs"), ("ask", _request(settings, facts, url))]
    return [f"  {name:<9} {value}" for name, value in rows]


def _size(count: int) -> str:
    """Bytes as people write them."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _request(settings: Settings, facts: dict[str, Any], url: str) -> str:
    """A command that asks the server something: in a chat if the model has a template for it. It never has a key."""
    if facts.get(CHAT_TEMPLATE):
        path = "/v1/chat/completions"
        body: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 50}
    else:
        path, body = "/generate", {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"


def short(path: Path) -> str:
    """A path as people write it, with ~ for their home."""
    try:
        return str("~" / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # elsewhere, or a user without a home
        return str(path)
