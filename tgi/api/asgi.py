"""The ASGI interface (asgi.readthedocs.io): its types, the keys that we add to a request's scope, and the watcher that
notices a disconnect. Neither falcon nor uvicorn cancels a responder whose client has disconnected."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from falcon.asgi import Request

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
AsgiApp = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

# Keys of the ASGI scope.
RECEIVE_KEY = "tgi.receive"  # ASGI's receive callable, for DisconnectWatcher
ABORT_KEY = "tgi.abort"  # closes the connection without sending what is buffered (http_server.py)
RECORD_KEY = "tgi.record"  # RequestRecord (requests.py); absent in requests of the readiness probe
PROBE_KEY = "tgi.probe"  # present in requests of the readiness probe only (readiness.py)


def is_probe(req: Request) -> bool:
    """Whether the readiness probe sent this request. It holds no permit, and is not counted, logged or traced."""
    return PROBE_KEY in req.scope


async def never() -> dict[str, Any]:
    """Receives nothing: for requests that do not need their client."""
    await asyncio.Event().wait()
    return {}


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
