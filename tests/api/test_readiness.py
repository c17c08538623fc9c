"""The readiness probe: clients are admitted once its requests are answered, and it is not counted."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tgi
from tests.api.conftest import LIMITS, Front, silent, standard, texts
from tgi.api.clients import client_at
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason, Generate, Status, Tokenize, Tokenized
from tgi.microkernel.observability import metrics

pytestmark = pytest.mark.slow


def one_token(message: Generate) -> list[Any]:
    """Answers the probe."""
    return [texts(message.rid, (5, " a", -0.34, False)), End(message.rid, FinishReason.LENGTH, "", " a", 1, 1)]


def until_stage(front: Front, stage: str) -> None:
    """Waits for a 503 with this stage; every response until then is a 503 too."""
    while (reply := front.get("/health")).headers.get("x-startup-stage") != stage:
        assert reply.status == 503
        time.sleep(0.01)


def until_healthy(front: Front) -> None:
    while front.get("/health").status != 200:
        time.sleep(0.01)


@pytest.mark.parametrize("keys", [(), ("secret", "other"), ("schlüssel €",)])
def test_the_probe_comes_before_any_client_and_is_not_counted(serve: Any, keys: tuple[str, ...]) -> None:
    before = metrics.render()
    front = serve(one_token, proves=True, api_key=keys)
    probe = front.tokenizers[0].next(Generate)
    assert (probe.inputs, probe.max_new_tokens, probe.truncate) == ("Is 1 + 1 = 2?", 1, 1)
    assert front.get("/health").status == 200
    assert front.get("/metrics").body.decode() == before == metrics.render()
    assert front.stages == ["answering the first request", ""]
    assert front.tokenizers[0].received.empty()


def test_the_limit_of_request_bodies_does_not_apply_to_the_probe(serve: Any) -> None:
    front = serve(one_token, proves=True, payload_limit=20)
    until_healthy(front)
    assert front.post("/generate", '{"inputs":"123456"}').status == 200
    assert front.post("/generate", '{"inputs":"12345678"}').status == 413


def test_the_probe_needs_no_permit_and_requests_wait_for_it(serve: Any) -> None:
    """A front end that replaces another finds the permits held by clients of the others. Another front end on the port
    may have been healthy before this one, so that what a client sends to either is answered."""
    front = serve(silent, up=False, proves=True, max_concurrent_requests=1)
    other = client_at("127.0.0.1").permit_id  # the same client, at another front end
    assert front.router.admission.permits.acquire(client=other)
    front.tokenizers[0].start()
    probe = front.tokenizers[0].next(Generate)
    until_stage(front, "answering the first request")
    with ThreadPoolExecutor() as clients:
        paths = ("/generate", "/tokenize", "/v1/chat/completions")
        early = [clients.submit(front.post, path, '{"inputs":"x","messages":[]}') for path in paths]
        while front.connections < len(early):
            time.sleep(0.01)
        until_stage(front, "answering the first request")
        assert not any(one.done() for one in early)
        assert front.router.admission.permits.held == 1
        front.tokenizers[0].send(*one_token(probe))
        front.tokenizers[0].send(Tokenized(front.tokenizers[0].next(Tokenize).rid, b"", b"", b"", b""))
        assert [one.result().status for one in early] == [429, 200, 422]
    until_healthy(front)
    assert front.router.admission.permits.held == 1
    front.router.admission.permits.release(client=other)


def test_a_probe_that_fails_in_another_process_keeps_the_server_unready(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True

    def answer(message: Any) -> list[Any]:
        return [End(message.rid, FinishReason.FAILED, "no kernel fits")] if broken else standard(message)

    front = serve(answer, up=False, proves=True)
    front.tokenizers[0].start()
    for _ in range(3):
        front.tokenizers[0].next(Generate)
    until_stage(front, "the first request failed: POST /generate")
    assert front.post("/generate", '{"inputs":"x"}').status == 503
    assert front.get("/info").status == 200
    (logged,) = [record.message for record in caplog.records if record.name == "tgi.api.readiness"]  # once
    assert logged == (
        "Not ready: the first request, which this server sends to itself, failed: POST /generate was answered with 424 "
        '{"error":"Request failed during generation: no kernel fits","error_type":"generation"}'
    )
    broken = False
    until_healthy(front)
    assert front.stages[-1] == ""


def test_a_probe_that_fails_in_this_process_keeps_the_server_unready(
    serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if another package shadowed this one."""
    version = tgi.__version__
    monkeypatch.delattr(tgi, "__version__")
    front = serve(up=False, proves=True)
    front.tokenizers[0].start()
    until_stage(front, "the first request failed: GET /info")
    assert "failed: GET /info was answered with 500" in caplog.text
    assert "has no attribute '__version__'" in caplog.text
    monkeypatch.setattr(tgi, "__version__", version, raising=False)
    until_healthy(front)


def test_a_probe_that_times_out_is_logged_and_repeated(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    unanswered = True
    front = serve(lambda message: None if unanswered else one_token(message), up=False, proves=True, stall_limit=0.2)
    front.tokenizers[0].start()
    first = front.tokenizers[0].next(Generate)
    assert front.tokenizers[0].next(Cancel).rid == first.rid
    until_stage(front, "the first request failed: POST /generate")
    assert "POST /generate has had no answer for 0.2 s" in caplog.text
    unanswered = False
    until_healthy(front)


def test_no_probe_is_sent_before_a_request_could_be_computed(serve: Any) -> None:
    front = serve(up=False, proves=True)
    front.tokenizers[0].start(Status(False, True, "loading weights", 40))
    until_stage(front, "loading weights 40%")
    assert front.stages == []
    front.tokenizers[0].send(Status(True, True, "ready", 100, LIMITS))
    until_healthy(front)


def test_the_probe_is_resubmitted_after_a_tokenizer_loss(serve: Any) -> None:
    front = serve(silent, up=False, proves=True)
    tokenizer = front.tokenizers[0]
    tokenizer.start()
    first = tokenizer.next(Generate)
    tokenizer.stop()
    tokenizer.start()
    again = tokenizer.next(Generate)
    assert again == first._replace(rid=again.rid, context=again.context)
    tokenizer.send(*one_token(again))
    until_healthy(front)
    assert front.stages == ["answering the first request", ""]
