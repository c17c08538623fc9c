"""Requests that are expensive before they reach the scheduler, next to clients that must not notice them."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.live.server import TIMEOUT_SECONDS, Server
from tests.models import model

pytestmark = pytest.mark.live

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
MIDDLING = "A river. " * 4000  # longer than what the loop encodes at once
LARGE = 1_800_000  # characters


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model-id", str(model("llama")), "--worker", "scripted", "--validation-workers", "2")
    flags += ("--grammar-compile-limit", "0.25")
    with Server(tmp_path_factory.mktemp("server") / "run", *flags) as server:
        yield server.start().wait_until_ready()


def send_and_leave(server: Server, bodies: list[dict[str, Any]], path: str = "/generate") -> None:
    """Sends all requests, and closes the connections when the last one has been sent."""
    connections = []
    for body in bodies:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", server.port), TIMEOUT_SECONDS)
        connection.sendall(head.encode() + data)
        connections.append(connection)
    for connection in connections:
        connection.close()


def dropped(server: Server) -> float:
    return server.metric("tgi_encoding_jobs_dropped")


def serve_clients(server: Server) -> None:
    """A client with a JSON schema, one with a text of ordinary length and one with a text that needs a thread."""
    server.generate("A person", max_new_tokens=4, grammar={"type": "json", "value": PERSON})
    server.generate("A river", max_new_tokens=4)
    server.generate(MIDDLING, max_new_tokens=4, truncate=50)


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
def test_long_texts_of_clients_that_have_left_are_dropped(server: Server, path: str) -> None:
    before = dropped(server)
    bodies = [{"inputs": f"word{n:02} " * (LARGE // 7), "parameters": {"truncate": 50}} for n in range(24)]
    attack = threading.Thread(target=send_and_leave, args=(server, bodies, path))
    attack.start()
    serve_clients(server)
    attack.join()
    server.wait_until(lambda: dropped(server) >= before + len(bodies) // 2, "the texts are dropped")
    serve_clients(server)


def endless(number: int) -> dict[str, Any]:
    """A schema whose compilation takes minutes and is within the library's own limits."""
    schema = {"allOf": [{"type": "integer", "multipleOf": 9973 + number}, {"multipleOf": 9967}]}
    return {"inputs": "x", "parameters": {"max_new_tokens": 4, "grammar": {"type": "json", "value": schema}}}


def test_grammars_of_clients_that_have_left_are_dropped(server: Server) -> None:
    before = dropped(server)
    bodies = [endless(number) for number in range(60)]
    attack = threading.Thread(target=send_and_leave, args=(server, bodies))
    attack.start()
    serve_clients(server)
    attack.join()
    server.wait_until(lambda: dropped(server) >= before + len(bodies) // 2, "the grammars are dropped")
    serve_clients(server)


def test_the_compile_time_of_a_grammar_is_limited(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(server.client.post, "/generate", json=endless(500 + number)) for number in range(4)]
        server.generate("A river", max_new_tokens=4)
        server.generate(MIDDLING, max_new_tokens=4, truncate=50)
        for answer in answers:
            assert answer.result().status_code == 422
            assert "takes more than 0.25 seconds of computation" in answer.result().json()["error"]
    serve_clients(server)


@pytest.mark.parametrize("regex", ["a{%d}", "(ab){%d}"])
def test_repetition_is_rejected_before_compiling(server: Server, regex: str) -> None:
    def post(number: int) -> httpx.Response:
        grammar = {"type": "regex", "value": regex % (10**9 + number)}
        return server.client.post("/generate", json={"inputs": "x", "parameters": {"grammar": grammar}})

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(post, range(60)))
    assert {answer.status_code for answer in answers} == {422}
    assert "at most 100000 are allowed" in answers[0].json()["error"]
    serve_clients(server)


class Flood:
    """Concurrent requests of another client: clients without keys are told apart by address. Waits until one of them is
    answered, so that all have arrived; fails if all are answered before the block ends."""

    def __init__(self, server: Server, bodies: list[dict[str, Any]]) -> None:
        self._server = server
        self._bodies = bodies
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        self._client = httpx.Client(base_url=server.url, transport=transport, timeout=TIMEOUT_SECONDS)
        self._pool = ThreadPoolExecutor(len(bodies))
        self.answers: list[Future[httpx.Response]] = []

    def __enter__(self) -> "Flood":
        self.answers = [self._pool.submit(self._client.post, "/generate", json=body) for body in self._bodies]
        self._server.wait_until(lambda: any(answer.done() for answer in self.answers), "the flood is being encoded")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        all_done = all(answer.done() for answer in self.answers)
        self._pool.shutdown()
        self._client.close()
        assert kind is not None or not all_done


def test_a_client_with_many_long_texts_delays_others_by_none_of_them(server: Server) -> None:
    body = {"inputs": "word é " * (LARGE // 8), "parameters": {"max_new_tokens": 2, "truncate": 50}}
    with Flood(server, [body] * 8) as flood:
        server.generate("word é " * 40_000, max_new_tokens=2, truncate=50)
    assert {answer.result().status_code for answer in flood.answers} == {200}


def test_a_client_with_many_endless_grammars_delays_others_by_none_of_them(server: Server) -> None:
    with Flood(server, [endless(1000 + number) for number in range(8)]) as flood:
        serve_clients(server)
    assert {answer.result().status_code for answer in flood.answers} == {422}
