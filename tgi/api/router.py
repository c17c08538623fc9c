"""Which tokenizer has which request: submits, resumes after a loss, cancels, and hands what comes back to its owner."""

import asyncio
import itertools
import logging
import math
import time

from tgi.api import accounting, errors
from tgi.api.calls import Adaptation, Bell, Call, Encoding, Generation, probing
from tgi.api.delivery import Delivery
from tgi.kernel import metrics
from tgi.kernel.answer import Prompted, PromptTokens, Texts
from tgi.kernel.link import Gone, Link, Peer
from tgi.kernel.messages import Adapted, Cancel, End, Tokenized
from tgi.kernel.permits import Permits
from tgi.kernel.presence import Adapter, Hello, Limits, Status
from tgi.kernel.sampling import SamplingDefaults

log = logging.getLogger(__name__)

# A request that has lost this many tokenizers without a token in between is what kills them.
MOST_LOSSES = 3
# The longest time that a refused client is told to wait, in seconds.
LONGEST_RETRY = 60


class Tokenizer:
    """One place of the tokenizer pool, and the requests that the process there has."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.peer: Peer | None = None
        self.status: Status | None = None
        self.calls: dict[int, Call] = {}


class Router:
    """Spreads the requests of this process over the tokenizers that are up.

    Each generation of a client has one of the server's permits as long as the client waits. `attach` watches the links
    from the running loop; libzmq's descriptor only tells of changes, so each link is read until it is empty, and again
    after each send.
    """

    def __init__(self, links: list[Link], permits: Permits) -> None:
        self._permits = permits
        self._admitted = 0  # permits of generations that will be submitted before this turn of the loop ends
        self.limits: Limits | None = None  # known once a worker has been ready
        self.defaults = SamplingDefaults()  # known once a tokenizer is up, which is before `limits`
        self.adapters: dict[str, Adapter] = {}  # those that a request may ask for, by name in their order of loading
        self.tokenizers = [Tokenizer(link) for link in links]
        self._rids = itertools.count(1)
        self._delivery = Delivery()
        self._at: dict[Call, tuple[Tokenizer, int]] = {}
        self._homeless: dict[Call, None] = {}  # wait for a tokenizer to come up
        self.proven = False  # the readiness probe was answered: set by readiness.py, and never taken back
        self.first_failure = ""  # that of the readiness probe until it is answered, for `stage`
        self._news = Bell()  # a tokenizer has told its status
        self._loop: asyncio.AbstractEventLoop | None = None

    # What the front end asks

    @property
    def in_flight(self) -> int:
        """Requests whose client waits."""
        return sum(call.wanted for call in (*self._at, *self._homeless))

    @property
    def was_ready(self) -> bool:
        """Whether a request has ever been answered: from then on requests wait out a restart instead of failing."""
        return self.proven

    @property
    def computes(self) -> bool:
        """Whether a request sent now would be computed, by the status of the other processes."""
        return self.limits is not None and any(
            t.status is not None and t.status.ready and t.status.healthy for t in self.tokenizers
        )

    @property
    def healthy(self) -> bool:
        """Whether a request sent now would be answered."""
        return self.proven and self.computes

    @property
    def stage(self) -> str:
        """What the server waits for before it can compute, in words, from the tokenizer that is furthest: at start, and
        while a process that was lost is replaced."""
        stages = [t.status for t in self.tokenizers if t.status is not None]
        if not stages:
            return "starting tokenizers"
        if self.computes and not self.proven:
            return self.first_failure or "answering the first request"
        best = max(stages, key=lambda status: (status.ready, status.percent))
        stage = best.stage or "starting"
        return stage if best.ready else f"{stage} {best.percent}%"

    @property
    def retry_after(self) -> int:
        """Seconds until there should be permits: until the next request ends and those that wait now have begun."""
        waits = [t.status.end_ms + t.status.wait_ms for t in self.tokenizers if t.status is not None]
        return min(max(1, math.ceil(max(waits, default=0) / 1000)), LONGEST_RETRY)

    def admit(self, count: int = 1) -> None:
        """Takes permits for so many generations, to be submitted before anything is awaited: what is left of them when
        the loop turns goes back. Raises ApiError if they cannot be taken: not ready yet, or too many in flight."""
        if probing.get():
            return
        if not self.proven:
            raise errors.unhealthy(self.stage)
        missing = count - self._admitted
        if missing > 0:
            if not self._permits.take(missing):
                raise errors.overloaded(self.retry_after)
            self._admitted = count
        if self._loop is not None:
            self._loop.call_soon(self._give_rest)

    def _give_rest(self) -> None:
        self._permits.give(self._admitted)
        self._admitted = 0

    def submit(self, call: Call) -> None:
        """Gives a request to the tokenizer that has the fewest, or keeps it until one is up.

        Raises ApiError if there is no permit for a generation.
        """
        if isinstance(call, Generation) and not call.probe:
            if self._admitted:
                self._admitted -= 1
            elif not self._permits.take():
                raise errors.overloaded(self.retry_after)
        self._place(call)
        self._pump_soon()

    def cancel(self, call: Call) -> None:
        """Nobody wants this request any more. Sent at once; the record stays until its End. No effect once ended."""
        if not call.wanted:
            return
        self._unwanted(call)
        call.bell.ring()
        if call in self._homeless:
            del self._homeless[call]
        elif place := self._at.get(call):
            tokenizer, rid = place
            if tokenizer.peer is not None:
                tokenizer.link.send(tokenizer.peer, Cancel(rid))
                self._pump(tokenizer)

    # What the links say

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts listening."""
        self._loop = loop
        for tokenizer in self.tokenizers:
            loop.add_reader(tokenizer.link.socket.fileno(), self._pump, tokenizer)
            loop.add_reader(tokenizer.link.monitor.fileno(), self._look, tokenizer)
        self._pump_soon()

    async def introduced(self, seconds: float) -> None:
        """Waits for the first Status of a tokenizer, at most this long."""
        end = time.monotonic() + seconds
        while not any(tokenizer.status for tokenizer in self.tokenizers) and time.monotonic() < end:
            await asyncio.sleep(0.005)

    async def computable(self) -> None:
        """Waits until a request would be computed. For one task."""
        while not self.computes:
            await self._news.rung()

    def close(self) -> None:
        """Stops listening and closes the links."""
        for tokenizer in self.tokenizers:
            if self._loop is not None:
                self._loop.remove_reader(tokenizer.link.socket.fileno())
                self._loop.remove_reader(tokenizer.link.monitor.fileno())
            tokenizer.link.close()

    def _pump_soon(self) -> None:
        if self._loop is not None:
            for tokenizer in self.tokenizers:
                self._loop.call_soon(self._pump, tokenizer)

    def _look(self, tokenizer: Tokenizer) -> None:
        tokenizer.link.look()
        self._pump(tokenizer)

    def _pump(self, tokenizer: Tokenizer) -> None:
        """Sends what is queued and handles what has come; comes back in the next turn of the loop if there is more."""
        link = tokenizer.link
        if link.socket.closed:
            return
        link.flush()
        for peer, message in link.receive():
            self._handle(tokenizer, peer, message)
        if link.pending and self._loop is not None:
            self._loop.call_soon(self._pump, tokenizer)

    def _handle(self, tokenizer: Tokenizer, peer: Peer, message: object) -> None:
        match message:
            case Texts():
                self._delivery.texts(tokenizer.calls, message)
            case End():
                self._delivery.measured()
                call = self._release(tokenizer, message.rid)
                if isinstance(call, Generation) and self.limits is not None:
                    accounting.admitted(call, message, self.limits)
                if call is not None and call.wanted:
                    self._unwanted(call)
                    if isinstance(call, Generation):
                        call.finish(message)
                    else:
                        call.fail(message.message)
            case Tokenized():
                call = self._release(tokenizer, message.rid)
                if isinstance(call, Encoding) and call.wanted:
                    self._unwanted(call)
                    call.finish(message)
            case Adapted():
                call = self._release(tokenizer, message.rid)
                if isinstance(call, Adaptation) and call.wanted:
                    self._unwanted(call)
                    call.finish(message)
            case Prompted():
                call = tokenizer.calls.get(message.rid)
                if isinstance(call, Generation):
                    call.characters, call.divided = message.characters, message.divided
                    call.text = message.text
            case PromptTokens():
                call = tokenizer.calls.get(message.rid)
                if isinstance(call, Generation) and call.wanted:
                    call.prompt.extend(message)
            case Status():
                tokenizer.status = message
                self._told(message)
            case Hello():
                log.debug("%s is up", peer)
                tokenizer.peer = peer
                self.defaults = message.defaults
                homeless, self._homeless = self._homeless, {}
                for call in homeless:
                    self._place(call)
            case Gone():
                self._lost(tokenizer, peer)
            case _:
                log.warning("unexpected %s from %s", type(message).__name__, peer)

    def _told(self, status: Status) -> None:
        if status.limits is not None and self.limits is None:
            self.limits = status.limits
            metrics.limits(status.limits.max_input_tokens, status.limits.max_total_tokens)
        if status.limits is not None and status.adapters != [*self.adapters.values()]:
            self.adapters = {adapter.name: adapter for adapter in status.adapters}
        self._news.ring()

    def _place(self, call: Call) -> None:
        up = [t for t in self.tokenizers if t.peer is not None]
        if not up:
            self._homeless[call] = None
            return
        best = min(up, key=lambda t: (not (t.status is not None and t.status.ready), len(t.calls)))
        rid = next(self._rids)
        best.calls[rid] = call
        self._at[call] = (best, rid)
        assert best.peer is not None
        best.link.send(best.peer, call.order(rid))

    def _release(self, tokenizer: Tokenizer, rid: int) -> Call | None:
        call = tokenizer.calls.pop(rid, None)
        if call is None:
            log.warning("an end for request %d, which is not there", rid)
        else:
            del self._at[call]
        return call

    def _unwanted(self, call: Call) -> None:
        call.wanted = False
        if isinstance(call, Generation) and not call.probe:
            self._permits.give()

    def _lost(self, tokenizer: Tokenizer, peer: Peer) -> None:
        """What the dead process had is submitted again, to another one or to its successor."""
        if tokenizer.peer != peer:
            return
        tokenizer.peer = tokenizer.status = None
        calls, tokenizer.calls = tokenizer.calls, {}
        again = [call for call in calls.values() if call.wanted]
        log.warning("%s is gone; %d requests go to another tokenizer", peer, len(again))
        for call in calls.values():
            del self._at[call]
        for call in again:
            call.losses += 1
            if call.losses >= MOST_LOSSES:
                self._unwanted(call)
                call.fail(f"the tokenizer died {call.losses} times while it had this request")
            else:
                self._place(call)
        self._pump_soon()
