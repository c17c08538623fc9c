"""Live requests of this process to the tokenizers: what was asked, what has been received, and who is woken for it."""

import asyncio
import secrets
import time
from array import array
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from zlib import crc32

from falcon.asgi import Request

from tgi.api.asgi import RECORD_KEY
from tgi.api.clients import ANONYMOUS, Client
from tgi.api.errors import ApiError
from tgi.api.images import ImageFailure, ImageSet
from tgi.api.token_columns import NO_TOKENS, PromptColumns, TextsColumns, TokenColumns
from tgi.microkernel.links.link import ReplicaId
from tgi.microkernel.messages.codec import ITEM_BYTES
from tgi.microkernel.messages.protocol import (
    SUCCESSES,
    AdapterUpdated,
    End,
    FinishReason,
    Generate,
    RequestContext,
    Tokenize,
    Tokenized,
    UpdateAdapter,
)
from tgi.microkernel.observability.flight_recorder import Event

if TYPE_CHECKING:
    from tgi.microkernel.observability.otlp import Span

# A stream with more unread tokens is parked, and continues when this many are left.
MAX_UNREAD_TOKENS, FEW_UNREAD_TOKENS = 1024, 256


class WakeEvent:
    """An event for one waiting task that clears itself: cheaper than asyncio.Event, and reused for every token."""

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Sets the event and wakes the waiting task."""
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Waits for wake(), unless it was called since the last wait; then clears the event."""
        if not self._set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._set = False


class RequestRecord:
    """What log, metrics and trace tell of one HTTP request, which has ended when its response is complete."""

    __slots__ = ("client", "error", "generations", "method", "path", "request_id", "span", "start_time", "status")

    def __init__(self, method: str, path: str, span: "Span | None" = None) -> None:
        self.method, self.path, self.span = method, path, span
        self.start_time = time.perf_counter()
        self.request_id = self.client = ""
        self.status = 0  # of the response, or of an error in its stream; 499: the client has disconnected
        self.error: ApiError | None = None
        self.generations: list[Generation] = []  # of a success

    @classmethod
    def of(cls, req: Request) -> "RequestRecord | None":
        """The record of a request; None for the readiness probe's, which are not counted, logged or traced."""
        record: RequestRecord | None = req.scope.get(RECORD_KEY)
        return record


NO_CONTEXT = RequestContext()


class LiveRequest:
    """One live request to the tokenizers. The router ends it exactly once, which wakes the route that waits for it."""

    def __init__(self, wake_event: WakeEvent, context: RequestContext = NO_CONTEXT) -> None:
        self.wake_event = wake_event
        self.context = context
        self.submission = Event.SUBMITTED  # what the next one to a tokenizer is in its timeline
        self.active = True  # neither ended nor cancelled
        self.on_trial = False  # a tokenizer works on it only while it has nothing else in progress
        self.record: RequestRecord | None = None  # of the HTTP request
        self.images: ImageSet | None = None  # of its prompt; loaded before it is submitted to a tokenizer

    @property
    def adapter(self) -> str:
        """The name of the adapter that it needs, or ""."""
        return ""

    def tokenizer_rank(self, replica_id: ReplicaId) -> int:
        """The lower, the rather this tokenizer gets the request; equal for all: the one with the fewest requests."""
        return 0

    def to_message(self, rid: int) -> tuple[Any, ...]:
        """The message that asks a tokenizer for what is still missing."""
        raise NotImplementedError

    def fail(self, error: str) -> None:
        """Ends the request with an error of the router: it has crashed tokenizers."""
        raise NotImplementedError

    def reject(self, failure: ImageFailure) -> None:
        """Ends the request, whose images cannot be loaded."""
        raise NotImplementedError

    @property
    def generated_count(self) -> int:
        return 0

    @property
    def ended(self) -> bool:
        """Whether the result is complete or the request has failed."""
        raise NotImplementedError

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        raise NotImplementedError


class Parking(Protocol):
    """Stops and continues generations whose clients do not read: the router."""

    def park(self, generation: "Generation") -> None:
        """Stops the generation; it keeps the tokens that it has received."""

    def unpark(self, generation: "Generation") -> None:
        """Continues it after those tokens."""


class Generation(LiveRequest):
    """One sequence to be generated. An HTTP request has one for each prompt and choice.

    `generated_ids` holds all ids received, so that another tokenizer can resume after a loss. With `stream` each
    arrival of tokens wakes the route, without it the end only. `probe` marks the readiness probe.
    """

    def __init__(
        self,
        message: Generate,
        stream: bool,
        wake_event: WakeEvent,
        probe: bool = False,
        client: Client = ANONYMOUS,
        timeout: float | None = None,
        holds_permit: bool = True,
        images: ImageSet | None = None,
    ) -> None:
        """`holds_permit`: while it is active; otherwise its HTTP request has one for all of its generations."""
        super().__init__(wake_event, message.context._replace(generation_id=secrets.randbits(63) + 1))
        self.images = images
        self.client = client
        self.holds_permit = holds_permit and not probe
        self.timeout = timeout  # seconds from `arrival_time` on
        self.parking: Parking | None = None  # of a stream whose client may read slowly
        self.parked = False
        self.message = message  # without rid, resume_ids, alone and the context
        self.stream = stream
        self.probe = probe
        self._has_held = message.hide_stop
        self._has_tops = message.sampling.top_n > 0
        self.generated_ids = array("i")
        self.partial_tokens: dict[int, bytes] = {}  # the bytes of the ids received that are parts of characters
        self.unread_tokens = NO_TOKENS  # received, and not yet taken by the route
        self.prompt_columns = PromptColumns.empty()  # complete before the first token
        self.end: End | None = None
        # For token ids the tokenizer sends both before the first token (Prompted), for a chat the length only.
        self.prompt_text = message.inputs
        self.prompt_characters = len(self.prompt_text)
        self.prompt_tokens = 0  # set by Prompted
        self.not_enforced: list[str] = []  # keywords of its schemas; set by Prompted
        self.has_parts = False  # the answer consists of parts (text, reasoning, tool calls); set by Prompted
        # time.perf_counter
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.latest_token_time = self.arrival_time

    @property
    def adapter(self) -> str:
        return self.message.sampling.adapter

    def tokenizer_rank(self, replica_id: ReplicaId) -> int:
        """By `resume_key`, so that every front end finds the tokenizer that keeps the stream."""
        key = self.message.resume_key
        return crc32(b"%d" % replica_id.number, crc32(key)) if key else 0

    def to_message(self, rid: int) -> Generate:
        span = None if self.record is None else self.record.span
        prompt_from = None if self.message.prompt_logprobs_from is None else len(self.prompt_columns.ids)
        now, deadline_ms = time.perf_counter(), 0
        if self.timeout is not None:
            deadline_ms = max(1, int(1000 * (self.arrival_time + self.timeout - now)))
        attempt = self.context.attempt + 1
        self.context = self.context._replace(
            attempt=attempt,
            deadline_ms=deadline_ms,
            waited_ms=int(1000 * (now - self.arrival_time)) if attempt > 1 else 0,
            traceparent="" if span is None else span.traceparent,
        )
        return self.message._replace(
            rid=rid,
            resume_ids=self.generated_ids.tobytes(),
            prompt_logprobs_from=prompt_from,
            alone=self.on_trial,
            context=self.context,
            images=[] if self.images is None else self.images.inputs,
        )

    def expire(self) -> None:
        """Ends the request because its timeout has passed, and wakes its waiter."""
        self.complete(End(0, FinishReason.TIMEOUT, f"no end within {self.timeout:g} s"))

    def fail(self, error: str) -> None:
        self.complete(End(0, FinishReason.QUARANTINED, error))

    def reject(self, failure: ImageFailure) -> None:
        self.complete(End(0, *failure))

    @property
    def ended(self) -> bool:
        return self.end is not None

    @property
    def failed(self) -> bool:
        return self.end is not None and self.end.reason not in SUCCESSES

    @property
    def taken_over(self) -> bool:
        """Whether a later request of the client has resumed the stream."""
        return bool(self.message.resume_key) and self.end is not None and self.end.reason == FinishReason.CANCELLED

    @property
    def generated_count(self) -> int:
        return len(self.generated_ids)

    def add_tokens(self, columns: TextsColumns, start: int, stop: int) -> None:
        # Called per request and step, so the columns are cut here: a call less.
        tokens = TokenColumns(
            columns.ids[start:stop], columns.logprobs[start:stop], columns.special[start:stop],
            columns.texts[start:stop],
        )  # fmt: skip
        if self._has_held or self._has_tops or self.has_parts or columns.partial:
            tokens = self._with_optional_columns(tokens, columns, start, stop)
        self.generated_ids += tokens.ids
        if not self.unread_tokens.texts:  # the usual case of a stream: the route has taken all earlier tokens
            self.unread_tokens = tokens
        else:
            for column, more in zip(self.unread_tokens, tokens, strict=True):
                column.extend(more)  # type: ignore[attr-defined]
            if self.parking is not None and len(self.unread_tokens.texts) > MAX_UNREAD_TOKENS:
                self.parking.park(self)
        if self.stream:
            self.wake_event.wake()

    def _with_optional_columns(
        self, tokens: TokenColumns, columns: TextsColumns, start: int, stop: int
    ) -> TokenColumns:
        """Adds the optional columns of this request. In the message such a column is empty if no request needs it."""
        self.partial_tokens |= columns.partial
        count = stop - start
        return tokens._replace(
            held=(columns.held[start:stop] or array("I", bytes(ITEM_BYTES * count))) if self._has_held else array("I"),
            tops=(columns.tops[start:stop] or [[] for _ in range(count)]) if self._has_tops else [],
            parts=(columns.parts[start:stop] or [[] for _ in range(count)]) if self.has_parts else [],
        )

    def complete(self, end: End) -> None:
        self.end = end
        self.wake_event.wake()

    def take_tokens(self, max_count: int | None = None) -> TokenColumns:
        """Removes and returns the unread tokens, at most the first `max_count`."""
        tokens, self.unread_tokens = self.unread_tokens, NO_TOKENS
        if max_count is not None and len(tokens.texts) > max_count:
            self.unread_tokens = tokens.select(slice(max_count, None))
            tokens = tokens.select(slice(max_count))
        if self.parked and self.parking is not None and len(self.unread_tokens.texts) <= FEW_UNREAD_TOKENS:
            self.parking.unpark(self)
        return tokens


ResultMessage = TypeVar("ResultMessage", Tokenized, AdapterUpdated)


class SingleReplyRequest(LiveRequest, Generic[ResultMessage]):
    """A request that one message answers."""

    def __init__(self, wake_event: WakeEvent, context: RequestContext = NO_CONTEXT) -> None:
        super().__init__(wake_event, context)
        self.result: ResultMessage | None = None

    @property
    def ended(self) -> bool:
        return self.result is not None

    @property
    def failed(self) -> bool:
        return self.result is not None and bool(self.result.error)

    def complete(self, result: ResultMessage) -> None:
        self.result = result
        self.wake_event.wake()


class TokenizationRequest(SingleReplyRequest[Tokenized]):
    """Asks for the token ids of a text or of a chat, or for the text of token ids."""

    def __init__(
        self,
        wake_event: WakeEvent,
        inputs: str,
        add_special_tokens: bool,
        chat: bytes = b"",
        context: RequestContext = NO_CONTEXT,
        ids: bytes = b"",
        images: ImageSet | None = None,
    ) -> None:
        super().__init__(wake_event, context)
        self.images = images
        self.quarantined = False  # it has failed because it crashes tokenizers
        self.inputs = inputs
        self.add_special_tokens = add_special_tokens
        self.chat = chat
        self.ids = ids

    def to_message(self, rid: int) -> Tokenize:
        images = [] if self.images is None else self.images.inputs
        return Tokenize(
            rid, self.inputs, self.add_special_tokens, self.chat, self.on_trial, self.context, self.ids, images
        )

    def fail(self, error: str) -> None:
        self.quarantined = True
        self.complete(Tokenized(0, b"", b"", b"", b"", error=error))

    def reject(self, failure: ImageFailure) -> None:
        self.quarantined = failure.reason is FinishReason.QUARANTINED
        self.complete(Tokenized(0, b"", b"", b"", b"", error=failure.message, reason=failure.reason))


class AdapterUpdateRequest(SingleReplyRequest[AdapterUpdated]):
    """Asks to load the adapter in the directory `path` under a name, or to unload it if `path` is empty."""

    def __init__(self, wake_event: WakeEvent, name: str, path: str) -> None:
        super().__init__(wake_event)
        self.name = name
        self.path = path

    def to_message(self, rid: int) -> UpdateAdapter:
        return UpdateAdapter(rid, self.name, self.path)
