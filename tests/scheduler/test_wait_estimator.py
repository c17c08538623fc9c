"""The wait estimator: predictions come true, and are reported when they change and not at every step."""

import pytest

from tests.scheduler.simulated_tokenizers import SubmittedRequest
from tests.scheduler.simulation import Simulation
from tgi.scheduler.estimators import MAX_INTERVAL_SECONDS, MeanInterval, WaitEstimator
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

SLOTS = 4
STEP_SECONDS = 0.1
WORKER_CONFIG = FakeWorkerConfig(pages=512, page_size=4, slots=SLOTS, vocab_size=128, max_total_tokens=64)


def step(sim: Simulation) -> None:
    """One step of STEP_SECONDS."""
    sim.now += STEP_SECONDS
    sim.step()
    sim.advance_time()


def busy(waiting: int) -> Simulation:
    """A simulation in which this number of requests has waited for a while, each of which runs for a second."""
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    for k in range(300):
        while sim.scheduler.queued < waiting or sim.scheduler.running + sim.scheduler.queued < SLOTS + waiting:
            sim.add([1, 2, 3], 10 + k % 3)  # lengths differ, so that they do not end together
        step(sim)
    return sim


def predicted(sim: Simulation) -> float:
    """The wait that was last reported to the tokenizer, in seconds."""
    return sim.tokenizers[0].statuses[-1].predicted_wait_ms / 1000


def actual(sim: Simulation, request: SubmittedRequest) -> float:
    while request.end is None:
        step(sim)
    return request.end.queue_us / 1e6


@pytest.mark.parametrize("waiting", [1, 8, 40])
def test_requests_wait_as_long_as_predicted(waiting: int) -> None:
    sim = busy(waiting)
    reported = predicted(sim)
    wait = actual(sim, sim.add([1, 2, 3], 5))
    assert reported == pytest.approx(wait, rel=0.4, abs=2 * STEP_SECONDS)


def test_the_mean_interval_between_ends_is_as_predicted() -> None:
    sim = busy(8)
    interval = sim.tokenizers[0].statuses[-1].mean_end_interval_ms / 1000
    ended, begun = sim.scheduler.counters.ended_requests, sim.now
    for _ in range(100):
        step(sim)
        while sim.scheduler.queued < 8:
            sim.add([1, 2, 3], 10)
    assert interval == pytest.approx((sim.now - begun) / (sim.scheduler.counters.ended_requests - ended), rel=0.3)


def test_the_predicted_wait_is_zero_while_a_slot_is_free() -> None:
    sim = busy(8)
    for request in sim.requests:
        if request.end is None and not request.ids:
            sim.cancel(request)
    sim.run()
    sim.advance_time(10)
    status = sim.tokenizers[0].statuses[-1]
    assert (status.queued, status.running, status.predicted_wait_ms) == (0, 0, 0)


def test_requests_that_do_not_wait_do_not_count() -> None:
    """A thousand single requests on an idle server do not make a long queue look short."""
    estimator = WaitEstimator()
    for k in range(1000):
        estimator.observe(k, k, 0, 1, float(k))
    estimator.observe(1000, 999, 10, 4, 1000.0)
    estimator.observe(1002, 1001, 8, 4, 1004.0)  # two were admitted in four seconds
    assert estimator.wait_seconds(8, full=True) == pytest.approx(9 * 2.0)


def test_without_admissions_the_prediction_is_at_least_the_time_so_far() -> None:
    estimator = WaitEstimator()
    estimator.observe(4, 0, 3, 4, 0.0)
    estimator.observe(4, 0, 3, 4, 5.0)
    assert estimator.wait_seconds(3, full=True) >= 5.0


def test_a_full_batch_is_left_at_the_interval_of_ends() -> None:
    estimator = WaitEstimator()
    estimator.observe(4, 0, 0, 4, 0.0)
    estimator.observe(6, 2, 0, 4, 6.0)
    assert estimator.wait_seconds(0, full=True) == pytest.approx(3.0)
    assert estimator.wait_seconds(0, full=False) == 0.0


def test_a_mean_interval_forgets_and_is_bounded() -> None:
    mean = MeanInterval()
    for _ in range(100):
        mean.record(1.0, 10)
    for _ in range(300):
        mean.record(1.0, 1)
    assert mean.interval == pytest.approx(1.0, rel=0.1)
    slower = 0.0
    for _ in range(100):
        mean.record(100.0, 0)
        assert slower <= mean.interval <= MAX_INTERVAL_SECONDS or not mean._events
        slower = mean.interval
    assert 100 <= slower <= MAX_INTERVAL_SECONDS


def test_load_alone_is_reported_at_most_twice_a_second() -> None:
    sim = busy(8)
    reported, begun = len(sim.tokenizers[0].statuses), sim.now
    for _ in range(200):
        step(sim)
        while sim.scheduler.queued < 8:
            sim.add([1, 2, 3], 10)
    assert 0 < len(sim.tokenizers[0].statuses) - reported <= 2 * (sim.now - begun) + 1


def test_an_idle_scheduler_reports_nothing() -> None:
    sim = busy(3)
    sim.run()
    sim.advance_time(1)
    reported = len(sim.tokenizers[0].statuses)
    assert sim.scheduler.deadline(sim.now) - sim.now > 1000
    for _ in range(50):
        sim.advance_time(1)
    assert len(sim.tokenizers[0].statuses) == reported
