"""Traces of whole process trees, as a collector receives them: who is whose parent, and how requests ended."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collector import Collector, Span, collecting
from tests.live.server import Server, free_port

SCRIPTED = ("--worker", "scripted", "--scripted-step-us", "5000", "--validation-workers", "1")
AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
AT_THE_END = {"OTEL_BSP_SCHEDULE_DELAY": "3600000"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def server(collector: Collector, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = tmp_path_factory.mktemp("traced") / "run"
    flags = ("--otlp-endpoint", collector.endpoint, "--otlp-service-name", "mine", "--max-total-tokens", "400")
    with Server(run, "--model-id", str(tiny_llama), *SCRIPTED, *flags, env=AT_ONCE) as made:
        yield made.start().ready()


class Caller:
    """Whose trace a request belongs to."""

    def __init__(self, collector: Collector) -> None:
        self.trace, self.span = os.urandom(16).hex(), os.urandom(8).hex()
        self.headers = {"traceparent": f"00-{self.trace}-{self.span}-01"}
        self._collector = collector

    def until(self, *names: str) -> dict[str, Span]:
        return self._collector.until(*names, when=lambda span: span.trace == self.trace)


@pytest.fixture
def caller(collector: Collector) -> Caller:
    return Caller(collector)


def body(tokens: int = 5, **parameters: Any) -> dict[str, Any]:
    return {"inputs": "Hello", "parameters": {"max_new_tokens": tokens, **parameters}}


BELOW = ("tokenize", "validate", "queued", "infer")


def is_a_tree(caller: Caller, spans: dict[str, Span], *names: str) -> None:
    """One request's span below its caller, and the others below that."""
    top, *below = (spans[name] for name in names)
    assert (top.parent, top.kind, top.error, top.resource["service.instance.id"]) == (
        caller.span,
        "SERVER",
        None,
        "api-0",
    )
    assert {span.parent for span in below} == {top.id}
    assert {span.resource["service.name"] for span in spans.values()} == {"mine"}
    assert all(top.begun <= span.begun <= span.ended <= top.ended for span in below)
    assert spans["queued"].ended == spans["infer"].begun
    assert {name: span.resource["service.instance.id"] for name, span in spans.items() if span is not top} == {
        **dict.fromkeys(names[1:-2], "tokenizer-0"), **dict.fromkeys(names[-2:], "scheduler-0")
    }  # fmt: skip


def test_a_plain_request_is_one_tree(server: Server, caller: Caller) -> None:
    answer = server.client.post("/generate", json=body(do_sample=True, seed=2**64 - 1), headers=caller.headers)
    assert answer.status_code == 200
    names = ("generate", *BELOW)
    spans = caller.until(*names)
    is_a_tree(caller, spans, *names)
    told = spans["generate"].attributes
    assert (told["http.request.method"], told["http.route"], told["http.response.status_code"]) == (
        "POST",
        "/generate",
        200,
    )
    assert '"max_new_tokens": 5' in told["parameters"]
    assert told["seed"] == str(2**64 - 1)
    for name in ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token"):
        assert told[name][-1] == "s"
    assert spans["infer"].attributes == {
        "prompt_tokens": int(answer.headers["x-prompt-tokens"]), "cached_tokens": 0, "generated_tokens": 5,
        "finish_reason": "length",
    }  # fmt: skip


def test_a_stream_ends_with_its_last_event(server: Server, caller: Caller) -> None:
    answer = server.client.post("/generate_stream", json=body(20), headers=caller.headers)
    assert answer.text.count("data:") == 20
    names = ("generate_stream", *BELOW)
    spans = caller.until(*names)
    is_a_tree(caller, spans, *names)  # the stream's span is not over before the last token was computed
    assert spans["generate_stream"].attributes["total_time"]


def test_a_chat_with_two_choices(server: Server, caller: Caller, collector: Collector) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "n": 2}
    assert server.client.post("/v1/chat/completions", json=chat, headers=caller.headers).status_code == 200
    names = ("chat_completions", "apply_chat_template", *BELOW)
    is_a_tree(caller, caller.until(*names), *names)
    first = caller.until("infer")["infer"]
    collector.until("infer", when=lambda span: span.trace == caller.trace and span.id != first.id)


def test_a_client_that_leaves(server: Server, caller: Caller) -> None:
    with server.client.stream("POST", "/generate_stream", json=body(390), headers=caller.headers) as answer:
        next(answer.iter_lines())
    spans = caller.until("generate_stream", "infer")
    top, infer = spans["generate_stream"], spans["infer"]
    assert (top.error, top.attributes["error.type"]) == ("the client has left", "dropped")
    assert (infer.attributes["finish_reason"], infer.attributes["error.type"]) == ("cancelled", "cancelled")
    assert infer.attributes["generated_tokens"] < 390


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_request_that_is_refused(server: Server, caller: Caller, path: str) -> None:
    name = path.removeprefix("/")
    assert server.client.post(path, json=body(temperature=0), headers=caller.headers).status_code == 422
    top = caller.until(name)[name]
    assert top.error == "Input validation error: `temperature` must be strictly positive"
    assert (top.attributes["error.type"], top.attributes["http.response.status_code"]) == ("validation", 422)


def test_a_prompt_that_is_refused_below(server: Server, caller: Caller) -> None:
    asked = {"inputs": "many words " * 400}
    assert server.client.post("/generate", json=asked, headers=caller.headers).status_code == 422
    spans = caller.until("generate", "validate")
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
def test_names(server: Server, caller: Caller, method: str, path: str, name: str, route: Any, status: int) -> None:
    asked = {"json": body()} if method == "POST" else {}
    assert server.client.request(method, path, headers=caller.headers, **asked).status_code == status
    span = caller.until(name)[name]
    told = span.attributes
    assert (span.kind, told["http.request.method"], told["url.path"], told.get("http.route")) == (
        "SERVER", method, path, route,
    )  # fmt: skip
    assert (told["http.response.status_code"], "error.type" in told) == (status, status >= 400)


def test_a_traceparent_that_is_none_begins_a_trace(server: Server, collector: Collector) -> None:
    strange, parent = os.urandom(16).hex(), os.urandom(8).hex()
    headers = {"traceparent": f"ff-{strange}-{parent}-01"}
    assert server.client.post("/tokenize", json={"inputs": strange}, headers=headers).status_code == 200
    span = collector.until("tokenize", when=lambda span: span.kind == "SERVER" and not span.parent)["tokenize"]
    assert span.trace != strange


def test_spans_are_sent_before_the_processes_end(collector: Collector, tiny_llama: Path, tmp_path: Path) -> None:
    flags = (*SCRIPTED, "--otlp-endpoint", collector.endpoint)
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *flags, env=AT_THE_END) as server:
        server.start().ready()
        caller = Caller(collector)
        assert server.client.post("/generate", json=body(), headers=caller.headers).status_code == 200
        assert not [span for span in collector.spans if span.trace == caller.trace]
        server.stop()
        spans = [span for span in collector.spans if span.trace == caller.trace]
        assert {span.name for span in spans} == {"generate", *BELOW}
        assert {span.resource["service.name"] for span in spans} == {"text-generation-inference.router"}


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
def test_a_dead_collector_disturbs_nobody(tiny_llama: Path, tmp_path: Path, hangs: bool) -> None:
    with socket.socket() as listener:  # bound: refuses; listening: takes connections and never says a word
        listener.bind(("127.0.0.1", 0))
        if hangs:
            listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        flags = (*SCRIPTED, "--otlp-endpoint", endpoint)
        env = AT_ONCE | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
        with Server(tmp_path / "run", "--model-id", str(tiny_llama), *flags, env=env) as server:
            server.start().ready()
            for _ in range(10):
                assert len(list(server.stream("Hello", max_new_tokens=5))) == 5
            server.until(lambda: server.said().count("Traces do not reach") == 3, "three processes say so")
            assert len(list(server.stream("Hello", max_new_tokens=5))) == 5
            server.stop()
            assert server.commands["up"].returncode == 0
    assert "did not end in time" not in server.said()
    assert server.said().count("Traces do not reach") == 3
    assert "Traceback" not in server.said()


def test_a_collector_that_goes_away_and_comes_back(tiny_llama: Path, tmp_path: Path) -> None:
    port = free_port()
    flags = (*SCRIPTED, "--otlp-endpoint", f"http://127.0.0.1:{port}", "--json-output")
    env = AT_ONCE | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with Server(tmp_path / "run", "--model-id", str(tiny_llama), *flags, env=env) as server:
        with collecting(port) as first:
            server.start().ready()
            server.generate("Hello", max_new_tokens=1)
            first.until("generate", "tokenize", "infer")
        server.generate("Hello", max_new_tokens=1)
        server.until(lambda: server.said().count("Traces do not reach") == 3, "three processes say so")
        with collecting(port) as second:

            def arrives() -> bool:
                server.generate("Hello", max_new_tokens=1)
                return server.said().count("Traces reach") == 3

            server.until(arrives, "all three reach it again")
            assert {span.name for span in second.spans} >= {"generate", "tokenize", "infer"}
        server.stop()
    after_start = server.said().partition("Ready in")[2].splitlines()[1:]
    assert [line for line in after_start if not line.startswith("{")] == []  # gRPC logs nothing by itself


def test_a_host_without_opentelemetry_says_what_to_install(tiny_llama: Path, tmp_path: Path) -> None:
    (missing := tmp_path / "missing").mkdir()
    (missing / "opentelemetry.py").write_text("raise ModuleNotFoundError(\"No module named 'opentelemetry'\")\n")
    command = [sys.executable, "-m", "tgi", "up", "--model-id", str(tiny_llama), "--port", str(free_port())]
    env = os.environ | {"PYTHONPATH": str(missing), "TGI_RUN": str(tmp_path / "run")}
    done = subprocess.run(
        [*command, "--otlp-endpoint", "http://127.0.0.1:4317"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc" in done.stderr
    assert "Traceback" not in done.stderr
