"""The log line of each POST request: what it says, and that all ends of a request have one."""

import json
import logging
import re
import time
from typing import Any

import pytest

from tests.api.conftest import Front, Stream, two_tokens
from tgi.api import request_metrics
from tgi.microkernel.messages.protocol import End, FinishReason, Generate

TARGET = request_metrics.__name__
KEY = "Bearer secret"


def answer(message: Any) -> list[Any] | None:
    """Two tokens; a failure of the prompt "crash"; nothing for "wait"."""
    if isinstance(message, Generate) and message.inputs == "crash":
        return [End(message.rid, FinishReason.FAILED, "it broke")]
    return None if isinstance(message, Generate) and message.inputs == "wait" else two_tokens(message)


@pytest.fixture
def front(serve: Any) -> Front:
    found: Front = serve(answer, api_key=("secret",), model_id="org/model")
    return found


def next_record(caplog: pytest.LogCaptureFixture) -> Any:
    """The only new record; it is made when the response has been read."""
    deadline = time.monotonic() + 20
    while not (found := [record for record in caplog.records if record.name == TARGET]):
        assert time.monotonic() < deadline, "nothing was logged"
        time.sleep(0.005)
    caplog.clear()
    assert len(found) == 1
    return found[0]


CHAT = {"messages": [{"role": "user", "content": "x"}], "n": 2}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "line", "message"),
    [
        ("/generate", {"inputs": "x"}, {}, 200, "3+2 tokens", "Success"),
        ("/generate_stream", {"inputs": "x"}, {}, 200, "3+2 tokens", "Success"),
        ("/v1/chat/completions", CHAT, {}, 200, "3+4 tokens", "Success"),  # the prompt of two choices counts once
        ("/vertex", {"instances": [{"inputs": "x"}, {"inputs": "y"}]}, {}, 200, "6+4 tokens", "Success"),
        ("/generate", {"inputs": "crash"}, {}, 424, "", "Request failed during generation: it broke"),
        ("/generate", {"inputs": "x", "parameters": {"top_k": 0}}, {}, 422, "",
         "Input validation error: `top_k` must be strictly positive"),
        ("/generate", {"inputs": {"private": 1}}, {}, 422, "", "validation"),  # its text quotes the body
        ("/generate", {"inputs": "x"}, {"authorization": "Bearer wrong"}, 401, "", "unauthorized"),
        ("/nothing", {}, {}, 404, "", "not_found"),
    ],
)  # fmt: skip
def test_all_ends_of_a_request_are_logged_once(
    front: Front, caplog: pytest.LogCaptureFixture, path: str, body: Any, headers: Any, status: int, line: str,
    message: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, TARGET)
    reply = front.post(path, json.dumps(body), **{"authorization": KEY, "x-request-id": "mine", **headers})
    record = next_record(caplog)
    assert reply.status == status
    assert (record.request_id, record.route, record.status) == ("mine", path, status)
    assert record.model == "org/model"
    known = status not in (401, 404)
    assert re.fullmatch(r"key [0-9a-f]{16}" if known else r"127\.0\.0\.1", record.client)
    assert record.getMessage() == message
    ending = "" if status == 200 else f": {message}"
    assert re.fullmatch(rf"POST {path} {status} {re.escape(line)} ?\d+ ms{re.escape(ending)}", record.brief.line)
    assert record.levelno == (logging.WARNING if status == 424 else logging.INFO)
    fields = {"parameters", "total_time", "validation_time", "queue_time", "inference_time", "time_per_token", "seed"}
    assert fields <= record.brief.details().keys() if status == 200 else record.total_time
    assert ("error_type" in vars(record)) == (status != 200)


def test_a_disconnect_and_a_failed_stream_are_logged_with_their_own_status(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, TARGET)
    stream = Stream(front, body='{"inputs":"wait"}', authorization=KEY)
    front.tokenizers[0].next(Generate)
    stream.connection.close()
    record = next_record(caplog)
    assert (record.status, record.getMessage()) == (499, "the client has disconnected")
    stream = Stream(front, body='{"inputs":"wait"}', authorization=KEY)
    sent = front.tokenizers[0].next(Generate)
    front.tokenizers[0].send(two_tokens(sent)[0])
    stream.read_until(b"data:")
    front.tokenizers[0].send(End(sent.rid, FinishReason.FAILED, "it broke"))
    assert stream.read_rest().status == 200
    assert next_record(caplog).status == 424


def test_a_response_that_a_defect_cuts_off_is_no_success(
    front: Front, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, TARGET)
    monkeypatch.setattr("tgi.api.sse.EventStream._next_chunk", lambda stream: 1 / 0)
    front.post("/generate_stream", '{"inputs":"x"}', authorization=KEY)
    record = next_record(caplog)
    assert (record.status, record.levelno) == (500, logging.WARNING)
    assert record.getMessage() == "the response was cut off"


def test_the_probe_and_reading_requests_are_not_logged(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, TARGET)
    front: Front = serve(proves=True)
    for path in ("/health", "/metrics", "/nothing"):
        front.get(path)
    assert front.post("/tokenize", '{"inputs":"x"}').status == 200
    assert next_record(caplog).route == "/tokenize"
