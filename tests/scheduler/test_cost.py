"""What a pass costs, in function calls and bytecode instructions: for a row that decodes, and for one that comes and
goes. Whoever asks for drafts, likeliest tokens or adapters may pay for it; these do not."""

import gc
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.counting import cost, per_item
from tgi.kernel import metrics
from tgi.kernel.link import Peer
from tgi.kernel.messages import Add, Result, Sampling, Step, encode
from tgi.kernel.pack import FLOAT32, INT32, pack
from tgi.kernel.presence import PROTOCOL, Hello, Limits, Status
from tgi.kernel.samples import Store
from tgi.scheduler.core import Config, Core
from tgi.scheduler.meter import Meter

WORKER = Peer("worker", 0, b"worker")
TOKENIZERS = [Peer("tokenizer", place, b"tokenizer") for place in range(2)]
PAGE, PROMPT, ROOM = 16, 64, 1024
# In so many steps each row comes to the end of a page once.
STEPS = PAGE


class Desk:
    """A core two steps deep, and all that it will hear, made before anything is counted."""

    def __init__(self, rows: int, new: int, slots: int = 256) -> None:
        self.core = Core(Config())
        self.steps: deque[Step] = deque()
        limits = Limits(
            ROOM, ROOM - 1, 256 * PROMPT, 1 << 20, slots, 256 * ROOM // PAGE, PAGE, 49152, "bfloat16", "cpu"
        )
        for peer in TOKENIZERS:
            self.core.handle(Hello(PROTOCOL, *peer), peer, 0.0)
        self.core.handle(Hello(PROTOCOL, *WORKER), WORKER, 0.0)
        self.core.handle(Status(True, True, "ready", 100, limits), WORKER, 0.0)
        self.adds = [
            Add(rid, pack(INT32, [*range(rid, rid + PROMPT)]), new, encode(Sampling(rid)), pack(INT32, [49000]))
            for rid in range(rows)
        ]

    def arrive(self) -> None:
        """Half of the requests from each tokenizer."""
        for add in self.adds:
            self.core.handle(add, TOKENIZERS[add.rid % 2], 0.0)

    def plan(self) -> None:
        """All that the worker is to have."""
        while (step := self.core.plan(0.0)) is not None:
            self.steps.append(step)

    def results(self, count: int) -> list[Result]:
        """What the worker will say to the next steps, all of which have a row for everybody."""
        step, rows = self.steps[0], len(self.adds)
        columns = b"\1" * rows, pack(INT32, [*range(rows)]), pack(FLOAT32, [-0.5] * rows)
        return [Result(step.number + number, step.epoch, *columns, 1000) for number in range(count)]

    def take(self, result: Result) -> None:
        """One result."""
        self.steps.popleft()
        self.core.handle(result, WORKER, 0.0)

    def tell(self) -> None:
        """What stands behind the pass."""
        for _, message in self.core.outgoing():
            encode(message)
        self.core.settle()


def decoding(rows: int) -> Callable[[], None]:
    """The passes in which all of these rows decode."""
    desk = Desk(rows, 4 * STEPS)
    desk.arrive()
    desk.plan()
    results = desk.results(3 + STEPS)
    for result in results[:3]:
        desk.take(result)
        desk.plan()
        desk.tell()

    def work() -> None:
        for result in results[3:]:
            desk.take(result)
            desk.plan()
            desk.tell()

    return work


def turning(rows: int) -> Callable[[], None]:
    """The whole of the loop's turns in these passes, but for links and processes."""
    desk, meter = Desk(rows, 4 * STEPS), Meter()
    desk.arrive()
    desk.plan()
    results = desk.results(3 + STEPS)

    def turn(result: Result, now: float) -> None:
        desk.steps.popleft()
        desk.core.deadline(now)
        meter.result(desk.core, result, WORKER, now)
        while (step := meter.plan(desk.core, now)) is not None:
            encode(step)
            desk.steps.append(step)
        desk.core.tick(now)
        desk.tell()
        meter.publish(desk.core, now)

    for result in results[:3]:
        turn(result, 0.0)

    def work() -> None:
        for number, result in enumerate(results[3:]):
            turn(result, number / 100)

    return work


def waiting(rows: int) -> Callable[[], object]:
    """A turn of the loop while all slots are taken and the rest wait."""
    desk = Desk(rows, 4, slots=16)
    desk.arrive()
    desk.plan()
    desk.tell()

    def work() -> None:
        desk.core.tick(1.0)
        desk.core.deadline(1.0)
        desk.plan()
        desk.tell()

    return work


def arriving(rows: int) -> Callable[[], object]:
    """The requests come."""
    return Desk(rows, 4).arrive


def admitting(rows: int) -> Callable[[], object]:
    """The plan that computes the whole of their prompts, which nobody has asked for before."""
    desk = Desk(rows, 4)
    desk.arrive()
    return partial(desk.core.plan, 0.0)


def entering(rows: int) -> Callable[[], object]:
    """What stands behind that plan: they are to decode from the next one on, and their pages can be found."""
    desk = Desk(rows, 4)
    desk.arrive()
    desk.core.plan(0.0)
    return desk.core.settle


def ending(rows: int) -> Callable[[], object]:
    """The result with the last token of each."""
    desk = Desk(rows, 1)
    desk.arrive()
    desk.plan()
    desk.tell()
    return partial(desk.take, *desk.results(1))


def leaving(rows: int) -> Callable[[], object]:
    """What is told and noted of those that have ended: four pages of each can be found, and all are free."""
    desk = Desk(rows, 1)
    desk.arrive()
    desk.plan()
    desk.take(*desk.results(1))
    return desk.tell


def test_a_row_that_decodes() -> None:
    """From its token to the next step, messages and pages included: that is a sixteenth of what a page costs.
    Of its own it has nothing. All else is done by column, in C: whoever looks at each request here makes every step of
    everybody slower."""
    each = per_item(decoding, 64, 256) / STEPS
    assert each.calls <= 1
    assert each.instructions <= 19


@pytest.mark.parametrize(("rows", "calls", "instructions"), [(64, 257, 3_617), (256, 437, 7_265)])
def test_a_pass(rows: int, calls: int, instructions: int) -> None:
    """Of rows that decode alone: what each costs, and some 190 calls for the step itself and two tokenizers."""
    each = cost(decoding(rows)) / STEPS
    assert each.calls <= calls
    assert each.instructions <= instructions


def test_a_turn_for_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics included, which are written when somebody comes or goes, and else once a second."""
    monkeypatch.setattr(metrics._here, "store", Store(tmp_path))
    monkeypatch.setattr(metrics._here, "made", {})
    each = cost(turning(1)) / STEPS
    assert each.calls <= 217
    assert each.instructions <= 2_564


@pytest.mark.parametrize(
    ("work", "calls", "instructions"),
    [(arriving, 10, 268), (admitting, 25, 430), (entering, 32, 565), (ending, 5, 115), (leaving, 12, 356)],
)
def test_a_request(work: Callable[[int], Callable[[], object]], calls: int, instructions: int) -> None:
    """As measured. Arrival, admission and end are in the way of a step that waits; what is in `entering`, which gives
    everybody another page, and `leaving` is not."""
    each = per_item(work, 64, 256)
    assert each.calls <= calls
    assert each.instructions <= instructions


def test_a_pass_leaves_no_garbage() -> None:
    """The collector is told to stay away (tgi/scheduler/main.py), so nothing may need it."""
    works = [work(16) for work in (decoding, ending, leaving)]
    while gc.collect():  # of other tests: what one round frees may have kept more
        pass
    gc.disable()
    try:
        for work in works:
            work()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_what_only_waits_costs_nothing() -> None:
    """Neither a turn of the loop nor a plan looks at requests in the queue: 10,000 of them cost what 100 do."""
    few, many = (cost(waiting(rows)) for rows in (100, 10_000))
    assert few == many
