"""One span per HTTP request, from its head to the last byte of the response or the client's disconnect."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from falcon.asgi import Request, Response

from tgi.api.asgi import PROBE_KEY, AsgiApp, Receive, Send

if TYPE_CHECKING:
    from tgi.microkernel.observability.otlp import Span, Tracer

SPAN_KEY = "tgi.span"  # of the ASGI scope; absent without tracing


def span_of(req: Request) -> "Span | None":
    """The span of a request, if tracing is on."""
    return req.scope.get(SPAN_KEY)


def with_spans(app: AsgiApp, tracer: "Tracer") -> AsgiApp:
    """Wraps an application: each request gets a span, except those of the readiness probe."""

    async def traced(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if PROBE_KEY in scope:
            await app(scope, receive, send)
            return
        method = scope["method"]
        parents = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
        parent = parents[0] if len(parents) == 1 else ""
        span = tracer.start_server_span(method, parent, {"http.request.method": method, "url.path": scope["path"]})
        scope[SPAN_KEY] = span

        async def send_and_record_status(event: dict[str, Any]) -> None:
            if event["type"] == "http.response.start":
                status = event["status"]
                span.set_attributes({"http.response.status_code": status})
                if status >= 400:
                    span.set_error(str(status))
            await send(event)

        try:
            await app(scope, receive, send_and_record_status)
        except BaseException as error:
            span.set_error(type(error).__name__)
            raise
        finally:
            span.end()

    return traced


class SpanNameMiddleware:
    """Falcon middleware that names a span by its operation as soon as the route is known, as TGI does. It runs before
    the API key is checked, so that a rejected request has its name too."""

    def __init__(self, names: Mapping[tuple[str, str], str]) -> None:
        self._names = names  # by method and path

    async def process_resource(self, req: Request, resp: Response, resource: object, params: object) -> None:
        if (span := span_of(req)) is not None and req.uri_template is not None:
            route = re.sub(r":\w+}", "}", req.uri_template)
            method = "GET" if req.method == "HEAD" else req.method
            span.update_name(self._names.get((method, route), f"{req.method} {route}"))
            span.set_attributes({"http.route": route})
