"""Sees the client leave. Neither falcon nor uvicorn stops a responder whose client is gone: it has to ask."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Client:
    """The other end of a request whose body has been read. Calls `on_gone` in the loop turn that sees it leave."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self.gone = False
        self._on_gone = on_gone
        self._watcher = asyncio.get_running_loop().create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._on_gone()

    def close(self) -> None:
        """Stops watching. To be called when the answer is complete."""
        self._watcher.cancel()
