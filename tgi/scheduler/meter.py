"""Turns what the core has counted into metrics, once a turn of the loop, and measures what the core takes for it."""

import time
from collections import deque

from tgi.kernel import metrics
from tgi.kernel.link import Peer
from tgi.kernel.messages import Result, Step
from tgi.scheduler.core import Core


class Meter:
    """Remembers what was published, so that only changes cost anything."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._gauges: dict[str, int] = {}
        self._handled: deque[float] = deque()  # seconds that each answered step took to handle
        self._joined: deque[float] = deque()  # seconds that each plan took in which new requests joined others

    def result(self, core: Core, result: Result, source: Peer, now: float) -> None:
        """Lets the core handle the result of a step."""
        begun = time.perf_counter()
        done = len(core.counters.done)
        core.handle(result, source, now)
        if len(core.counters.done) > done:
            self._handled.append(time.perf_counter() - begun)

    def plan(self, core: Core, now: float) -> Step | None:
        """Lets the core plan a step."""
        begun = time.perf_counter()
        admitted = core.counters.admitted
        known = len(admitted)
        step = core.plan(now)
        if len(admitted) > known and admitted[-1].joined:
            self._joined.append(time.perf_counter() - begun)
        return step

    def publish(self, core: Core) -> None:
        """To be called at the end of a turn."""
        self._steps(core)
        counters = core.counters
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
        for method, sent in counters.steps.items():
            before = self._sums.get(method, 0)
            if sent != before:
                metrics.tgi_batch_inference_count.labels(method=method).inc(sent - before)
                self._sums[method] = sent
        while counters.admitted:
            batch = counters.admitted.popleft()
            metrics.tgi_batch_next_size.observe(batch.requests)
            if batch.joined:
                metrics.tgi_batch_concat.labels(reason="chunking").inc()
        while self._joined:
            metrics.tgi_batch_concat_duration.labels(method="decode").observe(self._joined.popleft())
        while counters.done:
            step = counters.done.popleft()
            handled = self._handled.popleft() if self._handled else None
            if step.failed:
                metrics.tgi_batch_inference_failure.labels(method=step.method).inc()
                continue
            metrics.tgi_batch_inference_success.labels(method=step.method).inc()
            metrics.tgi_batch_inference_duration.labels(method=step.method).observe(step.seconds)
            metrics.tgi_batch_forward_duration.labels(method=step.method).observe(step.forward_seconds)
            if handled is not None:
                metrics.tgi_batch_filter_duration.labels(method=step.method).observe(handled)

    def _count(self, name: str, total: int) -> None:
        before = self._sums.get(name, 0)
        if total != before:
            getattr(metrics, name).inc(total - before)
            self._sums[name] = total

    def _set(self, name: str, value: int) -> None:
        if self._gauges.get(name) != value:
            getattr(metrics, name).set(value)
            self._gauges[name] = value
