"""The steps that were sent and are not answered yet, and whether the worker gets on with them."""

from collections import deque

from tgi.kernel.messages import Result
from tgi.scheduler.flight import Flight

# Steps that may be under way at once; one with drafts is alone.
DEPTH = 2


class UnderWay:
    """A worker runs steps in their order, and so they are answered. They are numbered in epochs: an epoch is over when
    the worker is gone or a step fails. Times are seconds."""

    def __init__(self, stall_limit: float) -> None:
        self.epoch = 1
        self._stall_limit = stall_limit
        self._number = 0  # of the latest step
        self._flights: deque[Flight] = deque()
        self._leftover: set[tuple[int, int]] = set()  # (epoch, number) of steps behind a failed one, to be answered yet
        self._moved = 0.0  # when a step was last answered, or sent into silence

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def flights(self) -> list[Flight]:
        """All of them, the oldest first."""
        return list(self._flights)

    @property
    def latest(self) -> Flight | None:
        """The one that was sent last."""
        return self._flights[-1] if self._flights else None

    @property
    def open(self) -> bool:
        """Whether another may be sent."""
        return len(self._flights) < DEPTH and not self._leftover

    @property
    def next(self) -> int:
        """The number of the next one."""
        return self._number + 1

    def sent(self, flight: Flight, now: float) -> None:
        """The next one is on its way."""
        if not self._flights:
            self._moved = now
        self._number += 1
        self._flights.append(flight)

    def answered(self, result: Result, now: float) -> tuple[Flight, float] | None:
        """The oldest, which this answers or should, is under way no more: that, and the seconds that it took behind
        those before it. None: the result is of an epoch that is over."""
        if result.epoch != self.epoch or not self._flights:
            self._leftover.discard((result.epoch, result.number))
            return None
        flight = self._flights.popleft()
        seconds = now - max(self._moved, flight.sent)
        self._moved = now
        return flight, seconds

    def failed(self) -> None:
        """So has the one that was answered last. What is still under way builds on what that did not compute. It is
        waited for, so that nobody is blamed for what it may do to the worker."""
        self._leftover = {(self.epoch, flight.step.number) for flight in self._flights}
        self.begin_again()

    def worker_gone(self) -> None:
        """Nothing will be answered."""
        self._leftover.clear()
        self.begin_again()

    def begin_again(self) -> None:
        """In the next epoch."""
        self._flights.clear()
        self.epoch += 1
        self._number = 0

    def stalled(self, now: float) -> bool:
        """Whether the next answer is long overdue."""
        return bool(self._flights or self._leftover) and now >= self._moved + self._stall_limit

    def overdue(self, now: float) -> float | None:
        """From when on it will be stalled. None: it is already, or there is nothing to answer."""
        if not (self._flights or self._leftover) or self.stalled(now):
            return None
        return self._moved + self._stall_limit
