"""What `tgi why` tells from the flight recorder: where the time of a request went, and for whom it waited.

Whom a request waited for is found when it is asked: the stamps of all requests say which of them ran or waited at any
time, so nothing more is stamped for it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tgi.microkernel.observability.flight_recorder import EVERY_REQUEST, KEY_DIGITS, Event, Stamp, client_name

# Ids of other requests that are listed of each of their clients, and clients.
MAX_IDS, MAX_CLIENTS = 4, 8
# Waits in the queue that are explained: the longest ones.
MAX_WAITS = 3

QUEUE, PREEMPTED, AWAY = "queue", "preempted", "client is away"
# What a request waits for after each event; an event that is missing here does not end the phase before it.
PHASES = {
    Event.RECEIVED: "front end",
    Event.SUBMITTED: "tokenizer",
    Event.TOKENIZER_LOST: "recovery of tokenizer-{a}",
    Event.RESUBMITTED: "tokenizer",
    Event.PARKED: "client does not read",
    Event.UNPARKED: "tokenizer",
    Event.TOKENIZED: "way to the scheduler",
    Event.SCHEDULER_LOST: "recovery of scheduler-{a}",
    Event.QUEUED: QUEUE,
    Event.ADMITTED: "prefill",
    Event.PREFILLED: "decode",
    Event.PREEMPTED: PREEMPTED,
    Event.WORKER_LOST: QUEUE,
    Event.ENDED: "delivery",
}
RECOVERY = "recovery of worker-0"
# Phases in which a request has turns only, while it is on trial at the role.
TRIED = {"scheduler": frozenset((QUEUE, PREEMPTED, "prefill", "decode")), "api": frozenset(("tokenizer",))}

TEXTS = {
    Event.RECEIVED: "received from {client}",
    Event.SUBMITTED: "sent to tokenizer-{a}",
    Event.TOKENIZER_LOST: "tokenizer-{a} was lost, or does not respond; {b} tokens had arrived",
    Event.RESUBMITTED: "sent to tokenizer-{a} with {b} tokens",
    Event.FIRST_TOKEN: "first token",
    Event.ANSWERED: "ended with {b} tokens",
    Event.LEFT: "cancelled: the client has disconnected",
    Event.PARKED: "parked with {b} tokens: its client does not read",
    Event.UNPARKED: "the client reads on: sent to tokenizer-{a} with {b} tokens",
    Event.TOKENIZED: "tokenized: {a} prompt tokens",
    Event.SCHEDULER_LOST: "scheduler-{a} was lost, or does not respond: waits for its successor or another",
    Event.QUEUED: "queued: {a} requests waited before it, {b} ran",
    Event.ADMITTED: "admitted: {a} tokens found in the prefix cache, {b} requests ran",
    Event.PREFILLED: "prompt computed",
    Event.PREEMPTED: "preempted: others needed its slot or its KV pages; {a} requests waited, {b} ran",
    Event.WORKER_LOST: "the worker was lost, or its step failed: queued again",
    Event.ENDED: "ended after {b} tokens",
    Event.ON_TRIAL: "on trial with {a} strikes after a crash: runs in turns of its own",
    Event.RELEASED: "released from trial",
    Event.WORKER_DOWN: "the worker has ended: waits for its successor",
    Event.WORKER_UP: "the worker is ready",
}
TRIAL_OF_OTHERS = "others are on trial: their turns alternate with those of all other requests"

# A request at the scheduler: its key, and the index of the generation.
GenerationId = tuple[int, int]


class Wait(NamedTuple):
    """A time in the scheduler's queue, and the other requests that had what this one waited for."""

    phase: str
    since: float
    until: float
    running: list[GenerationId]  # when it began to wait
    admitted: list[GenerationId]  # before this one, since then


class Timeline:
    """One generation of a request: its phases, its waits and its events. `seconds` are those of each phase."""

    def __init__(self, stamps: Sequence[Stamp], key: int, generation: int) -> None:
        """`stamps`: those of all requests, in order of time; one at least is of this generation."""
        self.id = key, generation
        own = [one.time for one in stamps if (one.key, one.generation) == self.id]
        self.begin, self.end = own[0], own[-1]
        self.events: list[Stamp] = []
        self.waits: list[Wait] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.tried_meanwhile: dict[GenerationId, None] = {}  # an ordered set
        self._phase, self._since = "", self.begin
        self._trials: set[str] = set()  # the roles at which it is on trial
        self._worker_down = False
        self._held = 0  # how often the scheduler has it: twice for a moment after the loss of a tokenizer
        self._connections = 0  # over which its client waits for it
        self._wait: Wait | None = None
        self._running: dict[GenerationId, None] = {}
        self._tried: dict[GenerationId, None] = {}
        self._clients: dict[int, str] = {}
        for stamp in stamps:
            if stamp.time > self.end:
                break
            self._observe(stamp)

    def lines(self) -> Iterator[str]:
        total = self.end - self.begin
        for phase, spent in sorted(self.seconds.items(), key=lambda item: -item[1]):
            yield f"{phase:26}{1e3 * spent:10.1f} ms{100 * spent / total if total else 0:5.0f} %"
        yield f"{'total':26}{1e3 * total:10.1f} ms"
        yield ""
        longest = sorted(self.waits, key=lambda wait: wait.since - wait.until)[:MAX_WAITS]
        for wait in sorted(longest):
            yield f"in {wait.phase} for {1e3 * (wait.until - wait.since):.1f} ms:"
            yield from self._others("ran when it began to wait", wait.running)
            yield from self._others("were admitted before it", wait.admitted)
            yield ""
        if self.tried_meanwhile:
            yield f"{TRIAL_OF_OTHERS}:"
            yield from self._others("on trial", list(self.tried_meanwhile))
            yield ""
        for one in self.events:
            text = TEXTS[one.event].format(a=one.a, b=one.b, client=client_name(one.a, one.b) or "an unknown client")
            yield f"{1e3 * (one.time - self.begin):10.1f} ms  {one.process:14}{text}"

    # --- stamps -------------------------------------------------------------------------------------------------------

    def _observe(self, stamp: Stamp) -> None:
        other = stamp.key, stamp.generation
        if stamp.event is Event.RECEIVED:
            self._clients[stamp.key] = client_name(stamp.a, stamp.b)
        if stamp.key == EVERY_REQUEST:
            self._enter(self._phase, stamp.time)
            self._worker_down = stamp.event is Event.WORKER_DOWN
            if self._held > 0:
                self.events.append(stamp)
        elif other == self.id:
            self._observe_own(stamp)
        else:
            self._observe_other(other, stamp)

    def _observe_own(self, stamp: Stamp) -> None:
        event = stamp.event
        if event in TEXTS:
            self.events.append(stamp)
        self._held += (event is Event.QUEUED) - (event is Event.ENDED)
        if event is Event.ENDED and self._held > 0:
            return
        if event in (Event.ENDED, Event.SCHEDULER_LOST):
            self._held = 0
        following = PHASES.get(event)
        if event is Event.RECEIVED:
            self._connections += 1
        elif event in (Event.ANSWERED, Event.LEFT):
            self._connections -= 1  # a client may resume before its first connection is found to be closed
            following = None if self._connections > 0 else AWAY
        elif self._phase == AWAY:
            following = None
        elif event is Event.FIRST_TOKEN and self._phase == "tokenizer":
            following = "decode"  # it had gone on at its tokenizer while its client was away
        self._enter(self._phase if following is None else following.format(a=stamp.a), stamp.time)
        role = stamp.process.partition("-")[0]
        if event is Event.ON_TRIAL:
            self._trials.add(role)
        elif event is Event.RELEASED:
            self._trials.discard(role)
        elif event is Event.TOKENIZED:
            self._trials.discard("api")
        if event in (Event.QUEUED, Event.PREEMPTED):
            self._wait = Wait(str(following), stamp.time, stamp.time, list(self._running), [])
            self.tried_meanwhile |= self._tried
        elif self._wait is not None and event in (Event.ADMITTED, Event.ENDED, Event.SCHEDULER_LOST):
            wait, self._wait = self._wait._replace(until=stamp.time), None
            if wait.running or wait.admitted:
                self.waits.append(wait)

    def _observe_other(self, other: GenerationId, stamp: Stamp) -> None:
        match stamp.event:
            case Event.ADMITTED:
                self._running[other] = None
                if self._wait is not None:
                    self._wait.admitted.append(other)
            case Event.ENDED | Event.SCHEDULER_LOST:
                self._running.pop(other, None)
                self._tried.pop(other, None)
            case Event.PREEMPTED | Event.WORKER_LOST:
                self._running.pop(other, None)
            case Event.ON_TRIAL if stamp.process.startswith("scheduler"):
                self._tried[other] = None
                if self._held > 0:
                    self.tried_meanwhile[other] = None
            case Event.RELEASED:
                self._tried.pop(other, None)

    def _enter(self, phase: str, now: float) -> None:
        """The phase so far ends; the next one may be the same."""
        name = self._phase
        if name == phase == AWAY:
            return
        if name in (QUEUE, PREEMPTED) and self._worker_down:
            name = RECOVERY
        elif any(name in TRIED[role] for role in self._trials):
            name += " on trial"
        if name and now > self._since:
            self.seconds[name] += now - self._since
        self._phase, self._since = phase, now

    # --- other requests -----------------------------------------------------------------------------------------------

    def _others(self, role: str, others: Sequence[GenerationId]) -> Iterator[str]:
        """How many there are, by client, with some of their ids."""
        if others:
            yield f"  {len(others)} {role}"
        own = self._clients.get(self.id[0])
        by_client = Counter(self._clients.get(key, "") for key, _ in others)
        for client, count in by_client.most_common(MAX_CLIENTS):
            ids = dict.fromkeys(key for key, _ in others if self._clients.get(key, "") == client)
            listed = [f"{key:0{KEY_DIGITS}x}" for key in list(ids)[:MAX_IDS]]
            more = ["…"] if len(ids) > MAX_IDS else []
            name = f"{client or 'unknown clients'}{', its own client' if client and client == own else ''}"
            yield f"    {count} of {name}: {' '.join([*listed, *more])}"
        if len(by_client) > MAX_CLIENTS:
            yield f"    and those of {len(by_client) - MAX_CLIENTS} other clients"


class InFlight(NamedTuple):
    """A generation that is not answered yet."""

    id: str  # names its request, as `tgi why` takes it
    client: str
    phase: str  # what it waits for
    seconds: float  # since it was received


def in_flight(stamps: Iterable[Stamp], now: float) -> list[InFlight]:
    """The generations that front ends have received and not answered, the oldest first. `now` is by time.monotonic."""
    received: dict[GenerationId, Stamp] = {}
    phases: dict[GenerationId, str] = {}
    for stamp in stamps:
        one = stamp.key, stamp.generation
        if stamp.event is Event.RECEIVED:
            received[one] = stamp
        elif stamp.event in (Event.ANSWERED, Event.LEFT):
            received.pop(one, None)
        if one in received and (phase := PHASES.get(stamp.event)) is not None:
            phases[one] = phase.format(a=stamp.a)
    return [
        InFlight(f"{one[0]:0{KEY_DIGITS}x}", client_name(stamp.a, stamp.b), phases[one], now - stamp.time)
        for one, stamp in received.items()
    ]


def explain(stamps: Sequence[Stamp], key: int) -> Iterator[str]:
    """The timelines of all generations of a request, in lines."""
    for index in generations(stamps, key):
        if index:
            yield f"\nGeneration {index}"
        yield from Timeline(stamps, key, index).lines()


def generations(stamps: Iterable[Stamp], key: int) -> list[int]:
    """The indices of the generations of a request."""
    return sorted({stamp.generation for stamp in stamps if stamp.key == key})
