"""What the scheduler counts. The loop turns the sums into metrics; the core only adds."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class StepDone(NamedTuple):
    """One answered step."""

    method: str  # "prefill" if any prompt token was computed, else "decode"
    failed: bool
    seconds: float  # from the later of its sending and the result before it
    forward_seconds: float


class Admitted(NamedTuple):
    """The requests that one step took from the queue."""

    requests: int
    joined: bool  # others that ran already


@dataclass
class Counters:
    """Sums since start. The deques hold what came about since they were last emptied: the newest, if nobody does."""

    steps: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})  # sent, by method
    begun: int = 0  # requests taken from the queue
    ended: int = 0  # requests, whatever the reason
    resumed_tokens: int = 0  # generated ids that came back as prefill
    preemptions: int = 0
    cache_hit_tokens: int = 0
    worker_losses: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these, drawn
    done: deque[StepDone] = field(default_factory=lambda: deque(maxlen=256))
    admitted: deque[Admitted] = field(default_factory=lambda: deque(maxlen=256))
