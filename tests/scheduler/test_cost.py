"""The cost of a step in function calls and bytecode instructions: per decode row, and per request that arrives or ends.
No request here uses drafts, top-n tokens or adapters."""

import gc
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.counting import cost, per_item
from tgi.microkernel import metrics
from tgi.microkernel.codec import FLOAT32, INT32, pack_column
from tgi.microkernel.link import PeerId
from tgi.microkernel.metric_store import MetricStore
from tgi.microkernel.protocol import PROTOCOL, Add, DeploymentLimits, Hello, Status, Step, StepResult, encode
from tgi.microkernel.sampling_params import SamplingParams
from tgi.scheduler.metrics import SchedulerMetrics
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig

WORKER = PeerId("worker", 0, b"worker")
TOKENIZERS = [PeerId("tokenizer", replica, b"tokenizer") for replica in range(2)]
PAGE, PROMPT, ROOM = 16, 64, 1024
# In this many steps each row fills one page.
STEPS = PAGE


class Harness:
    """A scheduler with two steps in flight; all messages to it are made before anything is counted."""

    def __init__(self, rows: int, new: int, slots: int = 256) -> None:
        self.scheduler = Scheduler(SchedulerConfig())
        self.steps: deque[Step] = deque()
        limits = DeploymentLimits(
            max_total_tokens=ROOM,
            max_input_tokens=ROOM - 1,
            max_batch_total_tokens=256 * ROOM,
            max_batch_prefill_tokens=1 << 20,
            max_batch_size=slots,
            pages=256 * ROOM // PAGE,
            page_size=PAGE,
            vocab_size=49152,
            dtype="bfloat16",
            device="cpu",
        )
        for peer in TOKENIZERS:
            self.scheduler.handle(Hello(PROTOCOL, *peer), peer, 0.0)
        self.scheduler.handle(Hello(PROTOCOL, *WORKER), WORKER, 0.0)
        self.scheduler.handle(Status(ready=True, healthy=True, stage="ready", percent=100, limits=limits), WORKER, 0.0)
        self.adds = [
            Add(
                rid,
                pack_column(INT32, [*range(rid, rid + PROMPT)]),
                new,
                encode(SamplingParams(rid)),
                pack_column(INT32, [49000]),
            )
            for rid in range(rows)
        ]

    def arrive(self) -> None:
        """Submits half of the requests from each tokenizer."""
        for add in self.adds:
            self.scheduler.handle(add, TOKENIZERS[add.rid % 2], 0.0)

    def plan(self) -> None:
        """Plans until the pipeline is full."""
        while (step := self.scheduler.plan(0.0)) is not None:
            self.steps.append(step)

    def results(self, count: int) -> list[StepResult]:
        """The results of the next steps, which have a row for every request."""
        step, rows = self.steps[0], len(self.adds)
        columns = b"\1" * rows, pack_column(INT32, [*range(rows)]), pack_column(FLOAT32, [-0.5] * rows)
        return [StepResult(step.number + number, step.epoch, *columns, 1000) for number in range(count)]

    def handle_result(self, result: StepResult) -> None:
        """Handles one result."""
        self.steps.popleft()
        self.scheduler.handle(result, WORKER, 0.0)

    def finish(self) -> None:
        """The work after the step is sent."""
        for _, message in self.scheduler.outgoing():
            encode(message)
        self.scheduler.commit()


def decoding(rows: int) -> Callable[[], None]:
    """STEPS steps in which all of these rows decode."""
    harness = Harness(rows, 4 * STEPS)
    harness.arrive()
    harness.plan()
    results = harness.results(3 + STEPS)
    for result in results[:3]:
        harness.handle_result(result)
        harness.plan()
        harness.finish()

    def work() -> None:
        for result in results[3:]:
            harness.handle_result(result)
            harness.plan()
            harness.finish()

    return work


def iterating(rows: int) -> Callable[[], None]:
    """Whole iterations of the loop for these steps, without links and processes."""
    harness, scheduler_metrics = Harness(rows, 4 * STEPS), SchedulerMetrics()
    harness.arrive()
    harness.plan()
    results = harness.results(3 + STEPS)

    def iterate(result: StepResult, now: float) -> None:
        harness.steps.popleft()
        harness.scheduler.deadline(now)
        scheduler_metrics.handle_result(harness.scheduler, result, WORKER, now)
        while (step := scheduler_metrics.plan(harness.scheduler, now)) is not None:
            encode(step)
            harness.steps.append(step)
        harness.scheduler.report_status(now)
        harness.finish()
        scheduler_metrics.publish(harness.scheduler, now)

    for result in results[:3]:
        iterate(result, 0.0)

    def work() -> None:
        for number, result in enumerate(results[3:]):
            iterate(result, number / 250)  # short steps: the next one is planned with each result

    return work


def waiting(rows: int) -> Callable[[], object]:
    """An iteration of the loop while all slots are held and the other requests wait."""
    harness = Harness(rows, 4, slots=16)
    harness.arrive()
    harness.plan()
    harness.finish()

    def work() -> None:
        harness.scheduler.report_status(1.0)
        harness.scheduler.deadline(1.0)
        harness.plan()
        harness.finish()

    return work


def arriving(rows: int) -> Callable[[], object]:
    """All requests arrive."""
    return Harness(rows, 4).arrive


def admitting(rows: int) -> Callable[[], object]:
    """The plan that computes all prompts, none of which is cached."""
    harness = Harness(rows, 4)
    harness.arrive()
    return partial(harness.scheduler.plan, 0.0)


def entering(rows: int) -> Callable[[], object]:
    """The commit after that plan: all requests enter the lanes, and their pages are published."""
    harness = Harness(rows, 4)
    harness.arrive()
    harness.scheduler.plan(0.0)
    return harness.scheduler.commit


def ending(rows: int) -> Callable[[], object]:
    """The result with the last token of each request."""
    harness = Harness(rows, 1)
    harness.arrive()
    harness.plan()
    harness.finish()
    return partial(harness.handle_result, *harness.results(1))


def leaving(rows: int) -> Callable[[], object]:
    """Messages and commit after all requests have ended: four pages of each are published, and all are released."""
    harness = Harness(rows, 1)
    harness.arrive()
    harness.plan()
    harness.handle_result(*harness.results(1))
    return harness.finish


def test_cost_of_a_decode_row() -> None:
    """From its token to the next step, messages included, with a sixteenth of the cost of a page. Nothing is done per
    row: all other work is done by column, in C. Python code per request here would slow down every step."""
    each = per_item(decoding, 64, 256) / STEPS
    assert each.within(1, 19), each


@pytest.mark.parametrize(("rows", "calls", "instructions"), [(64, 278, 4_015), (256, 458, 7_663)])
def test_cost_of_a_step(rows: int, calls: int, instructions: int) -> None:
    """Decode rows alone: their own cost, and about 210 calls for the step itself and two tokenizers."""
    each = cost(decoding(rows)) / STEPS
    assert each.within(calls, instructions), each


def test_cost_of_a_loop_iteration_for_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including metrics, which are published when requests arrive or end, and otherwise once a second."""
    monkeypatch.setattr(metrics._process, "store", MetricStore(tmp_path))
    monkeypatch.setattr(metrics._process, "metrics", {})
    each = cost(iterating(1)) / STEPS
    assert each.within(236, 2_952), each


@pytest.mark.parametrize(
    ("work", "calls", "instructions"),
    [(arriving, 37, 620), (admitting, 35, 575), (entering, 32, 565), (ending, 12, 192), (leaving, 12, 356)],
)
def test_cost_of_a_request(work: Callable[[int], Callable[[], object]], calls: int, instructions: int) -> None:
    """As measured. The worker may wait for arrival, admission and end; it does not wait for `entering`, which appends a
    page to each request, and `leaving`."""
    each = per_item(work, 64, 256)
    assert each.within(calls, instructions), each


def test_a_step_leaves_no_reference_cycles() -> None:
    """The garbage collector runs rarely (tgi/scheduler/main.py), so no step may need it."""
    works = [work(16) for work in (decoding, ending, leaving)]
    while gc.collect():  # garbage of other tests: one pass may free what keeps more
        pass
    gc.disable()
    try:
        for work in works:
            work()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_waiting_requests_cost_nothing() -> None:
    """Neither the loop nor a plan iterates over the queue: 10,000 waiting requests cost what 100 do."""
    few, many = (cost(waiting(rows)) for rows in (100, 10_000))
    assert few == many
