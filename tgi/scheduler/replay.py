"""Replays a journal: the same calls again, or the same requests under other limits or another load.

`RecordedRun` makes every call of a journal on a new scheduler and compares what it returns, bit for bit. `estimate`
simulates what would have happened otherwise: the recorded requests arrive at (scaled) recorded times at a scheduler
with other limits, and a simulated worker draws the recorded tokens. Its step times follow the model that fits the
recorded steps, `fixed + row * decode rows + token * prompt tokens`. Time is virtual.
"""

import heapq
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from tgi.microkernel.codec import FLOAT32, INT32, UINT8, pack_column, unpack_int32, unpack_uint32
from tgi.microkernel.errors import UserError
from tgi.microkernel.link import PeerId
from tgi.microkernel.protocol import (
    PROTOCOL,
    Add,
    Cancel,
    DeploymentLimits,
    End,
    FinishReason,
    Hello,
    LoadedAdapter,
    Status,
    StepResult,
    Stop,
    Tokens,
)
from tgi.scheduler.in_flight import InFlightStep
from tgi.scheduler.journal import Call, Journal, messages_digest, step_digest
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.scheduler.snapshot import load_snapshot

# The id of tokens that a simulated worker draws for a request after its recorded ones.
FILLER_ID = 0

# A request: its tokenizer and rid.
RequestKey = tuple[PeerId, int]


class ReplayChanges(NamedTuple):
    """What an estimate changes; None keeps what was recorded. The names are those of the server's flags."""

    load: float | None = None  # times the recorded rate of arrivals
    max_batch_size: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    step_target: float | None = None
    prefix_caching: bool | None = None


class Divergence(NamedTuple):
    """The first call whose result differs from the recorded one."""

    number: int  # of the call, from 0
    call: Call


@dataclass
class ReplayedRequest:
    """What is known of one request. Times are those of the (virtual) clock, in seconds."""

    add: Add
    arrived_at: float
    token_ids: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    queue_seconds: float = 0.0
    left_after: float | None = None  # seconds from arrival until its client cancelled it


class ReplayReport(NamedTuple):
    """The figures of a recorded or simulated run."""

    requests: int
    ended_well: int
    seconds: float  # from the first arrival to the last end
    tokens: int
    steps: int
    preemptions: int
    first_token_seconds: list[float]  # of each request that has drawn a token
    queue_seconds: list[float]  # of each request that has ended

    def figures(self) -> dict[str, str]:
        """The figures as texts, by name."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return {
            "requests": f"{self.requests}",
            "ended well": f"{self.ended_well}",
            "seconds": f"{self.seconds:.3f}",
            "tokens": f"{self.tokens}",
            "tokens/s": f"{rate:.1f}",
            "steps": f"{self.steps}",
            "preemptions": f"{self.preemptions}",
            "time to first token, median": _milliseconds(self.first_token_seconds, 0.5),
            "time to first token, p99": _milliseconds(self.first_token_seconds, 0.99),
            "queue time, median": _milliseconds(self.queue_seconds, 0.5),
            "queue time, p99": _milliseconds(self.queue_seconds, 0.99),
        }


def _milliseconds(values: Sequence[float], rank: float) -> str:
    return f"{1e3 * sorted(values)[int(rank * (len(values) - 1))]:.1f} ms" if values else "-"


# --- the same calls ---------------------------------------------------------------------------------------------------


class RecordedRun:
    """The calls of a journal, made again. Collects the requests and the step times on the way. Raises UserError if the
    journal's snapshot cannot be read."""

    def __init__(self, journal: Journal) -> None:
        self.config = journal.config
        self._journal = journal
        self.divergence: Divergence | None = None
        self.requests: dict[RequestKey, ReplayedRequest] = {}
        self.step_times: list[tuple[int, int, float]] = []  # decode rows, prompt tokens, seconds
        self._scheduler = _first_state(journal)
        self.limits = self._scheduler.worker.limits
        self._before = _report((), self._scheduler)
        self._requests_before = self._scheduler.queued + self._scheduler.running
        self._now = 0.0
        self._began: float | None = None
        for number, call in enumerate(journal.calls):
            if self._differs(call):
                self.divergence = Divergence(number, call)
                break

    def report(self) -> ReplayReport:
        """The figures of the recorded run. They leave out the requests that an earlier file has."""
        report, before = _report(self.requests.values(), self._scheduler), self._before
        return report._replace(steps=report.steps - before.steps, preemptions=report.preemptions - before.preemptions)

    def verdict(self) -> str:
        """Whether the decisions were repeated, in a sentence."""
        if self.divergence is None:
            cut = "; the journal ends within a record" if self._journal.cut_off else ""
            begin = (
                f" It begins with {self._requests_before} requests of an earlier file."
                if self._journal.snapshot
                else ""
            )
            return f"All {len(self._journal.calls)} calls gave the recorded results, bit for bit{cut}.{begin}"
        number, call = self.divergence
        return (
            f"Call {number} of {len(self._journal.calls)} ({call.method} at {call.now:.6f} s) gave another result than "
            "the recorded one. Was the journal written by another version of tgi?"
        )

    def adapters(self) -> list[LoadedAdapter]:
        """All adapters that a request has asked for or that the worker has reported at the end."""
        return list(self._scheduler.worker.adapters.loaded)

    def _differs(self, call: Call) -> bool:
        """Makes a call. Returns whether its result differs from the recorded one."""
        scheduler = self._scheduler
        if call.now:
            self._now = call.now
        match call.method:
            case "handle":
                assert call.source is not None
                self._observe_input(call.message, call.source)
                scheduler.handle(call.message, call.source, call.now)
            case "plan":
                return step_digest(scheduler.plan(call.now)) != call.digest
            case "report_status":
                scheduler.report_status(call.now)
            case "outgoing":
                messages = list(scheduler.outgoing())
                for peer, message in messages:
                    observe_output(self.requests, peer, message, self._now)
                return messages_digest(messages) != call.digest
            case _:
                scheduler.commit()
        return False

    def _observe_input(self, message: Any, source: PeerId) -> None:
        if isinstance(message, Add):
            self.requests.setdefault((source, message.rid), ReplayedRequest(message, self._now))
        elif isinstance(message, Cancel) and (request := self.requests.get((source, message.rid))) is not None:
            request.left_after = self._now - request.arrived_at
        elif isinstance(message, Status) and message.limits is not None and self.limits is None:
            self.limits = message.limits
        elif isinstance(message, StepResult) and self._scheduler.pipeline.steps and message.forward_us > 0:
            step = self._scheduler.pipeline.steps[0]
            self.step_times.append((step.decode_rows, step.prefill_tokens, message.forward_us / 1e6))


def _first_state(journal: Journal) -> Scheduler:
    """The scheduler before the first call. Raises UserError if another version has written its snapshot."""
    if not journal.snapshot:
        return Scheduler(journal.config)
    try:
        return load_snapshot(journal.snapshot)
    except ValueError as error:
        raise UserError(f"The journal was written by another version of tgi, or is damaged: {error}.") from error


def observe_output(requests: dict[RequestKey, ReplayedRequest], peer: PeerId, message: Any, now: float) -> None:
    """Adds what a message tells a tokenizer to the requests."""
    if isinstance(message, Tokens):
        ids = iter(unpack_int32(message.token_ids))
        for rid, count in zip(unpack_uint32(message.rids), unpack_uint32(message.counts), strict=True):
            drawn = [next(ids) for _ in range(count)]
            if (request := requests.get((peer, rid))) is not None:
                request.token_ids += drawn
                if request.first_token_at is None:
                    request.first_token_at = now
    elif isinstance(message, End) and (request := requests.get((peer, message.rid))) is not None:
        request.ended_at, request.reason = now, message.reason
        request.queue_seconds = message.queue_us / 1e6


def _report(requests: Iterable[ReplayedRequest], scheduler: Scheduler) -> ReplayReport:
    known = list(requests)
    ended = [one for one in known if one.ended_at is not None]
    begin = min((one.arrived_at for one in known), default=0.0)
    end = max((one.ended_at for one in ended if one.ended_at is not None), default=begin)
    return ReplayReport(
        requests=len(known),
        ended_well=sum(one.reason in (FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP) for one in ended),
        seconds=end - begin,
        tokens=sum(len(one.token_ids) for one in known),
        steps=sum(scheduler.counters.steps.values()),
        preemptions=scheduler.counters.preemptions,
        first_token_seconds=[one.first_token_at - one.arrived_at for one in known if one.first_token_at is not None],
        queue_seconds=[one.queue_seconds for one in ended],
    )


# --- other limits, another load ---------------------------------------------------------------------------------------


class StepTimes(NamedTuple):
    """Seconds of a step: `fixed + row * decode rows + token * prompt tokens + position * positions before the rows`."""

    fixed: float
    row: float
    token: float
    position: float = 0.0  # reading the keys and values of one; not fitted

    def seconds(self, step: InFlightStep) -> float:
        """The predicted duration of a step."""
        seconds = self.fixed + self.row * step.decode_rows + self.token * step.prefill_tokens
        return seconds + self.position * sum(unpack_int32(step.message.starts)) if self.position else seconds


def fit_step_times(observed: Sequence[tuple[int, int, float]]) -> StepTimes:
    """Least squares over (decode rows, prompt tokens, seconds); no coefficient is negative. With too little variation
    in the steps the mean is the fixed part."""
    mean = statistics.fmean(seconds for _, _, seconds in observed) if observed else 0.0
    columns = [[1.0] * len(observed), [float(rows) for rows, _, _ in observed], [float(one) for _, one, _ in observed]]
    seconds = [one for _, _, one in observed]
    used = [0] + [k for k in (1, 2) if len(set(columns[k])) > 1]
    while True:
        fitted = _solve([columns[k] for k in used], seconds)
        worst = min(range(len(used)), key=lambda k: fitted[k], default=0) if fitted else 0
        if not fitted or len(used) == 1:
            return StepTimes(mean, 0.0, 0.0)
        if fitted[worst] >= 0:
            return StepTimes(*(fitted[used.index(k)] if k in used else 0.0 for k in range(3)))
        if used[worst] == 0:
            return StepTimes(mean, 0.0, 0.0)
        del used[worst]


def _solve(columns: list[list[float]], values: list[float]) -> list[float]:
    """The coefficients of the columns that fit the values best; [] if they are not determined."""
    size = len(columns)
    rows = [
        [sum(a * b for a, b in zip(one, other, strict=True)) for other in [*columns, values]] for one in columns
    ]  # the normal equations
    for k in range(size):
        pivot = max(range(k, size), key=lambda r: abs(rows[r][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        if abs(rows[k][k]) < 1e-12:
            return []
        for r in range(size):
            if r != k:
                factor = rows[r][k] / rows[k][k]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[k], strict=True)]
    return [rows[k][size] / rows[k][k] for k in range(size)]


def estimate(recorded: RecordedRun, changes: ReplayChanges) -> ReplayReport:
    """What would have happened to the recorded requests with these changes. Speculation is not simulated: each row
    draws one token. Raises UserError if the journal has no worker that was ready."""
    limits, config = recorded.limits, recorded.config
    if limits is None:
        raise UserError("The journal ends before a worker was ready, so there is nothing to estimate from.")
    given = {name: value for name, value in changes._asdict().items() if value is not None}
    if (tokens := given.get("max_batch_total_tokens")) is not None:
        given["pages"] = max(1, tokens // limits.page_size)
    limits = limits._replace(**{name: given[name] for name in limits._fields if name in given})
    config = config._replace(**{name: given[name] for name in config._fields if name in given}, max_drafts=0)
    return _Estimate(recorded, config, limits, changes.load or 1.0).run()


class _StepEvent(Enum):
    END = "the oldest step ends"
    DUE = "the next step is due"


class _Estimate:
    """A scheduler, one tokenizer and a worker on a virtual clock."""

    TOKENIZER, WORKER = PeerId("tokenizer", 0, b"replay"), PeerId("worker", 0, b"replay")

    def __init__(self, recorded: RecordedRun, config: SchedulerConfig, limits: DeploymentLimits, load: float) -> None:
        self._times = fit_step_times(recorded.step_times)
        self._scheduler = Scheduler(config)
        self._requests: dict[RequestKey, ReplayedRequest] = {}
        self._originals: dict[int, ReplayedRequest] = {}
        self._steps: deque[InFlightStep] = deque()  # on the worker, the oldest first
        self._worker_free_at = 0.0
        # (time, order, what): an Add, a Cancel, the end of the oldest step, or the time to plan the next one.
        self._events: list[tuple[float, int, Add | Cancel | _StepEvent]] = []
        self._order = 0
        originals = sorted(recorded.requests.values(), key=lambda one: one.arrived_at)
        begin = originals[0].arrived_at if originals else 0.0
        for rid, original in enumerate(originals, 1):
            self._originals[rid] = original
            self._schedule(
                1.0 + (original.arrived_at - begin) / load,
                original.add._replace(rid=rid, context=original.add.context._replace(traceparent="")),
            )
        for peer in (self.TOKENIZER, self.WORKER):
            self._scheduler.handle(Hello(PROTOCOL, *peer), peer, 0.0)
        adapters = recorded.adapters()
        self._scheduler.handle(Status(True, True, "", 100, limits, adapters=adapters), self.WORKER, 0.0)

    def run(self) -> ReplayReport:
        """Runs until nothing is left to happen."""
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, Add):
                self._arrive(event, now)
            elif event is _StepEvent.END:
                result = self._result(self._steps.popleft())
                self._scheduler.handle(result, self.WORKER, now)
            elif isinstance(event, Cancel):
                self._scheduler.handle(event, self.TOKENIZER, now)
            self._settle(now)
        return _report(self._requests.values(), self._scheduler)

    def _schedule(self, at: float, event: Add | Cancel | _StepEvent) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, event))

    def _arrive(self, add: Add, now: float) -> None:
        self._requests[self.TOKENIZER, add.rid] = ReplayedRequest(add, now)
        left_after = self._originals[add.rid].left_after
        if left_after is not None:
            self._schedule(now + left_after, Cancel(add.rid))
        self._scheduler.handle(add, self.TOKENIZER, now)

    def _settle(self, now: float) -> None:
        """Delivers what the scheduler sends, lets tokenizers stop requests, and starts steps, until all is quiet."""
        scheduler = self._scheduler
        stops: list[int] = []
        while True:
            for rid in stops:
                scheduler.handle(Stop(rid), self.TOKENIZER, now)
            while scheduler.plan(now) is not None:
                step = scheduler.pipeline.latest
                assert step is not None
                self._worker_free_at = max(now, self._worker_free_at) + self._times.seconds(step)
                self._steps.append(step)
                self._schedule(self._worker_free_at, _StepEvent.END)
            if (due_at := scheduler.next_plan_at) is not None:
                self._schedule(due_at, _StepEvent.DUE)
            scheduler.report_status(now)
            messages = [(peer, message) for peer, message in scheduler.outgoing() if peer is not self.WORKER]
            scheduler.commit()
            for peer, message in messages:
                observe_output(self._requests, peer, message, now)
            stops = [rid for rid in self._drawn(messages) if self._is_complete(rid)]
            if not stops:
                return

    def _drawn(self, messages: list[tuple[PeerId, Any]]) -> Iterator[int]:
        for _, message in messages:
            if isinstance(message, Tokens):
                yield from unpack_uint32(message.rids)

    def _is_complete(self, rid: int) -> bool:
        """Whether a request that still runs has drawn all recorded tokens, after which its tokenizer stopped it."""
        request, original = self._requests[self.TOKENIZER, rid], self._originals[rid]
        stopped = original.reason in (FinishReason.STOP, "")
        return request.ended_at is None and stopped and len(request.token_ids) >= len(original.token_ids)

    def _result(self, step: InFlightStep) -> StepResult:
        """The recorded tokens of the requests in a step."""
        tokens = []
        for request in step.drawing:
            known = self._originals[request.rid].token_ids
            drawn = request.generated_tokens - len(self._originals[request.rid].add.resume_ids) // 4
            tokens.append(known[drawn] if drawn < len(known) else FILLER_ID)
        prompt = sum(row.tokens for row in step.prompt_logprob_rows)
        tops = sum(row.tokens * min(row.request.prompt_top_n, self._vocab_size) for row in step.prompt_logprob_rows)
        return StepResult(
            step.message.number,
            step.message.epoch,
            pack_column(UINT8, [1] * len(tokens)),
            pack_column(INT32, tokens),
            pack_column(FLOAT32, [0.0] * len(tokens)),
            forward_us=int(1e6 * self._times.seconds(step)),
            prompt_logprobs=bytes(4 * prompt),
            prompt_top_ids=bytes(4 * tops),
            prompt_top_logprobs=bytes(4 * tops),
        )

    @property
    def _vocab_size(self) -> int:
        limits = self._scheduler.worker.limits
        assert limits is not None
        return limits.vocab_size
