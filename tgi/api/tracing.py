"""One span per request, from its head to the last byte of the answer, or until its client has left."""

import re
from typing import TYPE_CHECKING, Any

from falcon.asgi import Request, Response

from tgi.api.asgi import Asgi, Receive, Send
from tgi.api.calls import probing
from tgi.api.operations import KSERVE, OPERATIONS
from tgi.kernel.settings import Settings

if TYPE_CHECKING:
    from tgi.kernel.trace import Span, Tracer

# The key of a request's span in its ASGI scope; not there without tracing.
SPAN = "tgi.span"
# All health checks are one operation in traces, as in TGI.
SAME = {"root_health": "health", "ping": "health"}


def span_of(req: Request) -> "Span | None":
    """The span of a request, if there is tracing."""
    return req.scope.get(SPAN)


def traced(app: Asgi, tracer: "Tracer") -> Asgi:
    """The same application, each request in its span, but for the readiness probe."""

    async def outermost(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if probing.get():
            await app(scope, receive, send)
            return
        method = scope["method"]
        parents = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
        parent = parents[0] if len(parents) == 1 else ""
        span = tracer.serve(method, parent, {"http.request.method": method, "url.path": scope["path"]})
        scope[SPAN] = span

        async def noting(event: dict[str, Any]) -> None:
            if event["type"] == "http.response.start":
                status = event["status"]
                span.set({"http.response.status_code": status})
                if status >= 400:
                    span.fail(str(status))
            await send(event)

        try:
            await app(scope, receive, noting)
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            span.end()

    return outermost


class Named:
    """Falcon's middleware that names a span as soon as the route is known: by the operation, as TGI does."""

    def __init__(self, settings: Settings) -> None:
        self._names = {
            (operation.method.upper(), operation.path): SAME.get(operation.id, operation.id)
            for operation in OPERATIONS + KSERVE
        }
        if settings.aip_predict_route:
            self._names["POST", settings.aip_predict_route] = "vertex_compatibility"
        if settings.aip_health_route:
            self._names["GET", settings.aip_health_route] = "health"

    async def process_resource(self, req: Request, resp: Response, resource: object, params: object) -> None:
        """Before the key is asked for, so that a refused request has its name too."""
        if (span := span_of(req)) is not None and req.uri_template is not None:
            route = re.sub(r":\w+}", "}", req.uri_template)
            method = "GET" if req.method == "HEAD" else req.method
            span.rename(self._names.get((method, route), f"{req.method} {route}"))
            span.set({"http.route": route})
