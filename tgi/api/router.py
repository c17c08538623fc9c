"""The router: assigns each request to a tokenizer, resubmits it after a loss, cancels it, and hands what the tokenizers
send to the request."""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping

from tgi.api import errors, request_metrics
from tgi.api.clients import Client
from tgi.api.requests import AdapterUpdateRequest, Generation, LiveRequest, TokenizationRequest, WakeEvent
from tgi.api.token_columns import TextsColumns
from tgi.microkernel import metrics
from tgi.microkernel.codec import ITEM_BYTES, unpack_uint32
from tgi.microkernel.crash_isolation import CrashIsolation
from tgi.microkernel.flight_recorder import NO_RECORDER, Event, FlightRecorder
from tgi.microkernel.link import Link, PeerDisconnected, PeerId, PeerResponds, PeerSilent
from tgi.microkernel.liveness import BEAT_SECONDS, ProgressClock
from tgi.microkernel.permits import Permits
from tgi.microkernel.protocol import (
    AdapterUpdated,
    Beat,
    Cancel,
    DeploymentLimits,
    End,
    FinishReason,
    Generate,
    Hello,
    LoadedAdapter,
    Prompted,
    PromptTokens,
    Status,
    Texts,
    Tokenized,
)
from tgi.microkernel.quarantine import Quarantine
from tgi.microkernel.sampling_params import SamplingDefaults
from tgi.microkernel.token_bucket import TokenBucket
from tgi.microkernel.token_rates import TokenRates
from tgi.microkernel.work_register import split_fingerprints

log = logging.getLogger(__name__)

# Requests of a lost tokenizer that are sent to another: at once, and then per second. So it can serve its own.
RESUBMISSION_BURST, RESUBMISSIONS_PER_SECOND = 100, 250.0
# A tokenizer whose work has made no progress for this long gets no new request if there is another.
STUCK_SECONDS = 2.0
# What the processes below report has an age of up to two beats at each of two hops.
PROGRESS_DELAY_SECONDS = 4 * BEAT_SECONDS
# How long the requests that a dead tokenizer had in hand are kept back: until its successor has told how it ended.
EXIT_REPORT_SECONDS = 5.0


class TokenizerConnection:
    """One tokenizer of the pool, and the requests that are assigned to it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.peer: PeerId | None = None  # None while no process is connected
        self.status: Status | None = None
        self.beat = Beat(None)
        self.silent = False  # it is connected, and sends no beats any more
        self.requests: dict[int, LiveRequest] = {}  # by rid
        self.moved: dict[int, LiveRequest] = {}  # by rid: moved to another tokenizer when this one was silent
        # By boot id: those that tokenizers had in hand when they disconnected.
        self.kept_back: dict[bytes, list[LiveRequest]] = {}

    @property
    def can_compute(self) -> bool:
        """Whether a request sent to it now would be computed, by what is known of it."""
        return self.status is not None and self.status.ready and self.status.healthy and not self.silent

    @property
    def stuck(self) -> bool:
        """Whether its work makes no progress."""
        return (self.beat.progress_age_ms or 0) > 1000 * STUCK_SECONDS


class Router:
    """Spreads the requests of this process over the connected tokenizers.

    Each generation of a client holds one of the server's permits while it is active. `attach` reads the links from the
    running loop. libzmq's descriptor signals changes only, so a link is read until it is empty, and again after each
    send.
    """

    def __init__(
        self,
        links: list[Link],
        permits: Permits,
        quarantine: Quarantine,
        recorder: FlightRecorder = NO_RECORDER,
        work_in_hand: Callable[[PeerId], bytes] = lambda peer: b"",
        stall_limit: float = 60.0,
        token_rates: TokenRates | None = None,
    ) -> None:
        """`work_in_hand`: the fingerprints of the requests that a dead process had in hand, as far as they are known
        before its successor reports them. `stall_limit`: upper bound of the seconds without progress of any request."""
        self.recorder = recorder
        self._permits = permits
        self._token_rates = token_rates  # None: keys have no limits of tokens per minute
        self.quarantine = quarantine
        self._work_in_hand = work_in_hand
        self._isolation: CrashIsolation[bytes] = CrashIsolation()  # of requests that crash tokenizers
        self._stall_limit = stall_limit
        self._progress = ProgressClock()
        self._stalled = False  # requests are in flight, and none makes progress
        self._beat = Beat(None)
        self._unused_permits: Counter[Client] = Counter()  # for generations that are submitted in this loop turn
        self.limits: DeploymentLimits | None = None  # known once a worker has been ready
        self.defaults = SamplingDefaults()  # known once a tokenizer has connected, which is before `limits`
        self.adapters: dict[str, LoadedAdapter] = {}  # by name, in the order of loading
        self.tokenizers = [TokenizerConnection(link) for link in links]
        self._rids = itertools.count(1)
        self._delivery = TokenDelivery(recorder)
        self._assignments: dict[LiveRequest, tuple[TokenizerConnection, int]] = {}  # with the rid
        self._unassigned: dict[LiveRequest, None] = {}  # an ordered set: until a tokenizer responds
        self._resubmissions = TokenBucket(RESUBMISSIONS_PER_SECOND, RESUBMISSION_BURST)
        self._resubmission_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        # The readiness probe (readiness.py) sets both. Once passed, it stays so: requests then wait out a restart of
        # other processes instead of failing.
        self.probe_passed = False
        self.probe_failure = ""  # until it has passed, for `stage`
        self._status_received = WakeEvent()
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- for the routes ---

    @property
    def in_flight(self) -> int:
        """Active requests."""
        return sum(request.active for request in self._requests())

    @property
    def can_compute(self) -> bool:
        """Whether a request sent now would be computed, by the status of the other processes."""
        return self.limits is not None and any(t.can_compute for t in self.tokenizers)

    @property
    def healthy(self) -> bool:
        """Whether a request sent now would be answered."""
        return self.probe_passed and self.can_compute and not self._stalled

    @property
    def stage(self) -> str:
        """What the server waits for before it can compute, in words: at start, and while a lost process is replaced.
        Taken from the tokenizer that is furthest."""
        statuses = [t.status for t in self.tokenizers if t.status is not None and not t.silent]
        if not statuses:
            return "the tokenizers do not respond" if any(t.silent for t in self.tokenizers) else "starting tokenizers"
        if self.can_compute and self._stalled:
            return "no request makes progress"
        if self.can_compute and not self.probe_passed:
            return self.probe_failure or "answering the first request"
        best = max(statuses, key=lambda status: (status.ready, status.percent))
        stage = best.stage or "starting"
        return stage if best.ready else f"{stage} {best.percent}%"

    @property
    def retry_after(self) -> int:
        """Seconds until there should be permits: until the next request ends and the waiting ones have begun."""
        waits = [
            t.status.mean_end_interval_ms + t.status.predicted_wait_ms for t in self.tokenizers if t.status is not None
        ]
        return min(max(1, math.ceil(max(waits, default=0) / 1000)), errors.MAX_RETRY_AFTER_SECONDS)

    def require_free_permit(self, client: Client) -> None:
        """Raises ApiError: 429 if no permit is free for this client now. Acquires none. Before the readiness probe has
        passed it does nothing: acquire_permits then answers 503."""
        if not self.probe_passed:
            return
        self._acquire(client, 1)
        self._permits.release(1, client.permit_id)

    def acquire_permits(self, client: Client, count: int = 1) -> None:
        """Acquires permits for this many generations of a client, to be submitted before anything is awaited: those
        that are unused when the loop turns are returned.

        Raises ApiError: 503 before the readiness probe has passed, 429 if too few permits are free for the client.
        """
        if not self.probe_passed:
            raise errors.unhealthy(self.stage)
        missing = count - self._unused_permits[client]
        if missing > 0:
            self._acquire(client, missing)
            self._unused_permits[client] = count
        if self._loop is not None:
            self._loop.call_soon(self._return_unused_permits)

    def _acquire(self, client: Client, count: int) -> None:
        if client.requests is not None and self._permits.held_by(client.permit_id) + count > client.requests:
            raise errors.overloaded(self.retry_after, f"This API key may have {client.requests} requests at once")
        if client.tokens_per_minute is not None and self._token_rates is not None:
            wait = self._token_rates.wait_seconds(client.permit_id, client.tokens_per_minute)
            if wait > 0:
                text = f"This API key may use {client.tokens_per_minute} tokens per minute"
                raise errors.overloaded(math.ceil(wait), text)
        if not self._permits.acquire(count, client.permit_id, client.weight):
            raise errors.overloaded(self.retry_after)

    def _charge(self, client: Client, tokens: int) -> None:
        if client.tokens_per_minute is not None and self._token_rates is not None:
            self._token_rates.charge(client.permit_id, client.tokens_per_minute, tokens)

    def _return_unused_permits(self) -> None:
        for client, count in self._unused_permits.items():
            self._permits.release(count, client.permit_id)
        self._unused_permits.clear()

    def submit(self, request: LiveRequest) -> None:
        """Sends a request to the tokenizer that has the fewest, or keeps it until one connects.

        Raises ApiError: 429 if there is no permit for a generation.
        """
        if isinstance(request, Generation) and not request.probe:
            if self._unused_permits[request.client]:
                self._unused_permits[request.client] -= 1
            else:
                self._acquire(request.client, 1)
        try:
            self._assign(request)
        except Exception:  # a defect: its message cannot be encoded
            self._deactivate(request)
            raise
        self._exchange_with_all_soon()

    def cancel(self, request: LiveRequest, client_lost: bool = False) -> None:
        """Cancels an active request; a Cancel is sent at once. The record stays until the End. `client_lost`: because
        its client has disconnected."""
        if not request.active:
            return
        self._deactivate(request)
        self._stamp(Event.LEFT, request)
        request.wake_event.wake()
        if isinstance(request, Generation) and request.parked:  # no End follows
            self._charge(request.client, request.generated_count)
        if request in self._unassigned:
            del self._unassigned[request]
        elif assignment := self._assignments.get(request):
            tokenizer, rid = assignment
            if tokenizer.peer is not None:
                tokenizer.link.send(tokenizer.peer, Cancel(rid, client_lost))
                self._exchange_messages(tokenizer)

    # --- slow readers ---

    def park(self, generation: Generation) -> None:
        """Cancels a generation below, because its client does not read, and drops what still comes of it. It keeps its
        permit."""
        generation.parked = True
        self._stamp(Event.PARKED, generation)
        metrics.tgi_parked_requests.inc()
        if generation in self._unassigned:
            del self._unassigned[generation]
        elif (assignment := self._assignments.pop(generation, None)) is not None:
            tokenizer, rid = assignment
            abandoned = LiveRequest(generation.wake_event)
            abandoned.active = False
            tokenizer.requests[rid] = abandoned  # until its End
            self._assignments[abandoned] = assignment
            if tokenizer.peer is not None:
                tokenizer.link.send(tokenizer.peer, Cancel(rid))
            self._exchange_with_all_soon()

    def unpark(self, generation: Generation) -> None:
        """Continues a parked generation from the tokens that it has, as after the loss of a tokenizer."""
        generation.parked = False
        if generation.active:
            self._assign(generation, resubmitted=Event.UNPARKED)
            self._exchange_with_all_soon()

    # --- links ---

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Registers the links with the running loop."""
        self._loop = loop
        for tokenizer in self.tokenizers:
            self._register(tokenizer)
        self._exchange_with_all_soon()
        self._tick_timer = loop.call_later(BEAT_SECONDS, self._tick)

    def add_tokenizer(self, link: Link) -> TokenizerConnection:
        """Uses another tokenizer from now on."""
        tokenizer = TokenizerConnection(link)
        self.tokenizers.append(tokenizer)
        self._register(tokenizer)
        return tokenizer

    def remove_tokenizer(self, tokenizer: TokenizerConnection) -> None:
        """Closes the link to a tokenizer that is not connected, so that no request is assigned to it."""
        assert tokenizer.peer is None
        self.tokenizers.remove(tokenizer)
        self._close_link(tokenizer)
        for boot in tokenizer.kept_back:
            self._submit_kept_back(tokenizer, boot)

    async def wait_for_status(self, timeout_seconds: float) -> None:
        """Waits for the first Status of any tokenizer."""
        end = time.monotonic() + timeout_seconds
        while not any(tokenizer.status for tokenizer in self.tokenizers) and time.monotonic() < end:
            await asyncio.sleep(0.005)

    async def wait_until_computing(self) -> None:
        """Waits until a request would be computed. For one task at a time."""
        while not self.can_compute:
            await self._status_received.wait()

    def close(self) -> None:
        """Removes the links from the loop and closes them."""
        for timer in (self._tick_timer, self._resubmission_timer):
            if timer is not None:
                timer.cancel()
        for tokenizer in self.tokenizers:
            self._close_link(tokenizer)

    def _register(self, tokenizer: TokenizerConnection) -> None:
        if self._loop is not None:
            self._loop.add_reader(tokenizer.link.socket.fileno(), self._exchange_messages, tokenizer)
            self._loop.add_reader(tokenizer.link.monitor.fileno(), self._on_monitor_event, tokenizer)
            self._loop.call_soon(self._exchange_messages, tokenizer)

    def _close_link(self, tokenizer: TokenizerConnection) -> None:
        if self._loop is not None:
            self._loop.remove_reader(tokenizer.link.socket.fileno())
            self._loop.remove_reader(tokenizer.link.monitor.fileno())
        tokenizer.link.close()

    def _exchange_with_all_soon(self) -> None:
        if self._loop is not None:
            for tokenizer in self.tokenizers:
                self._loop.call_soon(self._exchange_messages, tokenizer)

    def beat(self) -> Beat:
        """How the requests of this process progress."""
        return self._beat

    def _tick(self) -> None:
        """Every BEAT_SECONDS: looks for silent tokenizers, and whether requests make progress."""
        for tokenizer in self.tokenizers:
            self._exchange_messages(tokenizer)
            tokenizer.link.exchange_beats(self._beat)
            self._exchange_messages(tokenizer)
        now = time.monotonic()
        in_flight = self.in_flight
        for tokenizer in self.tokenizers:
            if tokenizer.beat.progress_age_ms is not None and not tokenizer.silent:
                self._progress.record_at(now - tokenizer.beat.progress_age_ms / 1000)
        age = self._progress.tick(now, busy=in_flight > 0 and self.can_compute)
        known = [t.beat.limit_ms / 1000 for t in self.tokenizers if t.requests and t.beat.limit_ms]
        limit = min(max(known, default=self._stall_limit), self._stall_limit)
        self._stalled = age is not None and age > limit + PROGRESS_DELAY_SECONDS
        self._beat = Beat(None) if age is None else Beat(int(1000 * age), int(1000 * limit), f"{in_flight} in flight")
        if self._loop is not None:
            self._tick_timer = self._loop.call_later(BEAT_SECONDS, self._tick)

    def _on_monitor_event(self, tokenizer: TokenizerConnection) -> None:
        tokenizer.link.detect_disconnects()
        self._exchange_messages(tokenizer)

    def _exchange_messages(self, tokenizer: TokenizerConnection) -> None:
        """Sends what is queued and handles what has been received; continues in the next loop turn if there is more."""
        link = tokenizer.link
        if link.socket.closed:
            return
        link.flush()
        for peer, message in link.receive():
            self._handle_message(tokenizer, peer, message)
        if link.has_pending_work and self._loop is not None:
            self._loop.call_soon(self._exchange_messages, tokenizer)

    def _handle_message(self, tokenizer: TokenizerConnection, peer: PeerId, message: object) -> None:
        match message:
            case Texts():
                self._delivery.deliver(tokenizer.requests, message)
                self._progress.record()
            case End():
                self._progress.record()
                self._delivery.flush_metrics()
                request = self._remove_assignment(tokenizer, message.rid)
                if request is not None:
                    self._record_end(request, message)
                if isinstance(request, Generation):
                    # The End of a stream that its client may resume has no counts.
                    generated = max(message.generated_tokens, request.generated_count)
                    self._charge(request.client, message.prompt_tokens + generated)
                if isinstance(request, Generation) and self.limits is not None:
                    request_metrics.observe_requested_lengths(request, message, self.limits)
                if request is not None and request.active:
                    self._deactivate(request)
                    self._stamp(Event.ANSWERED, request)
                    if isinstance(request, Generation):
                        request.complete(message)
                    else:
                        request.fail(message.message)
            case Tokenized():
                self._progress.record()
                request = self._remove_assignment(tokenizer, message.rid)
                if request is not None and self._isolation.suspects:
                    self._isolation.discard(request.fingerprint, well=True)
                if isinstance(request, TokenizationRequest) and request.active:
                    self._deactivate(request)
                    request.complete(message)
            case AdapterUpdated():
                request = self._remove_assignment(tokenizer, message.rid)
                if isinstance(request, AdapterUpdateRequest) and request.active:
                    self._deactivate(request)
                    request.complete(message)
            case Prompted():
                request = tokenizer.requests.get(message.rid)
                if isinstance(request, Generation):
                    request.prompt_text, request.prompt_characters = message.text, message.characters
                    request.has_parts = message.in_parts
            case PromptTokens():
                request = tokenizer.requests.get(message.rid)
                if isinstance(request, Generation) and request.active:
                    request.prompt_columns.extend(message)
            case Status():
                tokenizer.status = message
                self._apply_status(message)
            case Hello():
                log.debug("%s is connected", peer)
                tokenizer.peer = peer
                self.defaults = message.sampling_defaults
                self._read_exit_report(tokenizer, message)
                self._on_tokenizer_available()
            case PeerDisconnected():
                self._on_tokenizer_lost(tokenizer, peer, message.planned)
            case PeerSilent():
                log.warning("%s does not respond", peer)
                tokenizer.silent = True
                self._move_requests()
            case PeerResponds():
                log.warning("%s responds again", peer)
                tokenizer.silent = False
                self._on_tokenizer_available()
            case Beat():
                tokenizer.beat = message
            case _:
                log.warning("unexpected %s from %s", type(message).__name__, peer)

    def _apply_status(self, status: Status) -> None:
        if status.limits is not None and self.limits is None:
            self.limits = status.limits
            metrics.set_length_limits(status.limits.max_input_tokens, status.limits.max_total_tokens)
        if status.limits is not None and status.adapters != [*self.adapters.values()]:
            self.adapters = {adapter.name: adapter for adapter in status.adapters}
        self._status_received.wake()

    # --- assignments ---

    def _requests(self) -> list[LiveRequest]:
        """All requests, cancelled ones included whose End is still to come."""
        kept_back = [one for tokenizer in self.tokenizers for some in tokenizer.kept_back.values() for one in some]
        return [*self._assignments, *self._unassigned, *kept_back]

    def _assign(self, request: LiveRequest, resubmitted: Event = Event.RESUBMITTED) -> None:
        """Sends a request to the tokenizer with the fewest requests, ready ones first, and those that make progress. A
        request that may be resumed goes where its key leads every front end."""
        request.on_trial = self._isolation.is_suspect(request.fingerprint)
        responding = [t for t in self.tokenizers if t.peer is not None and not t.silent]
        if not responding:
            self._unassigned[request] = None
            return
        best = min(
            responding,
            key=lambda t: (
                not (t.status is not None and t.status.ready),
                t.stuck,
                0 if t.peer is None else request.tokenizer_rank(t.peer.replica),
                len(t.requests),
            ),
        )
        rid = next(self._rids)
        assert best.peer is not None
        message = request.to_message(rid)
        best.link.send(best.peer, message)
        best.requests[rid] = request
        self._assignments[request] = (best, rid)
        if isinstance(message, Generate):
            event = resubmitted if request.submitted else Event.SUBMITTED
            key, index = message.request_key, message.request_index
            self.recorder.stamp(event, key, index, best.peer.replica, len(message.resume_ids) // ITEM_BYTES)
            if request.on_trial:
                self.recorder.stamp(Event.ON_TRIAL, key, index, self._isolation.suspects[request.fingerprint].strikes)
        request.submitted = True

    def _remove_assignment(self, tokenizer: TokenizerConnection, rid: int) -> LiveRequest | None:
        request = tokenizer.requests.pop(rid, None)
        if request is None and tokenizer.moved.pop(rid, None) is not None:
            return None  # another tokenizer has it
        if request is None:
            log.warning("a tokenizer has ended request %d, which is unknown", rid)
        else:
            del self._assignments[request]
        return request

    def _stamp(self, event: Event, request: LiveRequest, number: int = 0) -> None:
        if isinstance(request, Generation):
            asked = request.message
            self.recorder.stamp(event, asked.request_key, asked.request_index, number, request.generated_count)

    def _deactivate(self, request: LiveRequest) -> None:
        request.active = False
        if isinstance(request, Generation) and not request.probe:
            self._permits.release(1, request.client.permit_id)

    def _on_tokenizer_lost(self, tokenizer: TokenizerConnection, peer: PeerId, planned: bool) -> None:
        """Submits the requests of a tokenizer that has ended again, to another one or to its replacement. Those that it
        had in hand wait until it is known how it ended."""
        if tokenizer.peer != peer:
            return
        tokenizer.peer = tokenizer.status = None
        tokenizer.beat, tokenizer.silent = Beat(None), False
        requests, tokenizer.requests = tokenizer.requests, {}
        tokenizer.moved = {}
        active = [request for request in requests.values() if request.active]
        in_hand = frozenset() if planned else frozenset(split_fingerprints(self._work_in_hand(peer)))
        suspects = tokenizer.kept_back[peer.boot] = [one for one in active if one.fingerprint in in_hand]
        level = logging.DEBUG if planned else logging.WARNING
        sent = len(active) - len(suspects)
        log.log(level, "%s has disconnected; %d requests are sent to another tokenizer", peer, sent)
        for request in requests.values():
            del self._assignments[request]
        for request in active:
            self._stamp(Event.TOKENIZER_LOST, request, peer.replica)
            if request.fingerprint not in in_hand:
                self._unassigned[request] = None
        if suspects and self._loop is not None:
            self._loop.call_later(EXIT_REPORT_SECONDS, self._submit_kept_back, tokenizer, peer.boot)
        self._assign_waiting()
        self._exchange_with_all_soon()

    def _on_tokenizer_available(self) -> None:
        self._move_requests()
        self._assign_waiting()

    def _move_requests(self) -> None:
        """Assigns the requests of silent tokenizers to another one, if there is one, and cancels them where they were:
        if such a tokenizer responds again, what it sends for them is dropped. What it has in hand stays there, since
        that may be what it hangs in."""
        if not any(t.peer is not None and not t.silent for t in self.tokenizers):
            return
        for tokenizer in self.tokenizers:
            if not tokenizer.silent or tokenizer.peer is None or not tokenizer.requests:
                continue
            in_hand = frozenset(split_fingerprints(self._work_in_hand(tokenizer.peer)))
            requests = {rid: one for rid, one in tokenizer.requests.items() if one.fingerprint not in in_hand}
            if not requests:
                continue
            log.warning("%d requests of %s are sent to another tokenizer", len(requests), tokenizer.peer)
            for rid, request in requests.items():
                del tokenizer.requests[rid]
                tokenizer.link.send(tokenizer.peer, Cancel(rid))
                tokenizer.moved[rid] = request
                del self._assignments[request]
                if request.active:
                    self._stamp(Event.TOKENIZER_LOST, request, tokenizer.peer.replica)
                    self._unassigned[request] = None
        self._assign_waiting()

    def _assign_waiting(self) -> None:
        """Assigns waiting requests at the limited rate, while a tokenizer responds."""
        if self._resubmission_timer is not None:
            self._resubmission_timer.cancel()
            self._resubmission_timer = None
        now = time.monotonic()
        for request in list(self._unassigned):
            if not any(t.peer is not None and not t.silent for t in self.tokenizers):
                return
            if not self._resubmissions.take(now):
                if self._loop is not None:
                    seconds = self._resubmissions.seconds_until_next(now)
                    self._resubmission_timer = self._loop.call_later(seconds, self._assign_waiting)
                break
            del self._unassigned[request]
            self._assign(request)
        self._exchange_with_all_soon()

    # --- crashes ---

    def _read_exit_report(self, tokenizer: TokenizerConnection, hello: Hello) -> None:
        """A tokenizer has connected. If it tells how its predecessor died, the requests that this had in hand are
        suspects; tokenizers work on them alone from now on."""
        report = hello.last_exit
        if report is not None and report.boot in tokenizer.kept_back:
            requests = self._requests()
            tokens = {request.fingerprint: request.generated_count for request in requests}
            in_hand = {name: tokens.get(name, 0) for name in split_fingerprints(report.in_hand)}
            for name in self._isolation.record_death(in_hand, time.monotonic(), outside=report.outside):
                self._quarantine(name, requests, f"the tokenizer {report.cause} while it worked on this request")
        for boot in list(tokenizer.kept_back):
            self._submit_kept_back(tokenizer, boot)
            del tokenizer.kept_back[boot]

    def _submit_kept_back(self, tokenizer: TokenizerConnection, boot: bytes) -> None:
        requests = tokenizer.kept_back.get(boot, [])
        while requests:
            request = requests.pop(0)
            if request.active:
                self._assign(request)
        self._exchange_with_all_soon()

    def _quarantine(self, fingerprint: bytes, requests: list[LiveRequest], cause: str) -> None:
        """Fails the requests of this name, and refuses it from now on."""
        self._refuse(fingerprint, cause)
        for request in requests:
            if request.fingerprint == fingerprint and request.active:
                self.cancel(request)
                request.fail(cause)

    def _refuse(self, fingerprint: bytes, cause: str) -> None:
        if fingerprint and self.quarantine.add(fingerprint, cause):
            metrics.tgi_quarantined_requests.inc()
            log.error("request %s is in quarantine: %s", fingerprint.hex(), cause)

    def _record_end(self, request: LiveRequest, end: End) -> None:
        """A strike is cleared by an answer of the pipeline, not by a disconnect: the same request may come back."""
        if end.reason == FinishReason.QUARANTINED:
            self._refuse(request.fingerprint, end.message)
        elif self._isolation.suspects and end.reason not in (FinishReason.CANCELLED, FinishReason.FAILED):
            self._isolation.discard(request.fingerprint, well=True)


class TokenDelivery:
    """Hands the tokens of a step to their requests, and measures the time between tokens.

    Call `flush_metrics` when a request has ended, so that a client that has seen its last token finds it in /metrics.
    """

    def __init__(self, recorder: FlightRecorder = NO_RECORDER) -> None:
        self._recorder = recorder
        self._metrics = metrics.ObservationBuffer()
        self._inter_token_seconds = self._metrics.values("tgi_inter_token_duration")
        self._skipped_tokens = self._metrics.values("tgi_request_skipped_tokens")  # beyond the first, per step

    def deliver(self, requests: Mapping[int, LiveRequest], message: Texts) -> None:
        """Hands out the tokens of a message. `requests` are those of the tokenizer that sent it, by rid."""
        now = time.perf_counter()
        columns = TextsColumns.from_message(message)
        inter_token_seconds, skipped_tokens = self._inter_token_seconds, self._skipped_tokens
        stop = 0
        for rid, count in zip(unpack_uint32(message.rids), unpack_uint32(message.counts), strict=True):
            start, stop = stop, stop + count
            request = requests.get(rid)
            if not isinstance(request, Generation) or not request.active:
                continue
            if request.first_token_time is None:
                request.first_token_time = now
                if request.probe:  # its only token
                    request.add_tokens(columns, start, stop)
                    continue
                self._recorder.stamp(Event.FIRST_TOKEN, request.message.request_key, request.message.request_index)
                metrics.tgi_time_to_first_token_duration.observe(now - request.arrival_time)
            else:
                inter_token_seconds.append(now - request.latest_token_time)
            request.latest_token_time = now
            if count > 1:
                inter_token_seconds += [0.0] * (count - 1)  # draft tokens arrive with the one before
            skipped_tokens.append(count - 1)
            request.add_tokens(columns, start, stop)
        if now > self._metrics.due_at:
            self._metrics.flush(now)

    def flush_metrics(self) -> None:
        """Observes the buffered measurements."""
        self._metrics.flush()
