"""The router: assigns each request to a tokenizer, resubmits it after a loss, cancels it, and hands what the tokenizers
send to the request."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tgi.api import request_metrics
from tgi.api.admission import Admission
from tgi.api.downstream import Downstream
from tgi.api.health import Health
from tgi.api.images import ImageFailure, ImageLoading
from tgi.api.requests import AdapterUpdateRequest, Generation, LiveRequest, TokenizationRequest
from tgi.api.token_delivery import TokenDelivery
from tgi.api.tokenizers import TokenizerConnection, choose_tokenizer
from tgi.microkernel.admission.permits import Permits
from tgi.microkernel.admission.token_rates import TokenRates
from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId
from tgi.microkernel.links.liveness import BEAT_SECONDS
from tgi.microkernel.messages.codec import ITEM_BYTES
from tgi.microkernel.messages.protocol import (
    DETACHED,
    AdapterUpdated,
    Cancel,
    DeploymentLimits,
    End,
    FetchImage,
    FinishReason,
    Generate,
    Hello,
    LoadedAdapter,
    ModelSource,
    Prompted,
    PromptTokens,
    Status,
    Texts,
    Tokenized,
)
from tgi.microkernel.messages.sampling_params import SamplingDefaults
from tgi.microkernel.observability import metrics
from tgi.microkernel.observability.flight_recorder import NO_RECORDER, Event, FlightRecorder
from tgi.microkernel.recovery.quarantine import Quarantine

log = logging.getLogger(__name__)


class Router:
    """Spreads the requests of this process over the connected tokenizers.

    Each generation of a client holds one of the server's permits while it is active (`admission`). `health` tells
    whether requests would be answered. `attach` reads the links from the running loop.
    """

    def __init__(
        self,
        links: list[Link],
        permits: Permits,
        quarantine: Quarantine,
        recorder: FlightRecorder = NO_RECORDER,
        work_in_progress: Callable[[PeerId], bytes | None] = lambda peer: b"",
        stall_limit: float = 60.0,
        token_rates: TokenRates | None = None,
        media_directory: Path = Path("media"),
        name: str = "api-0-0",
    ) -> None:
        """`work_in_progress`: what a dead process had in progress, as in Assignments. `stall_limit`: upper bound of the
        seconds without progress of any request. `name`: of this process and its life, for its files in the
        `media_directory`."""
        self.recorder = recorder
        self.quarantine = quarantine
        self._downstream: Downstream[TokenizerConnection, LiveRequest] = Downstream(
            self._choose, self._send, self._handle_message, self._quarantine, work_in_progress, self._on_moved
        )
        self.assignments = self._downstream.assignments
        self.limits: DeploymentLimits | None = None  # known once a worker has been ready
        self.defaults = SamplingDefaults()  # known once a tokenizer has connected, which is before `limits`
        self.source = ModelSource()  # the same
        self.adapters: dict[str, LoadedAdapter] = {}  # by name, in the order of loading
        self._model = ""  # of the first tokenizer that has connected; links reject those with another one
        self._adapters: dict[str, list[LoadedAdapter]] = {}  # as the tokenizers of each host have reported last
        self.tokenizers = self._downstream.connections
        self.health = Health(self.tokenizers, stall_limit)
        self.admission = Admission(permits, token_rates, self.health)
        self.images = ImageLoading(media_directory, name, work_in_progress, self._refuse)
        self._rids = itertools.count(1)
        self._delivery = TokenDelivery(recorder)
        self._tick_timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        for link in links:
            self._downstream.add(TokenizerConnection(link))

    # --- for the routes ---

    @property
    def in_flight(self) -> int:
        """Active requests."""
        return sum(request.active for request in self.assignments)

    def submit(self, request: LiveRequest) -> None:
        """Sends a request to the tokenizer that has the fewest, or keeps it until one connects. One with images is sent
        when they are loaded.

        Raises ApiError: 429 if there is no permit for a generation.
        """
        if isinstance(request, Generation) and request.holds_permit:
            self.admission.take_permit(request.client)
        if request.images is not None:
            self.images.load(request.images, partial(self._on_images, request))
            return
        try:
            self._downstream.submit(request)
        except Exception:  # a defect: its message cannot be encoded
            self._deactivate(request)
            raise

    def _on_images(self, request: LiveRequest, failure: ImageFailure | None) -> None:
        """The images of a request are loaded, or cannot be."""
        if not request.active:
            return
        if failure is not None:
            self._deactivate(request)
            self._stamp(Event.ANSWERED, request)
            request.reject(failure)
            return
        self._downstream.submit(request)

    def cancel(self, request: LiveRequest, client_lost: bool = False) -> None:
        """Cancels an active request; a Cancel is sent at once. The record stays until the End. `client_lost`: because
        its client has disconnected."""
        if not request.active:
            return
        kept_ms = request.message.resume_window_ms if client_lost and isinstance(request, Generation) else 0
        self._deactivate(request, kept_ms)
        self._stamp(Event.LEFT, request)
        request.wake_event.wake()
        if isinstance(request, Generation) and request.parked:  # no End follows
            self.admission.charge(request.client, request.generated_count)
        if (assigned := self.assignments.neighbour_of(request)) is not None:  # until its End
            tokenizer, rid = assigned
            self._downstream.cancel(tokenizer, Cancel(rid, client_lost))
            self._downstream.exchange(tokenizer)
        else:
            self.assignments.remove(request)

    # --- slow readers ---

    def park(self, generation: Generation) -> None:
        """Takes a generation from its tokenizer, because its client does not read. It keeps its permit."""
        generation.parked = True
        self._stamp(Event.PARKED, generation)
        metrics.tgi_parked_requests.inc()
        self._downstream.withdraw(generation)
        self._downstream.exchange_soon()

    def unpark(self, generation: Generation) -> None:
        """Continues a parked generation from the tokens that it has, as after the loss of a tokenizer."""
        generation.parked = False
        if generation.active:
            generation.submission = Event.UNPARKED
            self._downstream.submit(generation)

    # --- links ---

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.admission.attach(loop)
        self.images.attach(loop)
        self._downstream.attach(loop)
        self._tick_timer = loop.call_later(BEAT_SECONDS, self._tick)

    def add_tokenizer(self, link: Link) -> TokenizerConnection:
        tokenizer = TokenizerConnection(link)
        self._downstream.add(tokenizer)
        self._require_model(self._model)
        return tokenizer

    def remove_tokenizer(self, tokenizer: TokenizerConnection) -> None:
        """Closes the link to a tokenizer that is not connected, so that no request is assigned to it."""
        self._downstream.remove(tokenizer)
        assert tokenizer.peer is None

    def forget_deployment(self) -> None:
        """The processes below have ended for good: those that follow may serve other files, within other limits."""
        self.limits, self.adapters, self._adapters = None, {}, {}
        self._require_model("")
        self.health.forget_probe()

    def close(self) -> None:
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self._downstream.close()
        self.images.close()

    def _require_model(self, model: str) -> None:
        """Has all links reject tokenizers with another model than this one: requests may move to any tokenizer."""
        self._model = model
        for tokenizer in self.tokenizers:
            tokenizer.link.own_hello = tokenizer.link.own_hello._replace(model=model)

    def _tick(self) -> None:
        """Every BEAT_SECONDS: looks for silent tokenizers, whether requests make progress, and for requests that have
        waited for a report in vain."""
        self._downstream.tick(self.health.beat)
        self.images.tick(self.health.beat)
        self.health.tick(time.monotonic(), self.in_flight)
        if self._loop is not None:
            self._tick_timer = self._loop.call_later(BEAT_SECONDS, self._tick)

    def _handle_message(self, tokenizer: TokenizerConnection, message: object) -> None:
        match message:
            case Texts():
                self._delivery.deliver(tokenizer.requests, message)
                self.health.progress.record()
            case End():
                self.health.progress.record()
                self._delivery.flush_metrics()
                request = self.assignments.pop(tokenizer, message.rid)
                if request is not None and is_superseded(request, message):
                    self.assignments.wait(request)
                    self._downstream.submit_waiting()
                    return
                if request is not None:
                    self._record_end(request, message)
                if isinstance(request, Generation):
                    # The End of a stream that its client may resume has no counts.
                    generated = max(message.generated_tokens, request.generated_count)
                    self.admission.charge(request.client, message.prompt_tokens + generated)
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
                self.health.progress.record()
                request = self.assignments.pop(tokenizer, message.rid)
                if request is not None:
                    self._downstream.ended_well(request)
                if isinstance(request, TokenizationRequest) and request.active:
                    self._deactivate(request)
                    request.complete(message)
            case AdapterUpdated():
                request = self.assignments.pop(tokenizer, message.rid)
                if isinstance(request, AdapterUpdateRequest) and request.active:
                    self._deactivate(request)
                    request.complete(message)
            case Prompted():
                request = tokenizer.requests.get(message.rid)
                if isinstance(request, Generation):
                    request.prompt_text = message.text or request.prompt_text
                    request.prompt_characters, request.prompt_tokens = message.characters, message.prompt_tokens
                    request.has_parts = message.in_parts
                    request.not_enforced = message.not_enforced
            case FetchImage():
                request = tokenizer.requests.get(message.rid)
                if request is not None and request.active and request.images is not None:
                    assert tokenizer.peer is not None
                    tokenizer.link.send(tokenizer.peer, self.images.read_chunk(request.images, message))
                    self._downstream.exchange_soon()
            case PromptTokens():
                request = tokenizer.requests.get(message.rid)
                if isinstance(request, Generation) and request.active:
                    request.prompt_columns.extend(message)
            case Status():
                tokenizer.status = message
                self._apply_status(message, tokenizer.replica_id.site)
            case Hello():
                self._require_model(self._model or message.model)
                self.defaults = message.sampling_defaults
                self.source = message.source or self.source
            case PeerDisconnected():
                tokenizer.status = None
            case _:
                log.warning("unexpected %s from %s", type(message).__name__, tokenizer.peer)

    def _apply_status(self, status: Status, site: str) -> None:
        """`site`: of the tokenizer that reports it. Those of one host have the same schedulers."""
        if status.limits is not None and self.limits is None:
            self.limits = status.limits
            metrics.set_length_limits(status.limits.max_input_tokens, status.limits.max_total_tokens)
        if status.limits is not None:
            present = {tokenizer.replica_id.site for tokenizer in self.tokenizers}
            self._adapters = {name: one for name, one in self._adapters.items() if name in present}
            self._adapters[site] = status.adapters
            found: dict[str, LoadedAdapter] = {}
            for adapter in itertools.chain.from_iterable(self._adapters.values()):
                found.setdefault(adapter.name, adapter)
            self.adapters = found
        self.health.status_received.wake()

    # --- assignments ---

    def _choose(self, request: LiveRequest) -> TokenizerConnection | None:
        return choose_tokenizer(self.tokenizers, request)

    def _send(self, request: LiveRequest, tokenizer: TokenizerConnection) -> int:
        assert tokenizer.peer is not None
        suspect = self._downstream.isolation.find(request)
        request.on_trial = suspect is not None
        rid = next(self._rids)
        message = request.to_message(rid)
        tokenizer.link.send(tokenizer.peer, message)
        if isinstance(message, Generate):
            resumed = len(message.resume_ids) // ITEM_BYTES
            self.recorder.stamp(request.submission, message.context, tokenizer.peer.replica, resumed)
            if suspect is not None:
                self.recorder.stamp(Event.ON_TRIAL, message.context, suspect.strikes)
        request.submission = Event.RESUBMITTED
        return rid

    def _stamp(self, event: Event, request: LiveRequest, number: int = 0) -> None:
        if isinstance(request, Generation):
            self.recorder.stamp(event, request.context, number, request.generated_count)

    def _deactivate(self, request: LiveRequest, kept_ms: int = 0) -> None:
        """`kept_ms`: how long a tokenizer may go on with it, and need its images."""
        request.active = False
        if isinstance(request, Generation) and request.holds_permit:
            self.admission.release_permit(request.client)
        if request.images is not None:
            self.images.release(request.images, kept_ms)

    # --- crashes ---

    def _on_moved(self, request: LiveRequest, peer: PeerId) -> bool:
        """A request was taken from a tokenizer that has ended or is silent. Returns whether it is still wanted."""
        if request.active:
            self._stamp(Event.TOKENIZER_LOST, request, peer.replica)
        return request.active

    def _quarantine(self, name: bytes, requests: list[LiveRequest], cause: str) -> None:
        """Fails these requests, and refuses their name from now on: with them a tokenizer has ended like that."""
        text = f"the tokenizer {cause} while it worked on this request"
        self._refuse(name, text)
        for request in requests:
            if request.active:
                self.cancel(request)
                request.fail(text)

    def _refuse(self, name: bytes, cause: str) -> None:
        if name and self.quarantine.add(name, cause):
            metrics.tgi_quarantined_requests.inc()
            log.error("request %s is in quarantine: %s", name.hex(), cause)

    def _record_end(self, request: LiveRequest, end: End) -> None:
        if end.reason == FinishReason.QUARANTINED:
            self._refuse(request.context.fingerprint, end.message)
        elif end.reason not in (FinishReason.CANCELLED, FinishReason.FAILED):
            self._downstream.ended_well(request)


def is_superseded(request: LiveRequest, end: End) -> bool:
    """Whether an active request has ended only because the scheduler has got a later submission of it: the stream that
    it has resumed belonged to a front end that died, after it had lost that tokenizer."""
    resumable = isinstance(request, Generation) and bool(request.message.resume_key)
    return resumable and request.active and end.reason == FinishReason.CANCELLED and end.message != DETACHED
