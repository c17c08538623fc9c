"""Health: whether a request sent now would be answered, and what the server waits for until then."""

import asyncio
import math
import time

from tgi.api.errors import MAX_RETRY_AFTER_SECONDS
from tgi.api.requests import WakeEvent
from tgi.api.tokenizers import TokenizerConnection
from tgi.microkernel.links.liveness import BEAT_SECONDS, ProgressClock
from tgi.microkernel.messages.protocol import Beat

# What the processes below report has an age of up to two beats at each of two hops.
PROGRESS_DELAY_SECONDS = 4 * BEAT_SECONDS


class Health:
    """The server's health as this front end sees it: from the status of the tokenizers, the progress of its requests,
    and its readiness probe."""

    def __init__(self, tokenizers: list[TokenizerConnection], stall_limit: float) -> None:
        """`tokenizers`: those of the router. `stall_limit`: upper bound of the seconds without progress of any
        request."""
        self._tokenizers = tokenizers
        self._stall_limit = stall_limit
        self._stalled = False  # requests are in flight, and none makes progress
        self.progress = ProgressClock()
        self.beat = Beat(None)  # how the requests of this process progress
        self.status_received = WakeEvent()
        # The readiness probe (readiness.py) sets both by end_probe. Once passed, it stays so: requests then wait out a
        # restart of other processes instead of failing.
        self.probe_passed = False
        self.probe_failure = ""  # until it has passed, for `stage`
        self._first_probe_ended = asyncio.Event()

    @property
    def can_compute(self) -> bool:
        """Whether a request sent now would be computed, by the status of the other processes."""
        return any(tokenizer.can_compute for tokenizer in self._tokenizers)

    @property
    def healthy(self) -> bool:
        """Whether a request sent now would be answered."""
        return self.probe_passed and self.can_compute and not self._stalled

    @property
    def stage(self) -> str:
        """What the server waits for before it can compute, in words: at start, and while a lost process is replaced.
        Taken from the tokenizer that is furthest."""
        statuses = [t.status for t in self._tokenizers if t.status is not None and not t.silent]
        if not statuses:
            return "the tokenizers do not respond" if any(t.silent for t in self._tokenizers) else "starting tokenizers"
        if self.can_compute and self._stalled:
            return "no request makes progress"
        if self.can_compute and not self.probe_passed:
            return self.probe_failure or "answering the first request"
        best = max(statuses, key=lambda status: (status.ready, status.percent))
        stage = best.stage or "starting"
        return stage if best.ready else f"{stage} {best.percent}%"

    @property
    def retry_after(self) -> int:
        """Seconds until there should be permits: until the next request ends and the waiting ones have begun."""
        statuses = [tokenizer.status for tokenizer in self._tokenizers if tokenizer.status is not None]
        waits = [status.mean_end_interval_ms + status.predicted_wait_ms for status in statuses]
        return min(max(1, math.ceil(max(waits, default=0) / 1000)), MAX_RETRY_AFTER_SECONDS)

    def tick(self, now: float, in_flight: int) -> None:
        """Every BEAT_SECONDS: finds out whether the requests in flight make progress, here or below."""
        for tokenizer in self._tokenizers:
            if tokenizer.beat.progress_age_ms is not None and not tokenizer.silent:
                self.progress.record_at(now - tokenizer.beat.progress_age_ms / 1000)
        age = self.progress.tick(now, busy=in_flight > 0 and self.can_compute)
        known = [t.beat.limit_ms / 1000 for t in self._tokenizers if t.requests and t.beat.limit_ms]
        limit = min(max(known, default=self._stall_limit), self._stall_limit)
        self._stalled = age is not None and age > limit + PROGRESS_DELAY_SECONDS
        self.beat = Beat(None) if age is None else Beat(int(1000 * age), int(1000 * limit), f"{in_flight} in flight")

    def end_probe(self, failure: str) -> None:
        """The readiness probe has passed (""), or failed for this reason and will be repeated."""
        self.probe_failure, self.probe_passed = failure, not failure
        self._first_probe_ended.set()

    def forget_probe(self) -> None:
        """The probe will be repeated, since all processes below are replaced."""
        self.probe_failure, self.probe_passed = "", False

    async def wait_for_first_probe(self) -> None:
        """Waits while the first answer of this front end's own probe is all that is missing. Another front end on the
        port may have answered /health with 200 already, and clients choose neither."""
        if not self.probe_passed and self.can_compute:
            await self._first_probe_ended.wait()

    async def wait_for_status(self, timeout_seconds: float) -> None:
        end = time.monotonic() + timeout_seconds
        while not any(tokenizer.status for tokenizer in self._tokenizers) and time.monotonic() < end:
            await asyncio.sleep(0.005)

    async def wait_until_computing(self) -> None:
        """Waits until a request would be computed. For one task at a time."""
        while not self.can_compute:
            await self.status_received.wait()
