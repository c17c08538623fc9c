"""Tracing, if --otlp-endpoint is given. Otherwise OpenTelemetry is not imported."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.table import Settings

if TYPE_CHECKING:
    from tgi.microkernel.observability.otlp import Tracer

_NO_SPAN = nullcontext()


def check_tracing(settings: Settings) -> None:
    """Raises UserError if --otlp-endpoint is given and OpenTelemetry cannot be imported."""
    if settings.otlp_endpoint is not None:
        _tracer_class()


def create_tracer(settings: Settings, process: str) -> "Tracer | None":
    """The tracer of `process`, or None without --otlp-endpoint. Raises UserError as check_tracing."""
    if settings.otlp_endpoint is None:
        return None
    return _tracer_class()(settings.otlp_endpoint, settings.otlp_service_name, process)


def trace_span(tracer: "Tracer | None", name: str, traceparent: str) -> AbstractContextManager[None]:
    """A span for the duration of a `with` block, if there is a tracer and `traceparent` is not empty."""
    return tracer.span(name, traceparent) if tracer is not None and traceparent else _NO_SPAN


def _tracer_class() -> "type[Tracer]":
    # gRPC's C core would write to standard error, ignoring the log settings.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from tgi.microkernel.observability.otlp import Tracer
    except ImportError as error:
        raise UserError(
            f"--otlp-endpoint asks for traces, but OpenTelemetry cannot be imported: {error}. Install it with "
            "`pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc` (the extra `tracing`), or leave "
            "out --otlp-endpoint.",
            code=2,
        ) from error
    return Tracer
