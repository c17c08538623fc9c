"""Server-sent events of one generation: an iterator for falcon that waits for tokens or for the client to leave."""

import asyncio
from typing import Protocol

from tgi.api import accounting, errors
from tgi.api.calls import Columns, Generation
from tgi.api.client import Client
from tgi.api.errors import ApiError, ClientGone
from tgi.kernel.messages import End

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b":\n\n"


class Events(Protocol):
    """How one route writes its events. Each event is `data: `, one line of JSON, and an empty line."""

    def tokens(self, columns: Columns, end: End | None) -> bytes:
        """The events of these tokens; `end` comes with the last ones (there is at least one)."""

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream that cannot go on."""


class EventStream:
    """What falcon iterates over. All events that are ready go out in one write; a slow client delays only itself,
    since falcon asks for the next chunk when the transport has room again."""

    def __init__(self, call: Generation, events: Events, client: Client) -> None:
        self._call = call
        self._events = events
        self._client = client
        self._over = False
        self._silent = False  # no event for KEEP_ALIVE_SECONDS
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        # One timer for the stream, which looks when the last event was: not one for each token.
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._tick)

    async def open(self) -> None:
        """Waits for the first token, so that an error before it has its own status: raises ApiError then.

        After KEEP_ALIVE_SECONDS the stream opens without one; errors are events from there on.
        Raises ClientGone if the client does not wait.
        """
        call = self._call
        while not self._silent and not call.fresh.texts and not call.ended:
            if self._client.gone:
                raise ClientGone
            await call.changed()
        if call.end is not None and not call.generated and (error := errors.of_end(call.end, streaming=True)):
            raise error

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> bytes:
        call = self._call
        while not self._over and not self._client.gone:
            if call.fresh.texts or call.end is not None:
                self._last = self._loop.time()
                return self._chunk(call.end)
            if self._silent:
                self._silent = False
                self._last = self._loop.time()
                return KEEP_ALIVE
            await call.changed()
        raise StopAsyncIteration

    async def close(self) -> None:
        """Called by falcon however the iteration ends."""
        self._timer.cancel()
        self._client.close()

    def _chunk(self, end: End | None) -> bytes:
        columns = self._call.take()
        if end is None:
            return self._events.tokens(columns, None)
        self._over = True
        error = errors.of_end(end, streaming=True)
        if error is None and columns.texts:
            accounting.succeeded(self._call, end)
            return self._events.tokens(columns, end)
        error = error or errors.incomplete(streaming=True)
        accounting.failed(error)
        before = self._events.tokens(columns, None) if columns.texts else b""
        return before + self._events.failure(error)

    def _tick(self) -> None:
        left = self._last + KEEP_ALIVE_SECONDS - self._loop.time()
        if left <= 0.001:
            self._silent = True
            self._call.wake()
            left = KEEP_ALIVE_SECONDS
        self._timer = self._loop.call_later(left, self._tick)
