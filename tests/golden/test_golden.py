"""Every exchange of the golden files, sent as raw bytes; the answer is compared byte by byte."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.conftest import Front, Reply
from tests.golden.conftest import in_flight
from tests.golden.reader import Exchange, exchanges, holes
from tests.golden.scripts import SCRIPTS
from tgi.kernel.messages import Generate

ALL = list(exchanges())
KEEP_ALIVE = b":\n\n"
TIMINGS = (
    "x-compute-type", "x-compute-time", "x-compute-characters", "x-total-time", "x-validation-time", "x-queue-time",
    "x-inference-time", "x-time-per-token", "x-prompt-tokens", "x-generated-tokens",
)  # fmt: skip
VARY = "origin,access-control-request-method,access-control-request-headers"


@pytest.mark.parametrize("exchange", ALL, ids=[f"{each.place} {each.title}" for each in ALL])
def test_exchange(exchange: Exchange, front_for: Callable[[Exchange], Front], monkeypatch: Any) -> None:
    front = front_for(exchange)
    before = int(time.time())
    if exchange.given == "one request is the limit, and it is there":
        with in_flight(front):
            reply = front.raw(exchange.bytes)
    elif exchange.given == "no token before a keep-alive comment":
        monkeypatch.setattr("tgi.api.sse.KEEP_ALIVE_SECONDS", 0.05)
        reply = after_keep_alive(front, exchange)
    else:
        reply = front.raw(exchange.bytes)
    body = reply.body.decode()
    if exchange.order == "any":
        body = by_choice(body)
    assert reply.status == exchange.status, body
    for name, value in exchange.headers.items():
        if value == "(none)":
            assert name not in reply.headers
        elif name == "allow" or name.startswith("access-control-allow-"):  # lists without an order
            assert sorted(items(reply.headers[name])) == sorted(items(value))
        else:
            assert exchange.header(name).fullmatch(reply.headers.get(name, "")), f"{name}: {reply.headers.get(name)}"
    common(exchange, reply)
    assert exchange.expected.fullmatch(body), exchange.difference(body)
    found = holes(exchange.expected, body, exchange.body)
    if "created" in found:
        assert before <= int(found["created"]) <= int(time.time())


def common(exchange: Exchange, reply: Reply) -> None:
    """What holds for every response: CORS (§2), a length that is true, no timings on errors (§6.1)."""
    assert items(reply.headers["vary"]) == items(VARY)
    if "access-control-allow-origin" not in exchange.headers:
        assert reply.headers["access-control-allow-origin"] == "*"
    if not exchange.request.startswith("HEAD") and "transfer-encoding" not in reply.headers:
        assert int(reply.headers["content-length"]) == len(reply.body)
    if reply.status != 200:
        assert not reply.headers.keys() & set(TIMINGS)


def items(header: str) -> list[str]:
    """A list in a header, whose spacing is not significant."""
    return [item.strip() for item in header.split(",")]


def by_choice(body: str) -> str:
    """A stream with the events of each choice side by side; events without a choice stay behind them."""

    def choice(event: str) -> int:
        data = json.loads(event.removeprefix("data: ")) if event.startswith("data: {") else {}
        return int(data["choices"][0]["index"]) if data.get("choices") else 1 << 30

    return "".join(sorted(re.findall(r"(?:[^\n]+\n)+\n|.+", body), key=choice))


def after_keep_alive(front: Front, exchange: Exchange) -> Reply:
    """The response to a request that gets its first token once the client has read a keep-alive comment."""
    tokenizer = front.tokenizers[0]
    script, tokenizer.answer = tokenizer.answer, SCRIPTS["silence"]()
    while not tokenizer.received.empty():
        tokenizer.received.get()
    with front.connect() as connection:
        connection.sendall(exchange.bytes)
        data = b""
        while KEEP_ALIVE not in data.partition(b"\r\n\r\n")[2]:
            data += (part := connection.recv(65536))
            assert part, f"closed without a keep-alive comment: {data!r}"
        tokenizer.send(*(script(tokenizer.next(Generate)) or ()))
        while part := connection.recv(65536):
            data += part
    return Reply(data)


def test_the_files_cover_every_route() -> None:
    """No route of the contract's table is without an exchange."""
    asked = {" ".join(each.request.split(" ", 2)[:2]) for each in ALL}
    routes = [
        "POST /", "POST /generate", "POST /generate_stream", "POST /v1/chat/completions", "POST /v1/completions",
        "POST /vertex", "POST /invocations", "POST /tokenize", "POST /chat_tokenize", "GET /", "GET /health",
        "GET /ping", "GET /info", "GET /metrics", "GET /v1/models", "GET /v1/models/m", "GET /docs",
        "GET /api-doc/openapi.json", "GET /v2", "GET /v2/health/live", "GET /v2/health/ready",
        "GET /v2/models/m/versions/1", "GET /v2/models/m/versions/1/ready", "POST /v2/models/m/versions/1/infer",
    ]  # fmt: skip
    assert [route for route in routes if route not in asked] == []
