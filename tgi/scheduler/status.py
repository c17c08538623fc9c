"""What the tokenizers are told about the floors below, and when."""

from typing import NamedTuple

from tgi.kernel.presence import Adapter, Limits, Status

WAITING = Status(False, True, "waiting for the worker", 0)
ADAPTING = Status(False, True, "loading adapters", 99)
REFUSED = Status(False, False, "the worker does not meet the limits", 0)
# A change of the load alone is told no more often than this.
LOAD_SECONDS = 0.5
# A prediction is told again when it has moved by more than this part of itself.
MOVED = 0.25


class Load(NamedTuple):
    """Some fields of a Status, in their order."""

    queued: int
    running: int
    wait_ms: int
    end_ms: int

    def differs(self, other: "Load") -> bool:
        """Whether somebody who knows the other should hear of this one."""
        return self[:2] != other[:2] or _moved(self.wait_ms, other.wait_ms) or _moved(self.end_ms, other.end_ms)


def _moved(new: int, old: int) -> bool:
    return abs(new - old) > MOVED * max(new, old)


def status_of(below: Status, stalled: bool, limits: Limits | None, load: Load, adapters: list[Adapter]) -> Status:
    """How things are. `stalled`: work is under way and no step finishes."""
    stage = "the worker finishes no step" if stalled else below.stage
    return Status(below.ready, below.healthy and not stalled, stage, below.percent, limits, *load, adapters)


class Report:
    """Keeps what was last told."""

    def __init__(self) -> None:
        self._told = WAITING
        self._told_load = Load(0, 0, 0, 0)
        self._told_at = 0.0
        self.due: float | None = None  # when a load that has changed since may be told

    def is_news(self, status: Status, load: Load, now: float) -> bool:
        """Whether to tell everybody now; if so, it counts as told."""
        self.due = self._told_at + LOAD_SECONDS if load.differs(self._told_load) else None
        same = status[:5] == self._told[:5] and status.adapters == self._told.adapters
        if same and (self.due is None or now < self.due):
            return False
        self._told, self._told_load = status, load
        self._told_at, self.due = now, None
        return True
