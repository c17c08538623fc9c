"""What a restarted worker may be: as much as the one before it or more, and alike where others count on it."""

import logging
from typing import Any

import pytest

from tests.scheduler.house import House
from tgi.scheduler.deployment import AT_LEAST, EQUAL, shortfall
from tgi.worker.scripted import Script

LIMITS = Script().limits()


@pytest.mark.parametrize("name", AT_LEAST)
def test_it_may_have_more_and_not_less(name: str) -> None:
    held = getattr(LIMITS, name)
    assert shortfall(LIMITS, LIMITS._replace(**{name: held + 1})) == ""
    assert shortfall(LIMITS, LIMITS._replace(**{name: held - 1})) == f"{name} is {held - 1}, at least {held} is needed"


@pytest.mark.parametrize(("name", "other"), [("page_size", 32), ("vocab_size", 50_000), ("dtype", "bfloat16")])
def test_some_things_stay_what_they_are(name: str, other: Any) -> None:
    assert name in EQUAL
    found = shortfall(LIMITS, LIMITS._replace(**{name: other}))
    assert found == f"{name} is {other} instead of {getattr(LIMITS, name)}"


def test_a_worker_that_would_compute_another_way_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Pages of another size are what shows it: see tests/worker/test_native_models.py."""
    house = House(Script())
    house.worker_up()
    with caplog.at_level(logging.ERROR):
        house.worker_up(Script(page_size=32))
    assert "page_size is 32 instead of 16" in caplog.text
    house.add([1, 2, 3])
    assert house.plan() == 0
