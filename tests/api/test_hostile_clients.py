"""Clients that send half requests, or connect and do nothing, against a front end in this process."""

import contextlib
import gc
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.conftest import Reply, Stream, request, silent, texts, word
from tgi.api import body_reader
from tgi.api.http_server import MAX_HEAD_BYTES, MAX_PIPELINED
from tgi.api.requests import Generation
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason, Generate

HALF_HEAD = b"POST /generate HTTP/1.1\r\nhost: a\r\nx-more: "
HEAD = {"content-type": "application/json", "content-length": "1900000"}
HALF_BODY = request("POST", "/generate", b'{"inputs":"', HEAD)


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_open(connection: socket.socket) -> bool:
    """Whether the server has neither closed the connection nor sent anything."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    finally:
        connection.settimeout(20)
    return False


def test_half_heads_end_with_408(serve: Any) -> None:
    front = serve(read_timeout=0.3)
    connections = [front.connect() for _ in range(200)]
    for connection in connections:
        connection.sendall(HALF_HEAD)
    for connection in connections:
        reply = Reply(read_all(connection))
        assert (reply.status, reply.body) == (408, b"The head of this request was not complete within 0.3 s.")
        assert reply.headers["connection"] == "close"
    assert front.post("/generate", '{"inputs":"x"}').status == 200


def test_a_head_that_drips_ends_too(serve: Any) -> None:
    front = serve(read_timeout=0.3)
    with front.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"x")
                time.sleep(0.01)
        assert not is_open(connection)


def test_half_bodies_end_with_408_in_the_format_of_the_route(serve: Any) -> None:
    front = serve(read_timeout=0.3)
    connections = [front.connect() for _ in range(200)]
    for connection in connections:
        connection.sendall(HALF_BODY)
    text = "The body of this request did not grow by 32 KiB within 0.3 s"
    for connection in connections:
        reply = Reply(read_all(connection))
        assert (reply.status, reply.body.decode()) == (408, text)
    for begin in (b"", b"{"):
        with front.connect() as connection:
            connection.sendall(request("POST", "/v1/completions", begin, HEAD))
            reply = Reply(read_all(connection))
            assert (reply.status, json.loads(reply.body)["error"]["message"]) == (408, text)
    assert front.post("/generate", '{"inputs":"x"}').status == 200


def test_a_slow_body_that_grows_is_read(serve: Any) -> None:
    front = serve(read_timeout=1)
    body = json.dumps({"inputs": "x" * 400_000}).encode()
    began = time.monotonic()
    with front.connect() as connection:
        connection.sendall(request("POST", "/generate", b"", HEAD | {"content-length": str(len(body))}))
        for start in range(0, len(body), 40_000):
            time.sleep(0.2)
            connection.sendall(body[start : start + 40_000])
        assert Reply(read_all(connection)).status == 200
    assert time.monotonic() - began > 1.5  # longer than the time limit without progress


def test_the_rest_of_a_body_whose_request_was_answered_is_not_awaited_for_ever(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgi.api.http_server.KEEP_ALIVE_SECONDS", 0.5)
    front = serve()
    with front.connect() as connection:
        connection.sendall(HALF_BODY.replace(b"/generate", b"/nothing").replace(b"connection: close\r\n", b""))
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"x")
                time.sleep(0.01)
    until(lambda: not front.connections)


def test_a_silent_connection_is_closed(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi.api.http_server.KEEP_ALIVE_SECONDS", 0.2)
    front = serve()
    with front.connect() as connection:
        connection.sendall(b"\r\n\r\n")  # allowed before a request, and no request
        assert read_all(connection) == b""


def test_memory_of_incomplete_bodies_is_bounded(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that have stopped are ended, so a client that sends its body is served at once."""
    monkeypatch.setattr(body_reader, "MAX_BYTES_IN_TRANSIT", 1 << 20)
    front = serve(payload_limit=200_000)
    half = request("POST", "/generate", b"x" * 190_000, HEAD | {"content-length": "195000"})
    connections = []
    for _ in range(20):
        connections.append(front.connect())
        connections[-1].sendall(half)
    reader = front.service.bodies
    until(lambda: sum(is_open(connection) for connection in connections) <= 5)
    assert reader.bytes_in_transit <= 1 << 20
    ended = [connection for connection in connections if not is_open(connection)]
    replies = [Reply(read_all(connection)) for connection in ended]
    text = b"The incomplete bodies of all requests take more than 1 MiB, and this one has made no progress for longest"
    assert {(reply.status, reply.body) for reply in replies} == {(408, text)}
    assert front.post("/generate", json.dumps({"inputs": "x" * 190_000})).status == 200
    for connection in connections:
        connection.close()
    until(lambda: reader.bytes_in_transit == 0)


def test_a_body_without_key_or_permit_is_not_read(serve: Any) -> None:
    front = serve(silent, max_concurrent_requests=1, api_key=("k",))
    with front.connect() as connection:
        connection.sendall(request("POST", "/generate", b"", HEAD))
        assert Reply(read_all(connection)).status == 401
    head = {"content-type": "application/json", "content-length": "14", "authorization": "Bearer k"}
    with front.connect() as running, front.connect() as connection:
        running.sendall(request("POST", "/generate_stream", b'{"inputs":"x"}', head))
        rid = front.tokenizers[0].next(Generate).rid
        for length in ({"content-length": "1900000"}, {"transfer-encoding": "chunked"}):
            with front.connect() as large:
                fields = {name: value for name, value in head.items() if name != "content-length"} | length
                large.sendall(request("POST", "/generate", b"", fields))
                assert Reply(read_all(large)).status == 429
        connection.sendall(request("POST", "/generate", b'{"inputs":"x"}', head))
        reply = Reply(read_all(connection))
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        front.tokenizers[0].send(word(rid, 1), End(rid, FinishReason.EOS, "", " 1", 1, 1))
        assert Reply(read_all(running)).status == 200


def test_idle_connections_make_room_the_longest_idle_first(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    front = serve(silent, max_connections=6)
    busy = Stream(front)
    rid = front.tokenizers[0].next(Generate).rid
    idle = []
    for count in range(2, 7):
        idle.append(front.connect())
        until(lambda count=count: front.connections == count)
    idle[0].sendall(b"GET /nothing HTTP/1.1\r\nhost: a\r\n\r\n")  # now the one that was used last
    assert b" 404 " in idle[0].recv(65536)
    idle[2].sendall(HALF_HEAD)
    with caplog.at_level(logging.WARNING, "tgi.api.http_server"):
        assert front.get("/nothing").status == 404
        until(lambda: not is_open(idle[1]))
        assert [is_open(connection) for connection in idle] == [True, False, True, True, True]
        more = [front.connect() for _ in range(2)]
        until(lambda: not is_open(idle[2]))
        until(lambda: "Closed" in caplog.text)
    assert [is_open(connection) for connection in idle] == [True, False, False, True, True]
    assert "refused 0: all 6 connections of this front end are in use (--max-connections)" in caplog.text
    front.tokenizers[0].send(word(rid, 1), End(rid, FinishReason.EOS, "", " 1", 1, 1))
    assert busy.read_rest().status == 200
    for connection in more:
        connection.close()


def test_connections_beyond_the_limit_are_refused(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    front = serve(silent, max_connections=3)
    streams = [Stream(front) for _ in range(3)]
    rids = [front.tokenizers[0].next(Generate).rid for _ in streams]
    with caplog.at_level(logging.WARNING, "tgi.api.http_server"):
        for _ in range(200):
            reply = front.get("/health")
            assert (reply.status, reply.headers["x-startup-stage"]) == (503, "too many connections")
            assert (reply.headers["retry-after"], reply.headers["connection"]) == ("1", "close")
        until(lambda: "refused" in caplog.text)
        time.sleep(1.2)  # a tick of the server later there is no second line
    assert len([record for record in caplog.records if "refused" in record.message]) == 1
    for rid in rids:
        front.tokenizers[0].send(word(rid, 1), End(rid, FinishReason.EOS, "", " 1", 1, 1))
    for stream in streams:
        assert stream.read_rest().status == 200
    until(lambda: front.get("/health").status == 200)


KEEP = {"content-type": "application/json", "content-length": "14"}
STREAM = request("POST", "/generate_stream", b'{"inputs":"x"}', KEEP).replace(b"connection: close\r\n", b"")
GET = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        (HALF_HEAD, b"HTTP/1.1 408 Request Timeout\r\n"),
        (b"\x16\x03\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\n"),
        (request("POST", "/generate", b"no chunk", {"transfer-encoding": "chunked"}), b"HTTP/1.1 400 Bad Request\r\n"),
    ],
)
def test_a_fault_behind_a_request_leaves_its_response_whole(serve: Any, fault: bytes, answer: bytes) -> None:
    front = serve(silent, read_timeout=0.2)
    with front.connect() as connection:
        connection.sendall(STREAM)
        rid = front.tokenizers[0].next(Generate).rid
        connection.sendall(fault)
        time.sleep(0.5)
        front.tokenizers[0].send(word(rid, 1), End(rid, FinishReason.EOS, "", " 1", 1, 1))
        stream, _, rejection = read_all(connection).partition(b"\r\n0\r\n\r\n")
    assert b'"text":" 1"' in stream
    assert stream.count(b"HTTP/1.1 ") == 1
    assert rejection.startswith(answer)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(serve: Any, path: str) -> None:
    front = serve(silent)
    with front.connect() as connection:
        connection.sendall(STREAM.replace(b"/generate_stream", path.encode()))
        connection.shutdown(socket.SHUT_WR)
        rid = front.tokenizers[0].next(Generate).rid
        time.sleep(0.5)  # several probes
        front.tokenizers[0].send(word(rid, 1), End(rid, FinishReason.EOS, "", " 1", 1, 1))
        *interim, answer = read_all(connection).split(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert not b"".join(interim)
    assert Reply(answer).status == 200
    assert b'"generated_text":" 1"' in answer
    until(lambda: not front.connections)


def test_a_client_that_leaves_behind_pipelined_requests_is_noticed(serve: Any) -> None:
    front = serve(silent)
    with front.connect() as connection:
        connection.sendall(STREAM)
        rid = front.tokenizers[0].next(Generate).rid
        connection.sendall(3 * GET)
        time.sleep(0.1)
    assert front.tokenizers[0].next(Cancel).rid == rid


@pytest.mark.parametrize("head", [GET, GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"])
def test_pipelined_requests_are_bounded(serve: Any, head: bytes) -> None:
    front = serve()
    with front.connect() as connection:
        connection.sendall((MAX_PIPELINED + 1) * head)
        received = b""
        while received.count(b" 200 OK") < MAX_PIPELINED + 1:
            received += connection.recv(65536)
        assert is_open(connection)
        connection.sendall(3000 * head)
        received = read_all(connection)
        assert received.count(b" 200 OK") == MAX_PIPELINED + 1
        assert received.endswith(b"More than 64 requests wait for the response to an earlier one.")


def test_trailers_are_bounded_and_dropped(serve: Any) -> None:
    front = serve()
    chunked = {"content-type": "application/json", "transfer-encoding": "chunked"}
    body = b'e\r\n{"inputs":"x"}\r\n0\r\n'
    with front.connect() as connection:
        connection.sendall(request("POST", "/generate", body + b"authorization: Bearer k\r\n\r\n", chunked))
        assert Reply(read_all(connection)).status == 200
    with front.connect() as connection:
        connection.sendall(request("POST", "/generate", body, chunked))
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                connection.sendall(b"x: " + b"y" * (MAX_HEAD_BYTES // 4) + b"\r\n")
                time.sleep(0.01)
        assert not is_open(connection)


def test_a_request_behind_a_large_body_has_its_own_head(serve: Any) -> None:
    front = serve()
    body = json.dumps({"inputs": "x" * 100_000}).encode()
    head = request("POST", "/generate", b"", KEEP | {"content-length": str(len(body))})
    with front.connect() as connection:
        connection.sendall(head.replace(b"connection: close\r\n", b"") + body + GET[:8])
        time.sleep(0.2)
        connection.sendall(b"lth HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert read_all(connection).count(b" 200 OK") == 2


# Some 100 KB: more than the buffers of the system take with a small window.
LARGE = request("GET", "/api-doc/openapi.json", b"", {})
LARGE_KEPT = LARGE.replace(b"connection: close\r\n", b"")


def with_window(front: Any, size: int = 4096) -> socket.socket:
    """A connection of which the client's system takes this much that is not read, about."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", front.port))
    return connection


@pytest.mark.parametrize("requests", [LARGE, 8 * LARGE_KEPT])
def test_a_response_that_is_not_read_is_ended(serve: Any, monkeypatch: pytest.MonkeyPatch, requests: bytes) -> None:
    monkeypatch.setattr("tgi.api.http_server.KEEP_ALIVE_SECONDS", 0.2)
    front = serve(slow_reader_timeout=0.5)
    with with_window(front) as connection:
        connection.sendall(requests)
        until(lambda: front.connections == 1)
        until(lambda: front.connections == 0)


def test_a_response_that_is_read_slowly_is_whole(serve: Any) -> None:
    front = serve(slow_reader_timeout=2)
    length = len(front.get("/api-doc/openapi.json").body)
    began = time.monotonic()
    with with_window(front, 65536) as connection:
        connection.sendall(7 * LARGE_KEPT + LARGE)
        received = b""
        while part := connection.recv(3 * length, socket.MSG_WAITALL):
            received += part
            time.sleep(0.8)
    assert len(received) > 8 * length
    assert time.monotonic() - began > 2  # longer than the time limit without progress


def parked_generations() -> list[Generation]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Generation and one.parked]


def test_a_parked_stream_is_forgotten_when_its_client_leaves(serve: Any) -> None:
    front = serve(silent)
    with with_window(front) as connection:
        connection.sendall(STREAM)
        rid = front.tokenizers[0].next(Generate).rid
        front.tokenizers[0].send(*(texts(rid, (number, "x" * 1000, -0.5, False)) for number in range(2000)))
        assert front.tokenizers[0].next(Cancel).rid == rid
        assert len(parked_generations()) == 1
    until(lambda: not parked_generations())
