"""What a step must not cost: garbage, and work for requests that wait."""

import gc
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest

from tests.counting import cost
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column
from tgi.microkernel.messages.protocol import PROTOCOL, Add, DeploymentLimits, Hello, Status, Step, StepResult, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.slow

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
