"""What the scheduler counts; metrics.py publishes it."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class FinishedStep(NamedTuple):
    """One answered step."""

    method: str  # "prefill" if any prompt token was computed, else "decode"
    failed: bool
    seconds: float  # from the later of its sending and the previous result
    forward_seconds: float  # as the worker measured it


class AdmittedRequests(NamedTuple):
    """The requests that one step admitted from the queue."""

    requests: int
    joined: bool  # whether others ran already


@dataclass
class Counters:
    """Sums since start. The deques hold events until they are published; the oldest are dropped."""

    steps: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})  # sent, by method
    admitted_requests: int = 0  # re-admissions after a preemption included
    ended_requests: int = 0  # whatever the reason
    recomputed_tokens: int = 0  # generated tokens that are computed again as prefill
    preemptions: int = 0
    cache_hit_tokens: int = 0
    worker_losses: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0  # drafts that were accepted
    finished_steps: deque[FinishedStep] = field(default_factory=lambda: deque(maxlen=256))
    admissions: deque[AdmittedRequests] = field(default_factory=lambda: deque(maxlen=256))
