"""The simulation: a whole server, its clients and what goes wrong, from one seed."""

import gc
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

from tests.scheduler.invariants import check_scheduler
from tests.simulation.clock import VirtualClock
from tests.simulation.faults import FaultConfig, FaultInjector
from tests.simulation.invariants import CrashesAtOneReplica, HealthCheck, IdleReplicaCheck, StoppedUpstreamCheck
from tests.simulation.network import Network
from tests.simulation.processes import (
    SETTINGS_ADAPTERS,
    FrontEnd,
    SchedulerProcess,
    SharedQuarantine,
    SimulatedProcess,
    Supervisor,
    TokenizerProcess,
    WorkerProcess,
)
from tests.simulation.workload import ADDED_ADAPTER, UNREADABLE, VOCAB_SIZE, ClientRequest, Workload
from tgi.microkernel.errors import UserError
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.kv_groups import GroupKind, KVGroup
from tgi.microkernel.messages.protocol import decode
from tgi.scheduler.adapters import MAX_RETRY_SECONDS
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.tokenizer import encoding_jobs
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig
from tgi.worker.lora import registry

NO_DEFAULT = object()
# Longer delays would look as if a process were silent.
MAX_DELAY_SECONDS = 0.5
# A busy machine may run a process this much later.
BUSY_SECONDS = 0.6
# Some restarts take longer.
LONG_RESTART_SECONDS, LONG_RESTART_SHARE = 10.0, 0.02
# Net allocations of container objects that start a pass of the garbage collector.
GC_THRESHOLD = 200_000
# Entries of the trace that are kept.
TRACE_ENTRIES = 20_000


# Mean seconds between two faults, and of a stop. With more of both the server would seldom compute.
FAULT_SECONDS = ((0.2, 0.1), (0.5, 0.1), (0.5, 4.0), (1.5, 0.1), (1.5, 4.0))


class SimulationConfig(NamedTuple):
    """One run. `draw_config` draws one from a seed."""

    seed: int
    requests: int
    front_ends: int
    tokenizers: int
    clients: int
    think_seconds: float
    worker: FakeWorkerConfig
    scheduler: SchedulerConfig
    faults: FaultConfig
    delay_seconds: float  # mean delay of a frame
    slow_share: float  # of the frames, which take up to a hundred times as long
    step_seconds: float
    restart_seconds: float
    busy_share: float = 0.0  # of the turns, which begin up to BUSY_SECONDS late
    inline_size: int = 1 << 20  # characters of a prompt that a tokenizer encodes in its loop
    poison_share: float = 0.0  # of the requests
    poison_roles: tuple[str, ...] = ("worker", "step", "tokenizer", "scheduler")
    max_concurrent_requests: int = 10_000
    adapter_share: float = 0.0  # of the requests, that load or unload an adapter
    adapter_failures: float = 0.0  # share of the adapters whose files cannot be read, while there are faults
    hang_timeout: float = 12.0  # seconds until the supervisor kills a stopped process
    healthy_after: float = 4.0  # seconds in which all processes run until /health must be 200
    patience: float = 150.0  # seconds that a request may take
    replicas: int = 1
    shares_memory: bool = False  # a worker has the memory of the one before it


class SimulationFailed(AssertionError):
    """An invariant does not hold. `trace` holds what happened before."""

    def __init__(self, seed: int, fault: str, trace: list[str]) -> None:
        super().__init__(f"seed {seed}: {fault}\n\n" + "\n".join(trace[-40:]))
        self.seed = seed
        self.fault = fault
        self.trace = trace


def draw_config(seed: int, requests: int = 1000) -> SimulationConfig:
    """The configuration of a seed."""
    random = Random(f"config {seed}")
    slots, clients = random.choice((2, 4, 8, 16, 32)), random.choice((10, 40, 80))
    worker = FakeWorkerConfig(
        pages=random.randint(24, 160), page_size=4, slots=slots, vocab_size=VOCAB_SIZE, max_total_tokens=96,
        max_batch_prefill_tokens=random.choice((16, 48, 256)),
    )  # fmt: skip
    groups = Random(f"groups {seed}")
    if groups.random() < 0.5:  # as a model whose layers alternate, or all have a sliding window
        sliding = KVGroup(GroupKind.SLIDING, groups.choice((3, 10, 33)))
        chosen = groups.choice(((KVGroup(), sliding), (KVGroup(), sliding, sliding), (sliding,)))
        worker = worker._replace(groups=chosen, pages=worker.pages * len(chosen))
    if groups.random() < 0.3:  # some of its layers are recurrent
        states = KVGroup(
            GroupKind.RECURRENT, snapshots=groups.choice((1, 4, 20)), interval=groups.choice((4, 16)), drafts=6
        )
        worker = worker._replace(groups=(*worker.groups, states))
    scheduler = SchedulerConfig(
        prefix_caching=random.random() < 0.7,
        step_target=random.choice((0.2, 0.01)),
        stall_limit=2.0,
        max_drafts=random.choice((0, 0, 1, 4)),
        draft_model=random.random() < 0.5,
    )
    config = SimulationConfig(
        seed=seed,
        requests=requests,
        front_ends=random.randint(1, 3),
        tokenizers=random.randint(1, 3),
        clients=clients,
        think_seconds=random.choice((0.01, 0.1)),
        worker=worker,
        scheduler=scheduler,
        faults=FaultConfig(*random.choice(FAULT_SECONDS)),
        delay_seconds=random.choice((0.0001, 0.001, 0.01)),
        slow_share=random.choice((0.0, 0.02)),
        step_seconds=random.choice((0.002, 0.01)),
        restart_seconds=random.choice((0.05, 0.5)),
        busy_share=random.choice((0.0, 0.003)),
        inline_size=random.choice((1 << 20, 40)),
        poison_share=random.choice((0.0, 0.01)),
        max_concurrent_requests=random.choice((10_000, 10_000, clients * 3 // 4)),
        adapter_share=random.choice((0.005, 0.03)),
        replicas=random.choice((1, 1, 2, 3)),
        adapter_failures=random.choice((0.0, 0.0, 0.3)),
        shares_memory=Random(f"memory {seed}").random() < 0.5,
    )
    # Where a process takes longer to start than until the next one dies, hardly any request ends.
    return config._replace(restart_seconds=min(config.restart_seconds, config.faults.mean_seconds / 2))


class Simulation:
    """One server with its clients. `run` raises SimulationFailed if an invariant does not hold."""

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        self.clock = VirtualClock()
        self.random = Random(f"times {config.seed}")
        self.quarantine = SharedQuarantine()
        self.network = Network(self.clock, self.random, self._delay)
        self.supervisor = Supervisor(self)
        self.faults = FaultInjector(self, config.faults)
        self.workload = Workload(self)
        self.front_ends = [FrontEnd(self, index) for index in range(config.front_ends)]
        self.tokenizers = [TokenizerProcess(self, index) for index in range(config.tokenizers)]
        self.schedulers = [SchedulerProcess(self, index) for index in range(config.replicas)]
        self.workers = [WorkerProcess(self, index) for index in range(config.replicas)]
        self.health = HealthCheck(self)
        self.overtaken: Counter[str] = Counter()  # the most that AdmissionOrder has counted
        self.stopped_upstream = StoppedUpstreamCheck(self)
        self.idle_replicas = IdleReplicaCheck(self)
        self.crashes = CrashesAtOneReplica(self)
        self.tokenizer_crashes: Counter[bytes] = Counter()  # by fingerprint of what they had in progress
        self._failure: SimulationFailed | None = None
        self._trace: deque[tuple[float, tuple[Any, ...]]] = deque(maxlen=TRACE_ENTRIES)

    @property
    def processes(self) -> list[SimulatedProcess]:
        return [*self.front_ends, *self.tokenizers, *self.schedulers, *self.workers]

    # --- times --------------------------------------------------------------------------------------------------------

    def _delay(self) -> float:
        delay = self.random.expovariate(1 / self.config.delay_seconds)
        if self.config.slow_share and self.random.random() < self.config.slow_share:
            delay *= self.random.uniform(1, 100)
        return min(delay, MAX_DELAY_SECONDS)

    def turn_delay(self) -> float:
        """Between an event and the turn of the process that handles it."""
        if self.random.random() < self.config.busy_share:
            return self.random.random() * BUSY_SECONDS
        return self.random.random() * self.config.delay_seconds

    def encoding_delay(self) -> float:
        return self.random.expovariate(1 / 0.01)

    def step_seconds(self, tokens: int) -> float:
        return self.config.step_seconds * (0.8 + 0.4 * self.random.random()) + 1e-5 * tokens

    def loading_seconds(self) -> float:
        return self.random.uniform(0, self.config.restart_seconds)

    def restart_seconds(self) -> float:
        seconds = self.random.uniform(0.1, 1.0) * self.config.restart_seconds
        return seconds + (LONG_RESTART_SECONDS if self.random.random() < LONG_RESTART_SHARE else 0.0)

    # --- run ----------------------------------------------------------------------------------------------------------

    def run(self, events: int | None = None) -> None:
        """Runs until all requests have ended, then without faults until nothing is left to do, or for `events`."""
        with (
            self.clock.installed(self.config.seed),
            self._rare_garbage_collection(),
            self._logs_in_trace(),
            self._simulated_threads(),
        ):
            for process in self.processes:
                process.start()
            self.workload.start()
            self.faults.start()
            self.health.start()
            self.stopped_upstream.start()
            self.idle_replicas.start()
            while not self.workload.finished:
                self._run_next()
                if self.clock.events == events:
                    return
            self.faults.end()
            end = self.clock.now + self.config.hang_timeout + self.config.healthy_after + 1
            if self.config.adapter_failures:
                end += MAX_RETRY_SECONDS
            while self.clock.now < end:
                self._run_next()
            self._check_idle()

    def _run_next(self) -> None:
        try:
            self.clock.run_next()
        except Exception as error:
            if self._failure is not None:
                raise self._failure from error
            raise SimulationFailed(self.config.seed, f"{type(error).__name__}: {error}", self.trace_lines()) from error
        if self._failure is not None:  # raised within code that caught it
            raise self._failure
        if self.clock.events % 1024 == 0:
            self._check_patience()

    def _check_patience(self) -> None:
        if self.clock.now - self.workload.latest_end > self.config.patience:
            self.fail(f"no request has ended since {self.workload.latest_end:.1f} s")
        for request in self.workload.active:
            if self.clock.now - request.began > self.config.patience:
                self.fail(f"request {request.plan.number} waits for {self.clock.now - request.began:.1f} s", request)

    def _check_idle(self) -> None:
        """Nothing is left of the requests in any process, and all know the same adapters."""
        adapters = sorted({one.name for worker in self.workers for one in worker.loaded_adapters})
        lasting = {*SETTINGS_ADAPTERS} | ({ADDED_ADAPTER} if self.workload.adapter_added_at is not None else set())
        for worker in self.workers:
            names = {one.name for one in worker.loaded_adapters}
            self._require(lasting <= names, f"{worker.name} has lost adapters: it has {names}")
            self._require(names == {*adapters}, f"{worker.name} has the adapters {names}, others {adapters}")
        for front_end in self.front_ends:
            assert front_end.router is not None
            self._require(front_end.router.in_flight == 0, f"{front_end.name} has active requests")
            left = [one for tokenizer in front_end.router.tokenizers for one in tokenizer.requests]
            self._require(not left, f"{front_end.name} keeps {left} without an End")
            names = sorted(front_end.router.adapters)
            self._require(names == adapters, f"{front_end.name} has the adapters {names}, the worker {adapters}")
            self._require(front_end.permits.held == 0, f"{front_end.name} holds {front_end.permits.held} permits")
        for tokenizer in self.tokenizers:
            assert tokenizer.pool is not None
            self._require(tokenizer.pool.idle, f"{tokenizer.name} keeps requests")
            self._require(not any(tokenizer.ends.open.values()), f"{tokenizer.name} owes {tokenizer.ends.open} an End")
        for process in self.schedulers:
            scheduler = process.scheduler
            assert scheduler is not None
            scheduler.commit()
            check_scheduler(scheduler)
            left = [scheduler.queued, scheduler.running, scheduler.pages_used]
            self._require(left == [0, 0, 0], f"the scheduler has {left} requests queued, running, and pages")
            self._require(not any(process.ends.open.values()), f"the scheduler owes {process.ends.open} an End")

    def _require(self, holds: bool, fault: str) -> None:
        if not holds:
            self.fail(fault)

    # --- trace --------------------------------------------------------------------------------------------------------

    def trace(self, *entry: Any) -> None:
        """Records what happens. Formatted only if the simulation fails."""
        self._trace.append((self.clock.now, entry))

    def trace_lines(self) -> list[str]:
        """All entries as text."""
        return [f"{now:10.6f} {' '.join(map(format_entry, entry))}" for now, entry in self._trace]

    def fail(self, fault: str, request: ClientRequest | None = None) -> None:
        """Ends the simulation."""
        if request is not None:
            fault += f"\n{format_entry(request.plan)}"
        fault = f"at {self.clock.now:.6f} s: {fault}"
        self._failure = self._failure or SimulationFailed(self.config.seed, fault, self.trace_lines())
        raise self._failure

    @contextmanager
    def _rare_garbage_collection(self) -> Iterator[None]:
        """As in the scheduler: little is in reference cycles, so most passes of the collector find nothing."""
        thresholds = gc.get_threshold()
        gc.set_threshold(GC_THRESHOLD)
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)

    @contextmanager
    def _simulated_threads(self) -> Iterator[None]:
        """Lets tokenizers encode prompts in threads that are shorter than the product's limit, and the worker's thread
        for adapters run in virtual time."""
        originals = encoding_jobs.MAX_INLINE_SIZE, registry.ThreadPoolExecutor
        encoding_jobs.MAX_INLINE_SIZE = self.config.inline_size
        registry.ThreadPoolExecutor = lambda *_: SimulatedThread(self)  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            encoding_jobs.MAX_INLINE_SIZE, registry.ThreadPoolExecutor = originals  # type: ignore[misc]

    @contextmanager
    def _logs_in_trace(self) -> Iterator[None]:
        """Log records of the product go to the trace."""
        logger, handler = logging.getLogger("tgi"), TraceHandler(self)
        propagates, level = logger.propagate, logger.level
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagates
            logger.setLevel(level)


class SimulatedThread:
    """The thread of a worker that reads the files of adapters."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        seconds = self._simulation.encoding_delay()
        if self._simulation.faults.adapter_fails():
            self._simulation.clock.after(seconds, lambda: future.set_exception(UserError(UNREADABLE)))
        else:
            self._simulation.clock.after(seconds, lambda: future.set_result(function(*arguments)))
        return future


def format_entry(entry: Any) -> str:
    """A part of an entry as text. Of a message the fields that differ from their defaults, columns as numbers."""
    fields = getattr(entry, "_fields", None)
    if fields is None or isinstance(entry, PeerId):
        return str(entry)
    defaults = entry._field_defaults
    shown = [
        f"{name}={format_field(name, value)}"
        for name, value in zip(fields, entry, strict=True)
        if value != defaults.get(name, NO_DEFAULT)
    ]
    return f"{type(entry).__name__}({', '.join(shown)})"


def format_field(name: str, value: Any) -> str:
    """A field of a message as text."""
    if isinstance(value, bytes) and name in ("counts", "samples") and len(value) % 4:
        return str(list(value))
    if isinstance(value, bytes) and len(value) % 4 == 0 and (name.endswith("ids") or name in ("counts", "rows")):
        return str(unpack_int32(value))
    if isinstance(value, bytes) and name == "sampling":
        return format_entry(decode(value))
    if isinstance(value, list):
        return f"[{', '.join(map(format_entry, value))}]"
    return format_entry(value)


class TraceHandler(logging.Handler):
    """Writes log records to the trace."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        self._simulation.trace("log", record.levelname, record.name, record.getMessage())
