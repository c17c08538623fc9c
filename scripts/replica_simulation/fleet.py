"""Replicas and tokenizers on virtual time: the real schedulers and the real choice, between a simulated worker per
replica, whose steps take the time of a cost model, and a workload.

Messages take no time and are not encoded. The loads that tokenizers know are those of the schedulers' status reports
and what they have sent since, as in the product. A scheduler has one connection for all tokenizers, whose requests
it would hold in one lane each otherwise.
"""

import heapq
import time
from array import array
from collections import OrderedDict, deque
from enum import IntEnum
from random import Random
from typing import NamedTuple, Protocol

from scripts.replica_simulation.workload import VOCAB_SIZE, Mix, Prompt, Workload, percentile
from tgi.microkernel.links.link import PeerId, ReplicaId
from tgi.microkernel.messages.codec import FLOAT32, INT32, unpack_int32
from tgi.microkernel.messages.protocol import (
    PROTOCOL,
    Add,
    DeploymentLimits,
    End,
    Generate,
    Hello,
    Status,
    StepResult,
    Tokens,
    encode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.in_flight import InFlightStep
from tgi.scheduler.peers import LOAD_REPORT_SECONDS
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.tokenizer.encoder import EncodedPrompt
from tgi.tokenizer.replica_choice import BLOCK_TOKENS
from tgi.tokenizer.request import TokenizerRequestState
from tgi.tokenizer.schedulers import Schedulers

API, TOKENIZER = PeerId("api", 0, b"simulated"), PeerId("tokenizer", 0, b"simulated")
WORKER = PeerId("worker", 0, b"simulated")
GENERATE, SAMPLING = Generate(0, "", SamplingParams(0)), encode(SamplingParams(0))
ID_BYTES = array(INT32).itemsize
# Requests that arrive before this share of them has arrived do not count: caches and replicas are empty at first.
WARM_UP = 0.2
# Requests from which the mean costs of a request are estimated.
SAMPLED = 5000


class StepTimes(NamedTuple):
    """Seconds of a step: `fixed + row * decode rows + token * prompt tokens + position * positions before the rows`."""

    fixed: float
    row: float
    token: float
    position: float = 0.0  # reading the keys and values of one

    def seconds(self, step: InFlightStep) -> float:
        """The duration of a step."""
        seconds = self.fixed + self.row * step.decode_rows + self.token * step.prefill_tokens
        return seconds + self.position * sum(unpack_int32(step.message.starts)) if self.position else seconds


class FleetConfig(NamedTuple):
    """The size of a fleet."""

    replicas: int
    tokenizers: int
    slots: int  # of each replica: requests that it computes at once
    pages: int  # of each replica, of BLOCK_TOKENS tokens
    step_times: StepTimes
    prefill_tokens: int  # per step, at most

    @property
    def limits(self) -> DeploymentLimits:
        """What each worker reports."""
        total = self.pages * BLOCK_TOKENS
        return DeploymentLimits(
            max_total_tokens=min(total, 8192),
            max_input_tokens=min(total, 8192) - 1,
            max_batch_total_tokens=total,
            max_batch_prefill_tokens=self.prefill_tokens,
            max_batch_size=self.slots,
            pages=self.pages,
            page_size=BLOCK_TOKENS,
            vocab_size=VOCAB_SIZE,
            dtype="bfloat16",
            device="cuda",  # the next step is planned at once
        )


class Sent(NamedTuple):
    """A request on its way through a replica."""

    prompt: Prompt
    arrived: float
    tokenizer: int
    counts: bool  # it arrived after the warm-up


class Policy(Protocol):
    """Chooses replicas."""

    def choose(self, fleet: "Fleet", tokenizer: int, request: TokenizerRequestState) -> int:
        """The number of the replica for a request that this tokenizer sends."""


class Product:
    """The tokenizers' own choice."""

    def choose(self, fleet: "Fleet", tokenizer: int, request: TokenizerRequestState) -> int:
        """What `Schedulers.choose` returns."""
        replica = fleet.views[tokenizer].choose(request, fleet.now)
        assert replica is not None
        return replica.number


class InTurn:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, fleet: "Fleet", tokenizer: int, request: TokenizerRequestState) -> int:
        """The one after that of the request before."""
        self._next = (self._next + 1) % len(fleet.replicas)
        return self._next


class ShortestQueue:
    """The perfect balancer: it knows the number of requests at each replica at any time, and chooses the lowest."""

    def choose(self, fleet: "Fleet", tokenizer: int, request: TokenizerRequestState) -> int:
        """Any of those with the fewest requests."""
        heap = fleet.by_load
        while True:
            load, _, number = heap[0]
            if load == fleet.replicas[number].load:
                return number
            heapq.heappop(heap)


class Replica:
    """A real scheduler, and a worker that takes the time of the cost model."""

    def __init__(self, config: FleetConfig) -> None:
        self.scheduler = Scheduler(SchedulerConfig())
        self._times = config.step_times
        self._steps: deque[tuple[InFlightStep, float]] = deque()  # on the worker, with their seconds, the oldest first
        self._free_at = 0.0  # when the worker has computed all of them
        self.reported_at = 0.0
        self.report_due = False  # whether an event will report the load
        self.load = 0  # requests
        self._load_since = 0.0
        self.request_seconds = 0.0  # time integral of the load, since the warm-up
        self.computed_tokens = 0  # since the warm-up
        for peer in (TOKENIZER, WORKER):
            self.scheduler.handle(Hello(PROTOCOL, *peer), peer, 0.0)
        self.scheduler.handle(Status(True, True, "", 100, config.limits), WORKER, 0.0)
        list(self.scheduler.outgoing())

    def change_load(self, change: int, now: float) -> None:
        """Requests have come or gone."""
        self.request_seconds += self.load * (now - self._load_since)
        self._load_since = now
        self.load += change

    def plan(self, now: float) -> float | None:
        """Starts the steps that the scheduler plans. Returns when the oldest one ends if it has begun now."""
        scheduler, steps, was_idle = self.scheduler, self._steps, not self._steps
        begin = None
        while scheduler.plan(now) is not None:
            step = scheduler.pipeline.latest
            assert step is not None
            seconds = self._times.seconds(step)
            self._free_at = max(now, self._free_at) + seconds
            self.computed_tokens += step.decode_rows + step.prefill_tokens
            steps.append((step, seconds))
            if was_idle and begin is None:
                begin = self._free_at
        return begin

    def finish_step(self, now: float) -> tuple[InFlightStep, float | None]:
        """The oldest step ends: its result goes to the scheduler. Returns it, and when the next one ends."""
        step, seconds = self._steps.popleft()
        rows = len(step.sampling_requests)
        next_end = now + self._steps[0][1] if self._steps else None
        result = StepResult(
            step.message.number,
            step.message.epoch,
            b"\1" * rows,
            bytes(ID_BYTES * rows),
            bytes(array(FLOAT32).itemsize * rows),
            forward_us=int(1e6 * seconds),
        )
        self.scheduler.handle(result, WORKER, now)
        return step, next_end


class OneCache:
    """A prefix cache with the pages of all replicas: the most that can be found, since it has each prompt and its
    answer when the prompt arrives."""

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._keys: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def serve(self, prompt: Prompt) -> int:
        """How many tokens of the prompt it has; then it has all of them, and those of the answer."""
        keys, size, at = self._keys, ID_BYTES * BLOCK_TOKENS, 0
        ids = prompt.ids + bytes(ID_BYTES * prompt.answer)
        key, own = 0, []
        for at in range(0, len(ids) - size + 1, size):
            key = hash((key, ids[at : at + size]))
            own.append(key)
        found = 0
        # The last token of a prompt is always computed.
        for key in own[: (len(prompt.ids) - ID_BYTES) // size]:
            if key not in keys:
                break
            found += 1
        for key in reversed(own):  # the end of a prefix is evicted before its beginning
            keys.pop(key, None)
            keys[key] = None
        while len(keys) > self._pages:
            keys.popitem(last=False)
        return found * BLOCK_TOKENS


class _Event(IntEnum):
    STEP_ENDS = 0
    REPORT_DUE = 1


class Figures(NamedTuple):
    """What a run has shown. Those of requests leave out the warm-up, as do loads and work."""

    requests: int
    virtual_seconds: float
    prompt_tokens: int
    cached_tokens: int
    one_cache_tokens: int  # that one cache of the size of all together would have had
    first_token_seconds: list[float]  # sorted
    loads: list[float]  # mean requests of each replica
    work: list[float]  # tokens that each replica computes per second
    queued_seconds: float  # mean wait for a slot
    steps: int
    preemptions: int
    choice_seconds: float  # CPU time of all choices

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in caches."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def one_cache_hit_rate(self) -> float:
        """The same in one cache of the size of all together, which knows each prompt when it arrives."""
        return self.one_cache_tokens / max(1, self.prompt_tokens)

    @property
    def load_imbalance(self) -> float:
        """The most that a replica has of the mean number of requests, each averaged over time."""
        return imbalance(self.loads)

    @property
    def work_imbalance(self) -> float:
        """The most that a replica has of the mean number of computed tokens."""
        return imbalance(self.work)

    def first_token(self, share: float) -> float:
        """A percentile of the time to first token, in seconds."""
        return percentile(self.first_token_seconds, share)


def imbalance(values: list[float]) -> float:
    """Maximum over mean."""
    return max(values) * len(values) / sum(values) if any(values) else 1.0


class Fleet:
    """Runs a workload. Deterministic: the same arguments give the same figures, but for `choice_seconds`."""

    def __init__(self, config: FleetConfig, policy: Policy, workload: Workload, seed: int) -> None:
        self.config = config
        self.now = 0.0
        self.replicas = [Replica(config) for _ in range(config.replicas)]
        self.views = [Schedulers(lambda peer: b"", config.tokenizers) for _ in range(config.tokenizers)]
        self.by_load: list[tuple[int, float, int]] = []  # a heap of load, random order, number; some are outdated
        self._policy = policy
        self._workload = workload
        self._random = Random(seed)
        self._sent: dict[int, Sent] = {}  # by rid, until the End
        self._waiting: set[int] = set()  # of these, rids without a first token
        self._events: list[tuple[float, int, _Event, int]] = []  # a heap of time, order, event, replica
        self._order = 0
        for view in self.views:
            for number in range(config.replicas):
                peer = PeerId("scheduler", number, b"simulated")
                view.connect(view.at(ReplicaId("", number)), peer, Hello(PROTOCOL, *peer), 0.0)
        for number in range(config.replicas):
            self._report(number, Status(True, True, "", 100, config.limits))
            self._push_load(number)
        self._one_cache = OneCache(config.replicas * config.pages)
        self._prompt_tokens = self._cached_tokens = self._one_cache_tokens = 0
        self._first_tokens: list[float] = []
        self._queued_us = self._counted = 0
        self._choice_seconds = 0.0

    def run(self, requests: int) -> Figures:
        """Runs until this many requests have ended."""
        warm_up, began = int(WARM_UP * requests), 0.0
        arrival = self._workload.next_arrival()
        sent = 0
        measured: tuple[float, list[float], list[float]] | None = None
        while True:
            if sent < requests and (not self._events or arrival <= self._events[0][0]):
                self.now = arrival
                if sent == warm_up:
                    began = arrival
                    self._begin_measuring()
                self._arrive(sent + 1, counts=sent >= warm_up)
                sent += 1
                if sent == requests:  # what follows is no steady load any more
                    measured = self._measured(began)
                else:
                    arrival = self._workload.next_arrival()
            elif self._events:
                self.now, _, event, number = heapq.heappop(self._events)
                if event is _Event.STEP_ENDS:
                    self._end_step(number)
                else:
                    self.replicas[number].report_due = False
                    self._settle(number)
            else:
                break
        assert not self._sent
        assert measured is not None
        self._first_tokens.sort()
        counters = [replica.scheduler.counters for replica in self.replicas]
        return Figures(
            requests=requests,
            virtual_seconds=measured[0],
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            one_cache_tokens=self._one_cache_tokens,
            first_token_seconds=self._first_tokens,
            loads=measured[1],
            work=measured[2],
            queued_seconds=self._queued_us / 1e6 / max(1, self._counted),
            steps=sum(sum(one.steps.values()) for one in counters),
            preemptions=sum(one.preemptions for one in counters),
            choice_seconds=self._choice_seconds,
        )

    def _begin_measuring(self) -> None:
        for replica in self.replicas:
            replica.change_load(0, self.now)
            replica.request_seconds, replica.computed_tokens = 0.0, 0

    def _measured(self, began: float) -> tuple[float, list[float], list[float]]:
        seconds = self.now - began
        for replica in self.replicas:
            replica.change_load(0, self.now)
        loads = [replica.request_seconds / seconds for replica in self.replicas]
        return seconds, loads, [replica.computed_tokens / seconds for replica in self.replicas]

    def _arrive(self, rid: int, counts: bool) -> None:
        prompt = self._workload.draw()
        tokenizer = self._random.randrange(self.config.tokenizers)
        request = TokenizerRequestState(rid, API, GENERATE, self.now)
        request.set_prompt(EncodedPrompt(prompt.ids, len(prompt.ids) // ID_BYTES, 0))
        began = time.thread_time()
        number = self._policy.choose(self, tokenizer, request)
        self._choice_seconds += time.thread_time() - began
        self.views[tokenizer][ReplicaId("", number)].requests[rid] = request
        self._sent[rid] = Sent(prompt, self.now, tokenizer, counts)
        self._waiting.add(rid)
        self._consult_one_cache(prompt, counts)
        replica = self.replicas[number]
        replica.change_load(1, self.now)
        self._push_load(number)
        replica.scheduler.handle(Add(rid, prompt.ids, prompt.answer, SAMPLING), TOKENIZER, self.now)
        self._settle(number)

    def _consult_one_cache(self, prompt: Prompt, counts: bool) -> None:
        tokens = self._one_cache.serve(prompt)
        if counts:
            self._one_cache_tokens += tokens

    def _end_step(self, number: int) -> None:
        replica = self.replicas[number]
        step, next_end = replica.finish_step(self.now)
        if next_end is not None:
            self._schedule(next_end, _Event.STEP_ENDS, number)
        for request in step.sampling_requests[step.decode_rows :]:  # the prompts that end in this step
            if request.rid in self._waiting:
                self._waiting.remove(request.rid)
                sent = self._sent[request.rid]
                if sent.counts:
                    self._first_tokens.append(self.now - sent.arrived)
        self._settle(number)

    def _settle(self, number: int) -> None:
        """Lets the scheduler plan, and delivers what it sends."""
        replica = self.replicas[number]
        scheduler = replica.scheduler
        if (end := replica.plan(self.now)) is not None:
            self._schedule(end, _Event.STEP_ENDS, number)
        if not replica.report_due:
            report_at = replica.reported_at + LOAD_REPORT_SECONDS
            if self.now < report_at:
                replica.report_due = True
                self._schedule(report_at, _Event.REPORT_DUE, number)
            else:
                scheduler.report_status(self.now)
        for _, message in scheduler.outgoing():
            if isinstance(message, End):
                self._end(number, message)
            elif isinstance(message, Tokens):
                self._report_load(number, message.load)
            elif isinstance(message, Status):
                replica.reported_at = self.now
                self._report(number, message)
        scheduler.commit()

    def _end(self, number: int, end: End) -> None:
        sent = self._sent.pop(end.rid)
        assert end.generated_tokens == sent.prompt.answer, end
        del self.views[sent.tokenizer][ReplicaId("", number)].requests[end.rid]
        self.replicas[number].change_load(-1, self.now)
        self._push_load(number)
        self._workload.ended(sent.prompt)
        if sent.counts:
            self._counted += 1
            self._prompt_tokens += end.prompt_tokens
            self._cached_tokens += end.cached_tokens
            self._queued_us += end.queue_us

    def _report(self, number: int, status: Status) -> None:
        for view in self.views:
            view.set_status(view[ReplicaId("", number)], status)

    def _report_load(self, number: int, load: int) -> None:
        """The tokenizers that have requests at this replica get tokens of nearly every step."""
        for view in self.views:
            if (seen := view[ReplicaId("", number)]).requests:
                seen.set_load(load)

    def _push_load(self, number: int) -> None:
        if isinstance(self._policy, ShortestQueue):
            heapq.heappush(self.by_load, (self.replicas[number].load, self._random.random(), number))

    def _schedule(self, at: float, event: _Event, number: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, event, number))


def seconds_per_request(config: FleetConfig, mix: Mix) -> float:
    """Mean time that a request takes of a replica with all slots in use and without a prefix cache."""
    workload, cache = Workload(mix, 1.0, config.replicas, 0), OneCache(SAMPLED * config.pages)
    times, total = config.step_times, 0.0
    for _ in range(SAMPLED):
        prompt = workload.draw()
        tokens = len(prompt.ids) // ID_BYTES
        row = times.fixed / config.slots + times.row + times.position * (tokens + prompt.answer / 2)
        total += times.token * (tokens - cache.serve(prompt)) + row * prompt.answer
        workload.ended(prompt)
    return total / SAMPLED


def simulate(config: FleetConfig, policy: Policy, mix: Mix, load: float, requests: int, seed: int) -> Figures:
    """Runs a load that is this share of the fleet's capacity without prefix caches."""
    rate = load * config.replicas / seconds_per_request(config, mix)
    return Fleet(config, policy, Workload(mix, rate, 2 * config.replicas, seed), seed).run(requests)
