"""Running estimates: the prefill budget of a step, its largest size, how long it may take, a linear fit of step times,
the waiting time of a new request."""

from math import exp
from typing import NamedTuple

from tgi.microkernel.messages.protocol import ENDED
from tgi.scheduler.request import Request

# --- prefill budget ---------------------------------------------------------------------------------------------------

# Weight of the newest step in the moving averages.
STEP_COST_WEIGHT = 0.2
# A step is worthwhile when its prompt tokens take this many times what a decode step takes: a larger one saves little
# more.
AMORTIZING_RATIO = 16
# What slices of the vision tower take in a step, unless one takes longer: much more than a step costs by itself, and
# about a step of decode rows, so that the first token of a text among many images takes 1.5 times as long as alone.
TOWER_SECONDS = 0.005


class PrefillBudget:
    """How many prompt tokens go into a step, from moving averages of two costs: a step of decode rows alone, and each
    prompt token on top of it. Times are microseconds."""

    def __init__(self, target_us: float) -> None:
        """`target_us`: how long a step may take that has decode rows, too."""
        self._target_us = target_us
        self._decode_us = 0.0  # a step of decode rows alone; 0: not measured yet
        self._shortest_us = 0.0  # the shortest step of decode rows so far: about the fixed cost of a step
        self._token_us = 0.0  # a prompt token on top of it; 0: not measured yet
        self._encoder_us = 0.0  # an image token in the vision tower; 0: not measured yet

    @property
    def encoder_measured(self) -> bool:
        """Whether an image was computed."""
        return self._encoder_us > 0

    @property
    def encoder_cost(self) -> float:
        """What an image token costs in the vision tower, in prompt tokens; 1 until both are measured."""
        return self._encoder_us / self._token_us if self._encoder_us and self._token_us else 1.0

    def record_images(self, positions: int, encoder_us: int) -> None:
        """Updates the averages with what the vision tower took for images with this many tokens."""
        if positions > 0 and encoder_us > 0:
            self._encoder_us = _average(self._encoder_us, encoder_us / positions)

    def record_step(self, decode_rows: int, prefill_tokens: int, step_us: int) -> None:
        """Updates the averages with a finished step, without its images. `step_us` is 0 if the worker did not measure
        it."""
        if step_us <= 0 or not (decode_rows or prefill_tokens):
            return
        if not prefill_tokens:
            self._decode_us = _average(self._decode_us, step_us)
            if not self._shortest_us or step_us < self._shortest_us:
                self._shortest_us = step_us
            return
        base = self._decode_us if decode_rows else 0.0
        self._token_us = _average(self._token_us, max(step_us - base, 0.0) / prefill_tokens)

    def target_tokens(self, at_least: int, at_most: int) -> int:
        """Prompt tokens with which a step that has decode rows meets the target time, within the bounds."""
        if not self._token_us:
            return at_most
        return int(min(at_most, max(at_least, (self._target_us - self._decode_us) / self._token_us)))

    def shared_tokens(self, at_most: int) -> int:
        """Prompt tokens with which a step without decode rows meets the target time, but as many as make it worth its
        fixed cost."""
        if not self._token_us:
            return at_most
        return int(min(at_most, max(self._target_us, AMORTIZING_RATIO * self._shortest_us) / self._token_us)) or 1

    def tower_tokens(self, at_most: int) -> int:
        """What slices of the vision tower may cost in a step, in prompt tokens: requests that arrive wait for them."""
        if not self._token_us:
            return at_most
        return int(min(at_most, TOWER_SECONDS * 1e6 / self._token_us))

    def amortizing_tokens(self, at_most: int) -> int:
        """Prompt tokens that make a step worth its fixed cost: at least 1, so that the first prompt is computed;
        `at_most` until both costs are measured."""
        if not self._token_us or not self._decode_us:
            return at_most
        return int(min(at_most, AMORTIZING_RATIO * self._decode_us / self._token_us)) or 1


# Steps without a lack of memory after which the largest step grows again.
GROWTH_STEPS = 64


class StepSizeLimit:
    """The most tokens of a step: halved when a step lacks memory. A step with one request is as small as any if
    it has at most `least` tokens, or more than the limit.

    It doubles after GROWTH_STEPS steps, once all requests with a row in a failed step have ended: so each of these
    fails a bounded number of times, and the limit comes back when the cause is gone.
    """

    def __init__(self, tokens: int, least: int) -> None:
        self.tokens = tokens
        self._most = tokens
        self._least = least
        self._steps = 0  # since it has changed
        self._lacked_memory: list[Request] = []

    def reduce(self, step_tokens: int, requests: list[Request]) -> bool:
        """A step of this size, with these requests, lacked memory. False: its only request did so before, and no step
        is smaller."""
        self._steps = 0
        undivided = step_tokens > self.tokens  # what one step has to compute together, such as an image
        smallest = len(requests) == 1 and (undivided or step_tokens <= self._least)
        if smallest and requests[0] in self._lacked_memory:
            return False
        found = dict.fromkeys((*self._lacked_memory, *requests))
        self._lacked_memory = [request for request in found if request.state is not ENDED]
        if not smallest:
            self.tokens = max(1, min(self.tokens, step_tokens) // 2)
        return True

    def record_step(self) -> None:
        """A step was computed."""
        if self.tokens == self._most:
            return
        self._steps += 1
        if self._steps >= GROWTH_STEPS and all(request.state is ENDED for request in self._lacked_memory):
            self.tokens, self._steps, self._lacked_memory = min(2 * self.tokens, self._most), 0, []


def _average(old: float, new: float) -> float:
    return new if not old else old + STEP_COST_WEIGHT * (new - old)


# --- step limits ------------------------------------------------------------------------------------------------------

# A step that takes longer than this many times what such steps take, and longer than the seconds, is late.
LATE_RATIO, LATE_SECONDS = 10, 4.0
# How much later it may be if no such step, or none by this worker, has been observed: something may be compiled.
UNSEEN_RATIO = 2
# Size of a step, relative to the largest observed one, up to which its time is predicted.
MAX_EXTRAPOLATION = 8
# A worker that is late for this long hangs.
HANG_SECONDS = 8.0
# Weight of the newest step in the expected time, if it is shorter; longer ones count at once, up to this ratio. In the
# least time it is the opposite: longer ones have this weight, and shorter ones count at once.
SHORTER_STEP_WEIGHT = LONGER_STEP_WEIGHT = 0.05
MAX_GROWTH = 2
# The next step is planned when the one that is computed ends in this share of its least time, and in no less than the
# seconds, and earlier by the time on the way to the worker and back: the worker has it in time, and what arrives before
# takes part in it.
PLAN_AHEAD_SHARE, PLAN_AHEAD_SECONDS = 0.25, 0.005
# Weight of the newest time on the way, if it is longer; shorter ones count at once.
LONGER_TRANSIT_WEIGHT = 0.25
# A shorter delay is not worth another turn of the scheduler's loop next to the worker's threads (a stream of the demo
# model with steps of 7 ms on two cores lost 8 %).
MIN_DELAY_SECONDS = 0.005


class SizeClass(NamedTuple):
    """The size of a step, on which its time depends, by powers of two: bit lengths of the number of computed tokens and
    of the number of pairs of a computed token and a position that it attends to."""

    tokens_bits: int
    attended_bits: int


class StepLimits:
    """How long a step may take, and takes at least, learned from the times of finished steps.

    A step takes at most as much longer than a smaller one as it is larger, in tokens or attended positions, whatever
    each of them costs. So a size that was not observed is predicted from those that were, up to MAX_EXTRAPOLATION;
    beyond it there is no limit. Times are seconds.
    """

    def __init__(self) -> None:
        self._expected: dict[SizeClass, float] = {}
        self._least: dict[SizeClass, float] = {}
        self._transit: float | None = None  # of a step to the worker and of its result back
        self._new_worker = True  # no step of this worker was observed

    def record(self, size: SizeClass, seconds: float) -> None:
        """Adds a finished step."""
        self._new_worker = False
        least = self._least.get(size)
        if least is not None and seconds > least:
            self._least[size] = least + LONGER_STEP_WEIGHT * (seconds - least)
        else:
            self._least[size] = seconds
        known = self._expected.get(size)
        if known is not None and seconds < known:
            self._expected[size] = known + SHORTER_STEP_WEIGHT * (seconds - known)
            return
        if known is None:
            known = self._extrapolate(size)
        # A step in which the worker was suspended says nothing about the next one.
        self._expected[size] = seconds if known is None else min(seconds, MAX_GROWTH * known)

    def record_transit(self, seconds: float) -> None:
        """Adds the time that a step and its result have been on their way: the worker computed it at once."""
        known = self._transit
        self._transit = (
            seconds if known is None or seconds < known else known + LONGER_TRANSIT_WEIGHT * (seconds - known)
        )

    def worker_lost(self) -> None:
        """The next worker's first step may take longer, and it may be elsewhere."""
        self._new_worker = True
        self._transit = None

    def plan_ahead_after(self, size: SizeClass) -> float:
        """Seconds from the begin of a step of this size until the next one should be planned; 0: at once."""
        least = self._least.get(size, 0.0)
        ahead = PLAN_AHEAD_SHARE * least
        delay = least - (ahead if ahead > PLAN_AHEAD_SECONDS else PLAN_AHEAD_SECONDS) - (self._transit or 0.0)
        return delay if delay >= MIN_DELAY_SECONDS else 0.0

    def late_after(self, size: SizeClass) -> float | None:
        """Seconds after which a step of this size is late; None: no such steps were observed."""
        expected = self._expected.get(size)
        unseen = expected is None
        if expected is None and (expected := self._extrapolate(size)) is None:
            return None
        seconds = LATE_RATIO * expected
        if seconds < LATE_SECONDS:
            seconds = LATE_SECONDS
        return seconds * UNSEEN_RATIO if unseen or self._new_worker else seconds

    def _extrapolate(self, size: SizeClass) -> float | None:
        """The expected time of a step of a size that was not observed."""
        scales = (
            (1 << max(0, size.tokens_bits - known.tokens_bits, size.attended_bits - known.attended_bits), seconds)
            for known, seconds in self._expected.items()
        )
        return min((scale * seconds for scale, seconds in scales if scale <= MAX_EXTRAPOLATION), default=None)


# --- linear fit -------------------------------------------------------------------------------------------------------

# Weight of the newest point.
FIT_WEIGHT = 0.05
# Variance of x at which the slope is halved (ridge regression). Old points fade, so a slope that no recent point shows
# shrinks towards 0.
SLOPE_SHRINKAGE = 0.05


class LinearFit:
    """Exponentially weighted least squares, y = intercept + slope * x, in O(1) time and memory."""

    def __init__(self) -> None:
        self._x = self._y = 0.0  # weighted means
        self._variance = self._covariance = 0.0  # of x, and of x with y

    def add(self, x: float, y: float) -> None:
        if not self._y:
            self._x, self._y = x, y
            return
        dx, dy = x - self._x, y - self._y
        self._x += FIT_WEIGHT * dx
        self._y += FIT_WEIGHT * dy
        self._variance = (1 - FIT_WEIGHT) * (self._variance + FIT_WEIGHT * dx * dx)
        self._covariance = (1 - FIT_WEIGHT) * (self._covariance + FIT_WEIGHT * dx * dy)

    @property
    def slope(self) -> float:
        """Increase of y per x, at least 0."""
        return max(0.0, self._covariance / (self._variance + SLOPE_SHRINKAGE))

    def at(self, x: float) -> float:
        """The value at x, with an intercept of at least 0; 0 without points."""
        slope = self.slope
        return max(self._y + slope * (x - self._x), slope * x)


# --- waiting time -----------------------------------------------------------------------------------------------------

# Time constant of the moving averages: an event of this age has a weight of 1/e.
MEMORY_SECONDS = 30.0
# Upper bound of an interval, for a queue that does not move.
MAX_INTERVAL_SECONDS = 3600.0


class MeanInterval:
    """Mean seconds between events: total time over number of events, both exponentially faded."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events = 0.0

    def record(self, seconds: float, events: int) -> None:
        """Adds a period and the number of events in it."""
        kept = exp(-seconds / MEMORY_SECONDS)
        self._seconds = self._seconds * kept + seconds
        self._events = self._events * kept + events

    @property
    def interval(self) -> float:
        """Mean seconds from one event to the next; before the first event, the time that has passed."""
        interval = self._seconds / self._events if self._events else self._seconds
        return min(interval, MAX_INTERVAL_SECONDS)


class WaitEstimator:
    """Predicts the waiting time of a request that arrives now, by Little's law: queue length times the mean interval
    between admissions. Only time in which requests wait (for admissions) or run (for completions) counts. Times are
    seconds."""

    def __init__(self) -> None:
        self._admissions = MeanInterval()  # while requests wait
        self._completions = MeanInterval()  # while requests run
        self._admitted = self._completed = 0
        self._queued = self._running = 0
        self._observed_at = 0.0

    def observe(self, admitted: int, completed: int, queued: int, running: int, now: float) -> None:
        """To be called when all steps are planned. `admitted` and `completed` are totals since start; `queued` and
        `running` are the requests that wait and run from now on."""
        seconds, self._observed_at = now - self._observed_at, now
        if self._queued:
            self._admissions.record(seconds, admitted - self._admitted)
        if self._running:
            self._completions.record(seconds, completed - self._completed)
        self._admitted, self._completed = admitted, completed
        self._queued, self._running = queued, running

    def wait_seconds(self, queued: int, full: bool) -> float:
        """Predicted waiting time of a request that arrives now, behind `queued` others. `full`: no slot is free, so
        that the first request in an empty queue waits for a completion, too."""
        if queued:
            return (queued + 1) * self._admissions.interval
        return self._completions.interval if full else 0.0

    @property
    def completion_interval(self) -> float:
        """Mean time from one completion to the next."""
        return self._completions.interval
