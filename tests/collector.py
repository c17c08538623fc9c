"""An OTLP collector for tests: a gRPC server on a loopback port that keeps the received spans."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from opentelemetry.proto.trace.v1.trace_pb2 import Status

TIMEOUT_SECONDS = 60


class Span(NamedTuple):
    """A received span. Ids in hexadecimal, times in nanoseconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    kind: str
    begun: int
    ended: int
    attributes: dict[str, Any]
    error: str | None  # the message of an error status
    resource: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The spans received so far, and the endpoint at which they are received."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Span] = []
        self._received = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        with self._received:
            for group in request.resource_spans:
                resource = _values(group.resource.attributes)
                self.spans += [_span(sent, resource) for scope in group.scope_spans for sent in scope.spans]
            self._received.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for_spans(self, *names: str, when: Callable[[Span], bool] = lambda span: True) -> dict[str, Span]:
        """Waits until there is a span of each of these names for which `when` is true: the first one of each."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        with self._received:
            while True:
                found = {span.name: span for span in reversed(self.spans) if span.name in names and when(span)}
                if len(found) == len(names):
                    return found
                assert time.monotonic() < deadline, f"timed out waiting for {names}: {self.spans}"
                self._received.wait(1)


def _span(sent: Sent, resource: dict[str, Any]) -> Span:
    return Span(
        sent.name,
        sent.trace_id.hex(),
        sent.span_id.hex(),
        sent.parent_span_id.hex(),
        Sent.SpanKind.Name(sent.kind).removeprefix("SPAN_KIND_"),
        sent.start_time_unix_nano,
        sent.end_time_unix_nano,
        _values(sent.attributes),
        sent.status.message if sent.status.code == Status.STATUS_CODE_ERROR else None,
        resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}


@contextmanager
def run_collector(port: int = 0) -> Iterator[Collector]:
    """Runs a collector for the duration of the block, on the given port or any free one."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
