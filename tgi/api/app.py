"""The falcon application: the routes, what surrounds them, and what errors turn into."""

import logging
from typing import Any

import falcon
import falcon.asgi
from falcon.asgi import Request, Response

from tgi.api import accounting, tracing
from tgi.api.asgi import Asgi, Receive, Send
from tgi.api.errors import ApiError, ClientGone, Rejection
from tgi.api.middleware import Auth, Cors
from tgi.api.routes import kserve
from tgi.api.routes.adapters import LoadResource, UnloadResource
from tgi.api.routes.chat import ChatResource
from tgi.api.routes.completions import CompletionsResource
from tgi.api.routes.docs import DocsResource, OpenApiResource
from tgi.api.routes.info import Health, InfoResource, MetricsResource
from tgi.api.routes.models import ModelResource, ModelsResource
from tgi.api.routes.native import GenerateResource, GenerateStreamResource, RootResource
from tgi.api.routes.sagemaker import SagemakerResource
from tgi.api.routes.tokenize import ChatTokenizeResource, TokenizeResource
from tgi.api.routes.vertex import VertexResource
from tgi.api.service import RECEIVE, Service
from tgi.kernel.errors import UserError

log = logging.getLogger(__name__)


def routes(service: Service) -> dict[str, object]:
    """The resource of each path, in falcon's syntax. Raises UserError if the settings name a path that is taken."""
    settings = service.settings
    made: dict[str, object] = {
        "/": RootResource(service),
        "/generate": GenerateResource(service),
        "/generate_stream": GenerateStreamResource(service),
        "/tokenize": TokenizeResource(service),
        "/chat_tokenize": ChatTokenizeResource(service),
        "/v1/chat/completions": ChatResource(service),
        "/v1/completions": CompletionsResource(service),
        "/invocations": SagemakerResource(service),
        "/vertex": VertexResource(service),
        "/health": Health(service),
        "/ping": Health(service),
        "/info": InfoResource(service),
        "/metrics": MetricsResource(),
        "/v1/models": ModelsResource(service),
        "/v1/models/{model:path}": ModelResource(service),
        "/v1/load_lora_adapter": LoadResource(service),
        "/v1/unload_lora_adapter": UnloadResource(service),
        "/api-doc/openapi.json": OpenApiResource(service),
        "/docs": DocsResource(),
        "/docs/": DocsResource(),
        "/docs/{asset}": DocsResource(),
    }
    if settings.kserve:
        made |= kserve.routes(service)
    _name(made, "AIP_HEALTH_ROUTE", settings.aip_health_route, Health(service))
    _name(made, "AIP_PREDICT_ROUTE", settings.aip_predict_route, VertexResource(service))
    return made


def _name(made: dict[str, object], variable: str, path: str | None, resource: object) -> None:
    """Serves a resource under the path that an environment variable names. Raises UserError if that cannot be."""
    if not path:
        return
    if not path.startswith("/") or "{" in path:
        raise UserError(f"{variable} is {path!r}. It must be a path, such as /predict.")
    taken = made.setdefault(path, resource)
    if not isinstance(taken, type(resource)) and not (isinstance(resource, Health) and isinstance(taken, RootResource)):
        raise UserError(f"{variable} is {path}, which this server uses already. Choose another path.")


def build(service: Service) -> Asgi:
    """The ASGI application of one front end."""
    app = falcon.asgi.App()
    app.add_middleware(Cors(service.settings.cors_allow_origin))
    if service.tracer is not None:
        app.add_middleware(tracing.Named(service.settings))
    app.add_middleware(Auth(service.settings.api_key, service.settings.aip_predict_route))
    app.resp_options.default_media_type = None  # type: ignore[assignment]  # an empty answer has no type
    errors = Errors(service)
    app.add_error_handler(Exception, errors.unexpected)
    app.add_error_handler(falcon.HTTPBadRequest, errors.bad_request)
    app.add_error_handler(falcon.HTTPNotFound, errors.not_found)
    app.add_error_handler(falcon.HTTPMethodNotAllowed, errors.not_allowed)
    app.add_error_handler(ApiError, errors.failed)
    app.add_error_handler(Rejection, errors.rejected)
    app.add_error_handler(ClientGone, errors.client_gone)
    for path, resource in routes(service).items():
        app.add_route(path, resource)

    async def outermost(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        scope[RECEIVE] = receive
        await app(scope, receive, send)

    return outermost if service.tracer is None else tracing.traced(outermost, service.tracer)


class Errors:
    """Falcon's handlers of exceptions: each becomes the answer that clients of its route read."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def failed(self, req: Request, resp: Response, error: ApiError, params: object) -> None:
        """A request that its route refuses, or that has failed."""
        accounting.failed(error, tracing.span_of(req))
        self._answer(req, resp, error)

    async def rejected(self, req: Request, resp: Response, error: Rejection, params: object) -> None:
        """A request that its route has not seen. Its text may quote the body, so traces do not have it."""
        self._answer(req, resp, error)

    async def bad_request(self, req: Request, resp: Response, error: falcon.HTTPBadRequest, params: object) -> None:
        """What falcon cannot read: a method that it does not know, a broken header. In TGI's form it has no body."""
        self._answer(req, resp, Rejection(400, error.description or error.title or "Bad request", plain=""))

    async def not_found(self, req: Request, resp: Response, error: falcon.HTTPNotFound, params: object) -> None:
        """An unknown path. In TGI's form it has no body."""
        text = f"There is no route {req.method} {req.path}. /docs lists the routes of this server"
        self._answer(req, resp, Rejection(404, text, plain=""))

    async def not_allowed(
        self, req: Request, resp: Response, error: falcon.HTTPMethodNotAllowed, params: object
    ) -> None:
        """A known path with another method. In TGI's form it has no body."""
        methods = dict(error.headers or {})["Allow"].split(", ")
        allow = ",".join(method for method in methods if method != "OPTIONS")
        text = f"{req.method} is not allowed on {req.path}. Allowed: {allow}"
        self._answer(req, resp, Rejection(405, text, plain="", headers={"allow": allow}))

    async def client_gone(self, req: Request, resp: Response, error: ClientGone, params: object) -> None:
        """The client has disconnected: what is set here is not sent."""
        resp.status = 499

    async def unexpected(self, req: Request, resp: Response, error: Exception, params: object) -> None:
        """A defect of the server."""
        log.error("%s %s failed", req.method, req.path, exc_info=error)
        await self.failed(req, resp, ApiError(500, "internal", "Internal server error"), params)

    def _answer(self, req: Request, resp: Response, error: ApiError) -> None:
        resp.status = error.status
        resp.set_headers(error.headers)
        if self._service.has_openai_errors(req):
            resp.content_type, resp.data = "application/json", error.openai()
        elif body := error.native():
            resp.content_type, resp.data = error.native_type, body
