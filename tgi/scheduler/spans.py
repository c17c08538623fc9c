"""The spans of requests, made from what passes the scheduler's loop: how long each waited, and was computed."""

import time
from typing import TYPE_CHECKING

from tgi.kernel.link import Peer
from tgi.kernel.messages import Add, End, Reason

if TYPE_CHECKING:
    from tgi.kernel.trace import Tracer

SUCCESSES = (Reason.LENGTH, Reason.EOS, Reason.STOP)


class Spans:
    """Remembers the trace of each request from its Add to its End, which says how long both took."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._traces: dict[tuple[Peer, int], str] = {}

    def came(self, peer: Peer, message: object) -> None:
        """A message has come."""
        if isinstance(message, Add) and message.trace:
            self._traces[peer, message.rid] = message.trace

    def went(self, peer: Peer, message: object) -> None:
        """A message is about to go to a tokenizer, or would if that were still there."""
        if isinstance(message, End) and (trace := self._traces.pop((peer, message.rid), "")):
            self._ended(trace, message)

    def _ended(self, trace: str, end: End) -> None:
        now = time.time()
        begun = now - end.inference_us / 1e6
        came = begun - end.queue_us / 1e6
        failure = None if end.reason in SUCCESSES else (str(end.reason), end.message)
        self._tracer.record("queued", trace, came, begun, failure=None if begun < now else failure)
        if begun < now:
            told = {name: getattr(end, name) for name in ("prompt_tokens", "cached_tokens", "generated_tokens")}
            self._tracer.record("infer", trace, begun, now, told | {"finish_reason": str(end.reason)}, failure)
