"""What the tokenizers are told about the floors below, and when."""

from tgi.kernel.messages import Limits, Status

WAITING = Status(False, True, "waiting for the worker", 0)
REFUSED = Status(False, False, "the worker does not meet the limits", 0)
# Changes of queue length and batch size alone are told no more often than this.
LOAD_SECONDS = 1.0


class Report:
    """Keeps the worker's status and what was last told."""

    def __init__(self) -> None:
        self.below = WAITING
        self._told = WAITING
        self._told_at = 0.0

    def status(self, stalled: bool, limits: Limits | None, queued: int, running: int) -> Status:
        """How things are. `stalled`: work is under way and no step finishes."""
        below = self.below
        stage = "the worker finishes no step" if stalled else below.stage
        return Status(below.ready, below.healthy and not stalled, stage, below.percent, limits, queued, running)

    def is_news(self, status: Status, now: float) -> bool:
        """Whether to tell everybody now; if so, it counts as told."""
        only_load = status[:5] == self._told[:5]
        if status == self._told or (only_load and now < self._told_at + LOAD_SECONDS):
            return False
        self._told = status
        self._told_at = now
        return True

    def due(self, queued: int, running: int) -> float | None:
        """When a changed load may be told; None if it has not changed."""
        changed = (queued, running) != (self._told.queued, self._told.running)
        return self._told_at + LOAD_SECONDS if changed else None
