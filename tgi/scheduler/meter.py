"""Turns what the core has counted into metrics, and measures what the core takes for it."""

import time

from tgi.kernel import metrics
from tgi.kernel.link import Peer
from tgi.kernel.messages import Result, Step
from tgi.scheduler.core import Core
from tgi.scheduler.counters import StepDone

# Steps in which nobody comes or goes are written down with the first turn after so long: to do so takes longer than to
# plan one.
KEPT_SECONDS = 1.0


class Meter:
    """Remembers what was published, so that only changes cost anything."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._gauges: dict[str, int] = {}
        self._done: list[tuple[StepDone, float]] = []  # answered steps, and the seconds that each took to handle
        self._joined: list[float] = []  # seconds that each plan took in which new requests joined others
        self._crowd: tuple[int, ...] = ()
        self._due = 0.0

    def result(self, core: Core, result: Result, source: Peer, now: float) -> None:
        """Lets the core handle the result of a step."""
        begun = time.perf_counter()
        core.handle(result, source, now)
        if done := core.counters.done:
            self._done.append((done.popleft(), time.perf_counter() - begun))

    def plan(self, core: Core, now: float) -> Step | None:
        """Lets the core plan a step."""
        begun = time.perf_counter()
        admitted = core.counters.admitted
        known = len(admitted)
        step = core.plan(now)
        if len(admitted) > known and admitted[-1].joined:
            self._joined.append(time.perf_counter() - begun)
        return step

    def publish(self, core: Core, now: float) -> None:
        """To be called at the end of a turn."""
        counters = core.counters
        crowd = core.queued, counters.begun, counters.ended, counters.worker_losses, core.adapters
        if crowd == self._crowd and now < self._due:
            return
        self._crowd = crowd
        self._due = now + KEPT_SECONDS
        self._steps(core)
        self._count("tgi_resumed_tokens", counters.resumed_tokens)
        self._count("tgi_preemptions", counters.preemptions)
        self._count("tgi_prefix_cache_hit_tokens", counters.cache_hit_tokens)
        self._count("tgi_worker_losses", counters.worker_losses)
        self._count("tgi_drafted_tokens", counters.drafted_tokens)
        self._count("tgi_accepted_tokens", counters.accepted_tokens)
        self._set("tgi_queue_size", core.queued)
        self._set("tgi_batch_current_size", core.running)
        self._set("tgi_adapters_loaded", core.adapters)
        if core.below.limits is not None:
            used, size = core.pages_used, core.below.limits.page_size
            self._set("tgi_batch_current_max_tokens", used * size)
            self._set("tgi_pages_used", used)
            self._set("tgi_pages_free", core.below.limits.pages - used)
            self._set("tgi_batch_max_total_tokens", core.below.limits.pages * size)

    def _steps(self, core: Core) -> None:
        counters = core.counters
        done, self._done = self._done, []
        for method, sent in counters.steps.items():
            before = self._sums.get(method, 0)
            if sent != before:
                metrics.tgi_batch_inference_count.labels(method=method).inc(sent - before)
                self._sums[method] = sent
            steps = [(step, handled) for step, handled in done if step.method == method]
            good = [(step, handled) for step, handled in steps if not step.failed]
            if failed := len(steps) - len(good):
                metrics.tgi_batch_inference_failure.labels(method=method).inc(failed)
            if good:
                metrics.tgi_batch_inference_success.labels(method=method).inc(len(good))
                for series, seconds in (
                    (metrics.tgi_batch_inference_duration, [step.seconds for step, _ in good]),
                    (metrics.tgi_batch_forward_duration, [step.forward_seconds for step, _ in good]),
                    (metrics.tgi_batch_filter_duration, [handled for _, handled in good]),
                ):
                    series.labels(method=method).observe_all(seconds)
        while counters.admitted:
            batch = counters.admitted.popleft()
            metrics.tgi_batch_next_size.observe(batch.requests)
            if batch.joined:
                metrics.tgi_batch_concat.labels(reason="chunking").inc()
        joined, self._joined = self._joined, []
        if joined:
            metrics.tgi_batch_concat_duration.labels(method="decode").observe_all(joined)

    def _count(self, name: str, total: int) -> None:
        before = self._sums.get(name, 0)
        if total != before:
            getattr(metrics, name).inc(total - before)
            self._sums[name] = total

    def _set(self, name: str, value: int) -> None:
        if self._gauges.get(name) != value:
            getattr(metrics, name).set(value)
            self._gauges[name] = value
