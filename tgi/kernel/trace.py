"""Spans, sent in batches to an OTLP collector. The one file that knows OpenTelemetry; kernel/tracing.py imports it.

A trace context travels as the text of a `traceparent` header (W3C): version, trace id, span id, flags.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span as Recorded
from opentelemetry.trace import SpanKind, Status, StatusCode, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

log = logging.getLogger(__name__)

Attributes = Mapping[str, str | int | float | bool]

# What a process that ends gives the collector to take the last spans.
CLOSE_SECONDS = 2.0

_propagator = TraceContextTextMapPropagator()


class Span:
    """A span that has begun in this process and has not ended."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._failed = False

    @property
    def traceparent(self) -> str:
        """The context for spans below this one."""
        context = self._recorded.get_span_context()
        return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"

    def rename(self, name: str) -> None:
        """The name, once it is known."""
        self._recorded.update_name(name)

    def set(self, attributes: Attributes) -> None:
        """Says more about what was done."""
        self._recorded.set_attributes(attributes)

    def fail(self, kind: str, message: str = "") -> None:
        """What was done has failed; of several failures the first counts."""
        if not self._failed:
            self._failed = True
            _fail(self._recorded, kind, message)

    def end(self) -> None:
        """It is done."""
        self._recorded.end()


class Tracer:
    """Makes the spans of one process. They are sent by a thread of its own: what the collector does not take in time is
    dropped, and no caller ever waits for it."""

    def __init__(self, endpoint: str, service: str, process: str) -> None:
        library = logging.getLogger("opentelemetry")
        if library.level == logging.NOTSET:  # it would repeat itself for as long as there is no collector
            library.setLevel(logging.CRITICAL)
        resource = Resource.create({"service.name": service, "service.instance.id": process})
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(endpoint)))
        self._tracer = self._provider.get_tracer("tgi")

    def serve(self, name: str, traceparent: str, attributes: Attributes) -> Span:
        """Begins the span of a request from outside. A `traceparent` that is none begins a trace of its own."""
        return Span(self._tracer.start_span(name, _context(traceparent), SpanKind.SERVER, attributes))

    @contextmanager
    def span(self, name: str, traceparent: str) -> Iterator[None]:
        """A span around what is done meanwhile; an exception is its failure."""
        span = Span(self._tracer.start_span(name, _context(traceparent)))
        try:
            yield
        except Exception as error:
            span.fail(type(error).__name__, str(error))
            raise
        finally:
            span.end()

    def record(
        self,
        name: str,
        traceparent: str,
        began: float,
        ended: float,
        attributes: Attributes | None = None,
        failure: tuple[str, str] | None = None,
    ) -> None:
        """A span that is over. Times are in seconds, as time.time gives them; `failure` is its kind and message."""
        span = self._tracer.start_span(name, _context(traceparent), attributes=attributes, start_time=int(began * 1e9))
        if failure is not None:
            _fail(span, *failure)
        span.end(int(ended * 1e9))

    def close(self) -> None:
        """Sends what is left, and gives up when CLOSE_SECONDS are over."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _Exporter(OTLPSpanExporter):
    """Says once that spans are lost, and once that they arrive again."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, insecure=not endpoint.startswith("https://"))
        self._address = endpoint
        self._arrive = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        arrive = result is SpanExportResult.SUCCESS
        if arrive != self._arrive:
            self._arrive = arrive
            if arrive:
                log.info("Traces reach %s now", self._address)
            else:
                log.warning(
                    "Traces do not reach %s and are dropped until they do. Is an OTLP collector listening there for "
                    "gRPC? --log-level info,opentelemetry=warn logs each failure.",
                    self._address,
                )
        return result


def _context(traceparent: str) -> Context:
    """The parent that a text names; none if it is empty or invalid."""
    return _propagator.extract({"traceparent": traceparent}, Context())


def _fail(span: Recorded, kind: str, message: str) -> None:
    span.set_attribute("error.type", kind)
    told = message.encode(errors="replace").decode()  # what clients write may hold half a character
    span.set_status(Status(StatusCode.ERROR, told or None))
