"""What all resources share: settings, the router, and the steps that each request goes through."""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from falcon.asgi import Request

from tgi.api import accounting
from tgi.api.calls import Call, Generation, probing
from tgi.api.client import Client
from tgi.api.errors import ClientGone, Rejection
from tgi.api.router import Router
from tgi.api.serde import Reader
from tgi.api.tracing import span_of
from tgi.kernel.settings import Settings

if TYPE_CHECKING:
    from tgi.kernel.trace import Tracer

T = TypeVar("T")

# The key under which the outermost layer leaves ASGI's receive for Client.
RECEIVE = "tgi.receive"
# What is left of a body that is too long is read for this long.
DROP_SECONDS = 2.0


@dataclass
class Service:
    """One front end."""

    settings: Settings
    router: Router
    model_id: str
    compute_type: str
    draws: random.Random = field(default_factory=random.SystemRandom)
    tracer: "Tracer | None" = None

    async def read(self, req: Request, body: Reader[T]) -> T:
        """The request in the body. Raises Rejection: 415, 413 as soon as the limit is passed, then 400 and 422."""
        if not _is_json(req.content_type or ""):
            raise Rejection(415, "Expected request with `Content-Type: application/json`")
        limit = math.inf if probing.get() else self.settings.payload_limit
        chunks = []
        size = 0
        stream = aiter(req.stream)
        async for chunk in stream:
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                await _drop(stream)
                raise Rejection(413, "Failed to buffer the request body: length limit exceeded")
        return body.decode(b"".join(chunks))

    def has_openai_errors(self, req: Request) -> bool:
        """Whether errors of this request have OpenAI's form: on every path below /v1, unless it is one of Vertex AI's,
        which often are there. As in routing, several slashes at the beginning count as one."""
        path = f"/{req.path.lstrip('/')}"
        vertex = (self.settings.aip_predict_route, self.settings.aip_health_route)
        return f"{path}/".startswith("/v1/") and path not in vertex

    def seed(self, given: int | None) -> int:
        """The request's seed, or a new one (uint64): drawn here, so that whoever dies below, it stays the same."""
        return self.draws.getrandbits(64) if given is None else given

    def submit(self, calls: Sequence[Call], req: Request) -> Client:
        """Sends the calls of a request down, and cancels those that go on as soon as its client leaves."""

        span = span_of(req)

        def release() -> None:
            if any(call.wanted for call in calls if isinstance(call, Generation)):
                accounting.dropped(span)
            self.cancel(calls)

        for call in calls:
            call.span = span
            self.router.submit(call)
        return Client(req.scope[RECEIVE], release)

    def cancel(self, calls: Sequence[Call]) -> None:
        """Nobody wants these any more."""
        for call in calls:
            self.router.cancel(call)

    async def finish(self, calls: Sequence[Call], req: Request) -> None:
        """Sends calls down and waits until all have ended; once one has failed, nobody wants the others.

        Raises ClientGone if the client does not wait that long.
        """
        client = self.submit(calls, req)
        try:
            while not all(call.ended for call in calls):
                if client.gone:
                    raise ClientGone
                if any(call.failed for call in calls):
                    self.cancel(calls)
                    break
                await calls[0].bell.rung()
        finally:
            client.close()


async def _drop(stream: AsyncIterator[bytes]) -> None:
    """Reads on for a while: a client that is cut off while it sends sees a broken connection, not the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_SECONDS):
            async for _ in stream:
                pass


def _is_json(content_type: str) -> bool:
    """application/json or application/*+json, whatever the parameters."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
