"""Publishes the scheduler's counters as metrics, measures its own time, and records the spans of requests."""

import time
from typing import TYPE_CHECKING

from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.protocol import SUCCESSES, Add, End, Step, StepResult
from tgi.microkernel.observability import metrics
from tgi.scheduler.counters import FinishedStep
from tgi.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from tgi.microkernel.observability.otlp import Tracer


class SchedulerMetrics:
    """Publishes differences to what it published before."""

    def __init__(self, model: str) -> None:
        """`model`: its name for clients."""
        self._model = model
        self._was_ready: bool | None = None
        self._published_sums: dict[str, int] = {}
        self._published_gauges: dict[str, int] = {}
        self._finished_steps: list[tuple[FinishedStep, float]] = []  # with the seconds that handling the result took
        self._buffer = metrics.ObservationBuffer()
        # Seconds of each plan in which admitted requests joined running ones.
        self._joined_seconds = self._buffer.values("tgi_batch_concat_duration", method="decode")
        self._requests: tuple[int, ...] = ()  # numbers that change when requests come or go

    def handle_result(self, scheduler: Scheduler, result: StepResult, source: PeerId, now: float) -> None:
        """Calls `Scheduler.handle` with the result of a step, and measures it."""
        begun = time.perf_counter()
        scheduler.handle(result, source, now)
        if finished := scheduler.counters.finished_steps:
            self._finished_steps.append((finished.popleft(), time.perf_counter() - begun))

    def plan(self, scheduler: Scheduler, now: float) -> Step | None:
        """Calls `Scheduler.plan`, and measures it."""
        begun = time.perf_counter()
        admissions = scheduler.counters.admissions
        known = len(admissions)
        step = scheduler.plan(now)
        if len(admissions) > known and admissions[-1].joined:
            self._joined_seconds.append(time.perf_counter() - begun)
        return step

    def publish(self, scheduler: Scheduler, now: float) -> None:
        """To be called at the end of each iteration of the loop.

        Publishes when requests come or go, and otherwise once per metrics.FLUSH_SECONDS: publishing takes longer than
        planning a step.
        """
        if (ready := scheduler.ready) is not self._was_ready:
            self._was_ready = ready
            metrics.tgi_model_replicas.labels(model=self._model).set(int(ready))
        counters = scheduler.counters
        requests = (
            scheduler.queued,
            counters.admitted_requests,
            counters.ended_requests,
            counters.worker_losses,
            scheduler.loaded_adapters,
        )
        if requests == self._requests and now < self._buffer.due_at:
            return
        self._requests = requests
        self._publish_steps(scheduler)
        self._buffer.flush(now)
        self._add("tgi_recomputed_tokens", counters.recomputed_tokens)
        self._add("tgi_preemptions", counters.preemptions)
        self._add("tgi_prefix_cache_hit_tokens", counters.cache_hit_tokens)
        self._add("tgi_worker_losses", counters.worker_losses)
        self._add("tgi_draft_tokens", counters.draft_tokens)
        self._add("tgi_accepted_draft_tokens", counters.accepted_draft_tokens)
        self._set("tgi_queue_size", scheduler.queued)
        self._set("tgi_batch_current_size", scheduler.running)
        self._set("tgi_adapters_loaded", scheduler.loaded_adapters)
        if (limits := scheduler.worker.limits) is not None:
            used = scheduler.pages_used
            self._set("tgi_batch_current_max_tokens", used * limits.max_batch_total_tokens // limits.pages)
            self._set("tgi_kv_cache_pages_used", used)
            self._set("tgi_kv_cache_pages_free", limits.pages - used)
            self._set("tgi_batch_max_total_tokens", limits.max_batch_total_tokens)

    def _publish_steps(self, scheduler: Scheduler) -> None:
        counters = scheduler.counters
        finished, self._finished_steps = self._finished_steps, []
        for method, sent in counters.steps.items():
            before = self._published_sums.get(method, 0)
            if sent != before:
                metrics.tgi_batch_inference_count.labels(method=method).inc(sent - before)
                self._published_sums[method] = sent
            steps = [(step, handled) for step, handled in finished if step.method == method]
            succeeded = [(step, handled) for step, handled in steps if not step.failed]
            if failures := len(steps) - len(succeeded):
                metrics.tgi_batch_inference_failure.labels(method=method).inc(failures)
            if succeeded:
                metrics.tgi_batch_inference_success.labels(method=method).inc(len(succeeded))
                for name, seconds in (
                    ("tgi_batch_inference_duration", [step.seconds for step, _ in succeeded]),
                    ("tgi_batch_forward_duration", [step.forward_seconds for step, _ in succeeded]),
                    ("tgi_batch_filter_duration", [handled for _, handled in succeeded]),
                ):
                    self._buffer.values(name, method=method).extend(seconds)
        while counters.admissions:
            admitted = counters.admissions.popleft()
            metrics.tgi_batch_next_size.observe(admitted.requests)
            if admitted.joined:
                metrics.tgi_batch_concat.labels(reason="chunking").inc()

    def _add(self, name: str, total: int) -> None:
        before = self._published_sums.get(name, 0)
        if total != before:
            getattr(metrics, name).inc(total - before)
            self._published_sums[name] = total

    def _set(self, name: str, value: int) -> None:
        if self._published_gauges.get(name) != value:
            getattr(metrics, name).set(value)
            self._published_gauges[name] = value


class RequestSpans:
    """Records two spans per traced request when it ends: "queued" and "infer". Its Add carries the trace, its End both
    durations."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._traces: dict[tuple[PeerId, int], str] = {}

    def message_received(self, peer: PeerId, message: object) -> None:
        """To be called with every message that comes."""
        if isinstance(message, Add) and message.context.traceparent:
            self._traces[peer, message.rid] = message.context.traceparent

    def message_sent(self, peer: PeerId, message: object) -> None:
        """To be called with every message to a tokenizer, even if that is gone."""
        if isinstance(message, End) and (trace := self._traces.pop((peer, message.rid), "")):
            self._record(trace, message)

    def _record(self, trace: str, end: End) -> None:
        now = time.time()
        begun = now - end.inference_us / 1e6
        received = begun - end.queue_us / 1e6
        failure = None if end.reason in SUCCESSES else (str(end.reason), end.message)
        self._tracer.record_span("queued", trace, received, begun, failure=None if begun < now else failure)
        if begun < now:
            attributes = {name: getattr(end, name) for name in ("prompt_tokens", "cached_tokens", "generated_tokens")}
            self._tracer.record_span(
                "infer", trace, begun, now, attributes | {"finish_reason": str(end.reason)}, failure
            )
