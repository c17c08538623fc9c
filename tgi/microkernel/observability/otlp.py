"""Spans, sent in batches to an OTLP collector. The only module that imports OpenTelemetry; tracing.py imports it.

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

# How long an ending process waits until the last spans are sent.
CLOSE_SECONDS = 2.0

_propagator = TraceContextTextMapPropagator()


class Span:
    """A started span of this process."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._failed = False

    @property
    def traceparent(self) -> str:
        """The trace context for child spans."""
        context = self._recorded.get_span_context()
        return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"

    def update_name(self, name: str) -> None:
        """Sets the name, which may be known only after the start."""
        self._recorded.update_name(name)

    def set_attributes(self, attributes: Attributes) -> None:
        self._recorded.set_attributes(attributes)

    def set_error(self, kind: str, message: str = "") -> None:
        """Marks the span as failed. Only the first call has an effect."""
        if not self._failed:
            self._failed = True
            _fail(self._recorded, kind, message)

    def end(self) -> None:
        self._recorded.end()


class Tracer:
    """Creates the spans of one process. A background thread sends them, so no caller waits for the collector. Spans
    that it does not accept in time are dropped."""

    def __init__(self, endpoint: str, service: str, process: str) -> None:
        library = logging.getLogger("opentelemetry")
        if library.level == logging.NOTSET:  # it would log every failed export
            library.setLevel(logging.CRITICAL)
        resource = Resource.create({"service.name": service, "service.instance.id": process})
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(endpoint)))
        self._tracer = self._provider.get_tracer("tgi")

    def start_server_span(self, name: str, traceparent: str, attributes: Attributes) -> Span:
        """Starts the server span of an HTTP request. An empty or invalid `traceparent` starts a new trace."""
        return Span(self._tracer.start_span(name, _context(traceparent), SpanKind.SERVER, attributes))

    @contextmanager
    def span(self, name: str, traceparent: str) -> Iterator[None]:
        """A span for the duration of a `with` block; an exception marks it as failed."""
        span = Span(self._tracer.start_span(name, _context(traceparent)))
        try:
            yield
        except Exception as error:
            span.set_error(type(error).__name__, str(error))
            raise
        finally:
            span.end()

    def record_span(
        self,
        name: str,
        traceparent: str,
        began: float,
        ended: float,
        attributes: Attributes | None = None,
        failure: tuple[str, str] | None = None,
    ) -> None:
        """Records a finished span. Times are in seconds since the epoch; `failure` is (error type, message)."""
        span = self._tracer.start_span(name, _context(traceparent), attributes=attributes, start_time=int(began * 1e9))
        if failure is not None:
            _fail(span, *failure)
        span.end(int(ended * 1e9))

    def close(self) -> None:
        """Sends the remaining spans, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _Exporter(OTLPSpanExporter):
    """Logs once when exports begin to fail, and once when they succeed again."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, insecure=not endpoint.startswith("https://"))
        self._address = endpoint
        self._succeeds = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        succeeds = result is SpanExportResult.SUCCESS
        if succeeds != self._succeeds:
            self._succeeds = succeeds
            if succeeds:
                log.info("Traces reach %s now", self._address)
            else:
                log.warning(
                    "Traces do not reach %s and are dropped until they do. Is an OTLP collector listening there for "
                    "gRPC? --log-level info,opentelemetry=warn logs each failure.",
                    self._address,
                )
        return result


def _context(traceparent: str) -> Context:
    """The parent context of a traceparent; an empty one if it is empty or invalid."""
    return _propagator.extract({"traceparent": traceparent}, Context())


def _fail(span: Recorded, kind: str, message: str) -> None:
    span.set_attribute("error.type", kind)
    description = message.encode(errors="replace").decode()  # input of clients may contain lone surrogates
    span.set_status(Status(StatusCode.ERROR, description or None))
