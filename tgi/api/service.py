"""What all routes share: settings, the router, and the steps that each request goes through."""

import asyncio
import codecs
import contextlib
import copy
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec
from falcon.asgi import Request, Response

from tgi.api import errors, request_metrics
from tgi.api.asgi import ABORT_KEY, RECEIVE_KEY, WHOLE_BODY_KEY, DisconnectWatcher, is_probe, never
from tgi.api.batch_store import BatchStore
from tgi.api.body_reader import BodyReader, decompress
from tgi.api.clients import Client, Clients
from tgi.api.errors import ClientDisconnected, Rejection
from tgi.api.json_body import BodyDecoder
from tgi.api.models import Models
from tgi.api.requests import Generation, LiveRequest, RequestRecord
from tgi.api.response_store import ResponseStore
from tgi.api.router import Router
from tgi.api.shapes.chat import ImageSource
from tgi.microkernel.messages.protocol import ModelTask
from tgi.microkernel.recovery.work_register import FINGERPRINT_BYTES
from tgi.microkernel.settings.options import MAX_SECONDS, seconds
from tgi.microkernel.settings.table import Settings

if TYPE_CHECKING:
    from tgi.microkernel.observability.otlp import Tracer

log = logging.getLogger(__name__)

T = TypeVar("T")
ErrorForm = Literal["native", "openai", "anthropic"]

# What a request to a route that the model does not serve is told.
ROUTES_OF_TASKS = {
    ModelTask.GENERATE: "it generates text: use /v1/chat/completions, /v1/completions or /generate",
    ModelTask.EMBED: "it makes embeddings: use /v1/embeddings, /embed, /rerank, /score or /similarity",
    ModelTask.CLASSIFY: "it classifies and ranks: use /classify, /predict, /rerank or /score",
}
# In the scope of a request: an iterator over the names of its generations in crash isolation.
FINGERPRINTS_KEY = "tgi.fingerprints"
# What uvicorn holds of a body that is not read.
SMALL_BODY_BYTES = 64 << 10
# For this long the rest of a body that is too long is read and dropped.
DRAIN_SECONDS = 2.0


@dataclass
class Service:
    """One front end."""

    settings: Settings
    router: Router
    model_id: str
    compute_type: str
    run_dir: Path
    tracer: "Tracer | None" = None
    store_dir: Path | None = None  # of stored responses, files and batches; None: they are in memory
    clients: Clients = field(init=False)
    models: Models | None = None  # of a server with several

    def __post_init__(self) -> None:
        self.clients = Clients(self.settings)
        kept = self.store_dir
        self.responses = ResponseStore(kept and kept / "responses-1.sqlite", self.settings.response_ttl)
        self.batches = BatchStore(
            kept and kept / "batches-3.sqlite", self.settings.batch_ttl, self.settings.batch_store_bytes
        )
        self.uploads: Counter[str] = Counter()  # of each client
        self._background: set[asyncio.Task[None]] = set()
        self.bodies = BodyReader(self.settings.payload_limit, self.settings.read_timeout)

    @property
    def model_sha(self) -> str | None:
        """The commit of the model, by the settings or by what tokenizers tell."""
        return self.settings.model_sha or self.router.source.sha or None

    @property
    def model_pipeline_tag(self) -> str | None:
        """The model's task on the Hub, by the settings or by what tokenizers tell."""
        return self.settings.model_pipeline_tag or self.router.source.pipeline_tag or None

    def for_model(self, model_id: str, router: Router) -> "Service":
        """The same front end for another one of several models: keys and what is stored are those of the server."""
        other = copy.copy(self)
        other.model_id, other.router = model_id, router
        return other

    @property
    def has_started(self) -> bool:
        """Whether requests of batches may be begun."""
        return self.router.health.probe_passed if self.models is None else self.models.has_started

    def require_task(self, *tasks: ModelTask) -> None:
        """Raises ApiError, a 404 in words, if the served model does something else."""
        if (served := self.router.source.task) not in tasks:
            words = ROUTES_OF_TASKS.get(ModelTask(served), "")
            raise errors.other_task(f"The model {self.model_id} does not serve this route: {words}")

    def new_images(self) -> list[ImageSource] | None:
        """A list for the images of a prompt; None: the model reads text alone. Raises ApiError: 503 while that is not
        known."""
        if self.router.source.image_token:
            return []
        if not self.router.health.probe_passed and self.settings.sees_images:
            raise errors.unhealthy(self.router.health.stage)
        return None

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that belongs to no connection. What it raises is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._on_background_end)

    def _on_background_end(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("Background work has failed", exc_info=error)

    async def close(self, timeout_seconds: float) -> None:
        """Waits for background work, and ends what is not done in time."""
        if self._background:
            await asyncio.wait(self._background, timeout=timeout_seconds)
        for task in [*self._background]:
            task.cancel()
        self.responses.close()
        self.batches.close()

    async def read_generation_body(self, req: Request, decoder: BodyDecoder[T]) -> T:
        """As read_body, for requests that need permits: while none is free, a large body is not read. The permit of a
        small one is acquired when it is decoded, since TGI reports invalid requests before it looks for a permit.

        Raises also ApiError: 429.
        """
        if not is_probe(req) and (req.content_length is None or req.content_length > SMALL_BODY_BYTES):
            self.router.admission.require_free_permit(req.context.client)
        return await self.read_body(req, decoder)

    async def read_body(self, req: Request, decoder: BodyDecoder[T]) -> T:
        """Reads and decodes the body. The size limit does not apply to the readiness probe.

        Raises Rejection: 415, 413 as soon as the limit is exceeded, 408, then 400 and 422. The limit holds for a
        compressed body and for what it decompresses to.
        """
        if not is_json(req.content_type or ""):
            raise Rejection(415, "Expected request with `Content-Type: application/json`")
        stream = aiter(req.stream)
        try:
            received = WHOLE_BODY_KEY in req.scope
            body = await self.bodies.read(stream, limited=not is_probe(req), received=received)
        except Rejection as rejection:
            if rejection.status == 413:
                await _drain(stream)
            raise
        if encoding := (req.get_header("content-encoding") or "").strip().lower():
            body = decompress(body, encoding, self.settings.payload_limit)
        body = body.removeprefix(codecs.BOM_UTF8)
        req.scope[FINGERPRINTS_KEY] = request_fingerprints(body)
        return decoder.decode(body)

    def has_openai_errors(self, req: Request) -> bool:
        """Whether errors of this request have OpenAI's format: on every path below /v1, except Vertex AI's own routes,
        which often are below /v1. As in routing, several leading slashes count as one."""
        path = f"/{req.path.lstrip('/')}"
        vertex = (self.settings.aip_predict_route, self.settings.aip_health_route)
        return f"{path}/".startswith("/v1/") and path not in vertex

    def error_form(self, req: Request) -> ErrorForm:
        return "anthropic" if in_messages(req.path) else "openai" if self.has_openai_errors(req) else "native"

    def next_fingerprints(self, req: Request, count: int) -> list[bytes]:
        """Those of the next `count` requests to the tokenizers that this HTTP request makes (Client.context): the same
        for the same body, whatever seeds are drawn. The readiness probe has none, so that it is never in quarantine.

        Raises ApiError: 424 if one of them is in quarantine.
        """
        if is_probe(req):
            return [b""] * count
        fingerprints = list(itertools.islice(req.scope[FINGERPRINTS_KEY], count))
        quarantine = self.router.quarantine
        for fingerprint in fingerprints:
            if (entry := quarantine.find(fingerprint)) is not None:
                raise errors.quarantined(entry.reason, quarantine.minutes_left(entry))
        return fingerprints

    def submit(self, requests: Sequence[LiveRequest], req: Request, detached: bool = False) -> DisconnectWatcher:
        """Submits the tokenizer requests of an HTTP request. The watcher cancels the active ones at a disconnect: those
        that the client may resume continue in the tokenizer for a while. `detached`: they do not need their client."""
        record = RequestRecord.of(req)

        def release() -> None:
            if any(request.active for request in requests if isinstance(request, Generation)):
                request_metrics.record_disconnect(record)
            for request in requests:
                self.router.cancel(request, client_lost=True)
            parking.close()

        parking = SlowReader(self.router, self.settings.slow_reader_timeout, req.scope.get(ABORT_KEY))
        for index, request in enumerate(requests):
            request.record = record
            if isinstance(request, Generation) and request.stream:
                request.parking = parking
            try:
                self.router.submit(request)
            except Exception:
                self.cancel(requests[:index])
                raise
        watcher = DisconnectWatcher(never if detached else req.scope[RECEIVE_KEY], release)
        if isinstance(requests[0], Generation) and requests[0].timeout is not None:
            watcher.call_later(requests[0].timeout, partial(self._expire, requests))
        return watcher

    def request_timeout(self, req: Request) -> float | None:
        """Seconds that this request may take; None: no limit. Raises ApiError: 422 for an invalid header."""
        client: Client = req.context.client
        limit = None if client.batch else self.settings.request_timeout
        if (given := req.get_header("x-request-timeout")) is None:
            return limit
        try:
            wanted = seconds(given)
        except ValueError:
            raise errors.validation_error(
                f"the header X-Request-Timeout must be a number of seconds above 0, at most {MAX_SECONDS:.0f}"
            ) from None
        return wanted if limit is None else min(wanted, limit)

    def _expire(self, requests: Sequence[LiveRequest]) -> None:
        """Ends the active ones of these generations, everywhere: their timeout has passed."""
        for request in requests:
            if request.active and isinstance(request, Generation):
                self.router.cancel(request)
                request.expire()

    def cancel(self, requests: Sequence[LiveRequest]) -> None:
        """Cancels those that are active. If another request of the client has taken one over, it takes over all."""
        taken_over = any(request.taken_over for request in requests if isinstance(request, Generation))
        for request in requests:
            self.router.cancel(request, client_lost=taken_over)

    async def run_requests(self, requests: Sequence[LiveRequest], req: Request) -> None:
        """Submits requests that share a wake event and waits until all have ended. One that fails cancels the others.

        Raises ClientDisconnected.
        """
        watcher = self.submit(requests, req)
        try:
            while not all(request.ended for request in requests):
                if watcher.disconnected:
                    raise ClientDisconnected
                if any(request.failed for request in requests):
                    self.cancel(requests)
                    break
                await requests[0].wake_event.wait()
        finally:
            watcher.close()


class SlowReader:
    """Parks the streams of one client that does not read, and closes its connection if it reads too little for too
    long: from the time at which all that was parked has been read, the limit begins anew."""

    def __init__(self, router: Router, limit_seconds: float, abort: Callable[[], None] | None) -> None:
        self._router = router
        self._limit_seconds = limit_seconds
        self._abort = abort
        self._parked: set[Generation] = set()
        self._timer: asyncio.TimerHandle | None = None

    def park(self, generation: Generation) -> None:
        if generation.parked or not generation.active:
            return
        self._router.park(generation)
        self._parked.add(generation)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limit_seconds, self._give_up)

    def unpark(self, generation: Generation) -> None:
        self._router.unpark(generation)
        self._parked.discard(generation)
        if not self._parked and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Stops the time: the client has disconnected, or has its response."""
        self._parked.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._abort is not None and any(generation.active for generation in self._parked):
            log.info("Closed a connection whose client has read too little for %g s", self._limit_seconds)
            self._abort()  # the watcher sees the disconnect, and cancels


class Resource:
    """The handlers of one path. The table of operations (operations.py) names the class of each path."""

    body: ClassVar[BodyDecoder[Any] | None] = None  # of POST requests
    form: ClassVar[Any] = None  # the shape of POST requests that are forms
    private: ClassVar[bool] = False  # all methods need a key, not POST alone

    def __init__(self, service: Service) -> None:
        self._service = service


def in_messages(path: str) -> bool:
    """Whether a path has errors in Anthropic's format."""
    return f"/{path.lstrip('/')}/".startswith("/v1/messages/")


def request_fingerprints(body: bytes) -> Iterator[bytes]:
    """The fingerprints of the generations of this body, in order."""
    digest = blake2b(body, digest_size=16).digest()
    return (blake2b(b"%d" % index, key=digest, digest_size=FINGERPRINT_BYTES).digest() for index in itertools.count())


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Reads on for DRAIN_SECONDS: a client that is cut off while it sends sees a broken connection, not the 413."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for _ in stream:
                pass


def is_json(content_type: str) -> bool:
    """application/json or application/*+json, with any parameters."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def answer_json(resp: Response, body: object) -> None:
    """Answers with a body that msgspec encodes."""
    resp.content_type, resp.data = "application/json", msgspec.json.encode(body)
