"""Requests over time: disconnects, tokenizer losses, permits, keep-alive events, pipelining."""

import asyncio
import contextlib
import json
import random
import socket
import time
from typing import Any

import pytest
import uvloop

from tests.api.conftest import FakeTokenizer, Front, Stream, events, request, silent, texts, word
from tests.api.test_hostile_clients import until
from tgi.api import sse
from tgi.api.downstream import REQUESTS_PER_FLUSH
from tgi.api.http_server import ResponseTransport
from tgi.api.requests import Generation, TokenizationRequest, WakeEvent
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    AnswerPart,
    Cancel,
    End,
    FinishReason,
    Generate,
    LastExit,
    PartKind,
    Prompted,
    PromptTokens,
    Tokenize,
    Tokenized,
)

pytestmark = pytest.mark.slow


def test_a_burst_is_sent_in_parts(serve: Any) -> None:
    """The tokenizers work on the first requests while the front end still reads others, in one turn of its loop."""
    front = serve(validation_workers=2)

    async def submit_in_one_turn() -> None:
        for _ in range(2):
            for _ in range(REQUESTS_PER_FLUSH):
                front.router.submit(TokenizationRequest(WakeEvent(), "x", True))
            for tokenizer in front.tokenizers:  # each has half of them
                for _ in range(REQUESTS_PER_FLUSH // 2):
                    tokenizer.next(Tokenize)

    asyncio.run_coroutine_threadsafe(submit_in_one_turn(), front._loop).result(30)


def test_disconnect_cancels_pipelined_requests(serve: Any) -> None:
    front = serve(silent)
    stream = Stream(front)
    body = b'{"inputs":"y"}'
    head = {"content-type": "application/json", "content-length": str(len(body))}
    stream.connection.sendall(request("POST", "/generate", body, head))
    rid = front.tokenizers[0].next(Generate).rid
    time.sleep(0.1)  # the second request is read as well
    stream.disconnect()
    assert front.tokenizers[0].next(Cancel).rid == rid


@pytest.mark.parametrize("path", ["/generate_stream", "/generate", "/"])
def test_disconnect_cancels_the_request(serve: Any, path: str) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front, path)
    rid = tokenizer.next(Generate).rid
    stream.disconnect()
    assert tokenizer.next(Cancel).rid == rid
    assert front.post("/generate", '{"inputs":""}').status == 422  # the server still answers
    assert front.router.in_flight == 0


def test_disconnect_in_mid_stream_cancels_the_request(serve: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front)
    rid = tokenizer.next(Generate).rid
    tokenizer.send(word(rid, 1))
    stream.read_until(b'"index":1')
    stream.disconnect()
    assert tokenizer.next(Cancel).rid == rid


def test_disconnect_of_a_client_that_does_not_read_cancels_the_request(serve: Any) -> None:
    """The stream waits for a full socket, so only DisconnectWatcher can notice the disconnect."""
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front)
    rid = tokenizer.next(Generate).rid
    tokenizer.send(word(rid, 1))
    stream.read_until(b'"index":1')
    big = "x" * 60_000
    for n in range(400):
        tokenizer.send(texts(rid, (n, big, -0.5, False)))
    # Other requests are served meanwhile.
    assert front.get("/health").status == 200
    stream.disconnect()
    assert tokenizer.next(Cancel).rid == rid


def test_a_stream_resumes_after_a_tokenizer_loss(serve: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front, body='{"inputs":"x","parameters":{"details":true,"do_sample":true}}')
    first = tokenizer.next(Generate)
    for n in (1, 2, 3):
        tokenizer.send(word(first.rid, n))
    stream.read_until(b'"index":3')
    tokenizer.stop()
    tokenizer.start()
    again = tokenizer.next(Generate)
    assert unpack_int32(again.resume_ids) == [1, 2, 3]
    assert again.context.waited_ms > 0
    repeated = first._replace(
        rid=again.rid,
        resume_ids=again.resume_ids,
        context=first.context._replace(attempt=2, waited_ms=again.context.waited_ms),
    )
    assert again == repeated  # with the same seed
    tokenizer.send(word(first.rid, 99))  # the rid of before the loss: dropped
    tokenizer.send(word(again.rid, 4))
    tokenizer.send(
        texts(again.rid, (5, " 5", -0.5, False)), End(again.rid, FinishReason.LENGTH, "", " 1 2 3 4 5", 3, 5)
    )
    got = events(stream.read_rest())
    assert [event["token"]["id"] for event in got] == [1, 2, 3, 4, 5]
    assert [event["index"] for event in got] == [1, 2, 3, 4, 5]
    assert got[-1]["generated_text"] == " 1 2 3 4 5"
    assert got[-1]["details"]["generated_tokens"] == 5


CHAT = '{"messages":[{"role":"user","content":"x"}],"stream":%s}'


def said(rid: int, token: int, *parts: tuple[PartKind, str]) -> Any:
    """A token of an answer that consists of parts."""
    return word(rid, token)._replace(parts=[AnswerPart(0, *part) for part in parts])


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_tool_call_resumes_after_a_tokenizer_loss(serve: Any, stream: str) -> None:
    """Each part is sent once: those of known tokens from before the loss, the rest from after it."""
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    client = Stream(front, "/v1/chat/completions", CHAT % stream)
    first = tokenizer.next(Generate)
    tokenizer.send(
        Prompted(first.rid, 3, 1, in_parts=True),
        said(first.rid, 1, (PartKind.TEXT, "Well."), (PartKind.CALL, "f")),
        said(first.rid, 2, (PartKind.ARGUMENTS, '{"a":')),
    )
    until_known(front, 2)
    tokenizer.stop()
    tokenizer.start()
    again = tokenizer.next(Generate)
    assert unpack_int32(again.resume_ids) == [1, 2]
    tokenizer.send(
        Prompted(again.rid, 3, 1, in_parts=True),
        word(again.rid, 3),  # a token without parts
        said(again.rid, 4, (PartKind.ARGUMENTS, " 1}"), (PartKind.CALL, "g")),
        said(again.rid, 5, (PartKind.ARGUMENTS, "{}")),
        End(again.rid, FinishReason.EOS, "", "raw", 3, 5),
    )
    reply = client.read_rest()
    if stream == "false":
        (choice,) = json.loads(reply.body)["choices"]
        text, calls = choice["message"]["content"], choice["message"]["tool_calls"]
        pieces = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    else:
        data = [part for part in reply.body.split(b"\n\n") if part not in (b"", b"data: [DONE]")]
        choices = [json.loads(part.removeprefix(b"data: "))["choices"][0] for part in data]
        choice = choices[-1]
        text = "".join(each["delta"].get("content", "") for each in choices)
        calls = [call for each in choices for call in each["delta"].get("tool_calls", ())]
        names = [call["function"]["name"] for call in calls if "id" in call]
        pieces = [
            (name, "".join(call["function"]["arguments"] for call in calls if call["index"] == index))
            for index, name in enumerate(names)
        ]
    assert text == "Well."
    assert pieces == [("f", '{"a": 1}'), ("g", "{}")]
    assert choice["finish_reason"] == "tool_calls"


def until_known(front: Front, count: int) -> None:
    """Waits until the front end has received this many tokens of the only request."""
    (call,) = front.router.tokenizers[0].requests.values()
    assert isinstance(call, Generation)
    while call.generated_count < count:
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("prompt", "fields", "sent"),
    [
        ([5, 7], {}, ("", [5, 7], True, None, None)),
        ("x", {"add_special_tokens": False, "truncate_prompt_tokens": 3}, ("x", [], False, 3, None)),
        ("x", {"max_completion_tokens": 9}, ("x", [], True, None, 9)),
        ("x", {"max_completion_tokens": 9, "max_tokens": 4}, ("x", [], True, None, 4)),
        ([5], {"max_tokens": 0, "echo": True}, ("", [5], True, None, 0)),
    ],
    ids=str,
)
def test_a_prompt_is_resubmitted_unchanged(serve: Any, prompt: Any, fields: dict[str, Any], sent: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front, "/v1/completions", json.dumps({"prompt": prompt, "stream": True, **fields}))
    for _ in range(2):
        asked = tokenizer.next(Generate)
        ids, special = unpack_int32(asked.input_ids), asked.add_special_tokens
        assert (asked.inputs, ids, special, asked.truncate, asked.max_new_tokens) == sent
        tokenizer.stop()
        tokenizer.start()
    tokenizer.send(End(tokenizer.next(Generate).rid, FinishReason.FAILED, "enough"))
    stream.read_rest()


def test_prompt_logprobs_resume_after_a_tokenizer_loss(serve: Any) -> None:
    """Received prompt tokens are kept; only the rest is requested again."""
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    body = '{"prompt":"a b c","echo":true,"logprobs":1,"stream":true}'
    stream = Stream(front, "/v1/completions", body)
    first = tokenizer.next(Generate)
    assert (first.prompt_logprobs_from, first.prompt_top_n) == (0, 1)
    nan, zero = pack_column(FLOAT32, [float("nan")]), pack_column(INT32, [0])
    other = Stream(front, "/generate")
    other_rid = tokenizer.next(Generate).rid
    tokenizer.send(
        PromptTokens(first.rid, pack_column(INT32, [7]), nan, zero, ["a"]),
        PromptTokens(
            first.rid,
            pack_column(INT32, [8]),
            pack_column(FLOAT32, [-0.5]),
            pack_column(INT32, [1]),
            [" b"],
            zero,
            zero,
            ["x"],
        ),
        texts(other_rid, (1, " 1", -0.5, False)),
        End(other_rid, FinishReason.LENGTH, "", " 1", 1, 1),
    )
    other.read_rest()  # by then the earlier messages were received too
    tokenizer.stop()
    tokenizer.start()
    again = tokenizer.next(Generate)
    assert (again.prompt_logprobs_from, again.prompt_top_n, unpack_int32(again.resume_ids)) == (2, 1, [])
    ids, logprobs, starts = pack_column(INT32, [9]), pack_column(FLOAT32, [-0.25]), pack_column(INT32, [3])
    tokenizer.send(
        PromptTokens(again.rid, ids, logprobs, starts, [" c"], zero, zero, ["y"]),
        texts(again.rid, (5, " d", -0.125, False)),
        End(again.rid, FinishReason.LENGTH, "", " d", 3, 1),
    )
    event = json.loads(stream.read_rest().body.split(b"\n\n")[0].removeprefix(b"data: "))
    assert event["choices"][0]["logprobs"] == {
        "tokens": ["a", " b", " c", " d"],
        "token_logprobs": [None, -0.5, -0.25, -0.125],
        "top_logprobs": [None, {"x": 0.0}, {"y": 0.0}, {}],
        "text_offset": [0, 1, 3, 5],
    }


def test_whole_responses_and_tokenization_resume_after_a_tokenizer_loss(serve: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    plain, encode = Stream(front, "/generate"), Stream(front, "/tokenize")
    tokenizer.send(word(tokenizer.next(Generate).rid, 1))
    tokenizer.next(Tokenize)
    tokenizer.stop()
    tokenizer.start()
    again: dict[type, Any] = {}
    while len(again) < 2:
        message = tokenizer.received.get(timeout=10)
        if isinstance(message, (Generate, Tokenize)):
            again[type(message)] = message
    assert unpack_int32(again[Generate].resume_ids) in ([], [1])
    zero = pack_column(INT32, [0])
    tokenizer.send(Tokenized(again[Tokenize].rid, zero, zero, zero, b"\0"))
    tokenizer.send(word(again[Generate].rid, 2), End(again[Generate].rid, FinishReason.EOS, "", "done", 1, 2))
    assert plain.read_rest().body == b'{"generated_text":"done"}'
    assert events(encode.read_rest())[0] == [{"id": 0, "text": "", "start": 0, "stop": 0, "special": False}]


def crash(tokenizer: Any, in_progress: bytes, outside: bool = False) -> None:
    """The tokenizer dies with these requests in progress, and its successor reports that."""
    tokenizer.stop()
    tokenizer.last_exit = LastExit(tokenizer.boot, "was killed by SIGSEGV", outside, in_progress)
    tokenizer.start()


def test_a_request_that_crashes_three_tokenizers_is_quarantined_and_no_other(serve: Any) -> None:
    front = serve(silent)
    (tokenizer,) = front.tokenizers
    body, innocent = '{"inputs":"poison"}', '{"inputs":"innocent"}'
    streams = [Stream(front, "/generate", text) for text in (innocent, body)]
    for strikes in range(3):
        received = {message.inputs: message for message in (tokenizer.next(Generate), tokenizer.next(Generate))}
        assert not received["innocent"].alone
        assert received["poison"].alone == (strikes > 0)
        crash(tokenizer, received["poison"].context.fingerprint)
    reply = streams[1].read_rest()
    assert reply.status == 424
    assert b"the tokenizer was killed by SIGSEGV while it worked on this request" in reply.body

    message = tokenizer.next(Generate)
    assert message.inputs == "innocent"
    tokenizer.send(word(message.rid, 1), End(message.rid, FinishReason.EOS, "", "done", 1, 1))
    assert streams[0].read_rest().status == 200

    again = front.post("/generate", body)  # refused before it reaches a tokenizer
    assert again.status == 424
    assert b"in quarantine for 60 more minutes" in again.body
    Stream(front, "/generate", '{"inputs":"poison "}')  # another one
    assert tokenizer.next(Generate).inputs == "poison "


@pytest.mark.parametrize("outside", [True, False])
def test_requests_that_a_dead_tokenizer_had_not_in_progress_are_no_suspects(serve: Any, outside: bool) -> None:
    front = serve(silent)
    (tokenizer,) = front.tokenizers
    stream = Stream(front, "/generate")
    for _ in range(12):
        assert not tokenizer.next(Generate).alone
        crash(tokenizer, b"" if outside else b"another!", outside)
    message = tokenizer.next(Generate)
    tokenizer.send(word(message.rid, 1), End(message.rid, FinishReason.EOS, "", "done", 1, 1))
    assert stream.read_rest().status == 200


def test_requests_in_progress_wait_until_it_is_known_how_the_tokenizer_ended(serve: Any) -> None:
    front = serve(silent, validation_workers=2)
    one, two = front.tokenizers
    suspects: set[bytes] = set()
    front.router.assignments.work_in_progress = lambda peer: b"".join(suspects)
    streams = [Stream(front, "/generate", f'{{"inputs":"{name}"}}') for name in ("a", "b", "c", "d")]
    held, innocent = one.next(Generate), one.next(Generate)
    assert {two.next(Generate).inputs, two.next(Generate).inputs, held.inputs, innocent.inputs} == set("abcd")
    suspects.add(held.context.fingerprint)
    boot = one.boot
    one.stop()
    assert two.next(Generate).inputs == innocent.inputs
    assert two.received.empty()
    one.last_exit = LastExit(boot, "was killed by SIGSEGV", False, held.context.fingerprint)
    one.start()
    message = two.next(Generate)  # the one that is ready
    assert (message.inputs, message.alone) == (held.inputs, True)
    for stream in streams:
        stream.disconnect()


def test_a_request_that_ends_tokenizers_of_other_hosts_ends_at_most_two(serve: Any) -> None:
    """What they had in progress is not known before a successor reports it."""
    front = serve(silent, validation_workers=3)
    front.router.assignments.work_in_progress = lambda peer: None
    stream = Stream(front, "/generate")
    tokenizers = front.tokenizers

    connections = front.router.tokenizers

    def holder(*ended: FakeTokenizer) -> FakeTokenizer:
        """The tokenizer that has the request now, after the loss of others."""
        until(lambda: all(connections[one.replica].peer is None for one in ended))
        until(lambda: any(connection.requests for connection in connections))
        (number,) = (number for number, one in enumerate(connections) if one.requests)
        return tokenizers[number]  # type: ignore[no-any-return]

    first = holder()
    first.stop()
    second = holder(first)
    name, boot = second.next(Generate).context.fingerprint, second.boot
    second.stop()
    until(lambda: connections[second.replica].peer is None)
    assert not any(connection.requests for connection in connections)
    second.last_exit = LastExit(boot, "was killed by SIGSEGV", False, name)
    second.start()
    assert holder(first).next(Generate).alone
    stream.disconnect()


def test_the_quarantine_of_the_scheduler_is_kept_by_front_ends(serve: Any) -> None:
    def refuse(message: Any) -> list[Any] | None:
        return [End(message.rid, FinishReason.QUARANTINED, "the worker crashed")] if message.inputs == "p" else None

    front = serve(refuse)
    assert front.post("/generate", '{"inputs":"p"}').status == 424
    front.tokenizers[0].next(Generate)
    reply = front.post("/generate", '{"inputs":"p"}')
    assert reply.status == 424
    assert b"in quarantine" in reply.body
    assert b"the worker crashed" in reply.body
    assert [entry.reason for entry in front.router.quarantine.entries().values()] == ["the worker crashed"]
    assert front.tokenizers[0].received.empty()


def test_disconnect_while_no_tokenizer_is_connected(serve: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front)
    tokenizer.next(Generate)
    tokenizer.stop()
    stream.disconnect()
    while front.connections:
        time.sleep(0.01)
    tokenizer.start()
    front.until_ready()
    other = Stream(front)
    message = tokenizer.next(Generate)
    tokenizer.send(word(message.rid, 1), End(message.rid, FinishReason.EOS, "", "", 1, 1))
    assert other.read_rest().status == 200


def test_requests_are_assigned_to_the_tokenizer_with_the_fewest(serve: Any) -> None:
    front = serve(silent, validation_workers=2)
    one, two = front.tokenizers
    streams = [Stream(front) for _ in range(4)]
    rids = [one.next(Generate).rid, one.next(Generate).rid, two.next(Generate).rid, two.next(Generate).rid]
    assert len(set(rids)) == 4
    for stream in streams:
        stream.disconnect()


def test_requests_beyond_the_permits_are_rejected(serve: Any) -> None:
    front = serve(silent, max_concurrent_requests=2)
    tokenizer = front.tokenizers[0]
    streams = [Stream(front), Stream(front, "/generate")]
    messages = [tokenizer.next(Generate), tokenizer.next(Generate)]
    for path in ("/generate", "/generate_stream", "/"):
        reply = front.post(path, '{"inputs":""}')  # permits are acquired before the rules are checked
        assert reply.status == 429
        assert reply.body == b'{"error":"Model is overloaded","error_type":"overloaded"}'
        assert reply.headers["retry-after"] == "1"
        assert front.post(path, '{"inputs":"","parameters":{"best_of":9}}').status == 422
    for message in messages:
        tokenizer.send(word(message.rid, 1), End(message.rid, FinishReason.EOS, "", "", 1, 1))
    for stream in streams:
        assert stream.read_rest().status == 200
    assert front.post("/generate", '{"inputs":""}').status == 422


def test_keep_alive_events(serve: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front)
    rid = tokenizer.next(Generate).rid
    stream.read_until(b":\n\n")  # sent before the first token, which opens the stream
    tokenizer.send(word(rid, 1))
    stream.read_until(b'"index":1')
    stream.raw = stream.raw[: stream.raw.index(b"\r\n\r\n") + 4]
    stream.read_until(b"3\r\n:\n\n\r\n")
    tokenizer.send(End(rid, FinishReason.FAILED, "x"))
    assert stream.read_rest().body.endswith(
        b'data: {"error":"Request failed during generation: x","error_type":"generation"}\n\n'
    )


def test_pipelined_requests_on_one_connection(serve: Any) -> None:
    front = serve()
    body = b'{"inputs":"x"}'
    head = {"content-type": "application/json", "content-length": str(len(body))}
    one = request("POST", "/generate", body, head).replace(b"connection: close\r\n", b"")
    with socket.create_connection(("127.0.0.1", front.port), timeout=20) as connection:
        connection.sendall(one * 3)
        raw = b""
        while raw.count(b'{"generated_text":" a"}') < 3:
            more = connection.recv(65536)
            assert more
            raw += more


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def write(self, data: Any) -> None:
        self.pieces.append(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.pieces.append(b"closed")


def test_the_head_of_a_response_is_written_with_its_body_and_its_last_piece_with_the_end() -> None:
    async def written(*pieces: bytes, closes: bool = False, last: bytes = b"") -> list[bytes]:
        transport = Written()
        responses = ResponseTransport(transport, asyncio.get_running_loop())
        for piece in pieces:
            if piece == last:
                responses.hold_next()
            responses.write(piece)
        if closes:
            responses.close()
        await asyncio.sleep(0)
        return transport.pieces

    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert asyncio.run(written(head, b"5\r\n", b"6\r\n")) == [head + b"5\r\n", b"6\r\n"]
    assert asyncio.run(written(head)) == [head]  # its body has not come in this turn of the loop
    assert asyncio.run(written(head, closes=True)) == [head, b"closed"]
    assert asyncio.run(written(head, b"5\r\n", b"6\r\n", b"0\r\n", last=b"6\r\n")) == [head + b"5\r\n", b"6\r\n0\r\n"]
    assert asyncio.run(written(head, b"5\r\n", b"0\r\n", last=b"5\r\n")) == [head + b"5\r\n0\r\n"]
    assert asyncio.run(written(b"5\r\n", last=b"5\r\n")) == [b"5\r\n"]  # the end has not come in this turn
    assert asyncio.run(written(b"5\r\n", last=b"5\r\n", closes=True)) == [b"5\r\n", b"closed"]


def test_the_head_of_a_response_whose_client_is_lost() -> None:
    """The connection is lost in the turn of the loop in which the head was written: nothing is left to do."""
    faults: list[dict[str, Any]] = []

    class Lost(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.abort()
            ResponseTransport(transport, asyncio.get_running_loop()).write(b"HTTP/1.1 200 OK\r\n\r\n")

    async def serve_one() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, fault: faults.append(fault))
        server = await loop.create_server(Lost, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            client.setblocking(False)
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(client, 99) == b""
        server.close()

    uvloop.run(serve_one())
    assert faults == []


def test_no_token_is_lost_or_repeated_over_many_tokenizer_losses(serve: Any) -> None:
    """A tokenizer sends at most three tokens of a request until its loss, which comes at a random time."""
    total = 12

    def three_more(message: Generate) -> list[Any]:
        known = unpack_int32(message.resume_ids)
        assert known == list(range(1, len(known) + 1))
        last = min(len(known) + 3, total)
        tokens: list[Any] = [word(message.rid, n) for n in range(len(known) + 1, last + 1)]
        return [*tokens, End(message.rid, FinishReason.LENGTH, "", "text", 1, total)] if last == total else tokens

    front = serve(three_more, validation_workers=2)
    paths = ["/generate_stream", "/generate"] * 6
    body = '{"inputs":"x","parameters":{"details":true}}'
    streams = [Stream(front, path, body) for path in paths]
    while front.router.in_flight < len(streams):
        time.sleep(0.001)
    restarts = random.Random(1)
    while front.router.in_flight:
        tokenizer = restarts.choice(front.tokenizers)
        time.sleep(restarts.uniform(0, 0.02))
        tokenizer.stop()
        tokenizer.start()
    for path, stream in zip(paths, streams, strict=True):
        reply = stream.read_rest()
        assert reply.status == 200
        if path == "/generate":
            tokens = json.loads(reply.body)["details"]["tokens"]
        else:
            tokens = [event["token"] for event in events(reply)]
        assert [token["id"] for token in tokens] == list(range(1, total + 1))
