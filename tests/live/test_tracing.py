"""Traces of whole process trees as an OTLP collector receives them: parents, attributes and errors of spans."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collector import Collector, Span, run_collector
from tests.live.server import Server, free_port, python_path

pytestmark = pytest.mark.live

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "5000", "--validation-workers", "1")
EXPORT_EVERY_50_MS = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
EXPORT_AT_EXIT = {"OTEL_BSP_SCHEDULE_DELAY": "3600000"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with run_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(collector: Collector, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = tmp_path_factory.mktemp("traced") / "run"
    flags = ("--otlp-endpoint", collector.endpoint, "--otlp-service-name", "mine", "--max-total-tokens", "400")
    with Server(run, "--model-id", str(tiny_llama), *SCRIPTED, *flags, env=EXPORT_EVERY_50_MS) as server:
        yield server.start().wait_until_ready()


class Caller:
    """The trace context that a client sends, and the spans received for it."""

    def __init__(self, collector: Collector) -> None:
        self.trace, self.span = os.urandom(16).hex(), os.urandom(8).hex()
        self.headers = {"traceparent": f"00-{self.trace}-{self.span}-01"}
        self._collector = collector

    def wait_for_spans(self, *names: str) -> dict[str, Span]:
        return self._collector.wait_for_spans(*names, when=lambda span: span.trace == self.trace)


@pytest.fixture
def caller(collector: Collector) -> Caller:
    return Caller(collector)


def body(tokens: int = 5, **parameters: Any) -> dict[str, Any]:
    return {"inputs": "Hello", "parameters": {"max_new_tokens": tokens, **parameters}}


CHILD_SPANS = ("tokenize", "validate", "queued", "infer")


def assert_span_tree(caller: Caller, spans: dict[str, Span], *names: str) -> None:
    """The first span is a child of the caller's, and the others are its children."""
    top, *children = (spans[name] for name in names)
    assert (top.parent, top.kind, top.error, top.resource["service.instance.id"]) == (
        caller.span,
        "SERVER",
        None,
        "api-0",
    )
    assert {span.parent for span in children} == {top.id}
    assert {span.resource["service.name"] for span in spans.values()} == {"mine"}
    assert all(top.begun <= span.begun <= span.ended <= top.ended for span in children)
    assert spans["queued"].ended == spans["infer"].begun
    assert {name: span.resource["service.instance.id"] for name, span in spans.items() if span is not top} == {
        **dict.fromkeys(names[1:-2], "tokenizer-0"), **dict.fromkeys(names[-2:], "scheduler-0")
    }  # fmt: skip


def test_a_request_is_one_span_tree(server: Server, caller: Caller) -> None:
    answer = server.client.post("/generate", json=body(do_sample=True, seed=2**64 - 1), headers=caller.headers)
    assert answer.status_code == 200
    names = ("generate", *CHILD_SPANS)
    spans = caller.wait_for_spans(*names)
    assert_span_tree(caller, spans, *names)
    attributes = spans["generate"].attributes
    assert (attributes["http.request.method"], attributes["http.route"], attributes["http.response.status_code"]) == (
        "POST",
        "/generate",
        200,
    )
    assert '"max_new_tokens": 5' in attributes["parameters"]
    assert attributes["seed"] == str(2**64 - 1)
    for name in ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token"):
        assert attributes[name][-1] == "s"
    assert spans["infer"].attributes == {
        "prompt_tokens": int(answer.headers["x-prompt-tokens"]), "cached_tokens": 0, "generated_tokens": 5,
        "finish_reason": "length",
    }  # fmt: skip


def test_the_span_of_a_stream_ends_with_its_last_event(server: Server, caller: Caller) -> None:
    answer = server.client.post("/generate_stream", json=body(20), headers=caller.headers)
    assert answer.text.count("data:") == 20
    names = ("generate_stream", *CHILD_SPANS)
    spans = caller.wait_for_spans(*names)
    assert_span_tree(caller, spans, *names)  # so the span of the stream ends after the last token was computed
    assert spans["generate_stream"].attributes["total_time"]


def test_a_chat_with_two_choices(server: Server, caller: Caller, collector: Collector) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "n": 2}
    assert server.client.post("/v1/chat/completions", json=chat, headers=caller.headers).status_code == 200
    names = ("chat_completions", "apply_chat_template", *CHILD_SPANS)
    assert_span_tree(caller, caller.wait_for_spans(*names), *names)
    first = caller.wait_for_spans("infer")["infer"]
    collector.wait_for_spans("infer", when=lambda span: span.trace == caller.trace and span.id != first.id)


def test_a_disconnected_client(server: Server, caller: Caller) -> None:
    with server.client.stream("POST", "/generate_stream", json=body(390), headers=caller.headers) as answer:
        next(answer.iter_lines())
    spans = caller.wait_for_spans("generate_stream", "infer")
    top, infer = spans["generate_stream"], spans["infer"]
    assert (top.error, top.attributes["error.type"]) == ("the client has disconnected", "dropped")
    assert (infer.attributes["finish_reason"], infer.attributes["error.type"]) == ("cancelled", "cancelled")
    assert infer.attributes["generated_tokens"] < 390


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_request_rejected_by_the_front_end(server: Server, caller: Caller, path: str) -> None:
    name = path.removeprefix("/")
    assert server.client.post(path, json=body(temperature=0), headers=caller.headers).status_code == 422
    top = caller.wait_for_spans(name)[name]
    assert top.error == "Input validation error: `temperature` must be strictly positive"
    assert (top.attributes["error.type"], top.attributes["http.response.status_code"]) == ("validation", 422)


def test_a_prompt_rejected_by_the_tokenizer(server: Server, caller: Caller) -> None:
    asked = {"inputs": "many words " * 400}
    assert server.client.post("/generate", json=asked, headers=caller.headers).status_code == 422
    spans = caller.wait_for_spans("generate", "validate")
    assert spans["generate"].error == f"Input validation error: {spans['validate'].error}"
    assert spans["validate"].parent == spans["generate"].id


@pytest.mark.parametrize(
    ("method", "path", "name", "route", "status"),
    [
        ("GET", "/health", "health", "/health", 200),
        ("GET", "/", "health", "/", 200),
        ("GET", "/ping", "health", "/ping", 200),
        ("HEAD", "/health", "health", "/health", 200),
        ("GET", "/info", "get_model_info", "/info", 200),
        ("GET", "/v1/models", "openai_get_model_info", "/v1/models", 200),
        ("GET", "/v1/models/a/b", "openai_get_one_model_info", "/v1/models/{model}", 404),
        ("GET", "/metrics", "metrics", "/metrics", 200),
        ("POST", "/", "compat_generate", "/", 200),
        ("POST", "/invocations", "sagemaker_compatibility", "/invocations", 200),
        ("POST", "/tokenize", "tokenize", "/tokenize", 200),
        ("POST", "/v1/completions", "completions", "/v1/completions", 422),
        ("POST", "/vertex", "vertex_compatibility", "/vertex", 422),
        ("POST", "/metrics", "POST /metrics", "/metrics", 405),
        ("GET", "/nowhere", "GET", None, 404),
        ("OPTIONS", "/generate", "OPTIONS", None, 200),
    ],
)
def test_span_names_and_routes(
    server: Server, caller: Caller, method: str, path: str, name: str, route: Any, status: int
) -> None:
    asked = {"json": body()} if method == "POST" else {}
    assert server.client.request(method, path, headers=caller.headers, **asked).status_code == status
    span = caller.wait_for_spans(name)[name]
    attributes = span.attributes
    assert (span.kind, attributes["http.request.method"], attributes["url.path"], attributes.get("http.route")) == (
        "SERVER", method, path, route,
    )  # fmt: skip
    assert (attributes["http.response.status_code"], "error.type" in attributes) == (status, status >= 400)


def test_an_invalid_traceparent_begins_a_new_trace(server: Server, collector: Collector) -> None:
    strange, parent = os.urandom(16).hex(), os.urandom(8).hex()
    headers = {"traceparent": f"ff-{strange}-{parent}-01"}
    assert server.client.post("/tokenize", json={"inputs": strange}, headers=headers).status_code == 200
    span = collector.wait_for_spans("tokenize", when=lambda span: span.kind == "SERVER" and not span.parent)["tokenize"]
    assert span.trace != strange


def test_pending_spans_are_exported_when_the_server_stops(
    collector: Collector, tiny_llama: Path, tmp_path: Path
) -> None:
    flags = (*SCRIPTED, "--otlp-endpoint", collector.endpoint)
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *flags, env=EXPORT_AT_EXIT) as server:
        server.start().wait_until_ready()
        caller = Caller(collector)
        assert server.client.post("/generate", json=body(), headers=caller.headers).status_code == 200
        assert not [span for span in collector.spans if span.trace == caller.trace]
        server.stop()
        spans = [span for span in collector.spans if span.trace == caller.trace]
        assert {span.name for span in spans} == {"generate", *CHILD_SPANS}
        assert {span.resource["service.name"] for span in spans} == {"text-generation-inference.router"}


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
def test_an_unreachable_collector_affects_no_request(tiny_llama: Path, tmp_path: Path, hangs: bool) -> None:
    with socket.socket() as listener:  # bound: refuses connections; listening: accepts them and never answers
        listener.bind(("127.0.0.1", 0))
        if hangs:
            listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        flags = (*SCRIPTED, "--otlp-endpoint", endpoint)
        env = EXPORT_EVERY_50_MS | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
        with Server(tmp_path / "run", "--model-id", str(tiny_llama), *flags, env=env) as server:
            server.start().wait_until_ready()
            for _ in range(10):
                assert len(list(server.stream("Hello", max_new_tokens=5))) == 5
            server.wait_until(
                lambda: server.output_text().count("Traces do not reach") == 3, "three processes report it"
            )
            assert len(list(server.stream("Hello", max_new_tokens=5))) == 5
            server.stop()
            assert server.commands["up"].returncode == 0
    assert "did not end in time" not in server.output_text()
    assert server.output_text().count("Traces do not reach") == 3
    assert "Traceback" not in server.output_text()


def test_a_collector_that_is_restarted(tiny_llama: Path, tmp_path: Path) -> None:
    port = free_port()
    flags = (*SCRIPTED, "--otlp-endpoint", f"http://127.0.0.1:{port}", "--json-output")
    env = EXPORT_EVERY_50_MS | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *flags, env=env) as server:
        with run_collector(port) as first:
            server.start().wait_until_ready()
            server.generate("Hello", max_new_tokens=1)
            first.wait_for_spans("generate", "tokenize", "infer")
        server.generate("Hello", max_new_tokens=1)
        server.wait_until(lambda: server.output_text().count("Traces do not reach") == 3, "three processes report it")
        with run_collector(port) as second:

            def all_reach_it() -> bool:
                server.generate("Hello", max_new_tokens=1)
                return server.output_text().count("Traces reach") == 3

            server.wait_until(all_reach_it, "all three processes reach it again")
            assert {span.name for span in second.spans} >= {"generate", "tokenize", "infer"}
        server.stop()
    after_start = server.output_text().partition("Ready in")[2].splitlines()[1:]
    assert [line for line in after_start if not line.startswith("{")] == []  # gRPC itself logs nothing


def test_missing_opentelemetry_is_reported_with_an_install_command(tiny_llama: Path, tmp_path: Path) -> None:
    (missing := tmp_path / "missing").mkdir()
    (missing / "opentelemetry.py").write_text("raise ModuleNotFoundError(\"No module named 'opentelemetry'\")\n")
    command = [sys.executable, "-m", "tgi", "up", "--model-id", str(tiny_llama), "--port", str(free_port())]
    env = os.environ | python_path(missing) | {"TGI_RUN": str(tmp_path / "run")}
    done = subprocess.run(
        [*command, "--otlp-endpoint", "http://127.0.0.1:4317"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc" in done.stderr
    assert "Traceback" not in done.stderr
