"""Server-sent events of one request: an iterator for falcon that waits for tokens or for the client to leave."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Protocol

from tgi.api import accounting, errors
from tgi.api.calls import Generation
from tgi.api.client import Client
from tgi.api.columns import Columns
from tgi.api.errors import ApiError, ClientGone
from tgi.kernel.messages import End

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b":\n\n"
# A client that reads slowly, or stops and goes on, may have thousands of tokens to come. So many events are written in
# one go, then others have their turn.
MOST_EVENTS = 256


Cancel = Callable[[Sequence[Generation]], None]


class Events(Protocol):
    """How one route writes its events. Each event is `data: `, one line of JSON, and an empty line."""

    def tokens(self, place: int, columns: Columns, end: End | None) -> list[str]:
        """The events of these tokens of generation `place`; `end` comes with its last ones. There is at least one, or
        none at all if none was to be generated."""

    def failure(self, error: ApiError) -> str:
        """The events that end a stream that cannot go on."""

    def close(self) -> str:
        """The events that end a stream whose generations are all complete."""


class EventStream:
    """What falcon iterates over. All events that are ready go out in one write; a slow client delays only itself,
    since falcon asks for the next chunk when the transport has room again."""

    def __init__(self, calls: Sequence[Generation], events: Events, client: Client, cancel: Cancel) -> None:
        self._calls = calls
        self._bell = calls[0].bell
        self._live = [*enumerate(calls)]  # those whose last token has not been written
        self._most = MOST_EVENTS // len(calls) or 1  # events of one generation in one go
        self._events = events
        self._client = client
        self._cancel = cancel
        self._behind = True  # there may be more than the latest chunk
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
        while not self._silent and not any(call.fresh.texts for call in self._calls):
            if self._client.gone:
                raise ClientGone
            for call in self._calls:
                if call.end is not None and (error := errors.of_end(call.end, streaming=True)):
                    self._cancel(self._calls)
                    raise error
            if any(call.end is not None for call in self._calls):
                return  # without a token
            await self._bell.rung()

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> bytes:
        while self._live and not self._client.gone:
            if not self._behind:
                await self._bell.rung()
            if chunk := self._chunk():
                self._silent = False
                self._last = self._loop.time()
                if self._behind:
                    await asyncio.sleep(0)
                return chunk.encode()
            if self._silent:
                self._silent = False
                self._last = self._loop.time()
                return KEEP_ALIVE
        raise StopAsyncIteration

    async def close(self) -> None:
        """Called by falcon however the iteration ends."""
        self._timer.cancel()
        self._client.close()

    def _chunk(self) -> str:
        """The events that are ready. Generations take turns, an event each."""
        turns: list[list[str]] = []
        ending = ""
        self._behind = False
        for place, call in self._live:
            if not call.fresh.texts and call.end is None:
                continue
            columns = call.take(self._most)
            if call.end is None or call.fresh.texts:
                self._behind = self._behind or bool(call.fresh.texts)
                turns.append(self._events.tokens(place, columns, None))
                continue
            error = errors.of_end(call.end, streaming=True)
            none_wanted = call.request.max_new_tokens == 0
            if error is None and not columns.texts and not none_wanted:
                error = errors.incomplete(streaming=True)
            if columns.texts or (none_wanted and error is None):
                turns.append(self._events.tokens(place, columns, None if error else call.end))
            if error is not None:
                ending = self._fail(error)
                break
            accounting.generated(call)
            ending = self._complete(place)
        events = turns[0] if len(turns) == 1 else chain.from_iterable(zip_longest(*turns, fillvalue=""))
        return "".join(events) + ending

    def _complete(self, place: int) -> str:
        """A generation's last token is written; what ends the stream, if it was the last generation."""
        self._live = [entry for entry in self._live if entry[0] != place]
        if self._live:
            self._most = MOST_EVENTS // len(self._live) or 1
            return ""
        accounting.succeeded(self._calls)
        return self._events.close()

    def _fail(self, error: ApiError) -> str:
        """One generation has failed: so has the request, and nobody wants the others."""
        accounting.failed(error, self._calls[0].span)
        self._cancel(self._calls)
        self._live = []
        return self._events.failure(error)

    def _tick(self) -> None:
        left = self._last + KEEP_ALIVE_SECONDS - self._loop.time()
        if left <= 0.001:
            self._silent = True
            self._bell.ring()
            left = KEEP_ALIVE_SECONDS
        self._timer = self._loop.call_later(left, self._tick)
