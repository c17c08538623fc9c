"""The ASGI interface (asgi.readthedocs.io): its types, the keys that we add to a request's scope, and the watcher that
notices a disconnect. Neither falcon nor uvicorn cancels a responder whose client has disconnected."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from falcon.asgi import Request

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
AsgiApp = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

# Keys of the ASGI scope.
RECEIVE_KEY = "tgi.receive"  # ASGI's receive callable, for DisconnectWatcher
WHOLE_BODY_KEY = "tgi.whole_body"  # present once the whole body has been received (http_server.py)
ABORT_KEY = "tgi.abort"  # closes the connection without sending what is buffered (http_server.py)
HOLD_KEY = "tgi.hold"  # sends the next piece of the body with the end of the response, which follows at once
RECORD_KEY = "tgi.record"  # RequestRecord (requests.py); absent in requests of the readiness probe
PROBE_KEY = "tgi.probe"  # present in requests of the readiness probe only (readiness.py)
CLIENT_KEY = "tgi.client"  # Client (clients.py) of a request that this process makes for one, which sends no key


def is_probe(req: Request) -> bool:
    """Whether the readiness probe sent this request. It holds no permit, and is not counted, logged or traced."""
    return PROBE_KEY in req.scope


async def never() -> dict[str, Any]:
    """Receives nothing: for requests that do not need their client."""
    await asyncio.Event().wait()
    return {}


class InnerResponse(NamedTuple):
    """The response to a request that this process has sent to itself."""

    status: int
    headers: dict[str, str]
    body: bytes


async def send_request(
    app: AsgiApp,
    method: str,
    path: str,
    body: bytes,
    headers: dict[str, str],
    keys: dict[str, Any],
    given_up: asyncio.Event | None = None,
) -> InnerResponse:
    """Sends a request to an ASGI application. `keys`: of its scope. `given_up`: its client disconnects when this is
    set."""
    headers = {"content-type": "application/json", "content-length": str(len(body))} | headers
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None, "server": None,
    }  # fmt: skip
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    outgoing: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await (given_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(event: dict[str, Any]) -> None:
        outgoing.append(event)

    await app(scope | keys, receive, send)
    received = {name.decode(): value.decode("latin-1") for name, value in outgoing[0]["headers"]}
    return InnerResponse(outgoing[0]["status"], received, b"".join(event.get("body", b"") for event in outgoing))


class DisconnectWatcher:
    """Watches the client of one request whose body has been read.

    Calls `release`, which must be idempotent, in the loop turn that sees the disconnect and again at `close`.
    """

    def __init__(self, receive: Receive, release: Callable[[], None]) -> None:
        self.disconnected = False
        self._release = release
        self._task = asyncio.get_running_loop().create_task(self._watch(receive))
        self._timer: asyncio.TimerHandle | None = None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self._release()

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Calls back after this many seconds, unless the watch has ended by then."""
        self._timer = asyncio.get_running_loop().call_later(delay, callback)

    def close(self) -> None:
        """Ends the watch: the response is complete or has failed."""
        self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._release()
