"""X-Request-Timeout and --request-timeout: what ends, how, and what is cancelled."""

import json
from typing import Any

import pytest

from tests.api.conftest import Stream, silent, word
from tgi.api.requests import Generation
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason, Generate

BODY = '{"inputs":"x"}'
ERROR = {"error": "Request timed out: no end within 0.2 s", "error_type": "timeout"}


def test_a_request_that_waits_too_long_ends_with_504(serve: Any) -> None:
    front = serve(silent)
    reply = front.post("/generate", BODY, x_request_timeout="0.2")
    assert (reply.status, json.loads(reply.body)) == (504, ERROR)
    generate = front.tokenizers[0].next(Generate)
    assert 0 < generate.context.deadline_ms <= 200
    assert front.tokenizers[0].next(Cancel).rid == generate.rid
    assert front.router.admission.permits.held == 0


def test_a_stream_that_has_begun_ends_with_an_event(serve: Any) -> None:
    front = serve(silent)
    stream = Stream(front, x_request_timeout="1", connection="close")
    generate = front.tokenizers[0].next(Generate)
    front.tokenizers[0].send(word(generate.rid, 1))
    reply = stream.read_rest()
    assert reply.status == 200
    assert json.loads(reply.body.split(b"\n\n")[-2].removeprefix(b"data: ")) == ERROR | {
        "error": "Request timed out: no end within 1 s"
    }
    assert front.tokenizers[0].next(Cancel).rid == generate.rid


def test_every_choice_of_a_request_ends(serve: Any) -> None:
    front = serve(silent)
    body = json.dumps({"model": "m", "prompt": "x", "n": 3, "max_tokens": 2})
    reply = front.post("/v1/completions", body, x_request_timeout="0.2")
    assert (reply.status, json.loads(reply.body)["error"]["type"]) == (504, "timeout")
    rids = {front.tokenizers[0].next(Generate).rid for _ in range(3)}
    assert {front.tokenizers[0].next(Cancel).rid for _ in range(3)} == rids


def test_the_header_only_shortens_the_servers_timeout(serve: Any) -> None:
    front = serve(silent, request_timeout=0.2)
    for headers in ({}, {"x_request_timeout": "50"}):
        assert front.post("/generate", BODY, **headers).status == 504


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "1e300", ""])
def test_an_invalid_header_is_rejected(serve: Any, value: str) -> None:
    front = serve(silent)
    reply = front.post("/generate", BODY, x_request_timeout=value)
    assert (reply.status, b"X-Request-Timeout" in reply.body) == (422, True)
    assert front.router.admission.permits.held == 0


def test_a_defect_in_submitting_leaves_no_permit_and_no_request(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    front = serve(silent)
    to_message = Generation.to_message

    def fail(generation: Generation, rid: int) -> Generate:
        message = to_message(generation, rid)
        return message._replace(max_new_tokens=2**70) if message.context.request_index == 2 else message

    monkeypatch.setattr(Generation, "to_message", fail)
    assert front.post("/v1/completions", json.dumps({"model": "m", "prompt": "x", "n": 3})).status == 500
    assert (front.router.admission.permits.held, front.router.in_flight) == (0, 0)
    rids = {front.tokenizers[0].next(Generate).rid for _ in range(2)}
    assert {front.tokenizers[0].next(Cancel).rid for _ in range(2)} == rids


def test_retry_after_is_the_schedulers(serve: Any) -> None:
    front = serve(
        lambda message: [End(message.rid, FinishReason.OVERLOADED, "late", retry_after_ms=4200)], request_timeout=50.0
    )
    reply = front.post("/generate", BODY)
    assert (reply.status, reply.headers["retry-after"]) == (429, "5")
