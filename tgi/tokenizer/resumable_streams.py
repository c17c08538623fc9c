"""Requests whose client may resume the stream: what was sent about them is kept, whether an api is attached or not.

ResumableStreams stands between the api link and the pool (sans-IO). To the pool each such request belongs to an api of
its own, a PeerId of the role STREAM, so the pool does not see that apis and clients come and go.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tgi.microkernel.links.link import PeerDisconnected, PeerId
from tgi.microkernel.messages.codec import ITEM_BYTES, UINT32, pack_column
from tgi.microkernel.messages.protocol import (
    DETACHED,
    PROTOCOL,
    Cancel,
    End,
    FetchImage,
    FinishReason,
    Generate,
    Hello,
    ImageChunk,
    Status,
    Texts,
    decode,
    encode,
)

log = logging.getLogger(__name__)

STREAM = "stream"
NO_FRONT_END = "the front end of this request left before its images had reached the worker's host"
# The rid of a stream's only request, between stream and pool.
RID = 1
# Limits of the streams without an api: their number and the bytes of all their messages. Beyond them the client with
# the most loses its oldest one.
MAX_DETACHED = 256
MAX_DETACHED_BYTES = 64 << 20


class ResumableStream:
    """One request. `api` and `rid` say who receives its messages; None: no front end is attached."""

    def __init__(self, peer: PeerId, api: PeerId, generate: Generate) -> None:
        self.peer = peer
        self.api: PeerId | None = api
        self.rid = generate.rid
        self.key = generate.resume_key
        self.client = generate.context.client
        self.client_limit = generate.resume_limit
        self.window_seconds = generate.resume_window_ms / 1000
        self.is_whole = not _is_resubmitted(generate)  # else the first messages went through another tokenizer
        self.messages: list[bytes] = []  # encoded: a tenth of the memory
        self.size = 0
        self.ended = False
        self.expires = 0.0  # without an api: seconds on the clock

    def record(self, message: Any) -> None:
        """Keeps a message for an api that takes the stream over."""
        if self.is_whole:
            self.messages.append(encode(message))
            self.size += len(self.messages[-1])


class ResumableStreams:
    """All resumable requests of a tokenizer process. `handle` is the pool's. `clock` returns seconds."""

    def __init__(self, handle: Callable[[PeerId, Any], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._handle = handle
        self._clock = clock
        self._streams: dict[bytes, ResumableStream] = {}  # by key
        self._attached: dict[PeerId, dict[int, ResumableStream]] = {}  # per api, by its rid
        self._detached: dict[ResumableStream, None] = {}  # an ordered set: the oldest first
        self._answers: list[tuple[PeerId, Any]] = []

    def receive(self, api: PeerId, message: Any) -> None:
        match message:
            case Generate(resume_key=key) if key:
                self._on_generate(api, message)
            case Cancel() if (stream := self._attached.get(api, {}).get(message.rid)) is not None:
                self._on_cancel(stream, message)
            case ImageChunk() if (stream := self._attached.get(api, {}).get(message.rid)) is not None:
                self._handle(stream.peer, message._replace(rid=RID))
            case PeerDisconnected():
                for stream in self._attached.pop(api, {}).values():
                    self._detach(stream)
                self._handle(api, message)
            case _:
                self._handle(api, message)

    def forward(self, messages: Iterable[tuple[PeerId, Any]]) -> Iterator[tuple[PeerId, Any]]:
        """The messages of the pool, those about streams with the api and its rid; before them the kept ones for an api
        that has taken a stream over."""
        answers, self._answers = self._answers, []
        yield from answers
        for peer, message in messages:
            if peer.role != STREAM:
                yield peer, message
            elif (stream := self._streams.get(peer.boot)) is not None and isinstance(message, FetchImage):
                if stream.api is not None:
                    yield stream.api, message._replace(rid=stream.rid)
                else:
                    self._handle(peer, ImageChunk(RID, message.digest, message.offset, b"", NO_FRONT_END))
            elif stream is not None and not isinstance(message, Status):
                stream.record(message)
                if stream.api is not None:
                    yield stream.api, _with_rid(message, stream.rid)
                if isinstance(message, End):
                    stream.ended = True
                    if stream.api is not None:
                        self._attached[stream.api].pop(stream.rid, None)
                        self._detach(stream)
                    # Submitted again through another tokenizer. It may have gone already, for the memory that it takes.
                    if message.reason == FinishReason.CANCELLED and stream.key in self._streams:
                        self._remove(stream)

    def drop_expired(self) -> None:
        """Ends the streams that were without an api for longer than their window. To be called every few seconds."""
        if not self._detached:
            return
        now = self._clock()
        for stream in [stream for stream in self._detached if stream.expires <= now]:
            self._remove(stream)

    def drop_detached(self) -> None:
        """Ends all streams without an api."""
        for stream in list(self._detached):
            self._remove(stream)

    def _on_generate(self, api: PeerId, generate: Generate) -> None:
        stream = self._streams.get(generate.resume_key)
        if stream is not None and stream.api not in (None, api) and generate.context.attempt > 1:
            # The client has resumed the stream at another api, while this one did not respond.
            self._answers.append((api, End(generate.rid, FinishReason.CANCELLED, DETACHED)))
            return
        if stream is not None and (not stream.is_whole or _is_resubmitted(generate)):
            self._remove(stream)
            stream = None
        if stream is None:
            peer = PeerId(STREAM, 0, generate.resume_key)
            stream = self._streams[generate.resume_key] = ResumableStream(peer, api, generate)
            self._attached.setdefault(api, {})[generate.rid] = stream
            self._handle(peer, Hello(PROTOCOL, *peer))
            self._handle(peer, generate._replace(rid=RID))
            return
        log.debug("%s takes over %s", api, stream.peer)
        self._release_api(stream)
        self._detached.pop(stream, None)
        self._answers += ((api, _with_rid(decode(message), generate.rid)) for message in stream.messages)
        if stream.ended:
            self._detach(stream)
        else:
            stream.api, stream.rid = api, generate.rid
            self._attached.setdefault(api, {})[generate.rid] = stream

    def _on_cancel(self, stream: ResumableStream, cancel: Cancel) -> None:
        if cancel.client_lost:
            self._release_api(stream)
            self._detach(stream)
        else:
            self._remove(stream)

    def _release_api(self, stream: ResumableStream) -> None:
        """Ends the request of the attached api, if there is one."""
        if stream.api is not None:
            self._attached[stream.api].pop(stream.rid, None)
            self._answers.append((stream.api, End(stream.rid, FinishReason.CANCELLED, DETACHED)))
            stream.api = None

    def _detach(self, stream: ResumableStream) -> None:
        """Keeps a stream without an api for its window."""
        stream.api = None
        stream.expires = self._clock() + stream.window_seconds
        self._detached[stream] = None
        running = [one for one in self._detached if one.client == stream.client and not one.ended]
        if stream.client_limit and len(running) > stream.client_limit:
            self._remove(running[0])
        while (too_many := len(self._detached) > MAX_DETACHED) or self._detached_bytes > MAX_DETACHED_BYTES:
            loads: Counter[str] = Counter()
            for one in self._detached:
                loads[one.client] += 1 if too_many else one.size
            ((client, _),) = loads.most_common(1)
            self._remove(next(one for one in self._detached if one.client == client))

    @property
    def _detached_bytes(self) -> int:
        return sum(one.size for one in self._detached)

    def _remove(self, stream: ResumableStream) -> None:
        """Forgets a stream. If its request runs, it is cancelled."""
        log.debug("%s is dropped", stream.peer)
        self._release_api(stream)
        self._detached.pop(stream, None)
        del self._streams[stream.key]
        self._handle(stream.peer, PeerDisconnected())


def _is_resubmitted(generate: Generate) -> bool:
    """Whether the api has received a part of the answer from another tokenizer, or over an earlier connection."""
    return bool(generate.resume_ids or generate.prompt_logprobs_from)


def _with_rid(message: Any, rid: int) -> Any:
    """The message of a stream for its api."""
    if isinstance(message, Texts):
        return message._replace(rids=pack_column(UINT32, [rid] * (len(message.rids) // ITEM_BYTES)))
    return message._replace(rid=rid)
