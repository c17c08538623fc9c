"""Sends every exchange of the golden files as raw bytes and compares the response byte by byte."""

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.api.conftest import Front, Reply
from tests.golden.conftest import in_flight
from tests.golden.reader import Exchange, exchanges, placeholder_values
from tests.golden.scripts import SCRIPTS
from tgi.microkernel.messages.protocol import Generate

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
    if exchange.given == "another request is in flight":
        with in_flight(front):
            reply = answer(front, exchange)
    elif exchange.given == "no token before a keep-alive comment":
        monkeypatch.setattr("tgi.api.sse.KEEP_ALIVE_SECONDS", 0.05)
        reply = answer_after_keep_alive(front, exchange)
    else:
        reply = answer(front, exchange)
    body = reply.body.decode()
    if exchange.order == "any":
        body = by_choice(body)
    differences = [*header_differences(exchange, reply)]
    if reply.status != exchange.status:
        differences.append(f"status: expected {exchange.status}, received {reply.status}")
    if not exchange.expected.fullmatch(body):
        differences.append(exchange.difference(body))
    if differences:
        pytest.fail("\n".join(differences), pytrace=False)
    check_common_headers(exchange, reply)
    found = placeholder_values(exchange.expected, body, exchange.body)
    if "created" in found:
        assert before <= int(found["created"]) <= int(time.time())


def header_differences(exchange: Exchange, reply: Reply) -> Iterator[str]:
    """A message for each header of the file that the response does not match."""
    for name, value in exchange.headers.items():
        given = reply.headers.get(name, "(none)")
        if name == "allow" or name.startswith("access-control-allow-"):  # lists in any order
            same = sorted(list_items(given)) == sorted(list_items(value))
        else:
            same = exchange.header(name).fullmatch(given) is not None
        if not same:
            yield f"{name}: expected {value}, received {given}"


def check_common_headers(exchange: Exchange, reply: Reply) -> None:
    """Checks every response: CORS (§2), a correct content-length, no timing headers on errors (§6.1)."""
    assert list_items(reply.headers["vary"]) == list_items(VARY)
    if "access-control-allow-origin" not in exchange.headers:
        assert reply.headers["access-control-allow-origin"] == "*"
    if not exchange.request.startswith("HEAD") and "transfer-encoding" not in reply.headers:
        assert int(reply.headers["content-length"]) == len(reply.body)
    if reply.status != 200:
        assert not reply.headers.keys() & set(TIMINGS)


def list_items(header: str) -> list[str]:
    """The items of a list in a header, without white space."""
    return [item.strip() for item in header.split(",")]


def by_choice(body: str) -> str:
    """Sorts the events of a stream by choice; events without a choice come last."""

    def choice(event: str) -> int:
        data = json.loads(event.removeprefix("data: ")) if event.startswith("data: {") else {}
        return int(data["choices"][0]["index"]) if data.get("choices") else 1 << 30

    return "".join(sorted(re.findall(r"(?:[^\n]+\n)+\n|.+", body), key=choice))


def answer(front: Front, exchange: Exchange) -> Reply:
    """Sends the request and reads until the server closes the connection."""
    with front.connect() as connection:
        connection.sendall(exchange.bytes)
        return Reply(b"".join(received(connection)))


def answer_after_keep_alive(front: Front, exchange: Exchange) -> Reply:
    """The same, but the tokenizer answers only after the client has received a keep-alive comment."""
    tokenizer = front.tokenizers[0]
    script, tokenizer.answer = tokenizer.answer, SCRIPTS["silence"]()
    while not tokenizer.received.empty():
        tokenizer.received.get()
    with front.connect() as connection:
        connection.sendall(exchange.bytes)
        data = b""
        for count, part in enumerate(received(connection)):
            data += part
            assert count < 20 or script is None, f"no keep-alive comment in {data!r}"
            if script and KEEP_ALIVE in data.partition(b"\r\n\r\n")[2]:
                tokenizer.send(*(script(tokenizer.next(Generate)) or ()))
                script = None
        return Reply(data)


def received(connection: socket.socket) -> Iterator[bytes]:
    """The received bytes in chunks, until the server closes the connection."""
    while part := connection.recv(65536):
        yield part


def test_the_files_cover_every_route() -> None:
    """Each route of the contract's table has an exchange."""
    covered = {" ".join(each.request.split(" ", 2)[:2]) for each in ALL}
    routes = [
        "POST /", "POST /generate", "POST /generate_stream", "POST /v1/chat/completions", "POST /v1/completions",
        "POST /v1/messages", "POST /v1/messages/count_tokens",
        "POST /v1/responses", "GET /v1/responses/resp_1", "DELETE /v1/responses/resp_1",
        "POST /v1/responses/resp_1/cancel", "GET /v1/responses/resp_1/input_items", "POST /v1/conversations",
        "POST /vertex", "POST /invocations", "POST /tokenize", "POST /chat_tokenize", "POST /detokenize",
        "POST /v1/chat/completions/input_tokens", "POST /v1/responses/input_tokens", "GET /", "GET /health",
        "GET /ping", "GET /info", "GET /metrics", "GET /v1/models", "GET /v1/models/m", "GET /docs",
        "GET /api-doc/openapi.json", "GET /v2", "GET /v2/health/live", "GET /v2/health/ready",
        "GET /v2/models/m/versions/1", "GET /v2/models/m/versions/1/ready", "POST /v2/models/m/versions/1/infer",
    ]  # fmt: skip
    assert [route for route in routes if route not in covered] == []
