"""The scheduler's counters are published as metrics, once."""

from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.simulation import Simulation
from tgi.microkernel.messages.protocol import StepResult
from tgi.microkernel.observability import metrics
from tgi.microkernel.observability.metrics import FLUSH_SECONDS
from tgi.scheduler.metrics import SchedulerMetrics
from tgi.scheduler.scheduler import Scheduler
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

WORKER_CONFIG = FakeWorkerConfig(pages=64, page_size=4, slots=2, vocab_size=128, max_total_tokens=64)


class MeasuredScheduler:
    """A scheduler whose plans and results are measured, as in the scheduler's loop."""

    def __init__(self, scheduler: Scheduler, scheduler_metrics: SchedulerMetrics) -> None:
        self._scheduler = scheduler
        self._scheduler_metrics = scheduler_metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def plan(self, now: float) -> Any:
        return self._scheduler_metrics.plan(self._scheduler, now)

    def handle(self, message: Any, source: Any, now: float) -> None:
        if isinstance(message, StepResult):
            self._scheduler_metrics.handle_result(self._scheduler, message, source, now)
        else:
            self._scheduler.handle(message, source, now)


@pytest.fixture
def metered(samples_here: Path) -> tuple[Simulation, SchedulerMetrics]:
    sim, scheduler_metrics = Simulation(WORKER_CONFIG), SchedulerMetrics("some/model")
    sim.scheduler = MeasuredScheduler(sim.scheduler, scheduler_metrics)  # type: ignore[assignment]
    return sim, scheduler_metrics


def samples() -> dict[str, float]:
    lines = [line for line in metrics.render().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_counters_and_gauges(metered: tuple[Simulation, SchedulerMetrics]) -> None:
    sim, scheduler_metrics = metered
    sim.worker_up()
    sim.broken.add(99)
    for first in (1, 1, 2, 99):
        sim.add([first, 2, 3, 4, 5], 6)
        sim.step()
        scheduler_metrics.publish(sim.scheduler, sim.now)
    sim.worker_up()
    sim.run()
    scheduler_metrics.publish(sim.scheduler, sim.now)
    scheduler_metrics.publish(sim.scheduler, sim.now)
    sim.add([1, 2, 3, 4, 5], 6)
    sim.step()
    scheduler_metrics.publish(sim.scheduler, sim.now)
    found = samples()
    assert found['tgi_model_replicas{model="some/model"}'] == 1
    methods = ["prefill", "decode"]
    started, ended, broken = [
        {method: found.get(f'tgi_batch_inference_{what}{{method="{method}"}}', 0.0) for method in methods}
        for what in ("count", "success", "failure")
    ]
    assert min(started.values()) > 0
    assert sum(broken.values()) == 2  # first with other requests, then alone
    assert sum(started.values()) > sum(ended.values()) + sum(broken.values())  # some were lost with the worker
    for method in methods:
        for duration in ("inference", "forward", "filter"):
            assert found[f'tgi_batch_{duration}_duration_count{{method="{method}"}}'] == ended[method]
    assert found["tgi_worker_losses"] == 1
    assert found["tgi_recomputed_tokens"] > 0
    joins = found['tgi_batch_concat{reason="chunking"}']
    assert joins > 0
    assert found['tgi_batch_concat_duration_count{method="decode"}'] == joins
    assert found['tgi_batch_concat_duration_sum{method="decode"}'] > 0
    assert found["tgi_batch_next_size_count"] >= joins
    assert found["tgi_prefix_cache_hit_tokens"] > 0
    assert (found["tgi_queue_size"], found["tgi_batch_current_size"]) == (0, 1)
    assert found["tgi_kv_cache_pages_used"] + found["tgi_kv_cache_pages_free"] == 64
    assert found["tgi_batch_current_max_tokens"] == found["tgi_kv_cache_pages_used"] * 4 > 0
    assert found["tgi_batch_max_total_tokens"] == 256


def test_gauges_of_an_idle_scheduler_are_zero(metered: tuple[Simulation, SchedulerMetrics]) -> None:
    sim, scheduler_metrics = metered
    sim.worker_up()
    for _ in range(5):
        sim.add([1, 2, 3], 4)
    sim.step()
    scheduler_metrics.publish(sim.scheduler, sim.now)
    assert (samples()["tgi_queue_size"], samples()["tgi_batch_current_size"]) == (3, 2)
    sim.run()
    sim.commit()
    scheduler_metrics.publish(sim.scheduler, sim.now)
    found = samples()
    for name in ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens", "tgi_kv_cache_pages_used"):
        assert found[name] == 0, name
    assert found["tgi_batch_next_size_sum"] == 5


def test_preemptions_are_counted(metered: tuple[Simulation, SchedulerMetrics]) -> None:
    sim, scheduler_metrics = metered
    sim.worker_config = WORKER_CONFIG._replace(pages=6)
    sim.worker_up()
    for _ in range(2):
        sim.add([1, 2, 3], 15)
    sim.run()
    scheduler_metrics.publish(sim.scheduler, sim.now)
    assert samples()["tgi_preemptions"] > 0


def test_without_arrivals_and_ends_steps_are_published_at_an_interval(
    metered: tuple[Simulation, SchedulerMetrics],
) -> None:
    sim, scheduler_metrics = metered
    name = 'tgi_batch_inference_success{method="decode"}'
    sim.worker_up()
    sim.add([1, 2, 3], 20)
    for _ in range(4):
        sim.step()
        scheduler_metrics.publish(sim.scheduler, sim.now)
    written = samples().get(name, 0.0)
    for _ in range(5):
        sim.step()
        scheduler_metrics.publish(sim.scheduler, sim.now)
    assert samples().get(name, 0.0) == written
    scheduler_metrics.publish(sim.scheduler, sim.now + FLUSH_SECONDS)
    now_and_then = samples()[name]
    assert now_and_then >= written + 5
    sim.run()
    scheduler_metrics.publish(sim.scheduler, sim.now)  # it has ended
    found = samples()
    assert found[name] > now_and_then
    assert found['tgi_batch_inference_duration_count{method="decode"}'] == found[name]
