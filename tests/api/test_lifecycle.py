"""Requests over time: clients that leave, tokenizers that die, limits, silence."""

import json
import random
import socket
import time
from typing import Any

import pytest

from tests.api.conftest import Front, Reply, request, texts
from tgi.api import router as router_module
from tgi.api import sse
from tgi.api.calls import Generation
from tgi.kernel.answer import Kind, Part, Prompted, PromptTokens
from tgi.kernel.messages import Cancel, End, Generate, Reason, Tokenize, Tokenized
from tgi.kernel.pack import FLOAT32, INT32, ints, pack


def silent(message: Any) -> None:
    """Leaves every answer to the test."""


class Stream:
    """A request whose answer is read as it comes."""

    def __init__(self, front: Front, path: str = "/generate_stream", body: str = '{"inputs":"x"}') -> None:
        self.connection = front.connect()
        head = {"content-type": "application/json", "content-length": str(len(body))}
        self.connection.sendall(request("POST", path, body.encode(), head))
        self.raw = b""

    def until(self, part: bytes) -> None:
        while part not in self.raw:
            more = self.connection.recv(65536)
            assert more, f"closed before {part!r}: {self.raw!r}"
            self.raw += more

    def rest(self) -> Reply:
        while more := self.connection.recv(65536):
            self.raw += more
        return Reply(self.raw)

    def leave(self) -> None:
        self.connection.close()


def events(reply: Reply) -> list[dict[str, Any]]:
    return [json.loads(part.removeprefix(b"data: ")) for part in reply.body.split(b"\n\n") if part]


def test_a_client_that_leaves_cancels_what_it_has_pipelined(serve: Any) -> None:
    front = serve(silent)
    stream = Stream(front)
    body = b'{"inputs":"y"}'
    head = {"content-type": "application/json", "content-length": str(len(body))}
    stream.connection.sendall(request("POST", "/generate", body, head))
    rid = front.tokenizers[0].next(Generate).rid
    time.sleep(0.1)  # the second request is read as well
    stream.leave()
    assert front.tokenizers[0].next(Cancel).rid == rid


def word(rid: int, n: int) -> Any:
    return texts(rid, (n, f" {n}", -0.5, False))


@pytest.mark.parametrize("path", ["/generate_stream", "/generate", "/"])
def test_a_client_that_leaves_cancels(serve: Any, path: str) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front, path)
    rid = tokenizer.next(Generate).rid
    stream.leave()
    assert tokenizer.next(Cancel).rid == rid
    assert front.post("/generate", '{"inputs":""}').status == 422  # it goes on
    assert front.router.in_flight == 0


def test_a_client_that_leaves_in_mid_stream_cancels(serve: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front)
    rid = tokenizer.next(Generate).rid
    tokenizer.send(word(rid, 1))
    stream.until(b'"index":1')
    stream.leave()
    assert tokenizer.next(Cancel).rid == rid


def test_a_client_that_does_not_read_and_leaves_cancels(serve: Any) -> None:
    """Its socket is full, so the stream waits to write: only the watcher can see that it goes."""
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front)
    rid = tokenizer.next(Generate).rid
    tokenizer.send(word(rid, 1))
    stream.until(b'"index":1')
    big = "x" * 60_000
    for n in range(400):
        tokenizer.send(texts(rid, (n, big, -0.5, False)))
    # Meanwhile others are served.
    assert front.get("/health").status == 200
    stream.leave()
    assert tokenizer.next(Cancel).rid == rid


def test_a_stream_survives_its_tokenizer(serve: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front, body='{"inputs":"x","parameters":{"details":true,"do_sample":true}}')
    first = tokenizer.next(Generate)
    for n in (1, 2, 3):
        tokenizer.send(word(first.rid, n))
    stream.until(b'"index":3')
    tokenizer.stop()
    tokenizer.start()
    again = tokenizer.next(Generate)
    assert ints(again.resume) == [1, 2, 3]
    assert again == first._replace(rid=again.rid, resume=again.resume)  # the same seed, above all
    tokenizer.send(word(first.rid, 99))  # of the old life: nobody's
    tokenizer.send(word(again.rid, 4))
    tokenizer.send(texts(again.rid, (5, " 5", -0.5, False)), End(again.rid, Reason.LENGTH, "", " 1 2 3 4 5", 3, 5))
    got = events(stream.rest())
    assert [event["token"]["id"] for event in got] == [1, 2, 3, 4, 5]
    assert [event["index"] for event in got] == [1, 2, 3, 4, 5]
    assert got[-1]["generated_text"] == " 1 2 3 4 5"
    assert got[-1]["details"]["generated_tokens"] == 5


CHAT = '{"messages":[{"role":"user","content":"x"}],"stream":%s}'


def said(rid: int, token: int, *parts: tuple[Kind, str]) -> Any:
    """A token of a divided answer."""
    return word(rid, token)._replace(parts=[Part(0, *part) for part in parts])


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_call_of_a_tool_survives_its_tokenizer(serve: Any, stream: str) -> None:
    """Each part comes once: those of the tokens that are known come from the first life, the rest from the second."""
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    client = Stream(front, "/v1/chat/completions", CHAT % stream)
    first = tokenizer.next(Generate)
    tokenizer.send(
        Prompted(first.rid, 3, 1, divided=True),
        said(first.rid, 1, (Kind.TEXT, "Well."), (Kind.CALL, "f")),
        said(first.rid, 2, (Kind.ARGUMENTS, '{"a":')),
    )
    until_known(front, 2)
    tokenizer.stop()
    tokenizer.start()
    again = tokenizer.next(Generate)
    assert ints(again.resume) == [1, 2]
    tokenizer.send(
        Prompted(again.rid, 3, 1, divided=True),
        word(again.rid, 3),  # lets nothing be shown
        said(again.rid, 4, (Kind.ARGUMENTS, " 1}"), (Kind.CALL, "g")),
        said(again.rid, 5, (Kind.ARGUMENTS, "{}")),
        End(again.rid, Reason.EOS, "", "raw", 3, 5),
    )
    reply = client.rest()
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
    """Waits until the front end has so many tokens of the one request in flight."""
    (call,) = front.router.tokenizers[0].calls.values()
    assert isinstance(call, Generation)
    while call.generated < count:
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
def test_a_prompt_goes_down_again_as_it_came(serve: Any, prompt: Any, fields: dict[str, Any], sent: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front, "/v1/completions", json.dumps({"prompt": prompt, "stream": True, **fields}))
    for _ in range(2):
        asked = tokenizer.next(Generate)
        ids, special = ints(asked.input_ids), asked.add_special_tokens
        assert (asked.inputs, ids, special, asked.truncate, asked.max_new_tokens) == sent
        tokenizer.stop()
        tokenizer.start()
    tokenizer.send(End(tokenizer.next(Generate).rid, Reason.FAILED, "enough"))
    stream.rest()


def test_a_prompt_survives_its_tokenizer(serve: Any) -> None:
    """In a stream whose first token waits, what has come of the prompt is kept, and only the rest is asked for."""
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    body = '{"prompt":"a b c","echo":true,"logprobs":1,"stream":true}'
    stream = Stream(front, "/v1/completions", body)
    first = tokenizer.next(Generate)
    assert (first.prompt_from, first.prompt_top_n) == (0, 1)
    nan, zero = pack(FLOAT32, [float("nan")]), pack(INT32, [0])
    other = Stream(front, "/generate")
    other_rid = tokenizer.next(Generate).rid
    tokenizer.send(
        PromptTokens(first.rid, pack(INT32, [7]), nan, zero, ["a"]),
        PromptTokens(first.rid, pack(INT32, [8]), pack(FLOAT32, [-0.5]), pack(INT32, [1]), [" b"], zero, zero, ["x"]),
        texts(other_rid, (1, " 1", -0.5, False)),
        End(other_rid, Reason.LENGTH, "", " 1", 1, 1),
    )
    other.rest()  # so the messages before its own have come, too
    tokenizer.stop()
    tokenizer.start()
    again = tokenizer.next(Generate)
    assert (again.prompt_from, again.prompt_top_n, ints(again.resume)) == (2, 1, [])
    ids, logprobs, starts = pack(INT32, [9]), pack(FLOAT32, [-0.25]), pack(INT32, [3])
    tokenizer.send(
        PromptTokens(again.rid, ids, logprobs, starts, [" c"], zero, zero, ["y"]),
        texts(again.rid, (5, " d", -0.125, False)),
        End(again.rid, Reason.LENGTH, "", " d", 3, 1),
    )
    event = json.loads(stream.rest().body.split(b"\n\n")[0].removeprefix(b"data: "))
    assert event["choices"][0]["logprobs"] == {
        "tokens": ["a", " b", " c", " d"],
        "token_logprobs": [None, -0.5, -0.25, -0.125],
        "top_logprobs": [None, {"x": 0.0}, {"y": 0.0}, {}],
        "text_offset": [0, 1, 3, 5],
    }


def test_plain_requests_and_tokenizing_survive_too(serve: Any) -> None:
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
    assert ints(again[Generate].resume) in ([], [1])
    zero = pack(INT32, [0])
    tokenizer.send(Tokenized(again[Tokenize].rid, zero, zero, zero, b"\0"))
    tokenizer.send(word(again[Generate].rid, 2), End(again[Generate].rid, Reason.EOS, "", "done", 1, 2))
    assert plain.rest().body == b'{"generated_text":"done"}'
    assert events(encode.rest())[0] == [{"id": 0, "text": "", "start": 0, "stop": 0, "special": False}]


def test_a_request_that_kills_tokenizers_is_given_up(serve: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front, "/generate")
    for _ in range(router_module.MOST_LOSSES):
        tokenizer.next(Generate)
        tokenizer.stop()
        tokenizer.start()
    reply = stream.rest()
    assert reply.status == 424
    assert b"the tokenizer died 3 times" in reply.body


def test_the_client_of_a_lost_request_may_leave(serve: Any) -> None:
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front)
    tokenizer.next(Generate)
    tokenizer.stop()
    stream.leave()
    tokenizer.start()
    front.until_ready()
    other = Stream(front)
    message = tokenizer.next(Generate)
    tokenizer.send(word(message.rid, 1), End(message.rid, Reason.EOS, "", "", 1, 1))
    assert other.rest().status == 200


def test_requests_go_to_the_tokenizer_with_the_fewest(serve: Any) -> None:
    front = serve(silent, validation_workers=2)
    one, two = front.tokenizers
    streams = [Stream(front) for _ in range(4)]
    rids = [one.next(Generate).rid, one.next(Generate).rid, two.next(Generate).rid, two.next(Generate).rid]
    assert len(set(rids)) == 4
    for stream in streams:
        stream.leave()


def test_too_many_requests(serve: Any) -> None:
    front = serve(silent, max_concurrent_requests=2)
    tokenizer = front.tokenizers[0]
    streams = [Stream(front), Stream(front, "/generate")]
    messages = [tokenizer.next(Generate), tokenizer.next(Generate)]
    for path in ("/generate", "/generate_stream", "/"):
        reply = front.post(path, '{"inputs":""}')  # the permit comes before the rules
        assert reply.status == 429
        assert reply.body == b'{"error":"Model is overloaded","error_type":"overloaded"}'
        assert reply.headers["retry-after"] == "1"
        assert front.post(path, '{"inputs":"","parameters":{"best_of":9}}').status == 422
    for message in messages:
        tokenizer.send(word(message.rid, 1), End(message.rid, Reason.EOS, "", "", 1, 1))
    for stream in streams:
        assert stream.rest().status == 200
    assert front.post("/generate", '{"inputs":""}').status == 422


def test_silence_is_filled(serve: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    front = serve(silent)
    tokenizer = front.tokenizers[0]
    stream = Stream(front)
    rid = tokenizer.next(Generate).rid
    stream.until(b":\n\n")  # before the first token: the stream is open now
    tokenizer.send(word(rid, 1))
    stream.until(b'"index":1')
    stream.raw = stream.raw[: stream.raw.index(b"\r\n\r\n") + 4]
    stream.until(b"3\r\n:\n\n\r\n")
    tokenizer.send(End(rid, Reason.FAILED, "x"))
    assert stream.rest().body.endswith(
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


def test_nothing_is_lost_or_repeated_however_often_tokenizers_die(serve: Any, monkeypatch: Any) -> None:
    """Each life of a tokenizer goes on for three tokens at most, and is cut off at any moment."""
    monkeypatch.setattr(router_module, "MOST_LOSSES", 10**6)
    total = 12

    def three_more(message: Generate) -> list[Any]:
        known = ints(message.resume)
        assert known == list(range(1, len(known) + 1))
        last = min(len(known) + 3, total)
        tokens: list[Any] = [word(message.rid, n) for n in range(len(known) + 1, last + 1)]
        return [*tokens, End(message.rid, Reason.LENGTH, "", "text", 1, total)] if last == total else tokens

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
        reply = stream.rest()
        assert reply.status == 200
        if path == "/generate":
            tokens = json.loads(reply.body)["details"]["tokens"]
        else:
            tokens = [event["token"] for event in events(reply)]
        assert [token["id"] for token in tokens] == list(range(1, total + 1))
