"""Virtual time: a queue of events. While it is installed, the modules `time` and `secrets` repeat the same values."""

import heapq
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

# time.time() at the start of a simulation.
EPOCH_SECONDS = 1.7e9


class VirtualClock:
    """Runs events in the order of their times, and of two at the same time the one that was added first.

    `now` is in seconds since the start. A process that computes or sleeps within an event moves it ahead of the event's
    time: what it sends then is sent later, and it handles nothing until then.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._added = 0

    def at(self, due: float, run: Callable[..., None], *arguments: Any) -> None:
        """Adds an event."""
        self._added += 1
        heapq.heappush(self._queue, (due if due > self.now else self.now, self._added, run, arguments))

    def after(self, seconds: float, run: Callable[..., None], *arguments: Any) -> None:
        """Adds an event `seconds` from now."""
        self.at(self.now + seconds, run, *arguments)

    def run_next(self) -> bool:
        """Runs the next event. False if there is none."""
        if not self._queue:
            return False
        self.now, _, run, arguments = heapq.heappop(self._queue)
        self.events += 1
        run(*arguments)
        return True

    def sleep(self, seconds: float) -> None:
        """The process of the current event does nothing else for this time."""
        self.now += seconds

    @contextmanager
    def installed(self, seed: int) -> Iterator[None]:
        """The module `time` tells virtual time, and random ids follow from the seed."""
        replacements: list[tuple[Any, str, Any]] = [
            (time, "monotonic", lambda: self.now),
            (time, "perf_counter", lambda: self.now),
            (time, "time", lambda: EPOCH_SECONDS + self.now),
            (time, "sleep", self.sleep),
            (secrets, "randbits", Random(f"ids {seed}").getrandbits),
        ]
        originals = [getattr(module, name) for module, name, _ in replacements]
        for module, name, replacement in replacements:
            setattr(module, name, replacement)
        try:
            yield
        finally:
            for (module, name, _), original in zip(replacements, originals, strict=True):
                setattr(module, name, original)
