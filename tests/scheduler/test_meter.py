"""What the core counts arrives in the metrics, once."""

from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.house import House
from tgi.kernel import metrics
from tgi.kernel.messages import Result
from tgi.kernel.samples import Store
from tgi.scheduler.core import Core
from tgi.scheduler.meter import KEPT_SECONDS, Meter
from tgi.worker.scripted import Script

SCRIPT = Script(pages=64, page_size=4, slots=2, vocab_size=128, max_total_tokens=64)


class Metered:
    """A core whose plans and results go through the meter, as in the scheduler's loop."""

    def __init__(self, core: Core, meter: Meter) -> None:
        self._core = core
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def plan(self, now: float) -> Any:
        return self._meter.plan(self._core, now)

    def handle(self, message: Any, source: Any, now: float) -> None:
        if isinstance(message, Result):
            self._meter.result(self._core, message, source, now)
        else:
            self._core.handle(message, source, now)


@pytest.fixture
def metered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[House, Meter]:
    monkeypatch.setattr(metrics._here, "store", Store(tmp_path))
    monkeypatch.setattr(metrics._here, "made", {})
    house, meter = House(SCRIPT), Meter()
    house.core = Metered(house.core, meter)  # type: ignore[assignment]
    return house, meter


def samples() -> dict[str, float]:
    lines = [line for line in metrics.render().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_sums_and_gauges(metered: tuple[House, Meter]) -> None:
    house, meter = metered
    house.worker_up()
    house.broken.add(99)
    for first in (1, 1, 2, 99):
        house.add([first, 2, 3, 4, 5], 6)
        house.step()
        meter.publish(house.core, house.now)
    house.worker_up()
    house.run()
    meter.publish(house.core, house.now)
    meter.publish(house.core, house.now)
    house.add([1, 2, 3, 4, 5], 6)
    house.step()
    meter.publish(house.core, house.now)
    found = samples()
    methods = ["prefill", "decode"]
    started, ended, broken = [
        {method: found.get(f'tgi_batch_inference_{what}{{method="{method}"}}', 0.0) for method in methods}
        for what in ("count", "success", "failure")
    ]
    assert min(started.values()) > 0
    assert sum(broken.values()) == 2  # with others, and alone
    assert sum(started.values()) > sum(ended.values()) + sum(broken.values())  # some were lost with the worker
    for method in methods:
        for duration in ("inference", "forward", "filter"):
            assert found[f'tgi_batch_{duration}_duration_count{{method="{method}"}}'] == ended[method]
    assert found["tgi_worker_losses"] == 1
    assert found["tgi_resumed_tokens"] > 0
    joins = found['tgi_batch_concat{reason="chunking"}']
    assert joins > 0
    assert found['tgi_batch_concat_duration_count{method="decode"}'] == joins
    assert found['tgi_batch_concat_duration_sum{method="decode"}'] > 0
    assert found["tgi_batch_next_size_count"] >= joins
    assert found["tgi_prefix_cache_hit_tokens"] > 0
    assert (found["tgi_queue_size"], found["tgi_batch_current_size"]) == (0, 1)
    assert found["tgi_pages_used"] + found["tgi_pages_free"] == 64
    assert found["tgi_batch_current_max_tokens"] == found["tgi_pages_used"] * 4 > 0
    assert found["tgi_batch_max_total_tokens"] == 256


def test_an_idle_batch_is_nothing(metered: tuple[House, Meter]) -> None:
    house, meter = metered
    house.worker_up()
    for _ in range(5):
        house.add([1, 2, 3], 4)
    house.step()
    meter.publish(house.core, house.now)
    assert (samples()["tgi_queue_size"], samples()["tgi_batch_current_size"]) == (3, 2)
    house.run()
    house.settle()
    meter.publish(house.core, house.now)
    found = samples()
    for name in ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens", "tgi_pages_used"):
        assert found[name] == 0, name
    assert found["tgi_batch_next_size_sum"] == 5


def test_requests_that_yield_their_pages_are_counted(metered: tuple[House, Meter]) -> None:
    house, meter = metered
    house.script = SCRIPT._replace(pages=6)
    house.worker_up()
    for _ in range(2):
        house.add([1, 2, 3], 15)
    house.run()
    meter.publish(house.core, house.now)
    assert samples()["tgi_preemptions"] > 0


def test_while_nobody_comes_or_goes_steps_are_written_down_now_and_then(metered: tuple[House, Meter]) -> None:
    house, meter = metered
    name = 'tgi_batch_inference_success{method="decode"}'
    house.worker_up()
    house.add([1, 2, 3], 20)
    for _ in range(4):
        house.step()
        meter.publish(house.core, house.now)
    written = samples().get(name, 0.0)
    for _ in range(5):
        house.step()
        meter.publish(house.core, house.now)
    assert samples().get(name, 0.0) == written
    meter.publish(house.core, house.now + KEPT_SECONDS)
    now_and_then = samples()[name]
    assert now_and_then >= written + 5
    house.run()
    meter.publish(house.core, house.now)  # it has ended
    found = samples()
    assert found[name] > now_and_then
    assert found['tgi_batch_inference_duration_count{method="decode"}'] == found[name]
