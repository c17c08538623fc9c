"""Server-sent events of one request: an iterator for falcon that waits for tokens or for the client's disconnect."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest

import msgspec

from tgi.api import errors, request_metrics
from tgi.api.asgi import DisconnectWatcher
from tgi.api.errors import ApiError, ClientDisconnected
from tgi.api.requests import Generation
from tgi.api.resumption import EventNumbering
from tgi.api.token_columns import TokenColumns
from tgi.microkernel.messages.protocol import End

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE_EVENT = b":\n\n"
# A client that reads slowly, or pauses, may have thousands of tokens to come. Bounds the time until other tasks run.
MAX_EVENTS_PER_WRITE = 256


Cancel = Callable[[Sequence[Generation]], None]


def named_event(body: msgspec.Struct) -> str:
    """An event whose name is the tag of its data."""
    return f"event: {body.__struct_config__.tag}\ndata: {msgspec.json.encode(body).decode()}\n\n"


class EventFormatter:
    """How a route writes its events. An event is `data: `, one line of JSON, and an empty line; a line `event: ` with
    its name may come before."""

    keep_alive = KEEP_ALIVE_EVENT  # after the opening events, in place of events of tokens

    def opening_events(self) -> list[str]:
        """The events before the first token of any generation: none, or one of each."""
        return []

    def token_events(self, index: int, columns: TokenColumns, end: End | None) -> list[str]:
        """The events of these tokens of generation `index`; `end` comes with its last ones. There is at least one
        token, or none at all if none was to be generated."""
        raise NotImplementedError

    def failure_events(self, error: ApiError) -> str:
        """The events that end a stream after an error."""
        raise NotImplementedError

    def closing_events(self) -> str:
        """The events that end a stream whose generations are all complete."""
        raise NotImplementedError


class EventStream:
    """What falcon iterates over. All events that are ready are one chunk. falcon asks for the next chunk once the
    transport has room, so a slow client delays only itself."""

    def __init__(
        self,
        generations: Sequence[Generation],
        formatter: EventFormatter,
        watcher: DisconnectWatcher,
        cancel: Cancel,
        numbering: EventNumbering | None = None,
        hold_next: Callable[[], None] = lambda: None,
    ) -> None:
        """`hold_next`: called before the last chunk, which the end of the response follows at once."""
        self._generations = generations
        self._wake_event = generations[0].wake_event
        self._unfinished = [*enumerate(generations)]  # those whose last token is not written
        self._formatter = formatter
        self._watcher = watcher
        self._cancel = cancel
        self._numbering = numbering  # of a stream that its client may resume
        self._hold_next = hold_next
        self._is_open = False  # the opening events are written
        self._has_more = True  # more events may be ready than the latest chunk held
        self._keep_alive_due = False
        self._loop = asyncio.get_running_loop()
        self._last_event_time = self._loop.time()
        # One timer for the stream that compares times, instead of one that is set again for each token.
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._on_timer)

    async def wait_for_first_token(self) -> None:
        """Waits for the first token, so that an error before it is an HTTP error. After KEEP_ALIVE_SECONDS the stream
        opens without one, and errors become events.

        Raises ApiError, and ClientDisconnected.
        """
        while not self._keep_alive_due and not any(generation.unread_tokens.texts for generation in self._generations):
            if self._watcher.disconnected:
                raise ClientDisconnected
            for generation in self._generations:
                if generation.end is not None and (error := _error_of(generation, generation.end)):
                    self._cancel(self._generations)
                    raise error
            if any(generation.end is not None for generation in self._generations):
                return  # no token was to be generated
            await self._wake_event.wait()

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> bytes:
        while self._unfinished and not self._watcher.disconnected:
            if not self._has_more:
                await self._wake_event.wait()
            chunk = self._next_chunk()
            if self._has_more:
                await asyncio.sleep(0)
            if chunk:
                self._keep_alive_due = False
                self._last_event_time = self._loop.time()
                if not self._unfinished:
                    self._hold_next()
                return chunk.encode()
            if self._keep_alive_due:
                self._keep_alive_due = False
                self._last_event_time = self._loop.time()
                return self._formatter.keep_alive if self._is_open else KEEP_ALIVE_EVENT
        raise StopAsyncIteration

    async def close(self) -> None:
        """Called by falcon at the end of the iteration, also after an exception."""
        self._timer.cancel()
        self._watcher.close()

    def _next_chunk(self) -> str:
        """The events that are ready. Those of several generations alternate."""
        event_lists: list[tuple[int, list[str]]] = []  # with the index of the generation
        openings: list[str] = []
        closing = failure = ""
        self._has_more = False
        most = MAX_EVENTS_PER_WRITE // len(self._unfinished) or 1  # of each generation
        for index, generation in self._unfinished:
            if not generation.unread_tokens.texts and generation.end is None:
                continue
            columns = generation.take_tokens(most)
            if generation.end is None or generation.unread_tokens.texts:
                self._has_more = self._has_more or bool(generation.unread_tokens.texts)
                openings += self._open()
                event_lists.append((index, self._formatter.token_events(index, columns, None)))
                continue
            error = _error_of(generation, generation.end)
            prompt_only = generation.message.max_new_tokens == 0
            if error is None and not columns.texts and not prompt_only:
                error = errors.incomplete_generation(streaming=True)
            if columns.texts or (prompt_only and error is None):
                end = None if error else generation.end
                openings += self._open()
                event_lists.append((index, self._formatter.token_events(index, columns, end)))
            if error is not None:
                failure = self._fail(error)
                break
            request_metrics.record_generation(generation)
            closing = self._finish(index)
        if self._numbering is None:
            lists = [events for _, events in event_lists]
            events = lists[0] if len(lists) == 1 else chain.from_iterable(zip_longest(*lists, fillvalue=""))
            return "".join(chain(openings, events)) + closing + failure
        try:
            return self._numbering.number(_indexed_events(openings, event_lists, closing)) + failure
        except ApiError as error:
            return self._fail(error)

    def _open(self) -> list[str]:
        """The opening events, at the first call."""
        if self._is_open:
            return []
        self._is_open = True
        return self._formatter.opening_events()

    def _finish(self, index: int) -> str:
        """Removes a finished generation. Returns the events that close the stream if it was the last one."""
        self._unfinished = [entry for entry in self._unfinished if entry[0] != index]
        if self._unfinished:
            return ""
        request_metrics.record_success(self._generations)
        return self._formatter.closing_events()

    def _fail(self, error: ApiError) -> str:
        """Fails the whole request with the error of one generation."""
        request_metrics.record_failure(error, self._generations[0].record)
        self._cancel(self._generations)
        self._unfinished = []
        return self._formatter.failure_events(error)

    def _on_timer(self) -> None:
        left = self._last_event_time + KEEP_ALIVE_SECONDS - self._loop.time()
        if left <= 0.001:
            self._keep_alive_due = True
            self._wake_event.wake()
            left = KEEP_ALIVE_SECONDS
        self._timer = self._loop.call_later(left, self._on_timer)


def _error_of(generation: Generation, end: End) -> ApiError | None:
    """The error with which a generation of a stream has ended, if any."""
    return errors.taken_over() if generation.taken_over else errors.from_end(end, streaming=True)


def _indexed_events(
    openings: list[str], event_lists: list[tuple[int, list[str]]], closing: str
) -> Iterator[tuple[int, str]]:
    """The events of a chunk in their order, each with the index of its generation; -1: a closing event."""
    yield from enumerate(openings)
    for row in zip_longest(*([(index, event) for event in events] for index, events in event_lists)):
        yield from (entry for entry in row if entry is not None)
    for event in closing.split("\n\n")[:-1]:
        yield -1, f"{event}\n\n"
