"""A token bucket: limits the rate of an action. Sans-IO: the time is passed in."""

# `take` succeeds after the time that `seconds_until_next` has returned.
ROUNDING = 1e-6


class TokenBucket:
    """Allows `burst` actions at once, and `rate` per second in the long run."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._filled_at = 0.0

    def take(self, now: float) -> bool:
        """Whether one action is allowed now; if so, it counts. `now` is in seconds and never decreases."""
        self._tokens = min(self._burst, self._tokens + self._rate * (now - self._filled_at))
        self._filled_at = now
        if self._tokens < 1 - ROUNDING:
            return False
        self._tokens -= 1
        return True

    def seconds_until_next(self, now: float) -> float:
        """Time from now until `take` returns True."""
        return max(0.0, (1 - self._tokens) / self._rate - (now - self._filled_at))
