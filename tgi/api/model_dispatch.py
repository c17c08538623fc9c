"""Several models in one front end: the ASGI application in front of those of the models, which chooses by `model`.

It reads the body of a request to find the name, has the model loaded, and hands the request to the application of the
model, which sees it as if it were the only one.
"""

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors
from tgi.api.asgi import CLIENT_KEY, WHOLE_BODY_KEY, AsgiApp, Receive, Send
from tgi.api.body_reader import decompress
from tgi.api.errors import ApiError, ClientDisconnected
from tgi.api.models import MODEL_KEY, HostedModel, Models
from tgi.api.readiness import run_readiness_probe
from tgi.api.service import Service, is_json
from tgi.microkernel.settings.options import MAX_SECONDS, seconds

# In the scope of a request: the error that it is answered with.
ERROR_KEY = "tgi.model_error"
# Requests below these paths need no model, nor do those without a JSON body.
WITHOUT_MODEL = ("/v1/models", "/v1/files", "/v1/batches", "/v1/conversations", "/sleep", "/wake_up")
# Of the response to a request that has waited: the state in which it found its model, and milliseconds.
STATE_HEADER, WAIT_HEADER = b"x-model-state", b"x-model-wait"
# Retry-After where too many requests wait for a model.
MODEL_RETRY_SECONDS = 5
# Of a request: for how many seconds it would wait.
LIMIT_HEADER = "x-model-wait"


class _Named(msgspec.Struct):
    """Of a body, what names the model."""

    model: str | None = None


_DECODER = msgspec.json.Decoder(_Named)


class ModelDispatcher:
    """Chooses the application for each request."""

    def __init__(self, models: Models, services: Mapping[str, Service], applications: Mapping[str, AsgiApp]) -> None:
        """`services`, `applications`: of each model, by name."""
        self._models = models
        self._services = services
        self._applications = applications
        self._server = services[models.default.name]

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Sends a request to the application of the model that it names, when that is loaded."""
        body = _Body(receive)
        name = await self._named(scope, body)
        model = self._models.default if name is None else self._chosen(name, scope)
        application = self._applications[model.name]
        if name is None or scope["method"] != "POST" or ERROR_KEY in scope:
            await application(scope, body.receive_again, send)
            return
        state, began = model.view.state, time.perf_counter()
        try:
            if not model.is_usable:
                while not model.is_usable:
                    await self._wait(model, scope, body)
                send = _with_headers(send, state, time.perf_counter() - began)
        except (ApiError, ClientDisconnected) as error:
            scope[ERROR_KEY] = error
            await application(scope, body.receive_again, send)
            return
        self._models.begin(model)  # nothing is awaited since it was usable
        try:
            await application(scope, body.receive_again, send)
        finally:
            self._models.end(model)

    async def probe(self, model: HostedModel) -> None:
        """Answers the first request of a model as often as it is loaded, until cancelled."""
        while True:
            service, application = self._services[model.name], self._applications[model.name]
            await run_readiness_probe(application, service, lambda stage: None)
            self._models.wake()
            while model.router.health.probe_passed:
                await self._models.change()

    async def _named(self, scope: dict[str, Any], body: "_Body") -> str | None:
        """The name of a model in a request, "" for the default one; None if it needs none, or is refused by any."""
        if scope["method"] == "POST" and _needs_no_model(scope["path"]):
            return None
        if scope["method"] != "POST":
            query = parse_qs(scope["query_string"].decode("latin-1"))
            return query["model"][0] if "model" in query else None
        req = Request(scope, body.receive_again)
        if not is_json(req.content_type or ""):
            return None
        settings = self._server.settings
        try:
            if CLIENT_KEY not in scope:
                self._server.clients.identify(req, needs_key=req.path != settings.aip_predict_route)
            content = await self._server.bodies.read(body.chunks(), received=WHOLE_BODY_KEY in scope)
            if encoding := (req.get_header("content-encoding") or "").strip().lower():
                content = decompress(content, encoding, settings.payload_limit)
        except ApiError:
            return None  # the application refuses it, too
        if not content or body.has_disconnected:
            return None
        try:
            named: _Named = _DECODER.decode(content.removeprefix(codecs.BOM_UTF8))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ""
        return named.model or ""

    def _chosen(self, name: str, scope: dict[str, Any]) -> HostedModel:
        """The model of this name; the default one, with an error in the scope, if no model has it."""
        if (model := self._models.find(name)) is None:
            scope[ERROR_KEY] = errors.unknown_model(name, self._models.all)
            return self._models.default
        scope[MODEL_KEY] = model.name
        return model

    async def _wait(self, model: HostedModel, scope: dict[str, Any], body: "_Body") -> None:
        """Waits until a model is loaded. Raises ApiError: 503 if it cannot be, or not in time, 429 if as many requests
        wait as may run; ClientDisconnected."""
        if model.waiting >= self._server.settings.max_concurrent_requests:
            raise errors.overloaded(MODEL_RETRY_SECONDS)
        limit = self._server.settings.start_timeout
        if (given := Request(scope, body.receive_again).get_header(LIMIT_HEADER)) is not None:
            try:
                limit = 0.0 if given.strip() == "0" else min(limit, seconds(given))
            except ValueError:
                text = f"the header X-Model-Wait must be a number of seconds from 0 on, at most {MAX_SECONDS:.0f}"
                raise errors.validation_error(text) from None
        usable = asyncio.ensure_future(self._models.until_usable(model))
        gone = asyncio.ensure_future(body.disconnect())
        try:
            await asyncio.wait((usable, gone), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if usable.done():
                usable.result()
            elif gone.done():
                raise ClientDisconnected
            else:
                raise errors.unhealthy(model.stage)
        finally:
            for task in (usable, gone):
                task.cancel()
            await asyncio.gather(usable, gone, return_exceptions=True)


class ModelMiddleware:
    """Answers requests for a model that is unknown or cannot be loaded."""

    async def process_resource(self, req: Request, resp: Response, resource: object, params: object) -> None:
        """Raises the error of a request that has one."""
        if (error := req.scope.get(ERROR_KEY)) is not None:
            raise error


class _Body:
    """The events of a request, which are received once and handed on to an application."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._events: list[dict[str, Any]] = []

    async def chunks(self) -> AsyncIterator[bytes]:
        """The pieces of the body."""
        while True:
            event = await self._receive()
            self._events.append(event)
            yield event.get("body", b"")
            if not event.get("more_body"):
                return

    @property
    def has_disconnected(self) -> bool:
        """Whether the client has, before the end of its body or while the model was loaded."""
        return bool(self._events) and self._events[-1]["type"] == "http.disconnect"

    async def disconnect(self) -> None:
        """Waits until the client of a request whose body has been read disconnects."""
        while not self.has_disconnected:
            self._events.append(await self._receive())

    async def receive_again(self) -> dict[str, Any]:
        """ASGI's receive callable for an application."""
        return self._events.pop(0) if self._events else await self._receive()


def _with_headers(send: Send, state: str, waited_seconds: float) -> Send:
    """Adds to a response what its request has waited for."""

    async def send_with(event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            waited = b"%d" % (1000 * waited_seconds)
            event["headers"] = [*event["headers"], (STATE_HEADER, state.encode()), (WAIT_HEADER, waited)]
        await send(event)

    return send_with


def _needs_no_model(path: str) -> bool:
    path = f"/{path.lstrip('/')}"
    return any(path == prefix or path.startswith(f"{prefix}/") for prefix in WITHOUT_MODEL)
