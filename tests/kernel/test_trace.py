"""Spans as a collector receives them, and what becomes of them where there is none."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.collector import collecting
from tgi.kernel import trace, tracing
from tgi.kernel.settings import Settings
from tgi.kernel.trace import Tracer

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
def test_a_traceparent_is_followed_or_ignored(traceparent: str, follows: bool) -> None:
    with collecting() as collector:
        tracer = Tracer(collector.endpoint, "mine", "api-0")
        span = tracer.serve("generate", traceparent, {"http.route": "/generate"})
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


def test_spans_that_fail_and_spans_of_the_past() -> None:
    with collecting() as collector:
        tracer = Tracer(collector.endpoint, "s", "p")
        span = tracer.serve("first", "", {})
        span.fail("validation", "half a character: \ud83d")
        span.fail("500", "later")
        with pytest.raises(RuntimeError), tracer.span("second", span.traceparent):
            raise RuntimeError("broken")
        tracer.record("third", span.traceparent, 1.5e9, 1.5e9 + 2, {"tokens": 5})
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
    """The endpoint of a port where nobody listens, or somebody who never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if not hangs:
            listener.close()
        yield endpoint


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
def test_nobody_waits_for_a_collector_that_is_dead(
    hangs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "CLOSE_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with listening(hangs) as endpoint:
        tracer = Tracer(endpoint, "s", "p")
        for _ in range(5000):  # more than are kept
            tracer.serve("generate", "", {}).end()
        while not caplog.messages:
            tracer.serve("generate", "", {}).end()
        tracer.close()
    (told,) = caplog.messages
    assert told.startswith(f"Traces do not reach {endpoint} and are dropped")


def test_without_the_flag_nothing_is_imported() -> None:
    assert tracing.tracer(Settings(), "api-0") is None
    code = (
        "import sys, tgi.cli, tgi.tree, tgi.api.main, tgi.tokenizer.main, tgi.scheduler.main, tgi.kernel.child\n"
        "sys.exit(str([name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'grpc')] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
