"""Drives an engine without a scheduler: requests of equal length that go in step, two steps at a time or each alone."""

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count as numbers
from itertools import pairwise
from typing import NamedTuple

import torch

from tgi.kernel.messages import Result, Sampling, Slot, Step, encode
from tgi.kernel.pack import INT32, UINT8, pack
from tgi.worker.engine import Pending, TorchEngine
from tgi.worker.loop import DEPTH


class Requests:
    """Requests with prompts of so many tokens in these slots of an engine. Each has its prompt computed, and then up to
    `further` tokens drawn, one in each step. Their pages are given to them at once, and lie one behind the other."""

    def __init__(
        self,
        engine: TorchEngine,
        slots: range,
        prompt: int,
        further: int,
        samplings: Sequence[Sampling] | None = None,
    ) -> None:
        self._limits = engine.limits
        self._slots = slots
        self._prompt = self._known = prompt
        self._samplings = samplings or [Sampling(0)] * len(slots)
        self._pages = -(-(prompt + further) // engine.limits.page_size)  # of each
        self._numbers = numbers(1)

    def prompts(self) -> Iterator[Step]:
        """Steps that compute the prompts, of no more tokens than a step may have. The last of each request draws."""
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
        """A token for each."""
        self._known += 1
        return self._step(self._slots, self._known - 1, 1, [])

    def steps(self, count: int) -> Iterator[Step]:
        """So many of these."""
        return (self.next() for _ in range(count))

    def _slot(self, slot: int, at: int) -> Slot:
        ids = pack(INT32, ((100 + place) % self._limits.vocab_size for place in range(self._prompt)))
        return Slot(slot, ids, self._prompt, encode(self._samplings[at]))

    def _step(self, slots: range, start: int, count: int, new: list[Slot]) -> Step:
        given = [(one.slot, one.slot * self._pages + page) for one in new for page in range(self._pages)]
        owners, pages = (pack(INT32, [pair[at] for pair in given]) for at in range(2))
        draws = [int(start + count >= self._prompt)] * len(slots)
        starts, counts = (pack(INT32, [value] * len(slots)) for value in (start, count))
        return Step(next(self._numbers), 1, new, owners, pages, pack(INT32, slots), starts, counts, pack(UINT8, draws))


class Flow(NamedTuple):
    """What steps took of which DEPTH are under way at a time. Milliseconds, medians but for the whole."""

    step: float  # from the end of one to the end of the next
    launch: float  # the host's, for one
    whole: float  # from the begin of the first to the end of the last
    between: (
        float | None
    )  # share of the time behind the end of a step and before the next begins; None: of one step, or on CPU


def flow(engine: TorchEngine, steps: Iterable[Step]) -> Flow:
    """Computes steps as the worker's loop does, where the next is always there."""
    under_way: deque[Pending | Result] = deque()
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    launches = []
    began = time.perf_counter()
    for step in steps:
        launched = time.perf_counter()
        pending = engine.launch(step)
        launches.append(1e3 * (time.perf_counter() - launched))
        if isinstance(pending, Pending) and pending.begin is not None and pending.end is not None:
            marks.append((pending.begin, pending.end))
        under_way.append(pending)
        if len(under_way) >= DEPTH:
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


def collected(engine: TorchEngine, pending: Pending | Result) -> Result:
    """The result of a step that went well."""
    result = engine.collect(pending)
    assert not result.error
    assert not result.faults
    return result


class Alone:
    """Measures steps of an engine that wait for nothing. A GPU sleeps until all of a step is launched; otherwise it
    might wait within the step, for a host that does not launch as fast as it computes. On CPU a launch computes."""

    MOST_MS = 500.0

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._cycles = cycles_per_ms() if engine.limits.device == "cuda" else 0.0
        self._sleep_ms = 1.0
        # Where it does not: a launch waits for the device, or for room among the kernels that a stream takes ahead.
        self.works = True

    def measure(self, requests: Requests, count: int) -> list[float]:
        """Milliseconds of so many steps, and at most 10 more that are not told."""
        found: list[float] = []
        while len(found) < count:
            if self._cycles and self.works:
                torch.cuda._sleep(int(self._sleep_ms * self._cycles))
            pending = self._engine.launch(requests.next())
            awake = isinstance(pending, Pending) and pending.begin is not None and pending.begin.query()
            forward_ms = collected(self._engine, pending).forward_us / 1e3
            if awake and self.works:
                self._sleep_ms *= 2
                self.works = self._sleep_ms <= self.MOST_MS
            else:
                found.append(forward_ms)
        return found


def cycles_per_ms() -> float:
    """How many cycles a GPU sleeps for a millisecond."""
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
