"""Spans as a collector receives them, and without a reachable collector."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.collector import run_collector
from tgi.microkernel.observability import otlp, tracing
from tgi.microkernel.observability.otlp import Tracer
from tgi.microkernel.settings.table import Settings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("traceparent", "follows"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", True),  # not sampled by the caller; every request is sampled here
        (f"cc-{TRACE}-{PARENT}-01-of the future", True),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{TRACE}-{PARENT}-01-more", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE[1:]}-{PARENT}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_valid_traceparent_is_the_parent(traceparent: str, follows: bool) -> None:
    with run_collector() as collector:
        tracer = Tracer(collector.endpoint, "mine", "api-0")
        span = tracer.start_server_span("generate", traceparent, {"http.route": "/generate"})
        below = span.traceparent
        span.end()
        tracer.close()
        (sent,) = collector.spans
    assert (sent.trace == TRACE, sent.parent == PARENT) == (follows, follows)
    assert below.startswith(f"00-{sent.trace}-{sent.id}-")
    assert int(below[-2:], 16) & 1  # sampled
    assert (sent.name, sent.kind, sent.error, sent.attributes) == (
        "generate",
        "SERVER",
        None,
        {"http.route": "/generate"},
    )
    assert (sent.resource["service.name"], sent.resource["service.instance.id"]) == ("mine", "api-0")


def test_failed_spans_and_recorded_spans() -> None:
    with run_collector() as collector:
        tracer = Tracer(collector.endpoint, "s", "p")
        span = tracer.start_server_span("first", "", {})
        span.set_error("validation", "half a character: \ud83d")
        span.set_error("500", "later")
        with pytest.raises(RuntimeError), tracer.span("second", span.traceparent):
            raise RuntimeError("broken")
        tracer.record_span("third", span.traceparent, 1.5e9, 1.5e9 + 2, {"tokens": 5})
        span.end()
        tracer.close()
        first, second, third = (next(span for span in collector.spans if span.name == name) for name in ORDER)
    assert (first.error, first.attributes) == ("half a character: ?", {"error.type": "validation"})
    assert (second.error, second.attributes) == ("broken", {"error.type": "RuntimeError"})
    assert {second.parent, third.parent} == {first.id}
    assert {second.trace, third.trace} == {first.trace}
    assert (third.begun, third.ended, third.error, third.attributes) == (
        15 * 10**17,
        15 * 10**17 + 2 * 10**9,
        None,
        {"tokens": 5},
    )
    assert second.kind == third.kind == "INTERNAL"


ORDER = ("first", "second", "third")


@contextmanager
def listening(hangs: bool) -> Iterator[str]:
    """An endpoint that refuses connections, or that accepts them and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if not hangs:
            listener.close()
        yield endpoint


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
def test_unreachable_collector_does_not_block(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with listening(hangs) as endpoint:
        tracer = Tracer(endpoint, "s", "p")
        for _ in range(5000):  # more than the queue of spans holds
            tracer.start_server_span("generate", "", {}).end()
        while not caplog.messages:
            tracer.start_server_span("generate", "", {}).end()
        tracer.close()
    (message,) = caplog.messages
    assert message.startswith(f"Traces do not reach {endpoint} and are dropped")


def test_opentelemetry_is_not_imported_by_default() -> None:
    assert tracing.create_tracer(Settings(), "api-0") is None
    code = (
        "import sys, tgi.cli, tgi.server, tgi.api.main, tgi.tokenizer.main, tgi.scheduler.main\n"
        "import tgi.microkernel.processes.process\n"
        "sys.exit(str([name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'grpc')] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
