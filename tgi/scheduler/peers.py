"""The scheduler's neighbours: the tokenizers, the worker, the messages queued for them, and the status report."""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from tgi.microkernel.errors import ProtocolError
from tgi.microkernel.links.link import PeerDisconnected, PeerId, PeerSilent
from tgi.microkernel.messages.protocol import (
    EQUAL_LIMITS,
    Add,
    DeploymentLimits,
    End,
    FinishReason,
    HeldPages,
    Hello,
    Status,
    StoredPages,
    Tokens,
    limits_out_of_range,
    limits_shortfall,
)
from tgi.microkernel.observability.log import ComplaintLimit
from tgi.scheduler.adapters import WorkerAdapters
from tgi.scheduler.columns import SampledColumns, SampledRow, TopTokens
from tgi.scheduler.request import Request, TokenizerPeer

log = logging.getLogger(__name__)

Outgoing = tuple[PeerId, tuple[Any, ...]]  # receiver, message


class Outbox:
    """Outgoing messages other than steps, in order: tokens, ends and status for tokenizers, adapter updates for the
    worker."""

    def __init__(self) -> None:
        self._messages: list[Iterable[Outgoing]] = []

    def append(self, peer: PeerId, message: tuple[Any, ...]) -> None:
        self._messages.append([(peer, message)])

    def extend(self, messages: Iterable[Outgoing]) -> None:
        """Queues several messages. An iterator is consumed when they are sent, so that the worker does not wait until
        they are made."""
        self._messages.append(messages)

    def discard(self, peer: PeerId) -> None:
        """Removes the messages for a peer that has disconnected: if it connects again before they are sent, they would
        answer requests of its new connection."""
        self._messages = [[one for one in messages if one[0] != peer] for messages in self._messages]

    def take_all(self) -> Iterator[Outgoing]:
        messages, self._messages = self._messages, []
        return chain.from_iterable(messages)


# --- status report ----------------------------------------------------------------------------------------------------

WAITING_FOR_WORKER = Status(ready=False, healthy=True, stage="waiting for the worker", percent=0)
LOADING_ADAPTERS = Status(ready=False, healthy=True, stage="loading adapters", percent=99)
LIMITS_NOT_MET = Status(ready=False, healthy=False, stage="the worker does not meet the limits", percent=0)
# Minimum interval between reports in which only the load differs.
LOAD_REPORT_SECONDS = 0.5
# A prediction is reported again when it has changed by more than this share.
SIGNIFICANT_CHANGE = 0.25


class LoadReport(NamedTuple):
    """The fields of a Status that change with the load."""

    queued: int
    running: int
    predicted_wait_ms: int
    mean_end_interval_ms: int

    def differs_from(self, other: "LoadReport") -> bool:
        """Whether a tokenizer that knows the other should be told this one."""
        return (
            self.queued != other.queued
            or self.running != other.running
            or _changed_significantly(self.predicted_wait_ms, other.predicted_wait_ms)
            or _changed_significantly(self.mean_end_interval_ms, other.mean_end_interval_ms)
        )

    def add_to(self, status: Status) -> Status:
        return status._replace(
            queued=self.queued,
            running=self.running,
            predicted_wait_ms=self.predicted_wait_ms,
            mean_end_interval_ms=self.mean_end_interval_ms,
        )


def _changed_significantly(new: int, old: int) -> bool:
    return abs(new - old) > SIGNIFICANT_CHANGE * max(new, old)


class StatusReporter:
    """Decides when a status is reported. A status here is without load."""

    def __init__(self) -> None:
        self._reported = WAITING_FOR_WORKER
        self._reported_load = LoadReport(queued=0, running=0, predicted_wait_ms=0, mean_end_interval_ms=0)
        self._reported_at = 0.0
        self.due_at: float | None = None  # when a load that has changed since may be reported

    def should_report(self, status: Status, load: LoadReport, now: float) -> bool:
        """Whether to report status and load now; if so, they count as reported."""
        self.due_at = self._reported_at + LOAD_REPORT_SECONDS if load.differs_from(self._reported_load) else None
        if status == self._reported and (self.due_at is None or now < self.due_at):
            return False
        self._reported, self._reported_load = status, load
        self._reported_at, self.due_at = now, None
        return True


# --- tokenizers -------------------------------------------------------------------------------------------------------


# Places per ms of arrival.
PLACES = 1 << 24


class TokenizerPeers:
    """The tokenizers that are connected, with their requests. Queues messages for them in the outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self.connected: dict[PeerId, TokenizerPeer] = {}
        self.reporter = StatusReporter()
        self._outbox = outbox
        self._arrivals = 0
        self._complaints = ComplaintLimit()

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return [request for tokenizer in self.connected.values() for request in tokenizer.requests.values()]

    def add_request(self, add: Add, tokenizer: TokenizerPeer, now: float) -> Request | None:
        """Creates a request. None if its columns are malformed, which is answered with an End, or its rid is in use."""
        if add.rid in tokenizer.requests:
            # A rid has one End, which belongs to the first request.
            if self._complaints.allows_one():
                log.error("%s used rid %d twice; the second request is ignored", tokenizer.peer, add.rid)
            return None
        try:
            request = Request(tokenizer, add, _place(now, add.context.waited_ms, self._arrivals), now)
        except (ValueError, ProtocolError) as error:
            self._outbox.append(tokenizer.peer, End(add.rid, FinishReason.INVALID, f"malformed request: {error}"))
            return None
        self._arrivals += 1
        tokenizer.requests[add.rid] = request
        return request

    def queue_tokens(
        self, make_message: Callable[[SampledColumns, list[SampledRow], list[TopTokens], int], Tokens], load: int
    ) -> None:
        """Queues the tokens that each tokenizer's requests have sampled, with the number of requests that the scheduler
        has. The messages are made when they are sent."""
        tokens = [
            (one.peer, one.take_tokens()) for one in self.connected.values() if one.token_rows or one.token_columns.rids
        ]
        self._outbox.extend((peer, make_message(*one, load)) for peer, one in tokens)

    def report_status(self, status: Status, load: LoadReport, now: float) -> None:
        """Queues the status, given without load, for all tokenizers if it should be reported."""
        if self.reporter.should_report(status, load, now):
            for peer in self.connected:
                self._outbox.append(peer, load.add_to(status))


def _place(now: float, waited_ms: int, number: int) -> int:
    """The place of a request in the order of arrival at the front ends, in ms: one that is submitted again after
    a loss does not queue behind those that came meanwhile. `number` makes it unique."""
    return (int(1000 * now) - waited_ms) * PLACES + number % PLACES


# --- worker -----------------------------------------------------------------------------------------------------------

MINIMUM_LIMITS = (
    *("max_total_tokens", "max_input_tokens", "max_batch_prefill_tokens", "max_batch_size", "pages"),
    "max_running_images",
)
SAME_LIMITS = (*EQUAL_LIMITS, "groups")  # a request keeps its page tables when another worker goes on with it


# Of the messages that tell which pages a worker holds: 15 million tokens in pages of 16. What is beyond is not adopted.
MAX_HELD_BYTES = 64 << 20
# A message takes this much besides its columns.
HELD_MESSAGE_BYTES = 256


class WaitingWorker:
    """A worker that has connected while there is another."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.status: Status | None = None
        self.stored_pages: StoredPages | None = None
        self.silent = False

    def record(self, message: Any) -> None:
        """Keeps what must be known of it when it is taken over."""
        if isinstance(message, Status):
            self.status = message
        elif isinstance(message, StoredPages):
            self.stored_pages = message
        self.silent = isinstance(message, PeerSilent)

    def meets(self, limits: DeploymentLimits | None) -> bool:
        """Whether it could compute now, in a deployment with these limits; None: they are not set yet."""
        offered = self.status.limits if self.status is not None and self.status.ready else None
        if self.silent or offered is None or limits_out_of_range(offered):
            return False
        return limits is None or not limits_shortfall(limits, offered, MINIMUM_LIMITS, SAME_LIMITS)


class WorkerPeer:
    """The worker. The limits of the first one hold for the life of the deployment."""

    def __init__(self) -> None:
        self.peer: PeerId | None = None
        self.site = ""  # Hello.site of the latest
        self._waiting: dict[PeerId, WaitingWorker] = {}  # in the order of connection
        self.limits: DeploymentLimits | None = None
        self.adapters = WorkerAdapters()
        self.silent = False  # it has stopped sending beats while it had nothing to compute
        self._reported = WAITING_FOR_WORKER
        self._held_pages: list[HeldPages] = []  # reported, and not yet taken
        self._held_bytes = 0
        self.stored_pages: StoredPages | None = None  # reported, and not yet taken
        self._complaints = ComplaintLimit()

    @property
    def status(self) -> Status:
        """The worker's status as tokenizers see it: it is not ready while it restores its predecessor's adapters."""
        return LOADING_ADAPTERS if self.adapters.restoring else self._reported

    @property
    def settled(self) -> bool:
        """Whether all that is known of it is its peer, its status and the adapters that it has loaded."""
        return self.peer is not None and not self.silent and not self._waiting and self.adapters.settled

    def connect(self, peer: PeerId, site: str) -> bool:
        """Takes a worker that has sent its Hello. Returns False for a second one, which has to wait."""
        if self.peer is not None:
            if self._complaints.allows_one():
                log.warning("%s waits: %s is the worker of this scheduler", peer, self.peer)
            return False
        self.peer = peer
        self.site = site
        self.silent = False
        return True

    def record_waiting(self, peer: PeerId, message: Any) -> None:
        """Takes note of a message, or event, of a worker that is not this scheduler's."""
        if isinstance(message, Hello):
            # How the process before it has ended says nothing about the worker that it will replace.
            self._waiting[peer] = WaitingWorker(message._replace(last_exit=None))
        elif isinstance(message, PeerDisconnected):
            self._waiting.pop(peer, None)
        elif (waiting := self._waiting.get(peer)) is not None:
            waiting.record(message)

    def take_waiting(self) -> tuple[PeerId, list[Any]] | None:
        """If there is no worker: removes the first of those that wait and could compute now, and returns what it has
        sent."""
        if self.peer is None:
            for peer, waiting in self._waiting.items():
                if waiting.status is not None and waiting.meets(self.limits):
                    del self._waiting[peer]
                    log.warning("%s, which has waited, is the worker of this scheduler now", peer)
                    sent = waiting.hello, waiting.stored_pages, waiting.status
                    return peer, [message for message in sent if message is not None]
        return None

    def update_status(self, status: Status) -> None:
        """Stores the worker's status, and its limits if it is the first worker."""
        if status.limits is not None and (fault := limits_out_of_range(status.limits)):
            log.error("%s states limits that no worker has: %s. It is not used.", self.peer, fault)
            status = LIMITS_NOT_MET
        elif status.ready and status.limits is not None and not self.status.ready:
            if self.limits is None:
                # A request that no step could ever hold would wait for ever.
                self.limits = status.limits._replace(max_total_tokens=status.limits.longest_request())
            elif fault := limits_shortfall(self.limits, status.limits, MINIMUM_LIMITS, SAME_LIMITS):
                log.error(
                    "The restarted worker does not meet this deployment's limits: %s. Free the memory that it lacks, "
                    "or restart the whole server with smaller limits.",
                    fault,
                )
                status = LIMITS_NOT_MET
        self._reported = status
        if status.ready:
            self.adapters.worker_reported(status.adapters)

    def record_held_pages(self, held: HeldPages) -> None:
        """Keeps a report until the worker is ready."""
        columns = held.token_ids, held.page_ids, *(extra.digest for extra in held.extras)
        size = HELD_MESSAGE_BYTES + sum(map(len, columns))
        if self._held_bytes + size <= MAX_HELD_BYTES:
            self._held_bytes += size
            self._held_pages.append(held)

    def take_held_pages(self) -> list[HeldPages]:
        held, self._held_pages, self._held_bytes = self._held_pages, [], 0
        return held

    def take_stored_pages(self) -> StoredPages | None:
        """Removes and returns the report of its pages in files."""
        stored, self.stored_pages = self.stored_pages, None
        return stored

    def disconnect(self) -> None:
        self.peer = None
        self.take_held_pages()
        self.stored_pages = None
        self._reported = WAITING_FOR_WORKER
        self.adapters.worker_lost()
