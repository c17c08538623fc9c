"""A worker in virtual time for `Simulation`: steps take the seconds of a function, and messages take a latency."""

import heapq
from collections.abc import Callable

from tests.scheduler.simulated_tokenizers import SubmittedRequest
from tests.scheduler.simulation import Simulation
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.protocol import Step, StepResult


class TimedWorker:
    """Computes the steps of a simulation one after the other, as soon as they arrive."""

    def __init__(self, sim: Simulation, step_seconds: Callable[[Step], float], latency: float = 0.0005) -> None:
        """`latency`: seconds from one process to the other."""
        self.sim = sim
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0  # between two steps, while there was something to compute
        self.first_token_at: dict[SubmittedRequest, float] = {}
        self._step_seconds = step_seconds
        self._latency = latency
        self._free_at = 0.0
        self._computed = 0  # steps of `sim.sent`
        self._arrivals: list[tuple[float, int, StepResult]] = []  # results on their way, in order of time
        sim.clock_tick = 0.0

    def run(self, until: float) -> None:
        """Lets time pass."""
        sim = self.sim
        self._plan()
        while True:
            due = [until, sim.scheduler.deadline(sim.now)] + [at for at, _, _ in self._arrivals[:1]]
            sim.now = max(sim.now, min(due))
            if sim.now >= until:
                return
            while self._arrivals and self._arrivals[0][0] <= sim.now:
                sim.results.append(heapq.heappop(self._arrivals)[2])
                sim.deliver()
            sim.advance_time()
            self._plan()
            for request in sim.requests:
                if request.ids:
                    self.first_token_at.setdefault(request, sim.now)

    def first_token(self, request: SubmittedRequest, within: float = 600.0) -> float:
        """Seconds from now until the first token of a request."""
        begun = self.sim.now
        while not request.ids:
            assert self.sim.now < begun + within
            self.run(self.sim.now + 0.0005)
        return self.first_token_at.get(request, self.sim.now) - begun

    def _plan(self) -> None:
        """Lets the scheduler plan, and computes what it has sent."""
        sim = self.sim
        sim.plan()
        while sim.steps:
            step = sim.steps[0]
            begins_at = max(self._free_at, sim.now + self._latency)
            if self._computed:
                self.idle_seconds += begins_at - self._free_at
            self._computed += 1
            seconds = self._step_seconds(step)
            self.busy_seconds += seconds
            self._free_at = begins_at + seconds
            sim.compute()
            result = sim.results.pop()._replace(forward_us=int(1e6 * seconds))
            heapq.heappush(self._arrivals, (self._free_at + self._latency, step.number, result))


def tokens_of(step: Step) -> int:
    """Tokens that a step computes."""
    return sum(unpack_int32(step.counts))
