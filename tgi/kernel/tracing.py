"""The way to tracing, which is nothing unless --otlp-endpoint is given: OpenTelemetry is not even imported then."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from tgi.kernel.errors import UserError
from tgi.kernel.settings import Settings

if TYPE_CHECKING:
    from tgi.kernel.trace import Tracer

_NOTHING = nullcontext()


def check(settings: Settings) -> None:
    """Raises UserError if traces are asked for and cannot be made."""
    if settings.otlp_endpoint is not None:
        _tracer_class()


def tracer(settings: Settings, process: str) -> "Tracer | None":
    """What makes the spans of `process`, if traces are asked for. Raises UserError if they cannot be made."""
    if settings.otlp_endpoint is None:
        return None
    return _tracer_class()(settings.otlp_endpoint, settings.otlp_service_name, process)


def span(tracer: "Tracer | None", name: str, traceparent: str) -> AbstractContextManager[None]:
    """A span around what is done meanwhile, if there is a tracer and `traceparent` names a trace."""
    return tracer.span(name, traceparent) if tracer is not None and traceparent else _NOTHING


def _tracer_class() -> "type[Tracer]":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's C core would write to standard error past all log settings
    try:
        from tgi.kernel.trace import Tracer
    except ImportError as error:
        raise UserError(
            f"--otlp-endpoint asks for traces, but OpenTelemetry cannot be imported: {error}. Install it with "
            "`pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc` (the extra `tracing`), or leave "
            "out --otlp-endpoint.",
            code=2,
        ) from error
    return Tracer
