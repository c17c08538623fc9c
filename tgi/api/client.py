"""Sees the client leave. Neither falcon nor uvicorn stops a responder whose client is gone: it has to ask."""

import asyncio
from collections.abc import Callable

from tgi.api.asgi import Receive


class Client:
    """The other end of a request whose body has been read.

    `release` gives up what the client asked for, if it is still going on: called in the loop turn that sees the client
    leave, and when the answer is over, however it went.
    """

    def __init__(self, receive: Receive, release: Callable[[], None]) -> None:
        self.gone = False
        self._release = release
        self._watcher = asyncio.get_running_loop().create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._release()

    def close(self) -> None:
        """The answer is over."""
        self._watcher.cancel()
        self._release()
