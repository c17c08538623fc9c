"""The scheduler without sockets and clocks: messages go in with the time, steps and messages come out."""

import logging
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from tgi.kernel.errors import ProtocolError
from tgi.kernel.link import Gone, Peer
from tgi.kernel.messages import (
    Adapt,
    Adapted,
    Add,
    Cancel,
    End,
    Hello,
    Limits,
    Reason,
    Result,
    Status,
    Step,
    Stop,
)
from tgi.kernel.states import State
from tgi.scheduler.adapters import Adapters
from tgi.scheduler.counters import Admitted, Counters, StepDone
from tgi.scheduler.deployment import misfit, shortfall
from tgi.scheduler.flight import Flight
from tgi.scheduler.forecast import Forecast
from tgi.scheduler.outbox import Outbox
from tgi.scheduler.pace import Pace
from tgi.scheduler.plan import Planner
from tgi.scheduler.prompts import pieces
from tgi.scheduler.queue import Queue
from tgi.scheduler.request import SUSPECT, Client, Request
from tgi.scheduler.results import one_each, runs_each
from tgi.scheduler.speculation import Speculation
from tgi.scheduler.status import ADAPTING, REFUSED, WAITING, Load, Report
from tgi.scheduler.suspects import Suspects
from tgi.scheduler.tokens import runs, tokens

log = logging.getLogger(__name__)

# Steps that may be under way at once; one with drafts is alone.
DEPTH = 2


class Config(NamedTuple):
    """How a core behaves."""

    prefix_caching: bool = True
    step_target: float = 0.2  # seconds that a step may take while requests decode and prompts are computed
    stall_limit: float = 60.0  # seconds without a finished step, with work under way, until unhealthy
    drafts: int = 0  # the most tokens that are drafted per row and step
    draft_model: bool = False  # the worker has a model that drafts them


class Core:
    """Knows all requests of all tokenizers and one worker.

    Feed it with `handle` (whatever a link yields) and `tick`; then send what `plan` returns to `worker` until it
    returns None, and what `outgoing` yields to whom it names; then, while the worker is busy, `settle`. The same calls
    always give the same outputs.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.counters = Counters()
        self.worker: Peer | None = None
        self.limits: Limits | None = None
        self.epoch = 1
        self._planner: Planner | None = None
        self._queue = Queue()
        self._pace = Pace(config.step_target * 1e6)
        self._speculation = Speculation(config.drafts, config.draft_model) if config.drafts else None
        self._outbox = Outbox()
        self._clients: dict[Peer, Client] = {}
        self._arrivals = 0
        self._number = 0
        self._flight: deque[Flight] = deque()
        self._leftover: set[tuple[int, int]] = set()  # (epoch, number) of steps behind a failed one, to be answered yet
        self._moved = 0.0  # when a step was last answered, or sent into silence
        self._suspects = Suspects()
        self._report = Report()
        self._worker_said = WAITING  # the worker's own status
        self._adapters = Adapters()
        self._orders: list[Adapt] = []  # to be sent to the worker once no step is under way
        self._forecast = Forecast()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def handle(self, message: Any, source: Peer, now: float) -> None:
        """Takes one message or event of a link. `now` is in seconds and never decreases."""
        if source.role == "worker":
            self._from_worker(message, source, now)
        else:
            self._from_tokenizer(message, source, now)

    def _from_tokenizer(self, message: Any, source: Peer, now: float) -> None:
        client = self._clients.get(source)
        if isinstance(message, Hello):
            self._clients[source] = Client(source)
            self._outbox.put(source, self._status(self._load(), now))
        elif client is None:
            return  # said before its Gone
        elif isinstance(message, Add):
            self._add(message, client, now)
        elif isinstance(message, Cancel | Stop):
            # Crossing messages: an unknown number is one whose End is on its way up.
            if (request := client.requests.get(message.rid)) is not None:
                self._end(request, Reason.STOP if isinstance(message, Stop) else Reason.CANCELLED, now)
        elif isinstance(message, Adapt):
            self._order(self._adapters.ask(source, message))
        elif isinstance(message, Gone):
            for request in list(client.requests.values()):
                self._end(request, Reason.CANCELLED, now)
            self._adapters.tokenizer_gone(source)
            del self._clients[source]
        else:
            log.warning("dropped an unexpected %s from %s", type(message).__name__, source)

    def _from_worker(self, message: Any, source: Peer, now: float) -> None:
        if isinstance(message, Hello):
            if self.worker is not None:
                log.error("%s is ignored: %s is the worker of this scheduler", source, self.worker)
                return
            self.worker = source
        elif source != self.worker:
            return
        elif isinstance(message, Result):
            self._result(message, now)
        elif isinstance(message, Status):
            self._worker_status(message, now)
        elif isinstance(message, Adapted):
            self._adapted(message, now)
        elif isinstance(message, Gone):
            self._worker_gone(now)
        else:
            log.warning("dropped an unexpected %s from %s", type(message).__name__, source)

    def tick(self, now: float) -> None:
        """To be called after every batch of messages, and when `deadline` has come."""
        self._tell(now)

    # --- what goes out ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Step | None:
        """The next step for the worker; None if it has enough to do, or there is nothing to do."""
        flight = self._next_flight(now)
        self._forecast.look(self.counters.begun, self.counters.ended, self.queued, self.running, now)
        return flight.step if flight is not None else None

    def _next_flight(self, now: float) -> Flight | None:
        planner = self._planner
        if planner is None or not self._report.below.ready or len(self._flight) >= DEPTH or self._leftover:
            return None
        if self._orders:
            return None
        suspects = self._suspects
        if suspects.trial is None and (head := self._queue.head()) is not None and head.suspected:
            if self._flight:
                return None  # first let the others land
            suspects.trial = head
        if self._flight and self._speculation is not None and self._speculation.waits(self._flight[-1], planner.batch):
            return None
        flight = planner.plan(self._number + 1, self.epoch, suspects.trial, bool(self._flight), now)
        if flight is None:
            return None
        if not self._flight:
            self._moved = now
        self._number += 1
        self._flight.append(flight)
        self.counters.steps[flight.method] += 1
        if flight.admitted:
            self.counters.begun += flight.admitted
            self.counters.admitted.append(Admitted(flight.admitted, flight.joined))
        return flight

    def settle(self) -> None:
        """Keeps the books that no step waits for. To be called after everything is sent; where that is omitted, a later
        `plan` does it."""
        if self._planner is not None:
            self._planner.settle()

    def outgoing(self) -> Iterator[tuple[Peer, tuple[Any, ...]]]:
        """(neighbour, message) for all that has come about since the last call: for tokenizers, and for the worker
        what are no steps."""
        return self._outbox.take()

    def deadline(self, now: float) -> float:
        """When `tick` has something to do even if no message comes."""
        times = [now + 3600.0]
        if (self._flight or self._leftover) and not self._stalled(now):
            times.append(self._moved + self.config.stall_limit)
        if (due := self._report.due(self._load())) is not None:
            times.append(due)
        return max(now, min(times))

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that hold a slot of the worker."""
        return len(self._planner.batch) if self._planner else 0

    @property
    def pages_used(self) -> int:
        """Pages that running requests hold, and those that ended since the last `settle`."""
        return self._planner.holdings.pool.used if self._planner else 0

    @property
    def adapters(self) -> int:
        """How many adapters a request may choose among."""
        return len(self._adapters.loaded)

    @property
    def ready(self) -> bool:
        """Whether a request would be computed now."""
        return self._report.below.ready

    def check(self) -> None:
        """Raises AssertionError if slots, pages, queue and requests contradict each other. For tests."""
        known = [request for client in self._clients.values() for request in client.requests.values()]
        waiting = self._queue.waiting()
        assert len(waiting) == len(set(waiting)) == len(self._queue), "the queue's length is wrong"
        batch = list(self._planner.batch) if self._planner else []
        assert set(known) == set(waiting) | set(batch), "a request is lost or left behind"
        assert all(request.state in (State.PREFILL, State.DECODE) for request in batch), "a slot of no use"
        if self._planner:
            self._planner.check()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _add(self, add: Add, client: Client, now: float) -> None:
        if add.rid in client.requests:
            # Its first Add lives on and gets the one End that this number can have.
            log.error("%s has used number %d twice; the second request is ignored", client.peer, add.rid)
            return
        try:
            request = Request(client, add, self._arrivals, now)
        except (ValueError, ProtocolError) as error:  # columns of odd length
            self._outbox.put(client.peer, End(add.rid, Reason.INVALID, f"malformed request: {error}"))
            return
        self._arrivals += 1
        if self._speculation is not None:
            self._speculation.begin(request)
        client.requests[add.rid] = request
        self._queue.push(request)
        resumed = request.generated
        self.counters.resumed_tokens += resumed
        if not request.prompt_tokens:
            self._end(request, Reason.INVALID, now, "`inputs` cannot be empty")
        elif add.max_new_tokens < 1:
            self._end(request, Reason.INVALID, now, "`max_new_tokens` must be strictly positive")
        elif resumed and (reason := request.finished()):
            self._end(request, reason, now)  # whoever resumes it missed only its End
        elif self.limits is not None and (fault := misfit(self.limits, request.prompt_tokens, add.max_new_tokens)):
            self._end(request, Reason.INVALID, now, fault)

    def _end(self, request: Request, reason: Reason, now: float, message: str = "") -> None:
        """The only way out, taken once by each request."""
        if request.state is State.QUEUED:
            self._queue.leave()
        elif self._planner is not None:
            self._planner.end(request)
        request.become("end")
        self.counters.ended += 1
        self._suspects.forget(request)
        del request.client.requests[request.rid]
        self._outbox.put(request.client.peer, partial(_end_of, request, reason, message, now))

    # --- results ------------------------------------------------------------------------------------------------------

    def _result(self, result: Result, now: float) -> None:
        if result.epoch != self.epoch or not self._flight:
            self._leftover.discard((result.epoch, result.number))
            return  # of a life that is over
        planner = self._planner
        assert planner is not None
        flight = self._flight[0]
        fault = result.error or flight.fault(result, planner.limits.vocab_size)
        self.counters.done.append(
            StepDone(flight.method, bool(fault), now - max(self._moved, flight.sent), result.forward_us / 1e6)
        )
        self._moved = now
        if fault:
            # Whatever else is under way builds on what this step did not compute. It is waited for, so that nobody
            # is blamed for what it may do to the worker.
            self._leftover = {(self.epoch, other.step.number) for other in self._flight if other is not flight}
            self._begin_again([flight], SUSPECT, f"Server error: {fault}", now)
            return
        self._flight.popleft()
        self._pace.learn(flight.decode_rows, flight.prefill_tokens, result.forward_us)
        if self._speculation is not None:
            self._speculation.learn(flight, result, now)
        number = flight.step.number
        if result.faults:
            for request, fault in zip(flight.in_order, result.faults, strict=True):
                if fault and number >= request.since:
                    self._end(request, Reason.FAILED, now, fault)
        for request, piece in pieces(flight.telling, result, planner.limits.vocab_size):
            if number >= request.since:
                request.prompt_from += len(piece.logprobs) // 4
                self._outbox.put(request.client.peer, piece)
        if flight.drafts:
            columns, ended = runs, runs_each(flight, result, planner, self.counters)
        else:
            columns, ended = tokens, one_each(flight, result)
        self._send_orders()
        for client in self._clients.values():
            if client.rows or client.columns.rids:
                self._outbox.put(client.peer, partial(columns, *client.take_rows()))
        for request, reason in ended:
            self._end(request, reason, now)
        self._suspects.clear()

    # --- the worker ---------------------------------------------------------------------------------------------------

    def _worker_status(self, status: Status, now: float) -> None:
        if status.ready and status.limits is not None and not self._report.below.ready:
            if self.limits is None:
                self._adopt(status.limits, now)
            elif fault := shortfall(self.limits, status.limits):
                log.error(
                    "The restarted worker does not meet this deployment's limits: %s. Free the memory that it lacks, "
                    "or restart the whole server with smaller limits.",
                    fault,
                )
                status = REFUSED
        self._worker_said = status
        if status.ready:
            self._order(self._adapters.told(status.adapters))
        self._show_worker(now)

    def _show_worker(self, now: float) -> None:
        """It gets steps, and tokenizers hear of it, once it has what the worker before it had."""
        self._report.below = ADAPTING if self._adapters.lacks else self._worker_said
        self._tell(now)

    def _order(self, changes: list[Adapt]) -> None:
        self._orders += changes
        self._send_orders()

    def _send_orders(self) -> None:
        """Changes are asked for when no step is under way, and none is sent before they are asked for: so the worker
        has what it was known to have when a step was planned, as long as that takes."""
        if self._flight or not self._orders:
            return
        assert self.worker is not None
        for order in self._orders:
            self._outbox.put(self.worker, order)
        self._orders.clear()

    def _adapted(self, answer: Adapted, now: float) -> None:
        if (told := self._adapters.answered(answer)) is not None:
            self._outbox.put(*told)
        self._show_worker(now)

    def _adopt(self, limits: Limits, now: float) -> None:
        """The first worker's limits hold for the deployment's life."""
        self.limits = limits
        self._planner = Planner(
            limits,
            self.config.prefix_caching,
            self._pace,
            self._queue,
            self.counters,
            self._adapters,
            self._speculation,
        )
        for request in self._queue.waiting():
            if fault := misfit(limits, request.prompt_tokens, request.limit - request.prompt_tokens):
                self._end(request, Reason.INVALID, now, fault)

    def _worker_gone(self, now: float) -> None:
        self.worker = None
        self._leftover.clear()
        self._orders.clear()
        self._adapters.worker_gone()
        self._report.below = self._worker_said = WAITING
        self.counters.worker_losses += 1
        self._begin_again(self._flight, 1, "Server error: the worker died while it computed this request alone", now)
        self._tell(now)

    def _begin_again(self, blamed: "deque[Flight] | list[Flight]", strikes: int, message: str, now: float) -> None:
        """What the worker held is void: all running requests go back to the queue. Those with rows in the blamed
        steps get strikes; one that was computed alone ends with `message`."""
        under_way = {
            request: None for flight in blamed for request in flight.requests if flight.step.number >= request.since
        }
        if (guilty := self._suspects.blame(under_way, strikes)) is not None:
            self._end(guilty, Reason.FAILED, now, message)
        self._flight.clear()
        self._send_orders()
        self.epoch += 1
        self._number = 0
        if self._planner is not None:
            self._planner.forget_worker()

    # --- status -------------------------------------------------------------------------------------------------------

    def _stalled(self, now: float) -> bool:
        return bool(self._flight or self._leftover) and now >= self._moved + self.config.stall_limit

    def _load(self) -> Load:
        queued, running, forecast = self.queued, self.running, self._forecast
        wait = forecast.wait(queued, self._planner is not None and self._planner.batch.full)
        return Load(queued, running, int(wait * 1000), int(forecast.end * 1000))

    def _status(self, load: Load, now: float) -> Status:
        return self._report.status(self._stalled(now), self.limits, load, self._adapters.loaded)

    def _tell(self, now: float) -> None:
        """Tells every tokenizer how things are, if that has changed."""
        load = self._load()
        status = self._status(load, now)
        if self._report.is_news(status, load, now):
            for peer in self._clients:
                self._outbox.put(peer, status)


def _end_of(request: Request, reason: Reason, message: str, now: float) -> End:
    """The End of a request that ended at `now`."""
    begun = now if request.first_planned is None else request.first_planned
    return End(
        request.rid,
        reason,
        message,
        prompt_tokens=request.prompt_tokens,
        generated_tokens=request.generated,
        cached_tokens=request.cached_tokens,
        queue_us=int((begun - request.received) * 1e6),
        inference_us=int((now - begun) * 1e6),
    )
