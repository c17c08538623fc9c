"""How long a request that came now would wait, from how fast others have been getting in and out of late.

By Little's law the time in a line is its length times the mean interval at which it moves. Intervals are measured as
seconds per event over the last half minute or so, counting only the time in which there was something to wait for.
"""

from math import exp

# What was this long ago counts 1/e.
MEMORY_SECONDS = 30.0
# No interval is said to be longer: nothing moves.
LONGEST_SECONDS = 3600.0


class Rhythm:
    """Seconds per event: both are summed up, and both sums fade."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events = 0.0

    def learn(self, seconds: float, events: int) -> None:
        """So much time has passed, and so many events came in it, at any moment of it."""
        kept = exp(-seconds / MEMORY_SECONDS)
        self._seconds = self._seconds * kept + seconds
        self._events = self._events * kept + events

    @property
    def interval(self) -> float:
        """Mean seconds from one event to the next; as long as there was none, the time that it has taken so far."""
        interval = self._seconds / self._events if self._events else self._seconds
        return min(interval, LONGEST_SECONDS)


class Forecast:
    """Watches requests begin and end. Times are seconds."""

    def __init__(self) -> None:
        self._begins = Rhythm()  # while somebody waits
        self._ends = Rhythm()  # while somebody runs
        self._begun = self._ended = 0
        self._queued = self._running = 0
        self._at = 0.0

    def look(self, begun: int, ended: int, queued: int, running: int, now: float) -> None:
        """To be called when all steps are planned: how many have ever begun and ended, and how many wait and run from
        now on."""
        seconds, self._at = now - self._at, now
        if self._queued:
            self._begins.learn(seconds, begun - self._begun)
        if self._running:
            self._ends.learn(seconds, ended - self._ended)
        self._begun, self._ended = begun, ended
        self._queued, self._running = queued, running

    def wait(self, queued: int, full: bool) -> float:
        """How long a request that came now would wait in the queue: until those before it have begun, and itself.

        `full`: no slot is free, so that even the first in an empty queue waits for an end.
        """
        if queued:
            return (queued + 1) * self._begins.interval
        return self._ends.interval if full else 0.0

    @property
    def end(self) -> float:
        """Mean time from one end to the next."""
        return self._ends.interval
