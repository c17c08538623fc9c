"""GET /health, /info and /metrics, POST /tokenize, and responses during the start."""

import json
from typing import Any

import tgi
from tests.api.conftest import LIMITS, READY, Front
from tgi.microkernel.messages.protocol import Status

UNHEALTHY = b'{"error":"unhealthy","error_type":"healthcheck"}'


def test_health(front: Front) -> None:
    for path in ("/health", "/ping", "/"):
        for method in ("GET", "HEAD"):
            reply = front.get(path, method)
            assert (reply.status, reply.body) == (200, b"")


def test_info(front: Front) -> None:
    reply = front.get("/info")
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.body.startswith(
        b'{"model_id":"m","model_sha":null,"model_pipeline_tag":null,"max_concurrent_requests":128,"max_best_of":2,'
        b'"max_stop_sequences":4,"max_input_tokens":2047,"max_total_tokens":2048,"validation_workers":1,'
        b'"max_client_batch_size":4,"router":"text-generation-router","version":"3.3.6"'
    )
    older = {"model_dtype": "torch.float32", "model_device_type": "cpu", "max_input_length": 2047}
    older |= {"waiting_served_ratio": 0.3, "max_batch_total_tokens": 32768, "max_waiting_tokens": 20}
    info = json.loads(reply.body)
    assert older | {"max_batch_size": 64, "sha": None, "docker_label": None} == {
        key: info[key] for key in [*older, "max_batch_size", "sha", "docker_label"]
    }
    assert info["server_version"] == tgi.__version__


def test_tokenize(front: Front) -> None:
    reply = front.post("/tokenize", '{"inputs":"aébc","parameters":{"truncate":1}}')
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    # Offsets are in bytes: the second token begins in the middle of "é".
    assert reply.body.decode() == (
        '[{"id":1,"text":"","start":0,"stop":0,"special":true},{"id":7,"text":"a\ufffd","start":0,"stop":2,'
        '"special":false},{"id":9,"text":"\ufffdb","start":2,"stop":4,"special":false}]'
    )


def test_metrics(front: Front) -> None:
    front.post("/generate", '{"inputs":"x"}')
    reply = front.get("/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    text = reply.body.decode()
    for series in ("tgi_request_count ", "tgi_request_success ", "tgi_request_inference_duration_sum "):
        assert f"\n{series}" in text


def test_all_routes_answer_503_while_starting(serve: Any) -> None:
    front = serve(up=False)
    tokenizer = front.tokenizers[0]
    for path in ("/health", "/ping", "/", "/info"):
        reply = front.get(path)
        assert (reply.status, reply.body) == (503, UNHEALTHY)
        assert reply.headers["x-startup-stage"] == "starting tokenizers"
    tokenizer.start(Status(False, True, "loading weights", 40))
    while (reply := front.get("/health")).headers["x-startup-stage"] != "loading weights 40%":
        assert reply.status == 503
    for path in ("/generate", "/generate_stream", "/", "/tokenize"):
        reply = front.post(path, '{"inputs":"x"}')
        assert (reply.status, reply.body) == (503, UNHEALTHY)
        assert reply.headers["x-startup-stage"] == "loading weights 40%"
    tokenizer.send(READY)
    front.until_ready()
    assert front.post("/generate", '{"inputs":"x"}').status == 200


def test_health_reports_a_stall(serve: Any) -> None:
    front = serve()
    front.tokenizers[0].send(Status(True, False, "the worker finishes no step", 100, LIMITS))
    while (reply := front.get("/health")).status == 200:
        pass
    assert (reply.status, reply.body) == (503, UNHEALTHY)
    assert reply.headers["x-startup-stage"] == "the worker finishes no step"


def test_health_reports_the_stage_of_a_recovery(serve: Any) -> None:
    front = serve()
    tokenizer = front.tokenizers[0]
    for status, stage in (
        (Status(False, True, "waiting for the worker", 0, LIMITS), "waiting for the worker 0%"),
        (Status(False, True, "loading weights", 40, LIMITS), "loading weights 40%"),
    ):
        tokenizer.send(status)
        while (reply := front.get("/health")).headers.get("x-startup-stage") != stage:
            assert reply.status == 200 or "x-startup-stage" in reply.headers
        assert (reply.status, reply.body) == (503, UNHEALTHY)
    tokenizer.stop()
    while (reply := front.get("/health")).headers["x-startup-stage"] != "starting tokenizers":
        assert reply.status == 503


def test_an_unexpected_error_does_not_reveal_its_cause(front: Front, monkeypatch: Any) -> None:
    monkeypatch.setattr("tgi.api.routes.info.metrics.render", lambda: 1 / 0)
    reply = front.get("/metrics")
    assert reply.status == 500
    assert reply.body == b'{"error":"Internal server error","error_type":"internal"}'
