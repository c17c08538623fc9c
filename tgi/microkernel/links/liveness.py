"""Whether other processes respond, and whether work progresses. Sans-IO: ticks and times are passed in."""

from collections.abc import Container, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# Interval of a process's beats and of its ticks, by its own loop.
BEAT_SECONDS = 0.5
# A peer that has sent nothing during this number of ticks does not respond: it is stopped, or its loop is stuck.
SILENT_TICKS = 4
# A longer gap between two ticks: the process itself did not run.
MAX_TICK_SECONDS = 3 * BEAT_SECONDS


class SilenceDetector(Generic[K]):
    """Finds peers that have stopped sending. It counts ticks of this process and not seconds, so that a process which
    was itself suspended or delayed raises no false alarm."""

    def __init__(self) -> None:
        self._silent_ticks: dict[K, int] = {}

    def watch(self, peer: K) -> None:
        """Expects messages of this peer from now on."""
        self._silent_ticks.setdefault(peer, 0)

    def forget(self, peer: K) -> None:
        """Expects no message of this peer any more."""
        self._silent_ticks.pop(peer, None)

    def tick(self, heard: Container[K]) -> tuple[list[K], list[K]]:
        """`heard`: the peers that have sent something since the previous tick. Returns the peers that do not respond
        from now on, and those that respond again."""
        silent, responding = [], []
        for peer, ticks in self._silent_ticks.items():
            if peer in heard:
                if ticks >= SILENT_TICKS:
                    responding.append(peer)
                self._silent_ticks[peer] = 0
            else:
                if ticks == SILENT_TICKS - 1:
                    silent.append(peer)
                self._silent_ticks[peer] = ticks + 1
        return silent, responding


class ProgressClock:
    """Measures for how long a process has had work without finishing any part of it. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._at = 0.0  # of the latest progress; 0.0: none is known
        self._ticked_at: float | None = None
        self._progressed = False  # since the latest tick

    def record(self) -> None:
        """A part of the work was finished."""
        self._progressed = True

    def record_at(self, at: float) -> None:
        """A part of the work was finished at this time, elsewhere."""
        if at > self._at:
            self._at = at

    def tick(self, now: float, busy: bool) -> float | None:
        """To be called every BEAT_SECONDS. Seconds since the latest progress, or since there is work, to a tick; None
        if there is none. Time in which this process did not run does not count."""
        gap = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        if self._progressed or not busy or not self._at:
            self._at, self._progressed = now, False
        if not busy:
            return None
        if gap > MAX_TICK_SECONDS:
            self._at = min(now, self._at + gap)
        return max(0.0, now - self._at)
