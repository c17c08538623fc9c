"""The scheduler in one thread, between simulated tokenizers that check every message and a strict fake worker.

Time is virtual. Nothing happens unless a test asks for it: `plan` lets the scheduler send steps, `compute` lets the
worker run the oldest one, `deliver` passes its result to the scheduler.
"""

from collections import deque
from hashlib import blake2b
from typing import Any, NamedTuple

from tests.scheduler.adapter_updates import PATHS, AdapterUpdates
from tests.scheduler.invariants import check_scheduler
from tests.scheduler.simulated_tokenizers import GREEDY, SimulatedTokenizer, SubmittedRequest
from tests.tops import Tops, split_tops
from tgi.microkernel.links.link import PeerDisconnected, PeerId
from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT8, pack_column, unpack_float32, unpack_int32
from tgi.microkernel.messages.kv_groups import KVGroup
from tgi.microkernel.messages.protocol import (
    PAGE_KEY_BYTES,
    PROTOCOL,
    AdapterUpdated,
    Add,
    Cancel,
    FinishReason,
    Hello,
    LastExit,
    LoadedAdapter,
    PagesTransferred,
    RequestContext,
    SlotAssignment,
    Step,
    StepResult,
    Stop,
    StoredPages,
    TransferPages,
    UpdateAdapter,
    decode,
    encode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorker, FakeWorkerConfig


class FailingWorker(FakeWorker):
    """A worker whose steps may fail, and whose pages can be moved to files."""

    def lose_step(self, step: Step) -> None:
        """A step fails, or builds on one that did: the pages that its rows write hold nothing of use afterwards."""
        if step.epoch > self.epoch:
            self.reset()
            self.epoch = step.epoch
        self.number = step.number
        self._copy_states(step)
        self._assign_slots(step)
        self._append_pages(step)
        self.lose_rows(step)

    def read_page(self, page: int) -> list[int]:
        return [*self._pages[page]]

    def write_page(self, page: int, content: list[int]) -> None:
        self._pages[page] = [*content]


class Simulation:
    """Its methods may be called in any order, `check` at any time."""

    def __init__(
        self,
        worker_config: FakeWorkerConfig,
        config: SchedulerConfig = SchedulerConfig(),  # noqa: B008
        tokenizers: int = 1,
    ) -> None:
        self.worker_config = worker_config
        self.scheduler = Scheduler(config)
        self.journal: list[tuple[Any, ...]] = []  # the calls of this scheduler: name of the method, arguments
        self.now = 0.0
        self.clock_tick = 0.001  # time that each call of the scheduler takes
        self.lives = 0  # processes that were started
        self.rids = 0
        self.waited_ms = 0  # of the requests that are submitted from now on
        self.tokenizers: dict[int, SimulatedTokenizer] = {}
        self.worker: PeerId | None = None
        self.last_exit: LastExit | None = None  # of the latest worker that died
        self.engine = FailingWorker(worker_config)
        self.steps: deque[Step | TransferPages | UpdateAdapter] = deque()  # on their way to the worker
        self.results: deque[StepResult] = deque()  # on their way to the scheduler
        self.sent: list[Step] = []  # all steps of this scheduler
        self.received: list[tuple[PeerId, Any]] = []  # all other messages of this scheduler, with their receivers
        self.poison: set[int] = set()  # the worker crashes when it computes a prompt with such a first id
        self.broken: set[int] = set()  # a step fails when it computes a prompt with such a first id
        self.exhausting: set[int] = set()  # a step lacks memory when it computes a prompt with such a first id
        self.memory = 1 << 30  # a step of more tokens lacks memory
        self.first_ids: dict[int, int] = {}  # the first id of the prompt in each slot
        self.position_us = 10  # what each position adds to the 1000 µs of a step
        self.commits_after_plan = True  # as the scheduler's loop does
        self.adapters = AdapterUpdates(self)
        self.failed_epoch = 0  # steps of this epoch are answered with nonsense
        self.names_requests = False  # requests have fingerprints
        self.files: dict[bytes, list[int]] | None = None  # of pages, by key; None: the worker keeps none
        self.most_files = 0
        self.transfers: deque[TransferPages] = deque()  # that the worker may do at any time
        for index in range(tokenizers):
            self.tokenizer_up(index)

    # --- processes ----------------------------------------------------------------------------------------------------

    def tokenizer_up(self, index: int) -> SimulatedTokenizer:
        """Starts a tokenizer; the previous one of this index, if any, is gone."""
        if index in self.tokenizers:
            self.handle(PeerDisconnected(), self.tokenizers[index].peer)
        self.lives += 1
        tokenizer = self.tokenizers[index] = SimulatedTokenizer(index, self.lives)
        self.handle(Hello(PROTOCOL, *tokenizer.peer), tokenizer.peer)
        self.adapters.request_again(index)
        return tokenizer

    def worker_up(self, worker_config: FakeWorkerConfig | None = None, keeps_pages: bool = False) -> None:
        """Starts a worker, which is ready at once; the previous one, if any, is killed from outside. `keeps_pages`: it
        has the memory of the previous one."""
        if self.worker is not None:
            self.worker_down(outside=True)
        self.lives += 1
        self.worker = PeerId("worker", 0, f"boot-{self.lives}".encode())
        previous, self.engine = self.engine, FailingWorker(worker_config or self.worker_config)
        if keeps_pages:
            self.engine.share_memory(previous)
        self.first_ids.clear()
        self.adapters.worker_started()
        hello = Hello(PROTOCOL, *self.worker, last_exit=self.last_exit, keeps_pages=keeps_pages)
        self.handle(decode(encode(hello)), self.worker)
        self._report_files()
        self.handle(self.adapters.worker_status(), self.worker)

    def worker_down(self, outside: bool = False) -> None:
        """The worker crashes, or is killed from outside; messages in both directions are lost."""
        assert self.worker is not None
        worker, self.worker = self.worker, None
        self.last_exit = LastExit(worker.boot, "was killed" if outside else "crashed", outside)
        for step in self.steps:  # which it may have begun
            if isinstance(step, Step):
                self.engine.lose_step(step)
        self.steps.clear()
        self.results.clear()
        self.transfers.clear()
        self.adapters.begun.clear()
        self.handle(PeerDisconnected(), worker)

    def restart_scheduler(self, outside: bool = True, in_progress: list[bytes] | None = None) -> None:
        """The scheduler is killed from outside, or crashes with these requests in progress. All processes connect to
        the new one, and tokenizers submit their requests again."""
        report = LastExit(b"scheduler", "crashed", outside, b"".join(in_progress or ()))
        predecessor = self.scheduler.successor_state._replace(last_exit=report)
        self.scheduler = Scheduler(self.scheduler.config)
        self.adapters.begun.clear()
        self.journal.clear()
        self.sent.clear()
        self.received.clear()
        self.steps.clear()
        self.results.clear()
        self.transfers.clear()
        held_pages = self.engine.held_pages()
        self.engine.reset()
        self.failed_epoch = 0
        self.handle(decode(encode(predecessor)), PeerId("scheduler", 0, b"scheduler"))
        for tokenizer in self.tokenizers.values():
            self.handle(Hello(PROTOCOL, *tokenizer.peer), tokenizer.peer)
        if self.worker is not None:
            self.handle(Hello(PROTOCOL, *self.worker), self.worker)
            for held in held_pages:
                self.handle(decode(encode(held)), self.worker)
            self._report_files()
            self.handle(self.adapters.worker_status(), self.worker)
        for index, tokenizer in self.tokenizers.items():
            for rid, request in tokenizer.requests.items():
                if request.end is None:
                    self.submit(index, rid, request)
                    if request.cancelled_by_client:
                        self.handle(Cancel(rid), tokenizer.peer)
            self.adapters.request_again(index)

    def begin_again_when_idle(self) -> None:
        """The scheduler begins again if it is idle, as it does for a new file of a journal."""
        if self.scheduler.idle:
            messages = self.scheduler.begin_again()
            self.journal.clear()
            self.sent.clear()
            self.received.clear()
            for message, peer in messages:
                self.handle(message, peer)

    # --- tokenizers ---------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        new: int = 4,
        *,
        tokenizer: int = 0,
        stop_ids: list[int] | None = None,
        seed: int | None = None,
        resume: list[int] | None = None,
        top_n: int = 0,
        choice: int = 0,
        prompt_top_n: int | None = None,
        adapter: LoadedAdapter | None = None,
        **context: Any,
    ) -> SubmittedRequest:
        """Submits a request. `seed`: None means greedy. `context`: fields of its RequestContext."""
        sampling = GREEDY if seed is None else SamplingParams(seed, do_sample=True)
        sampling = sampling._replace(top_n=top_n, choice=choice)
        if adapter is not None:
            sampling = sampling._replace(adapter=adapter.name, adapter_digest=adapter.digest)
        request = SubmittedRequest(
            prompt, new, stop_ids or [], sampling, resume or [], prompt_top_n, RequestContext(**context)
        )
        self.rids += 1
        self.tokenizers[tokenizer].requests[self.rids] = request
        self.submit(tokenizer, self.rids, request)
        return request

    def submit(self, tokenizer: int, rid: int, request: SubmittedRequest) -> None:
        columns = [pack_column(INT32, values) for values in (request.prompt, request.stop_ids, request.ids)]
        request.resumed = len(request.ids)
        add = Add(rid, columns[0], request.new, request.sampling, columns[1], columns[2], request.cache_salt)
        context = request.context._replace(
            waited_ms=self.waited_ms, fingerprint=fingerprint_of(request) if self.names_requests else b""
        )
        add = add._replace(context=context)
        if request.prompt_top_n is not None:
            add = add._replace(prompt_logprobs_from=1 + len(request.prompt_logprobs), prompt_top_n=request.prompt_top_n)
        if (rejection := self.scheduler.rejection(add, self.now)) is not None:
            self.tokenizers[tokenizer].receive(rejection._replace(prompt_tokens=len(request.prompt)))
            return
        self.handle(add, self.tokenizers[tokenizer].peer)

    def cancel(self, request: SubmittedRequest, kind: Any = Cancel) -> None:
        for tokenizer in self.tokenizers.values():
            latest_first = reversed(tokenizer.requests.items())
            if (rid := next((rid for rid, other in latest_first if other is request), None)) is not None:
                self.handle(kind(rid), tokenizer.peer)
                request.cancelled_by_client = True

    def stop(self, request: SubmittedRequest) -> None:
        self.cancel(request, Stop)

    # --- scheduler and worker -----------------------------------------------------------------------------------------

    def handle(self, message: Any, source: PeerId) -> None:
        self.now += self.clock_tick
        self.journal.append(("handle", message, source, self.now))
        self.scheduler.handle(message, source, self.now)
        self._pass_outgoing()

    def plan(self) -> int:
        """Lets the scheduler send all steps that it plans. Returns how many."""
        self.now += self.clock_tick
        count = 0
        while True:
            self.journal.append(("plan", self.now))
            step = self.scheduler.plan(self.now)
            if step is None:
                break
            assert self.worker is not None
            self.sent.append(step)
            self.steps.append(step)
            count += 1
        self._pass_outgoing()
        if self.commits_after_plan:
            self.commit()
        sent = [one for one in (*self.steps, *self.results) if isinstance(one, Step | StepResult)]
        in_flight = [one for one in sent if one.epoch == self.scheduler.pipeline.epoch]
        assert len(in_flight) <= 2
        assert not any(isinstance(one, Step) and one.drafts for one in in_flight) or len(in_flight) == 1
        return count

    def commit(self) -> None:
        self.journal.append(("commit",))
        self.scheduler.commit()

    def compute(self) -> StepResult | None:
        """The worker runs the next step. None if there is none, or the worker crashes."""
        self.begin_others()
        if not self.steps:
            return None
        step = self.steps.popleft()
        assert isinstance(step, Step)
        self.first_ids |= {slot.slot: unpack_int32(slot.token_ids)[0] for slot in step.slots}
        computed = {self.first_ids[slot] for slot in unpack_int32(step.rows)}
        if computed & self.poison:
            self.steps.appendleft(step)
            self.worker_down()
            return None
        lacks_memory = sum(unpack_int32(step.counts) + unpack_int32(step.drafts)) > self.memory
        if step.epoch == self.failed_epoch:
            self.engine.lose_step(step)
            result = self._nonsense(step)
        elif computed & self.broken:
            self.failed_epoch = step.epoch
            self.engine.lose_step(step)
            result = StepResult(step.number, step.epoch, b"", b"", b"", error="ValueError: broken")
        elif computed & self.exhausting or lacks_memory:
            self.failed_epoch = step.epoch
            self.engine.lose_step(step)
            result = StepResult(step.number, step.epoch, b"", b"", b"", error="no memory", out_of_memory=True)
        else:
            result = self.engine.run_step(step)
            assert result.error == "", result.error
        self.results.append(
            result._replace(
                forward_us=1000 + self.position_us * sum(unpack_int32(step.counts) + unpack_int32(step.drafts))
            )
        )
        return result

    def _report_files(self) -> None:
        if self.files is not None:
            assert self.worker is not None
            self.handle(StoredPages(b"".join([*self.files][-self.most_files :]), self.most_files), self.worker)

    def begin_others(self) -> None:
        """Takes the transfers and adapter updates before which all steps have been computed."""
        while self.steps and not isinstance(message := self.steps[0], Step):
            self.steps.popleft()
            (self.transfers if isinstance(message, TransferPages) else self.adapters.begun).append(message)

    def transfer(self) -> bool:
        """The worker writes or reads the pages of the oldest message for which it has computed all steps before, and
        answers. Returns whether there was one."""
        self.begin_others()
        if not self.transfers:
            return False
        message, done = self.transfers.popleft(), 0
        assert self.files is not None
        assert self.worker is not None
        size = PAGE_KEY_BYTES
        for begin in range(0, len(message.removed), size):
            self.files.pop(message.removed[begin : begin + size], None)
        for done, page in enumerate(unpack_int32(message.page_ids), 1):
            key = message.keys[(done - 1) * size : done * size]
            if not message.load:
                self.files[key] = self.engine.read_page(page)
            elif key in self.files:
                self.engine.write_page(page, self.files[key])
            else:
                done -= 1
                break
        assert len(self.files) <= self.most_files
        self.handle(PagesTransferred(message.number, done), self.worker)
        return True

    def _nonsense(self, step: Step) -> StepResult:
        """What a worker may answer to a step that builds on a failed one."""
        rows = sum(step.samples)
        return StepResult(
            step.number, step.epoch, b"\1" * rows, pack_column(INT32, [1] * rows), pack_column(FLOAT32, [0.0] * rows)
        )

    def deliver(self) -> bool:
        """The oldest result reaches the scheduler. Returns whether there was one."""
        if not self.results:
            return False
        assert self.worker is not None
        self.handle(self.results.popleft(), self.worker)
        return True

    def advance_time(self, seconds: float = 0.0) -> None:
        """Time passes; the scheduler may report its status."""
        self.now += seconds
        self.journal.append(("report_status", self.now))
        self.scheduler.report_status(self.now)
        self._pass_outgoing()

    def _pass_outgoing(self) -> None:
        for peer, message in self.scheduler.outgoing():
            message = decode(encode(message))
            self.received.append((peer, message))
            if peer == self.worker:
                self.steps.append(message)
            for index, tokenizer in self.tokenizers.items():
                if tokenizer.peer == peer and isinstance(message, AdapterUpdated):
                    self.adapters.receive_answer(index, message)
                elif tokenizer.peer == peer:
                    tokenizer.receive(message)

    def step(self) -> bool:
        """One result, with the next step planned ahead. Returns whether anything happened."""
        planned = self.plan() + self.adapters.apply_next_update()
        self.compute()
        if self.worker is None and self.scheduler.counters.worker_losses:
            return True
        return self.deliver() or self.transfer() or planned > 0

    def run(self, steps: int = 10_000) -> int:
        """Steps until nothing is left to do, and restarts the worker when it crashes. Returns the number of steps."""
        for count in range(steps):
            if self.worker is None:
                self.worker_up()
            if not self.step():
                self.check()
                return count
        raise AssertionError(f"not finished after {steps} steps")

    def check(self) -> None:
        check_scheduler(self.scheduler)

    @property
    def requests(self) -> list[SubmittedRequest]:
        return [request for tokenizer in self.tokenizers.values() for request in tokenizer.requests.values()]


def fingerprint_of(request: SubmittedRequest) -> bytes:
    """Equal for equal requests."""
    described = repr((request.prompt, request.new, request.stop_ids, request.sampling))
    return blake2b(described.encode(), digest_size=8).digest()


class ExpectedAnswer(NamedTuple):
    """What a request must receive, whatever the schedule."""

    ids: list[int]
    tops: list[Tops]  # of each id
    prompt_logprobs: list[float]  # from the prompt's second token on
    prompt_tops: Tops


def expected_ids(request: SubmittedRequest, worker_config: FakeWorkerConfig) -> list[int]:
    return expected_answer(request, worker_config).ids


def expected_answer(request: SubmittedRequest, worker_config: FakeWorkerConfig) -> ExpectedAnswer:
    """The reference: the request is computed alone, one token per step, without limits."""
    limits = worker_config.limits()
    pages = -(-limits.max_total_tokens // worker_config.page_size)
    worker = FakeWorker(worker_config._replace(groups=(KVGroup(),), pages=pages))
    if request.cache_salt:
        worker.adapters.add_adapter(worker.adapters.fetch_adapter("", PATHS[request.cache_salt]))
    size = worker_config.page_size
    known = len(request.prompt)
    expected = ExpectedAnswer([], [], [], [])
    asks = () if request.prompt_top_n is None or known == 1 else (1, request.prompt_top_n)
    prompt_only = not request.new and asks
    while (prompt_only and not expected.prompt_logprobs) or (
        len(expected.ids) < request.new and known < limits.max_total_tokens
    ):
        first = not expected.ids
        slots = [SlotAssignment(0, pack_column(INT32, request.prompt), known, request.sampling, *asks)] if first else []
        start = 0 if first else known - 1
        held = 0 if first else -(-start // size)
        pages = list(range(held, -(-known // size)))
        step = Step(
            number=len(expected.ids) + 1, epoch=1, slots=slots,
            page_tables=pack_column(INT32, [0] * len(pages)), page_ids=pack_column(INT32, pages),
            rows=pack_column(INT32, [0]), starts=pack_column(INT32, [start]),
            counts=pack_column(INT32, [known - start]),
            samples=pack_column(UINT8, [not prompt_only]),
        )  # fmt: skip
        worker.limits = worker.limits._replace(max_batch_prefill_tokens=1 << 30)
        result = worker.run_step(step)
        assert not result.error, result.error
        drawn = unpack_int32(result.token_ids)
        expected.ids.extend(drawn)
        expected.tops.extend(split_tops(result) or [[]] * len(drawn))
        expected.prompt_logprobs.extend(unpack_float32(result.prompt_logprobs))
        expected.prompt_tops.extend(
            zip(unpack_int32(result.prompt_top_ids), unpack_float32(result.prompt_top_logprobs), strict=True)
        )
        known += 1
        if expected.ids and expected.ids[-1] in request.stop_ids:
            break
    return expected


def replay(journal: list[tuple[Any, ...]], scheduler: Scheduler) -> tuple[list[tuple[PeerId, Any]], list[Step]]:
    """The messages and steps of a scheduler that gets the recorded calls."""
    messages: list[tuple[PeerId, Any]] = []
    steps: list[Step] = []
    for method, *arguments in journal:
        answer = getattr(scheduler, method)(*arguments)
        if method == "plan" and answer is not None:
            steps.append(answer)
        messages += scheduler.outgoing()
    return messages, steps


def assert_as_if_alone(request: SubmittedRequest, worker_config: FakeWorkerConfig) -> None:
    """Asserts that a request has ended with the same answer as if it had been computed alone."""
    assert request.end is not None
    expected = expected_answer(request, worker_config)
    assert request.ids == expected.ids
    assert request.tops == expected.tops[len(expected.ids) - len(request.tops) :]
    assert (request.prompt_logprobs, request.prompt_tops) == (expected.prompt_logprobs, expected.prompt_tops)
    by_length = len(expected.ids) == request.new
    assert request.end.reason == (FinishReason.LENGTH if by_length else FinishReason.EOS)
