"""The falcon application: the resource of each path, middleware, and what exceptions are answered with."""

import logging
from typing import Any

import falcon
import falcon.asgi
from falcon.asgi import Request, Response

from tgi.api import docs, page, request_metrics, tracing
from tgi.api.asgi import PROBE_KEY, RECEIVE_KEY, RECORD_KEY, AsgiApp, Receive, Send
from tgi.api.errors import ApiError, ClientDisconnected, Rejection, no_such_route
from tgi.api.middleware import ClientMiddleware, CorsMiddleware, ReadinessMiddleware, RequestIdMiddleware
from tgi.api.model_dispatch import ModelMiddleware
from tgi.api.operations import KSERVE, OPERATIONS, SEVERAL_MODELS
from tgi.api.requests import RequestRecord
from tgi.api.routes.info import HealthResource
from tgi.api.routes.native import RootResource
from tgi.api.routes.vertex import VertexResource
from tgi.api.service import Resource, Service
from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.table import Settings

ALL_OPERATIONS = OPERATIONS + KSERVE + SEVERAL_MODELS

log = logging.getLogger(__name__)


def build(service: Service) -> AsgiApp:
    """The ASGI application of one front end. Raises UserError if the settings name a path that is in use."""
    settings = service.settings
    app = falcon.asgi.App()
    app.add_middleware(CorsMiddleware(settings.cors_allow_origin))
    app.add_middleware(RequestIdMiddleware())
    if service.tracer is not None:  # before the API key, so that a span has its name also if the key is wrong
        app.add_middleware(tracing.SpanNameMiddleware(span_names(settings)))
    app.add_middleware(ClientMiddleware(service.clients, settings.aip_predict_route))
    if settings.models:
        app.add_middleware(ModelMiddleware())
    app.add_middleware(ReadinessMiddleware(service.router.health))
    app.resp_options.default_media_type = None  # type: ignore[assignment]  # an empty response has no content type
    handlers = ErrorHandlers(service)
    app.add_error_handler(Exception, handlers.handle_unexpected)
    app.add_error_handler(falcon.HTTPBadRequest, handlers.handle_bad_request)
    app.add_error_handler(falcon.HTTPNotFound, handlers.handle_not_found)
    app.add_error_handler(falcon.HTTPMethodNotAllowed, handlers.handle_method_not_allowed)
    app.add_error_handler(ApiError, handlers.handle_api_error)
    app.add_error_handler(Rejection, handlers.handle_rejection)
    app.add_error_handler(ClientDisconnected, handlers.handle_client_disconnected)
    for route, resource in resource_classes(settings).items():
        app.add_route(route, resource(service))

    configured = (settings.aip_predict_route, settings.aip_health_route)

    async def outermost(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        scope[RECEIVE_KEY] = receive
        path = scope["path"]
        if path.endswith("/") and path.lstrip("/").startswith("v1/") and path not in configured:
            scope["path"] = path.rstrip("/")
        if PROBE_KEY in scope:
            await app(scope, _with_head_event(receive), send)
            return
        record = scope[RECORD_KEY] = RequestRecord(scope["method"], scope["path"], scope.get(tracing.SPAN_KEY))
        try:
            await app(scope, _with_head_event(receive), send)
        except BaseException:  # a defect, or the end of the server, after the response has begun
            request_metrics.record_cut(record)
            raise
        finally:
            request_metrics.log_request(record, service.model_id)
            record.error = None  # its traceback has the frames that have the body, and the scope, which has the record

    return outermost if service.tracer is None else tracing.with_spans(outermost, service.tracer)


def _with_head_event(receive: Receive) -> Receive:
    """Prepends an event without content. falcon waits for the first event before it calls middleware and responder, so
    they see a request once its head is complete, not only with the first bytes of its body."""
    is_first = True

    async def receive_head_first() -> dict[str, Any]:
        nonlocal is_first
        if is_first:
            is_first = False
            return {"type": "http.request", "body": b"", "more_body": True}
        return await receive()

    return receive_head_first


def resource_classes(settings: Settings) -> dict[str, type[Resource]]:
    """The resource of each path, in falcon's syntax. Raises UserError if the settings name a path that is in use."""
    operations = OPERATIONS + (KSERVE if settings.kserve else ()) + (SEVERAL_MODELS if settings.models else ())
    classes = {operation.route: operation.resource for operation in operations} | docs.ROUTES
    if settings.ui:
        classes |= page.ROUTES
    _add_configured_path(classes, "AIP_HEALTH_ROUTE", settings.aip_health_route, HealthResource)
    _add_configured_path(classes, "AIP_PREDICT_ROUTE", settings.aip_predict_route, VertexResource)
    return classes


def _add_configured_path(
    classes: dict[str, type[Resource]], variable: str, path: str | None, resource: type[Resource]
) -> None:
    """Adds the path that an environment variable names. Raises UserError if it is invalid or another resource's."""
    if not path:
        return
    if not path.startswith("/") or "{" in path:
        raise UserError(f"{variable} is {path!r}. It must be a path, such as /predict.")
    present = classes.setdefault(path, resource)
    if present is not resource and (present, resource) != (RootResource, HealthResource):  # GET / is a health check too
        raise UserError(f"{variable} is {path}, which this server uses already. Choose another path.")


def span_names(settings: Settings) -> dict[tuple[str, str], str]:
    """The name of a request's span by method and path."""
    names = {(operation.method.upper(), operation.path): operation.span_name for operation in ALL_OPERATIONS}
    if settings.aip_predict_route:
        names["POST", settings.aip_predict_route] = "vertex_compatibility"
    if settings.aip_health_route:
        names["GET", settings.aip_health_route] = "health"
    return names


class ErrorHandlers:
    """Falcon's handlers of exceptions. Each answers with an error in the format of the request's route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle_api_error(self, req: Request, resp: Response, error: ApiError, params: object) -> None:
        """A request that its route has rejected, or that has failed."""
        request_metrics.record_failure(error, RequestRecord.of(req))
        self._answer(req, resp, error)

    async def handle_rejection(self, req: Request, resp: Response, error: Rejection, params: object) -> None:
        """A request that was rejected before its route handled it. Its text may quote the body, so neither span nor log
        has it."""
        self._answer(req, resp, error)

    async def handle_bad_request(
        self, req: Request, resp: Response, error: falcon.HTTPBadRequest, params: object
    ) -> None:
        """What falcon rejects: an unknown method, an invalid header. In TGI's format there is no body."""
        self._answer(req, resp, Rejection(400, error.description or error.title or "Bad request", plain=""))

    async def handle_not_found(self, req: Request, resp: Response, error: falcon.HTTPNotFound, params: object) -> None:
        """An unknown path. In TGI's format there is a body only for paths of other servers."""
        self._answer(req, resp, no_such_route(req.method, req.path))

    async def handle_method_not_allowed(
        self, req: Request, resp: Response, error: falcon.HTTPMethodNotAllowed, params: object
    ) -> None:
        """A known path with another method. In TGI's format there is no body."""
        methods = dict(error.headers or {})["Allow"].split(", ")
        allow = ",".join(method for method in methods if method != "OPTIONS")
        text = f"{req.method} is not allowed on {req.path}. Allowed: {allow}"
        self._answer(req, resp, Rejection(405, text, plain="", headers={"allow": allow}))

    async def handle_client_disconnected(
        self, req: Request, resp: Response, error: ClientDisconnected, params: object
    ) -> None:
        """The client has disconnected; the status is seen by the span only."""
        resp.status = 499

    async def handle_unexpected(self, req: Request, resp: Response, error: Exception, params: object) -> None:
        """A defect of the server."""
        log.error("%s %s failed", req.method, req.path, exc_info=error)
        await self.handle_api_error(req, resp, ApiError(500, "internal", "Internal server error"), params)

    def _answer(self, req: Request, resp: Response, error: ApiError) -> None:
        resp.status = error.status
        resp.set_headers(error.headers)
        if (record := RequestRecord.of(req)) is not None:
            record.error = error
        match self._service.error_form(req):
            case "anthropic":
                resp.status = error.anthropic_status
                resp.content_type, resp.data = "application/json", error.anthropic_body(req.context.request_id)
            case "openai":
                resp.content_type, resp.data = "application/json", error.openai_body()
            case _:
                if body := error.native_body():
                    resp.content_type, resp.data = error.native_type, body
