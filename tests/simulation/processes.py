"""The processes of a server, each with the product's own classes and loop, and the supervisor that restarts them."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.scheduler.invariants import check_scheduler
from tests.simulation.invariants import AdmissionOrder, EndsPerAdd
from tests.simulation.network import Crashed, Killed, Monitor, SimulatedSocket
from tests.tokenizer.vocabularies import byte_level
from tgi.api.requests import Generation, WakeEvent
from tgi.api.router import Router
from tgi.microkernel.host.rundir import scheduler_socket
from tgi.microkernel.links.link import Link, PeerId
from tgi.microkernel.links.liveness import BEAT_SECONDS
from tgi.microkernel.messages.codec import FLOAT32, INT32, ITEM_BYTES, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import (
    PROTOCOL,
    Add,
    Beat,
    Cancel,
    End,
    Generate,
    HeldPages,
    Hello,
    LastExit,
    LoadedAdapter,
    PredecessorState,
    Step,
    StepResult,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.recovery.work_register import WorkRegister, register_number, split_in_progress
from tgi.scheduler import main as scheduler_main
from tgi.scheduler.metrics import SchedulerMetrics
from tgi.scheduler.scheduler import Scheduler
from tgi.tokenizer import main as tokenizer_main
from tgi.tokenizer.chat import ChatRenderer, RenderedChat
from tgi.tokenizer.chat_template import ChatTemplates
from tgi.tokenizer.encoder import PromptEncoder
from tgi.tokenizer.encoding_jobs import THREADS, EncodingJob, EncodingQueue, ExecutorName
from tgi.tokenizer.pool import TokenizerPool
from tgi.tokenizer.resumable_streams import ResumableStreams
from tgi.tokenizer.structured_output.grammar import CheckedGrammar, GrammarError
from tgi.worker.engine.loop import WorkerLoop
from tgi.worker.fake_worker.fake_worker import FakeWorker
from tgi.worker.lora.registry import load_adapters

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

ROLES = ("api", "tokenizer", "scheduler", "worker")
# First ids of prompts that kill the process of a role when it works on them; "step": that fail a step of the worker.
POISON = {"tokenizer": 5, "scheduler": 4, "worker": 3, "step": 1}


CHATS = ChatRenderer(
    ChatTemplates({"default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"}, {})
)
INVALID_GRAMMAR = b"invalid"
ADAPTERS = Path(__file__).with_name("adapters")
# Adapters that the settings of the worker name; clients load and unload others.
SETTINGS_ADAPTERS = ("amber", "blue")


# A scheduler that is replaced may finish its requests for this long. Soon all tokenizers know that it drains: a frame
# and the turns of two loops may each be half a second late.
DRAIN_SECONDS, DRAINING_KNOWN_SECONDS = 5.0, 2.5


def is_poison(role: str, ids: bytes) -> bool:
    """Whether a prompt (an int32 column) has this effect."""
    return ids[:ITEM_BYTES] == pack_column(INT32, [POISON[role]])


class SimulatedProcess:
    """One process, through all its lives. It runs when a socket is readable or its deadline has come."""

    role = ""

    def __init__(self, simulation: "Simulation", replica: int) -> None:
        self.simulation = simulation
        self.clock = simulation.clock
        self.replica = replica
        self.name = f"{self.role}-{replica}"
        self.alive = False
        self.stopped = False  # by SIGSTOP
        self.lives = 0
        self.links: list[Link] = []
        self.last_exit: LastExit | None = None
        self.work_register = WorkRegister()
        self.changed_at = 0.0  # when it last began to run, or ceased to
        self._busy_until = 0.0
        self._scheduled = False
        self._runnable = False  # something happened while it was stopped
        self._next_beat_at = 0.0
        self._deadline = float("inf")

    @property
    def running(self) -> bool:
        """Whether it does its work."""
        return self.alive and not self.stopped

    @property
    def had_been_ready(self) -> bool:
        """Whether it has told its neighbours how its predecessor ended."""
        return True

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins a new life."""
        self.lives += 1
        self.alive, self.stopped = True, False
        self._scheduled = self._runnable = False
        self._deadline = float("inf")
        self._busy_until = self.clock.now
        self.work_register = WorkRegister()
        self.simulation.trace(self.name, "starts")
        self._changed()
        self._start()
        self.wake()

    def kill(self, cause: str, outside: bool = True) -> None:
        """Ends this life; the supervisor begins another. `outside`: no request is the cause."""
        if not self.alive:
            return
        self.simulation.trace(self.name, "dies:", cause)
        self.alive = self.stopped = False
        self._changed()
        for link in self.links:
            link.socket.close()
        self.links = []
        in_progress = self.work_register.in_progress()
        if self.had_been_ready or in_progress or self.last_exit is None:  # as ChildProcess.exit_report
            self.last_exit = LastExit(self.hello().boot, cause, outside, in_progress)
        self._ended()
        self.simulation.supervisor.process_ended(self)

    def hand_over(self) -> None:
        """Ends this life as `tgi restart` does: the neighbours are told."""
        if self.running and self.role != "api":
            self.run_code(self._say_goodbye)
            self.kill("replaced")

    def _say_goodbye(self) -> None:
        for link in self.links:
            link.say_goodbye()
            link.socket.peers_answer = True  # type: ignore[attr-defined]  # as end_sessions waits for

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.stopped:
            self.simulation.trace(self.name, "is stopped")
            self.stopped = True
            self._changed()
            self.simulation.supervisor.process_stopped(self)

    def resume(self) -> None:
        """SIGCONT."""
        if self.stopped:
            self.simulation.trace(self.name, "continues")
            self.stopped = False
            self._changed()
            if self._runnable:
                self._runnable = False
                self.wake()

    def _changed(self) -> None:
        self.changed_at = self.clock.now
        self.simulation.health.disturbed(self.role)

    def _start(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        """One turn of the process's loop."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Drops the state of this life."""

    # --- links --------------------------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        boot = self.lives.to_bytes(6, "big") + bytes((ROLES.index(self.role), self.replica))
        return Hello(PROTOCOL, self.role, self.replica, boot, "model", last_exit=self.last_exit)

    def bind(self, address: str) -> Link:
        self.links.append(self.simulation.network.bind(self, address, self.hello()))
        return self.links[-1]

    def connect(self, address: str) -> Link:
        self.links.append(self.simulation.network.connect(self, address, self.hello()))
        return self.links[-1]

    # --- turns --------------------------------------------------------------------------------------------------------

    def socket_readable(self, source: Any) -> None:
        self.wake()

    def message_sent(self) -> None:
        if self.simulation.faults.kills_after_send(self):
            raise Killed("killed after it had sent a message")

    def wake(self) -> None:
        """Has the process run soon."""
        if not self.alive or self._scheduled:
            return
        if self.stopped:
            self._runnable = True
            return
        self._scheduled = True
        due = max(self.clock.now, self._busy_until) + self.simulation.turn_delay()
        self.clock.at(due, self._turn, self.lives)

    def wake_at(self, deadline: float) -> None:
        """Has the process run at this time at the latest."""
        if deadline < self._deadline:
            self._deadline = deadline
            self.clock.at(deadline, self._deadline_reached, self.lives, deadline)

    def _deadline_reached(self, life: int, deadline: float) -> None:
        if life == self.lives and deadline == self._deadline:
            self._deadline = float("inf")
            self.wake()

    def _turn(self, life: int) -> None:
        if life != self.lives or not self.alive:
            return
        self._scheduled = False
        if self.stopped:
            self._runnable = True
            return
        self.run_code(self._run)

    def run_code(self, code: Callable[[], None]) -> None:
        """Runs code of the process, which may be killed meanwhile."""
        try:
            code()
        except Killed as killed:
            self.kill(str(killed), outside=not isinstance(killed, Crashed))
        finally:
            self._busy_until = self.clock.now

    def poll_links(self) -> None:
        """What Process.wait does when it returns."""
        for link in self.links:
            if link.monitor.poll(0):
                link.detect_disconnects()

    @property
    def beat_due(self) -> bool:
        """As Process.beat_due."""
        return self.clock.now >= self._next_beat_at

    def exchange_beats(self, beat: Beat) -> None:
        """As Process.exchange_beats."""
        self._next_beat_at = self.clock.now + BEAT_SECONDS
        for link in self.links:
            link.exchange_beats(beat)

    def wake_while_readable(self) -> None:
        """What Process.wait does when it is called: it returns at once if there is something to read, and when a beat
        is due."""
        self.wake_at(self._next_beat_at)
        if any(link.has_pending_work or link.socket.readable for link in self.links):
            self.wake()


# --- front ends -------------------------------------------------------------------------------------------------------


class SimulatedLoop:
    """The part of an asyncio loop that the router uses."""

    def __init__(self, process: "FrontEnd") -> None:
        self._process = process
        self._ready: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._readers: dict[int, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def time(self) -> float:
        return self._process.clock.now

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> None:
        self._ready.append((callback, arguments))
        self._process.wake()

    def call_later(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> "SimulatedTimer":
        timer = SimulatedTimer(self, callback, arguments)
        self._process.clock.after(seconds, timer.expire)
        return timer

    def call_at(self, due: float, callback: Callable[..., None], *arguments: Any) -> "SimulatedTimer":
        return self.call_later(max(0.0, due - self.time()), callback, *arguments)

    def add_reader(self, descriptor: int, callback: Callable[..., None], *arguments: Any) -> None:
        self._readers[descriptor] = callback, arguments

    def remove_reader(self, descriptor: int) -> None:
        self._readers.pop(descriptor, None)

    def readable(self, descriptor: int) -> None:
        """libzmq's descriptor signals changes only, so the callback runs once per change."""
        if descriptor in self._readers:
            callback, arguments = self._readers[descriptor]
            self.call_soon(callback, *arguments)

    def run_ready(self) -> None:
        for _ in range(len(self._ready)):
            callback, arguments = self._ready.popleft()
            callback(*arguments)
        if self._ready:
            self._process.wake()


class SimulatedTimer:
    """What call_later returns."""

    def __init__(self, loop: SimulatedLoop, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._loop = loop
        self._callback: Callable[..., None] | None = callback
        self._arguments = arguments

    def cancel(self) -> None:
        self._callback = None

    def expire(self) -> None:
        if self._callback is not None:
            self._loop.call_soon(self._callback, *self._arguments)


class CallbackEvent(WakeEvent):
    """Calls a route's continuation in the next turn of the loop."""

    def __init__(self, loop: SimulatedLoop, callback: Callable[[], None]) -> None:
        super().__init__()
        self._loop = loop
        self._callback = callback
        self._called = False

    def wake(self) -> None:
        if not self._called:
            self._called = True
            self._loop.call_soon(self._call)

    def _call(self) -> None:
        self._called = False
        self._callback()


class SharedPermits:
    """The permits of one front end. All front ends share the limit; their clients have no shares of it."""

    def __init__(self, process: "FrontEnd") -> None:
        self._simulation = process.simulation
        self._held: Counter[int] = Counter()  # by client

    @property
    def held(self) -> int:
        return self._held.total()

    def held_by(self, client: int) -> int:
        return sum(one.permits._held[client] for one in self._simulation.front_ends if one.alive)

    def acquire(self, count: int, client: int, weight: float) -> bool:
        held = sum(one.permits.held for one in self._simulation.front_ends if one.alive)
        if held + count > self._simulation.config.max_concurrent_requests:
            return False
        self._held[client] += count
        return True

    def release(self, count: int, client: int) -> None:
        assert self._held[client] >= count, "permits are released twice"
        self._held[client] -= count


class SharedQuarantine:
    """The quarantine of all front ends."""

    def __init__(self) -> None:
        self.reasons: dict[bytes, str] = {}

    def add(self, fingerprint: bytes, reason: str) -> bool:
        return self.reasons.setdefault(fingerprint, reason) is reason


class FrontEnd(SimulatedProcess):
    """A front end: a router, and the clients that are connected to it."""

    role = "api"

    def _start(self) -> None:
        links = [self.connect(f"tok-{index}.front") for index in range(self.simulation.config.tokenizers)]
        self.permits = SharedPermits(self)
        self.loop = SimulatedLoop(self)
        self.router: Router | None = Router(
            links,
            self.permits,  # type: ignore[arg-type]
            self.simulation.quarantine,  # type: ignore[arg-type]
            work_in_progress=self._work_in_progress,
        )
        self.router.attach(self.loop)  # type: ignore[arg-type]
        self._probe: Generation | None = None

    def _work_in_progress(self, peer: PeerId) -> bytes:
        """As process.work_in_progress."""
        process = self.simulation.tokenizers[peer.replica]
        if process.alive and process.hello().boot == peer.boot:
            return process.work_register.in_progress()
        last = process.last_exit
        return last.in_progress if last is not None and last.boot == peer.boot else b""

    def _ended(self) -> None:
        self.router = None
        self.simulation.workload.front_end_lost(self)

    def socket_readable(self, source: SimulatedSocket | Monitor) -> None:
        self.loop.readable(source.fileno())

    def _run(self) -> None:
        self.loop.run_ready()
        self._run_readiness_probe()

    @property
    def accepting(self) -> bool:
        """Whether clients are served: the readiness probe has passed."""
        return self.alive and self.router is not None and self.router.health.probe_passed

    @property
    def healthy(self) -> bool:
        """What GET /health tells."""
        return self.router is not None and self.router.health.healthy

    def _run_readiness_probe(self) -> None:
        """As readiness.py."""
        router = self.router
        assert router is not None
        if router.health.probe_passed:
            return
        if self._probe is None:
            if router.health.can_compute:
                message = Generate(0, "Is 1 + 1 = 2?", SamplingParams(1), max_new_tokens=1, truncate=1)
                self._probe = Generation(message, False, CallbackEvent(self.loop, lambda: None), probe=True)
                router.submit(self._probe)
        elif self._probe.ended:
            router.health.end_probe("failed" if self._probe.failed else "")
            self._probe = None
            self.wake()


# --- tokenizers -------------------------------------------------------------------------------------------------------


class SimulatedExecutors:
    """Encoding threads: each job takes virtual time."""

    def __init__(self, process: "TokenizerProcess") -> None:
        self._process = process
        self._completed: deque[tuple[EncodingJob, Any]] = deque()
        self._life = process.lives
        self._units = process.work_register.units
        self._running: dict[ExecutorName, list[EncodingJob]] = {name: [] for name in ExecutorName}

    @property
    def idle(self) -> bool:
        return not any(self._running.values())

    def start_jobs(self, jobs: EncodingQueue) -> None:
        """As JobExecutors."""
        if any(job.alone for running in self._running.values() for job in running):
            return
        if jobs.trials:
            if self.idle and (trial := jobs.take_trial(in_loop=False)) is not None:
                self._begin(trial)
            return
        for name, running in self._running.items():
            while (free := THREADS[name] - len(running)) > 0:
                job = jobs.take(name, passed_over=[one.client for one in running] if free == 1 else ())
                if job is None:
                    break
                self._begin(job)

    def _begin(self, job: EncodingJob) -> None:
        unit = next(unit for unit in range(1, len(self._units)) if not self._units[unit])
        self._units[unit] = register_number(job.context) or 1
        self._running[job.executor].append(job)
        self._process.clock.after(self._process.simulation.encoding_delay(), self._finish, job, unit)

    def _finish(self, job: EncodingJob, unit: int) -> None:
        if self._life == self._process.lives and self._process.alive:
            self._process.run_code(lambda: self._completed.append((job, job.run())))
            self._units[unit] = 0
            self._process.wake()

    def completed_jobs(self) -> Iterator[tuple[EncodingJob, Any]]:
        while self._completed:
            job, result = self._completed.popleft()
            self._running[job.executor].remove(job)
            yield job, result


class TokenizerProcess(SimulatedProcess):
    """A tokenizer."""

    role = "tokenizer"

    def _start(self) -> None:
        self.front = self.bind(f"tok-{self.replica}.front")
        replicas = self.simulation.config.replicas
        self.backs = [self.connect(scheduler_socket(index, "front")) for index in range(replicas)]
        self.ends = EndsPerAdd(self.simulation, self.name)
        self.pool: TokenizerPool | None = CheckedPool(self)
        self._streams = ResumableStreams(self.pool.handle, lambda: self.clock.now)
        self._executors = SimulatedExecutors(self)

    def scheduler_work_in_progress(self, peer: PeerId) -> bytes:
        """As process.work_in_progress."""
        scheduler = self.simulation.schedulers[peer.replica]
        return scheduler.work_register.in_progress() if scheduler.hello().boot == peer.boot else b""

    def kill(self, cause: str, outside: bool = True) -> None:
        if self.alive and not outside:
            self.simulation.tokenizer_crashes.update(split_in_progress(self.work_register.in_progress()))
        super().kill(cause, outside)

    def _ended(self) -> None:
        self.pool = None

    def _run(self) -> None:
        assert self.pool is not None
        self.poll_links()
        executors: Any = self._executors
        tokenizer_main.run_once(self.pool, self._streams, [self.front], self.backs, executors)
        if self.beat_due:
            self.exchange_beats(self.pool.beat())
        if (deadline := self.pool.deadline()) is not None:
            self.wake_at(deadline)
        self.wake_while_readable()


class CheckedPool(TokenizerPool):
    """A pool whose answers are checked, and which some prompts crash."""

    def __init__(self, process: TokenizerProcess) -> None:
        super().__init__(
            byte_level(),
            CHATS,
            lambda: process.clock.now,
            build_grammar=build_grammar,
            work_register=process.work_register,
            work_in_progress=process.scheduler_work_in_progress,
        )
        self._encoder = MortalEncoder(byte_level(), CHATS, None)
        self._process = process
        self._cancelled: set[tuple[Any, int]] = set()  # by Cancels since the latest `drain_outgoing`

    def handle(self, peer: Any, message: Any) -> None:
        process = self._process
        process.simulation.trace(process.name, "<-", peer, message)
        if isinstance(message, Cancel) and process.ends.open.get(peer, {}).get(message.rid) is Generate:
            self._cancelled.add((peer, message.rid))
        if peer.role != "scheduler":
            process.ends.received(peer, message)
        super().handle(peer, message)

    def drain_outgoing(self) -> list[tuple[Any, Any]]:
        messages = super().drain_outgoing()
        forwarded = 0
        for peer, message in messages:
            if peer.role != "scheduler":
                self._process.ends.sent(peer, message)
                if isinstance(message, End):
                    self._cancelled.discard((peer, message.rid))
            forwarded += isinstance(message, Cancel)
        if len(self._cancelled) > forwarded and all(peer in self._process.ends.open for peer, _ in self._cancelled):
            self._process.simulation.fail(f"{self._process.name} does not forward a Cancel: {self._cancelled}")
        self._cancelled.clear()
        return messages


def build_grammar(grammar: bytes, chat: RenderedChat | None, is_wanted: Callable[[], bool]) -> CheckedGrammar:
    """Stands for GrammarCompiler.build. The worker's form of a grammar is its text; INVALID_GRAMMAR is rejected."""
    if grammar == INVALID_GRAMMAR:
        raise GrammarError("the grammar is invalid")
    return CheckedGrammar(f"compiled {grammar.decode()}")


class MortalEncoder(PromptEncoder):
    """An encoder that some prompts crash."""

    def encode_generate(self, message: Generate) -> Any:
        if is_poison("tokenizer", message.input_ids):
            raise Crashed("a poisonous prompt")
        return super().encode_generate(message)


# --- scheduler --------------------------------------------------------------------------------------------------------


class SchedulerProcess(SimulatedProcess):
    """The scheduler."""

    role = "scheduler"
    _state_for_successor = PredecessorState([])  # what it has written down for its successor

    def _start(self) -> None:
        self.front = self.bind(scheduler_socket(self.replica, "front"))
        self._links = [self.bind(scheduler_socket(self.replica, "back")), self.front]
        self.ends = EndsPerAdd(self.simulation, self.name)
        self.scheduler: Scheduler | None = CheckedScheduler(self)
        self._state_changes = 0
        predecessor = self._state_for_successor._replace(last_exit=self.last_exit)
        self.scheduler.handle(predecessor, PeerId(*self.hello()[1:4]), self.clock.now)
        self._metrics = UnpublishedMetrics("model")
        self._turns = 0
        self._draining_since = float("inf")

    def hand_over(self) -> None:
        """With several replicas it is drained first."""
        if self.scheduler is None or len(self.simulation.schedulers) == 1 or self.scheduler.draining:
            super().hand_over()
        elif self.running:
            self.simulation.trace(self.name, "drains")
            self.scheduler.draining, self._draining_since = True, self.clock.now
            self.wake()
            self.clock.after(DRAIN_SECONDS, self._end_drain, self.lives)

    def _end_drain(self, life: int) -> None:
        if life == self.lives:
            self.hand_over()

    @property
    def drains(self) -> bool:
        """Whether it takes no new requests."""
        return self.scheduler is not None and self.scheduler.draining

    def check_add(self, tokenizer: PeerId) -> None:
        """A scheduler that drains gets no new requests when the tokenizers know it."""
        now, simulation = self.clock.now, self.simulation
        changes = self.changed_at, simulation.tokenizers[tokenizer.replica].changed_at, simulation.health.dropped_at
        if now - max(self._draining_since, *changes) > DRAINING_KNOWN_SECONDS:
            simulation.fail(f"{self.name} drains, and {tokenizer} sends it a new request")

    def _ended(self) -> None:
        self.scheduler = None

    @property
    def loaded_adapters(self) -> list[LoadedAdapter]:
        """The adapters that the worker has, or is to load again."""
        return self.scheduler.worker.adapters.loaded if self.scheduler is not None else []

    def _run(self) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        if scheduler.draining and not scheduler.computes:
            self._say_goodbye()
            raise Killed("drained")
        self.poll_links()
        scheduler_main.run_once(scheduler, self._links, self._metrics, None)
        if self.beat_due:
            self.exchange_beats(scheduler.beat(self.clock.now))
        if scheduler.successor_state_changes != self._state_changes:  # as SuccessorFile.write_changes
            self._state_changes = scheduler.successor_state_changes
            self._state_for_successor = scheduler.successor_state
        self._turns += 1
        if self._turns % 64 == 0:
            check_scheduler(scheduler)
        self.wake_at(scheduler.deadline(self.clock.now))
        self.wake_while_readable()


class UnpublishedMetrics(SchedulerMetrics):
    """Publishes nothing: metrics are not simulated."""

    def publish(self, scheduler: Scheduler, now: float) -> None:
        scheduler.counters.admissions.clear()
        self._finished_steps.clear()
        self._joined_seconds.clear()


class CheckedScheduler(Scheduler):
    """A scheduler whose answers are checked, and which some prompts crash."""

    def __init__(self, process: SchedulerProcess) -> None:
        super().__init__(process.simulation.config.scheduler, AdmissionOrder(process.simulation), process.work_register)
        self._process = process

    def handle(self, message: Any, source: Any, now: float) -> None:
        process = self._process
        process.simulation.trace(process.name, "<-", source, message)
        if isinstance(message, Add) and is_poison("scheduler", message.prompt_ids):
            raise Crashed("a poisonous prompt")
        if isinstance(message, Add):
            process.check_add(source)
        if source.role == "tokenizer":
            process.ends.received(source, message)
        super().handle(message, source, now)

    def outgoing(self) -> Iterator[tuple[Any, Any]]:
        for peer, message in super().outgoing():
            if peer.role == "tokenizer":
                self._process.ends.sent(peer, message)
            yield peer, message


# --- worker -----------------------------------------------------------------------------------------------------------


class SimulatedEngine:
    """A FakeWorker whose steps take virtual time, two of them queued on the device. Steps that break the protocol fail
    the simulation."""

    def __init__(self, process: "WorkerProcess") -> None:
        self._process = process
        self._clock = process.clock
        self._simulation = process.simulation
        self._worker = FakeWorker(self._simulation.config.worker)
        if process.memory is not None:
            self._worker.share_memory(process.memory)
        self.limits = self._worker.limits
        self.adapters = self._worker.adapters
        load_adapters(self.adapters, tuple((name, str(ADAPTERS / name)) for name in SETTINGS_ADAPTERS))
        self._deadly: set[int] = set()  # slots with prompts that crash the worker
        self._broken: set[int] = set()  # slots with prompts that fail their step
        self._failed_epoch = 0  # a step of it has failed: those that follow are answered with nonsense
        self._free_at = 0.0
        self._in_flight: deque[PendingStep] = deque()

    @property
    def next_done_at(self) -> float | None:
        """When the oldest step in flight is done."""
        return self._in_flight[0].done_at if self._in_flight else None

    def end(self) -> FakeWorker:
        """Returns the worker, whose pages hold nothing of use where the steps in flight write."""
        for pending in self._in_flight:
            if not pending.crashes and pending.step.epoch != self._failed_epoch:
                self._worker.lose_rows(pending.step)
        return self._worker

    def reset(self) -> None:
        self._worker.reset()
        self._deadly.clear()
        self._broken.clear()
        self._failed_epoch = 0

    def held_pages(self) -> list[HeldPages]:
        return self._worker.held_pages()

    def prefault_memory(self) -> bool:
        return False

    def release_memory(self) -> None:
        pass

    def launch(self, step: Step) -> "PendingStep":
        for slot in step.slots:
            for role, slots in (("worker", self._deadly), ("step", self._broken)):
                (slots.add if is_poison(role, slot.token_ids) else slots.discard)(slot.slot)
        computed = sum(unpack_int32(step.counts))
        self._free_at = max(self._clock.now, self._free_at) + self._simulation.step_seconds(computed)
        rows = unpack_int32(step.rows)
        if not self._deadly.isdisjoint(rows) or any(pending.crashes for pending in self._in_flight):
            return self._launched(step, StepResult(step.number, step.epoch, b"", b"", b""), crashes=True)
        if step.epoch == self._failed_epoch:
            return self._launched(step, nonsense(step), crashes=False)
        if not self._broken.isdisjoint(rows):
            self._failed_epoch = step.epoch
            raise ValueError("a poisonous prompt")
        result = self._worker.run_step(step)
        if result.error:
            self._simulation.fail(f"the scheduler sent an invalid step: {result.error}")
        microseconds = int((self._free_at - self._clock.now) * 1e6)
        return self._launched(step, result._replace(forward_us=microseconds), crashes=False)

    def _launched(self, step: Step, result: StepResult, crashes: bool) -> "PendingStep":
        self._in_flight.append(PendingStep(step, result, self._free_at, crashes))
        return self._in_flight[-1]

    def is_done(self, pending: "PendingStep") -> bool:
        return self._clock.now >= pending.done_at

    def collect(self, pending: "PendingStep") -> StepResult:
        if (wait := pending.done_at - self._clock.now) > 0:
            self._clock.sleep(wait)
        if pending.crashes:
            raise Crashed("a poisonous prompt")
        self._in_flight.popleft()
        return pending.result


def nonsense(step: Step) -> StepResult:
    """What a worker may answer to a step that builds on a failed one."""
    rows = sum(step.samples)
    return StepResult(
        step.number, step.epoch, b"\1" * rows, pack_column(INT32, [41] * rows), pack_column(FLOAT32, [0.0] * rows)
    )


class PendingStep(SimpleNamespace):
    """A step that the engine computes."""

    def __init__(self, step: Step, result: StepResult, done_at: float, crashes: bool) -> None:
        super().__init__(step=step, result=result, done_at=done_at, crashes=crashes)


class WorkerProcess(SimulatedProcess):
    """A worker; also the `Process` of its loop."""

    role = "worker"
    settings = SimpleNamespace(start_timeout=0.0, hang_timeout=60.0)
    stopping = False
    memory: FakeWorker | None = None  # with the pages of the life before
    _updates: Any = None

    def hello(self) -> Hello:
        report = self.last_exit
        kept = self.memory is not None and report is not None and report.outside
        return super().hello()._replace(keeps_pages=kept)

    def _start(self) -> None:
        self._worker_loop: WorkerLoop | None = WorkerLoop(self, self.connect(scheduler_socket(self.replica, "back")))  # type: ignore[arg-type]
        self._engine = SimulatedEngine(self)
        self._ready_at = self.clock.now + self.simulation.loading_seconds()
        self._updates = None
        self._worker_loop.progress("loading weights", 0)

    def kill(self, cause: str, outside: bool = True) -> None:
        scheduler = self.simulation.schedulers[self.replica].scheduler
        if self.alive and not outside and scheduler is not None:
            in_progress = {one for step in scheduler.pipeline.steps for one in step.requests}
            crashing = {
                one.context.fingerprint for one in in_progress if is_poison("worker", one.token_ids[:1].tobytes())
            }
            self.simulation.crashes.worker_crashed(self.replica, crashing)
        super().kill(cause, outside)

    def _ended(self) -> None:
        self._worker_loop = None
        if self.simulation.config.shares_memory:
            self.memory = self._engine.end()

    @property
    def had_been_ready(self) -> bool:
        return self._updates is not None

    @property
    def loaded_adapters(self) -> list[LoadedAdapter]:
        """The adapters that this worker has."""
        return self._engine.adapters.loaded_adapters if self.alive else []

    def _run(self) -> None:
        loop = self._worker_loop
        assert loop is not None
        self.poll_links()
        if self._updates is None:
            if self.clock.now < self._ready_at:
                loop.progress("loading weights", int(100 * (1 - (self._ready_at - self.clock.now))))
                self.wake_at(self._ready_at)
                return
            self._updates = loop.begin_serving(self._engine)
        loop.run_once(self._engine, self._updates)
        if loop.wait_seconds() == 0.0:
            self.wake()
        elif (done_at := self._engine.next_done_at) is not None:
            self.wake_at(done_at)
        self.wake_while_readable()

    def watch_link(self, link: Link) -> None:
        pass

    def wake_loop(self) -> None:
        self.wake()

    def extend_deadline(self, seconds: float) -> None:
        pass

    def begin_work(self, seconds: float, work: str, began_at: float) -> None:
        pass

    def end_work(self) -> None:
        pass

    def publish_state(self, state: str, stage: str = "", percent: int = 0) -> None:
        pass


# --- supervisor -------------------------------------------------------------------------------------------------------


class Supervisor:
    """Restarts processes that have ended, and kills those that are stopped for `hang_timeout` seconds."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation

    def process_ended(self, process: SimulatedProcess) -> None:
        self._simulation.clock.after(self._simulation.restart_seconds(), self._restart, process)

    def process_stopped(self, process: SimulatedProcess) -> None:
        timeout = self._simulation.config.hang_timeout
        self._simulation.clock.after(timeout, self._replace_hung, process, process.lives, self._simulation.clock.now)

    def _restart(self, process: SimulatedProcess) -> None:
        if not process.alive:
            process.start()

    def _replace_hung(self, process: SimulatedProcess, life: int, stopped_at: float) -> None:
        if process.lives == life and process.stopped:
            process.kill("missed its heartbeat deadline")
