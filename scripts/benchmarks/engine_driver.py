"""Drives an engine without a scheduler: requests of equal length in lockstep, two steps in flight or one at a time."""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count as numbers
from itertools import pairwise
from typing import NamedTuple

import torch

from tgi.microkernel.messages.codec import INT32, UINT8, pack_column
from tgi.microkernel.messages.kv_groups import paged_groups
from tgi.microkernel.messages.protocol import PIPELINE_DEPTH, SlotAssignment, Step, StepResult, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.worker.engine.engine import PendingStep, TorchEngine


class Requests:
    """Requests with prompts of `prompt` tokens in these slots. After its prompt each samples up to `further` tokens,
    one per step. Pages are allocated at once and are contiguous. Token ids are consecutive; those of a slot begin
    `apart` after those of the one before it."""

    def __init__(
        self,
        engine: TorchEngine,
        slots: range,
        prompt: int,
        further: int,
        samplings: Sequence[SamplingParams] | None = None,
        apart: int = 0,
    ) -> None:
        self._apart = apart
        self._limits = engine.limits
        self._slots = slots
        self._prompt = self._known = prompt
        self._samplings = samplings or [SamplingParams(0)] * len(slots)
        self._groups = len(paged_groups(engine.limits.groups))
        self._pages = -(-(prompt + further) // engine.limits.page_size)  # of each page table
        assert slots.stop * self._groups * self._pages <= engine.limits.pages, "the KV cache is too small"
        self._numbers = numbers(1)

    def prompts(self) -> Iterator[Step]:
        """Steps that compute the prompts within the token limit of a step. The last one of each request samples."""
        most = self._limits.max_batch_prefill_tokens
        chunk = min(self._prompt, most)
        together = most // chunk
        for first in range(0, len(self._slots), together):
            slots = self._slots[first : first + together]
            new = [self._slot(slot, first + at) for at, slot in enumerate(slots)]
            for start in range(0, self._prompt, chunk):
                yield self._step(slots, start, min(chunk, self._prompt - start), new)
                new = []

    def next(self) -> Step:
        """A step with one token per request."""
        self._known += 1
        return self._step(self._slots, self._known - 1, 1, [])

    def steps(self, count: int) -> Iterator[Step]:
        """The given number of decode steps."""
        return (self.next() for _ in range(count))

    def prompt_ids(self, slot: int) -> list[int]:
        """The token ids of the prompt in a slot."""
        first = 100 + slot * self._apart
        return [(first + place) % self._limits.vocab_size for place in range(self._prompt)]

    def _slot(self, slot: int, at: int) -> SlotAssignment:
        ids = pack_column(INT32, self.prompt_ids(slot))
        return SlotAssignment(slot, ids, self._prompt, encode(self._samplings[at]))

    def _step(self, slots: range, start: int, count: int, new: list[SlotAssignment]) -> Step:
        tables = [one.slot * self._groups + group for one in new for group in range(self._groups)]
        given = [(table, table * self._pages + page) for table in tables for page in range(self._pages)]
        owners, pages = (pack_column(INT32, [pair[at] for pair in given]) for at in range(2))
        samples = [int(start + count >= self._prompt)] * len(slots)
        starts, counts = (pack_column(INT32, [value] * len(slots)) for value in (start, count))
        return Step(
            next(self._numbers),
            1,
            new,
            owners,
            pages,
            pack_column(INT32, slots),
            starts,
            counts,
            pack_column(UINT8, samples),
        )


def joined(one: Step, other: Step) -> Step:
    """The rows of two steps, in this order, as one step."""
    columns = ("slots", "page_tables", "page_ids", "rows", "starts", "counts", "samples")
    return one._replace(**{name: getattr(one, name) + getattr(other, name) for name in columns})


class Flow(NamedTuple):
    """Times of steps with DEPTH of them in flight. Milliseconds, medians except for the whole."""

    step: float  # between the ends of consecutive steps
    launch: float  # host time per step
    whole: float  # from the start of the first to the end of the last
    between: (
        float | None
    )  # share of time between the end of a step and the start of the next; None: one step only, or on CPU


def flow(engine: TorchEngine, steps: Iterable[Step]) -> Flow:
    """Runs steps as the worker's loop does when the next one is always available."""
    under_way: deque[PendingStep | StepResult] = deque()
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    launches = []
    began = time.perf_counter()
    for step in steps:
        launched = time.perf_counter()
        pending = engine.launch(step)
        launches.append(1e3 * (time.perf_counter() - launched))
        if isinstance(pending, PendingStep) and pending.begin_event is not None and pending.end_event is not None:
            marks.append((pending.begin_event, pending.end_event))
        under_way.append(pending)
        if len(under_way) >= PIPELINE_DEPTH:
            collected(engine, under_way.popleft())
    for pending in under_way:
        collected(engine, pending)
    whole, launch = 1e3 * (time.perf_counter() - began), statistics.median(launches)
    if not marks:
        return Flow(launch, launch, whole, None)
    whole = marks[0][0].elapsed_time(marks[-1][1])
    if len(marks) == 1:
        return Flow(whole, launch, whole, None)
    each = [one[1].elapsed_time(other[1]) for one, other in pairwise(marks)]
    gaps = [one[1].elapsed_time(other[0]) for one, other in pairwise(marks)]
    return Flow(statistics.median(each), launch, whole, sum(gaps) / sum(each))


def collected(engine: TorchEngine, pending: PendingStep | StepResult) -> StepResult:
    """The result of a successful step."""
    result = engine.collect(pending)
    assert not result.error
    assert not result.row_errors
    return result


class Alone:
    """Measures steps without waits. A GPU is kept asleep until the whole step is launched; otherwise it might wait for
    the host within the step. On CPU a launch computes."""

    MOST_MS = 500.0

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._cycles = cycles_per_ms() if engine.limits.device == "cuda" else 0.0
        self._sleep_ms = 1.0
        # False if a launch waits for the device, or for room in the stream's queue.
        self.works = True

    def measure(self, requests: Requests, count: int) -> list[float]:
        """Milliseconds of that many steps, after at most 10 uncounted ones."""
        found: list[float] = []
        while len(found) < count:
            if self._cycles and self.works:
                torch.cuda._sleep(int(self._sleep_ms * self._cycles))
            pending = self._engine.launch(requests.next())
            awake = isinstance(pending, PendingStep) and pending.begin_event is not None and pending.begin_event.query()
            forward_ms = collected(self._engine, pending).forward_us / 1e3
            if awake and self.works:
                self._sleep_ms *= 2
                self.works = self._sleep_ms <= self.MOST_MS
            else:
                found.append(forward_ms)
        return found


def cycles_per_ms() -> float:
    """GPU cycles per millisecond of sleep."""
    cycles = 1_000_000
    found: list[float] = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        found.append(cycles / begin.elapsed_time(end))
    return statistics.median(found)
