"""How long a step may take: learned from finished steps, with a wide margin, never for steps of unknown size."""

import pytest

from tests.scheduler.simulation import Simulation
from tests.scheduler.timed_worker import TimedWorker
from tgi.microkernel.links.link import PeerSilent
from tgi.scheduler.estimators import HANG_SECONDS, LATE_SECONDS, UNSEEN_RATIO, SizeClass, StepLimits
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig


def size(tokens: int, attended: int) -> SizeClass:
    return SizeClass(tokens.bit_length(), attended.bit_length())


DECODE = size(tokens=4, attended=400)


def test_no_limit_before_a_step_was_observed() -> None:
    assert StepLimits().late_after(DECODE) is None


def test_short_steps_are_late_after_the_minimum() -> None:
    limits = StepLimits()
    limits.record(DECODE, 0.02)
    assert limits.late_after(DECODE) == LATE_SECONDS


def test_a_slow_model_gets_ten_times_what_its_steps_take() -> None:
    limits = StepLimits()
    limits.record(DECODE, 6.0)
    assert limits.late_after(DECODE) == 60.0
    for _ in range(100):
        limits.record(DECODE, 3.0)
    assert 30.0 <= (limits.late_after(DECODE) or 0.0) < 31.0


def test_steps_far_larger_than_any_observed_one_have_no_limit() -> None:
    limits = StepLimits()
    limits.record(size(1, 1), 1.0)
    assert limits.late_after(size(2000, 2000 * 2000)) is None
    assert limits.late_after(size(4, 4)) == UNSEEN_RATIO * 10 * 4 * 1.0
    limits.record(size(2000, 2000 * 2000), 300.0)
    assert limits.late_after(size(2000, 2000 * 2000)) == 3000.0


def test_a_smaller_step_is_predicted_from_a_larger_one() -> None:
    limits = StepLimits()
    limits.record(size(2000, 2000 * 2000), 30.0)
    assert limits.late_after(size(1, 2000)) == UNSEEN_RATIO * 300.0


def test_a_step_in_which_the_worker_was_suspended_does_not_raise_the_limit() -> None:
    limits = StepLimits()
    limits.record(DECODE, 0.02)
    limits.record(DECODE, 60.0)
    assert limits.late_after(DECODE) == LATE_SECONDS


def test_the_first_step_of_a_new_worker_may_take_longer() -> None:
    limits = StepLimits()
    limits.record(DECODE, 0.02)
    limits.worker_lost()
    assert limits.late_after(DECODE) == UNSEEN_RATIO * LATE_SECONDS
    limits.record(DECODE, 0.02)
    assert limits.late_after(DECODE) == LATE_SECONDS


def test_the_next_step_is_planned_before_the_soonest_end() -> None:
    limits = StepLimits()
    assert limits.plan_ahead_after(DECODE) == 0
    limits.record(DECODE, 0.1)
    assert limits.plan_ahead_after(DECODE) == pytest.approx(0.075)
    limits.record(DECODE, 0.012)
    assert limits.plan_ahead_after(DECODE) == pytest.approx(0.007)
    limits.record(DECODE, 0.1)
    assert limits.plan_ahead_after(DECODE) == pytest.approx(0.007 + 0.05 * 0.088, abs=1e-4)
    limits.record(DECODE, 0.009)
    assert limits.plan_ahead_after(DECODE) == 0


def test_the_way_to_the_worker_lets_the_next_step_be_planned_earlier() -> None:
    limits = StepLimits()
    limits.record(DECODE, 0.1)
    limits.record_transit(0.02)
    assert limits.plan_ahead_after(DECODE) == pytest.approx(0.055)
    limits.record_transit(0.01)
    assert limits.plan_ahead_after(DECODE) == pytest.approx(0.065)
    limits.record_transit(1.0)
    assert limits.plan_ahead_after(DECODE) == 0
    limits.worker_lost()
    assert limits.plan_ahead_after(DECODE) == pytest.approx(0.075)


@pytest.mark.parametrize("latency", [0.0005, 0.002, 0.005, 0.008])
def test_a_slow_link_leaves_no_worker_idle(latency: float) -> None:
    """As long as a step takes longer than its way to the worker and back."""
    sim = Simulation(FakeWorkerConfig(), SchedulerConfig())
    sim.worker_up()
    sim.add([1, 2, 3], 100)
    worker = TimedWorker(sim, lambda step: 0.02, latency)
    worker.run(1.9)
    assert worker.busy_seconds > 1.8
    assert worker.idle_seconds < 2.5 * latency  # after the first step


def test_a_late_step_makes_the_status_unhealthy_until_it_is_answered() -> None:
    sim = Simulation(FakeWorkerConfig(), SchedulerConfig(stall_limit=60.0))
    sim.worker_up()
    sim.add([1, 2, 3], 50)
    for _ in range(20):
        sim.step()
    assert sim.plan()
    step = sim.steps[0]
    assert step.limit_ms == int(1000 * (LATE_SECONDS + HANG_SECONDS))
    sim.advance_time(LATE_SECONDS - 0.5)
    assert sim.tokenizers[0].statuses[-1].healthy
    sim.advance_time(1.0)
    assert not sim.tokenizers[0].statuses[-1].healthy
    assert sim.tokenizers[0].statuses[-1].stage == "the worker finishes no step"
    sim.compute()
    sim.deliver()
    sim.advance_time()
    assert sim.tokenizers[0].statuses[-1].healthy


def test_a_worker_that_is_silent_without_work_is_unhealthy_until_it_answers_a_step() -> None:
    sim = Simulation(FakeWorkerConfig(), SchedulerConfig(stall_limit=60.0))
    sim.worker_up()
    sim.handle(PeerSilent(), sim.worker)
    sim.advance_time()
    assert sim.tokenizers[0].statuses[-1].stage == "the worker does not respond"
    sim.add([1, 2, 3], 50)
    assert sim.plan()
    sim.advance_time()
    assert not sim.tokenizers[0].statuses[-1].healthy
    sim.compute()
    sim.deliver()
    sim.advance_time()
    assert sim.tokenizers[0].statuses[-1].healthy
    assert sim.plan()
    sim.handle(PeerSilent(), sim.worker)  # it computes, which takes longer than four beats
    sim.advance_time()
    assert sim.tokenizers[0].statuses[-1].healthy
