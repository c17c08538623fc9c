"""Readiness: a front end admits clients once its own requests were answered, in which nothing is counted."""

import time
from typing import Any

import pytest

import tgi
from tests.api.conftest import LIMITS, Front, standard, texts
from tests.api.test_lifecycle import silent
from tgi.kernel import metrics
from tgi.kernel.messages import Cancel, End, Generate, Reason
from tgi.kernel.presence import Status


def one_token(message: Generate) -> list[Any]:
    """What is asked for."""
    return [texts(message.rid, (5, " a", -0.34, False)), End(message.rid, Reason.LENGTH, "", " a", 1, 1)]


def until_stage(front: Front, stage: str) -> None:
    """Waits for a 503 with this stage. Whatever the server is asked meanwhile, it is not ready."""
    while (reply := front.get("/health")).headers.get("x-startup-stage") != stage:
        assert reply.status == 503
        time.sleep(0.01)


def until_healthy(front: Front) -> None:
    while front.get("/health").status != 200:
        time.sleep(0.01)


@pytest.mark.parametrize("keys", [(), ("secret", "other"), ("schlüssel €",)])
def test_the_probe_is_answered_before_any_client_and_is_not_counted(serve: Any, keys: tuple[str, ...]) -> None:
    before = metrics.render()
    front = serve(one_token, proves=True, api_key=keys)
    probe = front.tokenizers[0].next(Generate)
    assert (probe.inputs, probe.max_new_tokens, probe.truncate) == ("Is 1 + 1 = 2?", 1, 1)
    assert front.get("/health").status == 200
    assert front.get("/metrics").body.decode() == before == metrics.render()
    assert front.stages == ["answering the first request", ""]
    assert front.tokenizers[0].received.empty()


def test_the_probe_is_not_bound_by_the_limit_of_request_bodies(serve: Any) -> None:
    front = serve(one_token, proves=True, payload_limit=20)
    until_healthy(front)
    assert front.post("/generate", '{"inputs":"123456"}').status == 200
    assert front.post("/generate", '{"inputs":"12345678"}').status == 413


def test_the_probe_needs_no_permit(serve: Any) -> None:
    """A front end that takes the place of another finds the permits of the server taken by clients of the others."""
    front = serve(silent, up=False, proves=True, max_concurrent_requests=1)
    assert front.router._permits.take()
    front.tokenizers[0].start()
    probe = front.tokenizers[0].next(Generate)
    until_stage(front, "answering the first request")
    assert front.post("/generate", '{"inputs":"x"}').status == 503
    assert front.router._permits.held == 1
    front.tokenizers[0].send(*one_token(probe))
    until_healthy(front)
    assert front.router._permits.held == 1
    assert front.post("/generate", '{"inputs":"x"}').status == 429
    front.router._permits.give()


def test_a_request_that_fails_below_keeps_the_server_unready(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    def answer(message: Any) -> list[Any]:
        return [End(message.rid, Reason.FAILED, "no kernel fits")] if broken else standard(message)

    front = serve(answer, up=False, proves=True)
    front.tokenizers[0].start()
    for _ in range(3):
        front.tokenizers[0].next(Generate)
    until_stage(front, "the first request failed: POST /generate")
    assert front.post("/generate", '{"inputs":"x"}').status == 503
    assert front.get("/info").status == 200
    (told,) = [record.message for record in caplog.records if record.name == "tgi.api.readiness"]  # once, not thrice
    assert told == (
        "Not ready: the first request, which this server sends to itself, failed: POST /generate was answered with 424 "
        '{"error":"Request failed during generation: no kernel fits","error_type":"generation"}'
    )
    broken = False
    until_healthy(front)
    assert front.stages[-1] == ""


def test_a_route_that_is_broken_here_keeps_the_server_unready(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where another package shadows this one."""
    version = tgi.__version__
    monkeypatch.delattr(tgi, "__version__")
    front = serve(up=False, proves=True)
    front.tokenizers[0].start()
    until_stage(front, "the first request failed: GET /info")
    assert "failed: GET /info was answered with 500" in caplog.text
    assert "has no attribute '__version__'" in caplog.text
    monkeypatch.setattr(tgi, "__version__", version, raising=False)
    until_healthy(front)


def test_a_request_without_an_answer_is_told_and_asked_again(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    deaf = True
    front = serve(lambda message: None if deaf else one_token(message), up=False, proves=True, stall_limit=0.2)
    front.tokenizers[0].start()
    first = front.tokenizers[0].next(Generate)
    assert front.tokenizers[0].next(Cancel).rid == first.rid
    until_stage(front, "the first request failed: POST /generate")
    assert "POST /generate has had no answer for 0.2 s" in caplog.text
    deaf = False
    until_healthy(front)


def test_while_the_others_start_nothing_is_asked_of_them(serve: Any) -> None:
    front = serve(up=False, proves=True)
    front.tokenizers[0].start(Status(False, True, "loading weights", 40))
    until_stage(front, "loading weights 40%")
    assert front.stages == []
    front.tokenizers[0].send(Status(True, True, "ready", 100, LIMITS))
    until_healthy(front)


def test_the_probe_survives_its_tokenizer(serve: Any) -> None:
    front = serve(silent, up=False, proves=True)
    tokenizer = front.tokenizers[0]
    tokenizer.start()
    first = tokenizer.next(Generate)
    tokenizer.stop()
    tokenizer.start()
    again = tokenizer.next(Generate)
    assert again == first._replace(rid=again.rid)
    tokenizer.send(*one_token(again))
    until_healthy(front)
    assert front.stages == ["answering the first request", ""]
