"""The scheduler without sockets and clocks: messages go in with the time, steps and messages come out."""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from tgi.kernel.link import Gone, Peer
from tgi.kernel.messages import Adapt, Adapted, Add, Cancel, Reason, Result, Step, Stop
from tgi.kernel.presence import Hello, Limits, Status
from tgi.kernel.states import DECODE, END, PREFILL, QUEUED
from tgi.scheduler.above import Above
from tgi.scheduler.below import Below
from tgi.scheduler.counters import Admitted, Counters, StepDone
from tgi.scheduler.deployment import refusal
from tgi.scheduler.flight import Flight
from tgi.scheduler.forecast import Forecast
from tgi.scheduler.outbox import Outbox
from tgi.scheduler.pace import Pace
from tgi.scheduler.plan import Planner
from tgi.scheduler.prompts import pieces
from tgi.scheduler.queue import Queue
from tgi.scheduler.request import SUSPECT, Client, Request
from tgi.scheduler.results import Ended, one_each, runs_each
from tgi.scheduler.speculation import Speculation
from tgi.scheduler.status import Load, status_of
from tgi.scheduler.suspects import Suspects
from tgi.scheduler.tokens import runs, tokens
from tgi.scheduler.underway import UnderWay

log = logging.getLogger(__name__)


class Config(NamedTuple):
    """How a core behaves."""

    prefix_caching: bool = True
    step_target: float = 0.2  # seconds that a step may take while requests decode and prompts are computed
    stall_limit: float = 60.0  # seconds without a finished step, with work under way, until unhealthy
    drafts: int = 0  # the most tokens that are drafted per row and step
    draft_model: bool = False  # the worker has a model that drafts them


class Core:
    """Knows all requests of all tokenizers and one worker.

    Feed it with `handle` (whatever a link yields); then send what `plan` returns to `below.worker` until it returns
    None; then `tick`, and send what `outgoing` yields to whom it names; then, while the worker is busy, `settle`. The
    same calls always give the same outputs.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.counters = Counters()
        self.below = Below()
        self.under_way = UnderWay(config.stall_limit)
        self._planner: Planner | None = None
        self._queue = Queue()
        self._pace = Pace(config.step_target * 1e6)
        self._speculation = Speculation(config.drafts, config.draft_model) if config.drafts else None
        self._outbox = Outbox()
        self._above = Above(self._outbox)
        self._suspects = Suspects()
        self._forecast = Forecast()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def handle(self, message: Any, source: Peer, now: float) -> None:
        """Takes one message or event of a link. `now` is in seconds and never decreases."""
        if source.role == "worker":
            self._from_worker(message, source, now)
        elif isinstance(message, Add) and (client := self._above.clients.get(source)) is not None:
            self._add(message, client, now)  # what comes most often
        else:
            self._from_tokenizer(message, source, now)

    def _from_tokenizer(self, message: Any, source: Peer, now: float) -> None:
        clients = self._above.clients
        client = clients.get(source)
        if isinstance(message, Hello):
            clients[source] = Client(source)
            self._outbox.put(source, self._status(self._load(), now))
        elif client is None:
            return  # said before its Gone
        elif isinstance(message, Cancel | Stop):
            # Crossing messages: an unknown number is one whose End is on its way up.
            if (request := client.requests.get(message.rid)) is not None:
                self._end(request, Reason.STOP if isinstance(message, Stop) else Reason.CANCELLED, now)
        elif isinstance(message, Adapt):
            self.below.adapters.ask(source, message)
            self._send_orders()
        elif isinstance(message, Gone):
            for request in list(client.requests.values()):
                self._end(request, Reason.CANCELLED, now)
            self.below.adapters.tokenizer_gone(source)
            del clients[source]
        else:
            log.warning("dropped an unexpected %s from %s", type(message).__name__, source)

    def _from_worker(self, message: Any, source: Peer, now: float) -> None:
        if isinstance(message, Hello):
            self.below.came(source)
        elif source != self.below.worker:
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
        """To be called after every batch of messages, when the steps are sent, and when `deadline` has come."""
        self._tell(now)

    # --- what goes out ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Step | None:
        """The next step for the worker; None if it has enough to do, or there is nothing to do."""
        if (flight := self._next_flight(now)) is not None:
            return flight.step
        self._forecast.look(self.counters.begun, self.counters.ended, self.queued, self.running, now)
        return None

    def _next_flight(self, now: float) -> Flight | None:
        planner, under_way, suspects = self._planner, self.under_way, self._suspects
        if planner is None or not self.ready or not under_way.open or self.below.adapters.waits:
            return None
        if suspects.trial is None and (head := self._queue.head()) is not None and head.suspected:
            if under_way:
                return None  # first let the others land
            suspects.trial = head
        latest, speculation = under_way.latest, self._speculation
        if latest is not None and speculation is not None and speculation.waits(latest, planner.batch):
            return None
        flight = planner.plan(under_way.next, under_way.epoch, suspects.trial, latest is not None, now)
        if flight is None:
            return None
        under_way.sent(flight, now)
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
        """When the next `tick` has something to do even if no message comes."""
        soonest = now + 3600.0
        for due in (self.under_way.overdue(now), self._above.report.due):
            if due is not None and due < soonest:
                soonest = due
        return max(now, soonest)

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
        return len(self.below.adapters.loaded)

    @property
    def ready(self) -> bool:
        """Whether a request would be computed now."""
        return self.below.status.ready

    def check(self) -> None:
        """Raises AssertionError if slots, pages, queue and requests contradict each other. For tests."""
        known = self._above.requests
        waiting = self._queue.waiting()
        assert len(waiting) == len(set(waiting)) == len(self._queue), "the queue's length is wrong"
        batch = list(self._planner.batch) if self._planner else []
        assert set(known) == set(waiting) | set(batch), "a request is lost or left behind"
        assert all(request.state in (PREFILL, DECODE) for request in batch), "a slot of no use"
        if self._planner:
            self._planner.check()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _add(self, add: Add, client: Client, now: float) -> None:
        if (request := self._above.take(add, client, now)) is None:
            return
        if self._speculation is not None:
            self._speculation.begin(request)
        self._queue.join(request)
        finished = None
        if add.resume:
            self.counters.resumed_tokens += request.generated
            finished = request.finished()
        if fault := refusal(request, None if finished else self.below.limits):
            self._end(request, Reason.INVALID, now, fault)
        elif finished:
            self._end(request, finished, now)  # whoever resumes it missed only its End

    def _end(self, request: Request, reason: Reason, now: float, message: str = "") -> None:
        self._end_all([(request, reason)], now, message)

    def _end_all(self, ended: Ended, now: float, message: str = "") -> None:
        """The only way out, taken once by each request."""
        running = []
        for request, _ in ended:
            state = request.state
            if state is not QUEUED:
                running.append(request)
            request.state = END[state]
            if request.strikes:
                self._suspects.forget(request)
            del request.client.requests[request.rid]
        if running and self._planner is not None:
            self._planner.end(running)
        self._queue.leave(len(ended) - len(running))
        self.counters.ended += len(ended)
        self._outbox.put_all((one.client.peer, one.end(reason, message, now)) for one, reason in ended)

    # --- results ------------------------------------------------------------------------------------------------------

    def _result(self, result: Result, now: float) -> None:
        if (answered := self.under_way.answered(result, now)) is None:
            return
        flight, seconds = answered
        planner = self._planner
        assert planner is not None
        fault = result.error or flight.fault(result, planner.limits.vocab_size)
        self.counters.done.append(StepDone(flight.method, bool(fault), seconds, result.forward_us / 1e6))
        if fault:
            guilty = self._suspects.blame([flight], SUSPECT)
            self.under_way.failed()
            self._begin_again(guilty, f"Server error: {fault}", now)
            return
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
                if request.scored and not request.tells:
                    self._end(request, Reason.LENGTH, now)
        if flight.drafts:
            columns, ended = runs, runs_each(flight, result, planner, self.counters)
        else:
            columns, ended = tokens, one_each(flight, result, planner.batch.left)
        self._send_orders()
        self._above.tell_rows(columns)
        if ended:
            self._end_all(ended, now)
        self._suspects.clear()

    # --- the worker ---------------------------------------------------------------------------------------------------

    def _worker_status(self, status: Status, now: float) -> None:
        self.below.hears(status)
        if self._planner is None and (limits := self.below.limits) is not None:
            self._adopt(limits, now)
        self._send_orders()
        self._tell(now)

    def _send_orders(self) -> None:
        adapters, worker = self.below.adapters, self.below.worker
        if adapters.waits and not self.under_way and worker is not None:
            for order in adapters.take():
                self._outbox.put(worker, order)

    def _adapted(self, answer: Adapted, now: float) -> None:
        if (told := self.below.adapters.answered(answer)) is not None:
            self._outbox.put(*told)
        self._tell(now)

    def _adopt(self, limits: Limits, now: float) -> None:
        """The first worker's limits hold for the deployment's life."""
        self._planner = Planner(
            limits,
            self.config.prefix_caching,
            self._pace,
            self._queue,
            self.counters,
            self.below.adapters,
            self._speculation,
        )
        for request in self._queue.waiting():
            if fault := refusal(request, limits):
                self._end(request, Reason.INVALID, now, fault)

    def _worker_gone(self, now: float) -> None:
        self.below.gone()
        self.counters.worker_losses += 1
        guilty = self._suspects.blame(self.under_way.flights, 1)
        self.under_way.worker_gone()
        self._begin_again(guilty, "Server error: the worker died while it computed this request alone", now)
        self._tell(now)

    def _begin_again(self, guilty: Request | None, message: str, now: float) -> None:
        """What the worker held is void: all running requests go back to the queue, but for a guilty one."""
        if guilty is not None:
            self._end(guilty, Reason.FAILED, now, message)
        self._send_orders()
        if self._planner is not None:
            self._planner.forget_worker()

    # --- status -------------------------------------------------------------------------------------------------------

    def _load(self) -> Load:
        queued, running, forecast = self.queued, self.running, self._forecast
        wait = forecast.wait(queued, self._planner is not None and self._planner.batch.full)
        return Load(queued, running, int(wait * 1000), int(forecast.end * 1000))

    def _status(self, load: Load, now: float) -> Status:
        below = self.below
        return status_of(below.status, self.under_way.stalled(now), below.limits, load, below.adapters.loaded)

    def _tell(self, now: float) -> None:
        load = self._load()
        self._above.tell(self._status(load, now), load, now)
