"""The predicted wait is what a request then waits, told when it moves and not at every step."""

import pytest

from tests.scheduler.house import House
from tests.scheduler.tokenizers import Asked
from tgi.scheduler.forecast import LONGEST_SECONDS, Forecast, Rhythm
from tgi.worker.scripted import Script

SLOTS = 4
STEP_SECONDS = 0.1
SCRIPT = Script(pages=512, page_size=4, slots=SLOTS, vocab_size=128, max_total_tokens=64)


def step(house: House) -> None:
    """One step of a worker that takes a tenth of a second."""
    house.now += STEP_SECONDS
    house.step()
    house.tick()


def busy(waiting: int) -> House:
    """A house in which always so many requests wait, for a while: every one of them runs for a second."""
    house = House(SCRIPT)
    house.worker_up()
    for k in range(300):
        while house.core.queued < waiting or house.core.running + house.core.queued < SLOTS + waiting:
            house.add([1, 2, 3], 10 + k % 3)  # so that they do not all end together
        step(house)
    return house


def predicted(house: House) -> float:
    """What the tokenizer was last told, in seconds."""
    return house.tokenizers[0].statuses[-1].wait_ms / 1000


def really(house: House, asked: Asked) -> float:
    while asked.end is None:
        step(house)
    return asked.end.queue_us / 1e6


@pytest.mark.parametrize("waiting", [1, 8, 40])
def test_the_wait_is_as_predicted(waiting: int) -> None:
    house = busy(waiting)
    told = predicted(house)
    wait = really(house, house.add([1, 2, 3], 5))
    assert told == pytest.approx(wait, rel=0.4, abs=2 * STEP_SECONDS)


def test_the_time_between_ends_is_as_predicted() -> None:
    house = busy(8)
    interval = house.tokenizers[0].statuses[-1].end_ms / 1000
    ended, begun = house.core.counters.ended, house.now
    for _ in range(100):
        step(house)
        while house.core.queued < 8:
            house.add([1, 2, 3], 10)
    assert interval == pytest.approx((house.now - begun) / (house.core.counters.ended - ended), rel=0.3)


def test_nobody_waits_where_a_slot_is_free() -> None:
    house = busy(8)
    for asked in house.asked:
        if asked.end is None and not asked.ids:
            house.cancel(asked)
    house.run()
    house.tick(10)
    status = house.tokenizers[0].statuses[-1]
    assert (status.queued, status.running, status.wait_ms) == (0, 0, 0)


def test_requests_that_need_not_wait_say_nothing_about_a_queue() -> None:
    """A thousand lone requests on an idle server do not make a long queue look short."""
    forecast = Forecast()
    for k in range(1000):
        forecast.look(k, k, 0, 1, float(k))
    forecast.look(1000, 999, 10, 4, 1000.0)
    forecast.look(1002, 1001, 8, 4, 1004.0)  # two got in, in four seconds
    assert forecast.wait(8, full=True) == pytest.approx(9 * 2.0)


def test_while_nobody_has_got_in_the_wait_is_at_least_what_the_first_has_waited() -> None:
    forecast = Forecast()
    forecast.look(4, 0, 3, 4, 0.0)
    forecast.look(4, 0, 3, 4, 5.0)
    assert forecast.wait(3, full=True) >= 5.0


def test_only_an_end_lets_anybody_into_a_full_batch() -> None:
    forecast = Forecast()
    forecast.look(4, 0, 0, 4, 0.0)
    forecast.look(6, 2, 0, 4, 6.0)
    assert forecast.wait(0, full=True) == pytest.approx(3.0)
    assert forecast.wait(0, full=False) == 0.0


def test_a_rhythm_forgets_and_stays_finite() -> None:
    rhythm = Rhythm()
    for _ in range(100):
        rhythm.learn(1.0, 10)
    for _ in range(300):
        rhythm.learn(1.0, 1)
    assert rhythm.interval == pytest.approx(1.0, rel=0.1)
    slower = 0.0
    for _ in range(100):
        rhythm.learn(100.0, 0)
        assert slower <= rhythm.interval <= LONGEST_SECONDS or not rhythm._events
        slower = rhythm.interval
    assert 100 <= slower <= LONGEST_SECONDS


def test_a_status_for_the_load_alone_comes_at_most_twice_a_second() -> None:
    house = busy(8)
    told, begun = len(house.tokenizers[0].statuses), house.now
    for _ in range(200):
        step(house)
        while house.core.queued < 8:
            house.add([1, 2, 3], 10)
    assert 0 < len(house.tokenizers[0].statuses) - told <= 2 * (house.now - begun) + 1


def test_an_idle_scheduler_is_silent() -> None:
    house = busy(3)
    house.run()
    house.tick(1)
    told = len(house.tokenizers[0].statuses)
    assert house.core.deadline(house.now) - house.now > 1000
    for _ in range(50):
        house.tick(1)
    assert len(house.tokenizers[0].statuses) == told
