"""Virtual time: a queue of events, and the functions of the module `time` that read it."""

import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# time.time() at the start of a simulation.
EPOCH_SECONDS = 1.7e9


class VirtualClock:
    """Runs events in the order of their times, and of two at the same time the one that was added first.

    A process that computes or sleeps within an event moves its own time ahead of the event's (`skew`): what it sends
    then is sent later, and it handles nothing until then.
    """

    def __init__(self) -> None:
        self.event_time = 0.0
        self.skew = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._added = 0

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self.event_time + self.skew

    def at(self, due: float, run: Callable[..., None], *arguments: Any) -> None:
        """Adds an event."""
        self._added += 1
        heapq.heappush(self._queue, (max(due, self.now), self._added, run, arguments))

    def after(self, seconds: float, run: Callable[..., None], *arguments: Any) -> None:
        """Adds an event `seconds` from now."""
        self.at(self.now + seconds, run, *arguments)

    def run_next(self) -> bool:
        """Runs the next event. False if there is none."""
        if not self._queue:
            return False
        self.event_time, _, run, arguments = heapq.heappop(self._queue)
        self.skew = 0.0
        self.events += 1
        run(*arguments)
        return True

    def sleep(self, seconds: float) -> None:
        """The process of the current event does nothing else for this time."""
        self.skew += seconds

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The module `time` tells virtual time."""
        names = ("monotonic", "perf_counter", "time", "sleep")
        original = {name: getattr(time, name) for name in names}
        time.monotonic = time.perf_counter = lambda: self.event_time + self.skew  # type: ignore[assignment]
        time.time = lambda: EPOCH_SECONDS + self.event_time + self.skew  # type: ignore[assignment]
        time.sleep = self.sleep  # type: ignore[assignment]
        try:
            yield
        finally:
            for name, function in original.items():
                setattr(time, name, function)
