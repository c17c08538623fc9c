"""What must hold on the links, of the front ends' health, and at the end."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from tgi.microkernel.links.link import PeerDisconnected, PeerId, ReplicaId
from tgi.microkernel.messages.codec import unpack_uint32
from tgi.microkernel.messages.protocol import (
    ROLES,
    AdapterUpdated,
    Add,
    End,
    Generate,
    Hello,
    Prompted,
    PromptLogprobs,
    PromptTokens,
    RequestContext,
    Texts,
    Tokenize,
    Tokenized,
    Tokens,
    UpdateAdapter,
)
from tgi.microkernel.observability.flight_recorder import Event, FlightRecorder
from tgi.microkernel.recovery.work_register import split_in_progress

if TYPE_CHECKING:
    from tests.simulation.processes import SchedulerProcess, SimulatedProcess, TokenizerProcess
    from tests.simulation.simulation import Simulation
    from tests.simulation.workload import ClientRequest

# The longest time between two looks at the health of the front ends, and at what stopped processes have asked for.
HEALTH_SECONDS = 0.25
# How long a role may be without a running process until /health must be 503, while all roles above it run undisturbed:
# the product promises 3 s for a silent process, and a late step is noticed after the stall limit, which is 2 s here. A
# message and the turn of a loop may each be half a second late. A neighbour that was stopped itself counts anew, which
# avoids false alarms: then the second limit holds. So it does for a process that stops before the first beat on a new
# connection, since silence is noticed from the first beat on.
UNHEALTHY_SECONDS, DISTURBED_UNHEALTHY_SECONDS = 4.0, 8.0
# After a change all neighbours have had a beat within this time.
FIRST_BEAT_SECONDS = 3.0
# A request of the same client is later if it came to its front end this much later: the ways to the scheduler differ.
LATER_SECONDS = 3.0
# Most requests that may overtake one: later ones of its client, and, if it is its client's only one, those of others.
MAX_OVERTAKEN, MAX_PASSED = 20, 60
# A worker that dies is noticed at once, one that stops after the stall limit of 2 s if it computes and after four beats
# if not. A message and the turns of two loops may each be half a second late.
IDLE_SECONDS = 6.0
# A request that has moved to another replica is computed at the first until that knows it: a message and the turns of
# two loops may each be half a second late.
MOVING_SECONDS = 2.0
# A process that is stopped is found after four ticks of its neighbour, each half a second and up to a busy turn later.
SILENT_SECONDS = 5.0


class EndsPerAdd:
    """One side that answers requests (the scheduler Adds, a tokenizer Generates and Tokenizes, both UpdateAdapters), in
    one life.

    Each gets one answer or End, and nothing after it. When a connection is lost, so are the answers on it.
    """

    def __init__(self, simulation: "Simulation", name: str) -> None:
        self._simulation = simulation
        self._name = name
        self.open: dict[PeerId, dict[int, type]] = {}  # by rid: what was asked

    def received(self, peer: PeerId, message: Any) -> None:
        if isinstance(message, UpdateAdapter) and not message.rid:
            return  # a change that the scheduler is told of
        if isinstance(message, Add | Generate | Tokenize | UpdateAdapter):
            self._require(message.rid not in self.open[peer], peer, message, "this rid is in use")
            self.open[peer][message.rid] = type(message)
        elif isinstance(message, Hello):
            self._require(peer not in self.open, peer, message, "a Hello without a loss before it")
            self.open[peer] = {}
        elif isinstance(message, PeerDisconnected):
            self.open.pop(peer, None)

    def sent(self, peer: PeerId, message: Any) -> None:
        if peer not in self.open:
            return
        if isinstance(message, End | Tokenized | AdapterUpdated):
            self._require(message.rid in self.open[peer], peer, message, "an End of a request that is not open")
            del self.open[peer][message.rid]
        elif isinstance(message, Tokens | Texts):
            rids = unpack_uint32(message.rids)
            self._require(self.open[peer].keys() >= {*rids}, peer, message, "tokens of a request that is not open")
        elif isinstance(message, PromptLogprobs | PromptTokens | Prompted):
            self._require(message.rid in self.open[peer], peer, message, "an answer to a request that is not open")

    def _require(self, holds: bool, peer: PeerId, message: Any, fault: str) -> None:
        if not holds:
            self._simulation.fail(f"{self._name}: {fault}: {message} ({peer})")


class AdmissionOrder(FlightRecorder):
    """The order in which one scheduler admits requests: none starves.

    A request is overtaken when a later one of its client is admitted first, or, if it is the only one of its client,
    any other of its priority.
    """

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._waiting: dict[tuple[int, int], ClientRequest] = {}
        self._overtaken: Counter[tuple[int, int]] = Counter()

    def stamp(self, event: Event, context: RequestContext, a: int = 0, b: int = 0) -> None:
        key, index = context.request_key, context.request_index
        if event is Event.QUEUED:
            request = self._simulation.workload.sent.get(key)
            if request is not None and not request.plan.resumes:
                self._waiting[key, index] = request
        elif event is Event.ENDED:
            self._waiting.pop((key, index), None)
            self._overtaken.pop((key, index), None)
        elif event is Event.ADMITTED and (admitted := self._waiting.pop((key, index), None)) is not None:
            self._overtaken.pop((key, index), None)
            self._count(admitted)

    def _count(self, admitted: "ClientRequest") -> None:
        client, simulation = admitted.plan.client, self._simulation
        for key, request in self._waiting.items():
            other = request.plan.client
            if other is client:
                unfair = request.began + LATER_SECONDS < admitted.began
                limit = MAX_OVERTAKEN
            else:
                unfair = other.name == "light" and other.priority >= client.priority
                limit = MAX_PASSED
            if unfair:
                self._overtaken[key] += 1
                which = "later ones of its client" if other is client else "others"
                simulation.overtaken[which] = max(simulation.overtaken[which], self._overtaken[key])
                if self._overtaken[key] > limit:
                    simulation.fail(
                        f"request {key[0]} waits, while {self._overtaken[key]} {which} were admitted", request
                    )


class HealthCheck:
    """`/health` is true: it is 503 when nothing was computed for long, and 200 when all has been well for long."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._disturbed_at = 0.0
        self.dropped_at = 0.0
        self._unwatched: set[str] = set()  # roles that have stopped before their neighbours may have had a beat
        self._changed_at: dict[str, float] = {}  # by role
        self._down_since: dict[str, float] = {}  # by role without a running process
        self.samples = 0
        # The longest time that a front end was healthy while no process of a role ran, and that one was not, while all
        # was well.
        self.longest: Counter[str] = Counter()

    def start(self) -> None:
        self._simulation.clock.after(HEALTH_SECONDS, self._look)

    def disturbed(self, role: str = "") -> None:
        """A process of this role has started, ended, was stopped or continues; without a role: a connection has
        broken."""
        simulation, before, self._disturbed_at = self._simulation, self._disturbed_at, self._simulation.clock.now
        if role:
            self._changed_at[role] = self._disturbed_at
        else:
            self.dropped_at = self._disturbed_at
        for processes in (simulation.tokenizers, simulation.schedulers, simulation.workers):
            if any(one.running for one in processes):
                self._down_since.pop(processes[0].role, None)
                self._unwatched.discard(processes[0].role)
            elif processes[0].role not in self._down_since:
                self._down_since[processes[0].role] = self._disturbed_at
                if self._disturbed_at - before < FIRST_BEAT_SECONDS:
                    self._unwatched.add(processes[0].role)

    def _must_be_noticed(self, role: str, since: float) -> bool:
        now, above = self._simulation.clock.now, ROLES[: ROLES.index(role)]
        latest = max([since, self.dropped_at, *(self._changed_at.get(one, 0.0) for one in above)])
        if now - latest > UNHEALTHY_SECONDS and role not in self._unwatched:
            return True
        return now - since > DISTURBED_UNHEALTHY_SECONDS

    def _look(self) -> None:
        simulation, now, config = self._simulation, self._simulation.clock.now, self._simulation.config
        self.samples += 1
        for front_end in simulation.front_ends:
            if front_end.running and front_end.healthy:
                for role, since in self._down_since.items():
                    self.longest[role] = max(self.longest[role], now - since)
            if front_end.running and not front_end.healthy and all(one.running for one in simulation.processes):
                self.longest["well"] = max(self.longest["well"], now - self._disturbed_at)
        down = [role for role, since in self._down_since.items() if self._must_be_noticed(role, since)]
        well = all(one.running for one in simulation.processes) and now - self._disturbed_at > config.healthy_after
        well &= not any(one.drains for one in simulation.schedulers)
        for front_end in simulation.front_ends:
            if front_end.running and front_end.healthy and down:
                simulation.fail(f"{front_end.name} is healthy, but no {down[0]} runs for long")
            if front_end.running and not front_end.healthy and well:
                assert front_end.router is not None
                stage = front_end.router.health.stage
                simulation.fail(
                    f"{front_end.name} is not healthy ({stage}), but all processes run undisturbed since "
                    f"{self._disturbed_at:.3f} s"
                )
        simulation.clock.after(HEALTH_SECONDS, self._look)


class IdleReplicaCheck:
    """No request waits at a replica whose worker computes nothing for long, while another replica computes: only what
    may have ended or stopped that worker stays."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self.samples = 0  # of replicas that computed nothing for long while another one did

    def start(self) -> None:
        self._simulation.clock.after(HEALTH_SECONDS, self._look)

    def _look(self) -> None:
        simulation = self._simulation
        simulation.clock.after(HEALTH_SECONDS, self._look)
        simulation.workload.look_for_adapter()
        if simulation.clock.now - simulation.health.dropped_at < IDLE_SECONDS:
            return
        replicas = list(zip(simulation.schedulers, simulation.workers, strict=True))
        if not any(self._runs(scheduler) and self._runs(worker) for scheduler, worker in replicas):
            return
        for scheduler, worker in replicas:
            if self._runs(scheduler) and not worker.running and self._is_settled(worker):
                self._check(scheduler)

    def _runs(self, process: "SimulatedProcess") -> bool:
        return process.running and self._is_settled(process)

    def _is_settled(self, process: "SimulatedProcess") -> bool:
        return self._simulation.clock.now - process.changed_at > IDLE_SECONDS

    def _check(self, scheduler: "SchedulerProcess") -> None:
        assert scheduler.scheduler is not None
        suspects = split_in_progress(scheduler.scheduler.suspects(self._simulation.clock.now))
        place = ReplicaId("", scheduler.replica)
        self.samples += 1
        for tokenizer in filter(self._runs, self._simulation.tokenizers):
            assert tokenizer.pool is not None
            for request in tokenizer.pool._schedulers[place].requests.values():
                free = request.in_progress and not request.stays and not request.generate.sampling.adapter
                if free and request.generate.context.fingerprint not in suspects:
                    self._simulation.fail(
                        f"{request.generate} of {tokenizer.name} waits at {scheduler.name}, which computes nothing"
                    )


class CrashesAtOneReplica:
    """A request that crashes workers ends those of one replica only, unless schedulers or what is above them have been
    disturbed since it crashed the first one, or shortly before: then it was at another replica already."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self.counts: Counter[bytes] = Counter()  # of workers that each request has ended, by fingerprint
        self._first: dict[bytes, tuple[int, float]] = {}  # the replica of the first of them, and when it was

    def worker_crashed(self, replica: int, crashing: set[bytes]) -> None:
        simulation = self._simulation
        above = (*simulation.front_ends, *simulation.tokenizers, *simulation.schedulers)
        disturbed_at = max(simulation.health.dropped_at, *(one.changed_at for one in above))
        for name in crashing:
            self.counts[name] += 1
            first, since = self._first.setdefault(name, (replica, simulation.clock.now))
            if replica != first and since > disturbed_at + MOVING_SECONDS:
                simulation.fail(f"{name.hex()} has crashed workers of the replicas {first} and {replica}")


class StoppedUpstreamCheck:
    """What a process has asked for is cancelled while it is stopped for long: nothing is computed for it."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._looks: Counter[tuple[str, int, bool]] = Counter()  # in a row, by name, life and whether it is stopped

    def start(self) -> None:
        self._simulation.clock.after(HEALTH_SECONDS, self._look)

    def _look(self) -> None:
        simulation = self._simulation
        states = [(one.name, one.lives, one.stopped) for one in simulation.processes if one.alive]
        self._looks = Counter({state: self._looks[state] + 1 for state in states})
        for front_end in simulation.front_ends:
            for tokenizer in simulation.tokenizers:
                self._check(front_end, tokenizer)
        for tokenizer in simulation.tokenizers:
            for scheduler in simulation.schedulers:
                self._check(tokenizer, scheduler)
        simulation.clock.after(HEALTH_SECONDS, self._look)

    def _check(self, upper: "SimulatedProcess", lower: "TokenizerProcess | SchedulerProcess") -> None:
        if self._seconds(upper, stopped=True) > SILENT_SECONDS and self._seconds(lower, stopped=False) > SILENT_SECONDS:
            hello = upper.hello()
            held = lower.ends.open.get(PeerId(hello.role, hello.replica, hello.boot))
            if held:
                self._simulation.fail(f"{lower.name} holds {held} of {upper.name}, which is stopped")

    def _seconds(self, process: "SimulatedProcess", stopped: bool) -> float:
        return HEALTH_SECONDS * self._looks[process.name, process.lives, stopped]
