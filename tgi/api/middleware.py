"""falcon middleware of all routes: CORS headers, request ids, and the API key. tracing.py has the one that names
spans."""

import hmac
import re
from uuid import uuid4

from falcon.asgi import Request, Response

from tgi.api import errors

VARY = "origin, access-control-request-method, access-control-request-headers"


class CorsMiddleware:
    """Allows browsers to call from the given origins, or from any if none or "*" is given."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins) - {"*"} if "*" not in origins else frozenset()

    async def process_request(self, req: Request, resp: Response) -> None:
        """Sets the headers of every response, errors included, and answers OPTIONS on every path."""
        resp.set_header("vary", VARY)
        origin = req.get_header("origin")
        if not self._origins:
            resp.set_header("access-control-allow-origin", "*")
        elif origin in self._origins:
            resp.set_header("access-control-allow-origin", origin)
        if req.method == "OPTIONS":
            resp.set_header("access-control-allow-methods", "GET,POST")
            resp.set_header("access-control-allow-headers", "content-type,authorization")
            resp.complete = True


REQUEST_ID = re.compile(r"[!-~]{1,128}")


class RequestIdMiddleware:
    """Names every request in the header `x-request-id` of its response: as the client does in its own header of that
    name, or by a new id. `tgi why` explains a request by this id."""

    async def process_request(self, req: Request, resp: Response) -> None:
        """Chooses the id."""
        given = req.get_header("x-request-id") or ""
        req.context.request_id = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        resp.set_header("x-request-id", req.context.request_id)


class ApiKeyMiddleware:
    """Requires `Authorization: Bearer KEY` on every POST if there are keys, except to `open_path`."""

    def __init__(self, keys: tuple[str, ...], open_path: str | None = None) -> None:
        self._keys = [key.encode() for key in keys]
        self._open_path = open_path

    async def process_resource(self, req: Request, resp: Response, resource: object, params: object) -> None:
        """Compares the given key with every key, each in constant time. Raises Rejection: 401."""
        if req.method != "POST" or not self._keys or req.path == self._open_path:
            return
        scheme, _, given = (req.get_header("authorization") or "").partition(" ")
        matches = sum(hmac.compare_digest(given.encode("latin-1", "replace"), key) for key in self._keys)
        if scheme.lower() != "bearer" or not matches:
            raise errors.unauthorized()
