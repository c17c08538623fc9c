"""falcon middleware of all routes: CORS headers, request ids, clients, and the wait for the readiness probe. tracing.py
has the one that names spans."""

import os
import re

from falcon.asgi import Request, Response

from tgi.api.asgi import CLIENT_KEY, is_probe
from tgi.api.clients import Client, Clients
from tgi.api.health import Health
from tgi.api.requests import RequestRecord

VARY = "origin, access-control-request-method, access-control-request-headers"
ALLOWED_HEADERS = ("content-type", "authorization")
# Headers of responses that scripts in browsers may read.
EXPOSED_HEADERS = ",".join(
    (
        "x-request-id", "retry-after", "x-startup-stage", "x-compute-type", "x-compute-time", "x-compute-characters",
        "x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token", "x-prompt-tokens",
        "x-generated-tokens", "x-tgi-not-enforced", "x-model-state", "x-model-wait",
    )
)  # fmt: skip
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")


class CorsMiddleware:
    """Allows browsers to call from the given origins, or from any if none or "*" is given. They may send any headers:
    SDKs and tracing add their own."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins) - {"*"} if "*" not in origins else frozenset()

    async def process_request(self, req: Request, resp: Response) -> None:
        """Sets the headers of every response, errors included, and answers OPTIONS on every path."""
        resp.set_header("vary", VARY)
        resp.set_header("access-control-expose-headers", EXPOSED_HEADERS)
        origin = req.get_header("origin")
        if not self._origins:
            resp.set_header("access-control-allow-origin", "*")
        elif origin in self._origins:
            resp.set_header("access-control-allow-origin", origin)
        if req.method == "OPTIONS":
            stored = any(f"/v1/{kind}/" in req.path for kind in ("responses", "conversations", "files"))
            resp.set_header("access-control-allow-methods", "GET,POST,DELETE" if stored else "GET,POST")
            wanted = (req.get_header("access-control-request-headers") or "").lower().split(",")
            names = [name for part in wanted if _HEADER_NAME.fullmatch(name := part.strip())]
            resp.set_header("access-control-allow-headers", ",".join(dict.fromkeys([*ALLOWED_HEADERS, *names])))
            resp.complete = True


REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestIdMiddleware:
    """Names every request in the header `x-request-id` of its response: as the client does in its own header of that
    name, or by a new id. `tgi why` explains a request by this id."""

    async def process_request(self, req: Request, resp: Response) -> None:
        """Chooses the id."""
        given = req.get_header("x-request-id") or ""
        req.context.request_id = given if REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
        resp.set_header("x-request-id", req.context.request_id)
        if (record := RequestRecord.of(req)) is not None:
            record.request_id = req.context.request_id

    async def process_response(self, req: Request, resp: Response, resource: object, req_succeeded: bool) -> None:
        """Records the status of the response, which is about to be sent."""
        if (record := RequestRecord.of(req)) is not None:
            record.status = resp.status_code


class ClientMiddleware:
    """Identifies the client of every POST, and of requests for what clients have stored, as `req.context.client`. If
    the server has keys, `Authorization: Bearer KEY` or `X-Api-Key: KEY` is required, except on `open_path`."""

    def __init__(self, clients: Clients, open_path: str | None = None) -> None:
        self._clients = clients
        self._open_path = open_path

    async def process_request(self, req: Request, resp: Response) -> None:
        """Records where the request comes from: all that is known of one without a route or a valid key."""
        if (record := RequestRecord.of(req)) is not None:
            record.client = self._clients.address_of(req)

    async def process_resource(self, req: Request, resp: Response, resource: object, params: object) -> None:
        """Raises Rejection: 401."""
        if req.method == "POST" or getattr(resource, "private", False):
            inner: Client | None = req.scope.get(CLIENT_KEY)
            req.context.client = inner or self._clients.identify(req, needs_key=req.path != self._open_path)
            if (record := RequestRecord.of(req)) is not None:
                record.client = req.context.client.name


class ReadinessMiddleware:
    """Has every POST wait while this front end answers the first request of its readiness probe."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def process_resource(self, req: Request, resp: Response, resource: object, params: object) -> None:
        """Returns at once after the probe's first end, and while another process is the reason for a 503."""
        if req.method == "POST" and not is_probe(req):
            await self._health.wait_for_first_probe()
