"""A row that could not draw ends its request with its own words, and nobody else's."""

from tests.scheduler.house import House, ok
from tgi.kernel.messages import Reason
from tgi.worker.scripted import Script

SCRIPT = Script(pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=64)


def test_only_the_row_that_failed_ends() -> None:
    house = House(SCRIPT)
    house.worker_up()
    first, failing, last = (house.add([n, 2, 3], 12, top_n=n) for n in range(3))
    for _ in range(3):
        house.step()
    known = len(failing.ids)
    house.plan()
    house.compute()
    house.results[0] = house.results[0]._replace(faults=["", "its grammar cannot go on", ""])
    house.deliver()
    assert failing.end is not None
    assert (failing.end.reason, failing.end.message) == (Reason.FAILED, "its grammar cannot go on")
    assert len(failing.ids) == known
    house.run()
    ok(first, SCRIPT)
    ok(last, SCRIPT)


def test_as_many_as_rows_or_none() -> None:
    house = House(SCRIPT)
    house.worker_up()
    asked = house.add([1, 2, 3], 4)
    house.plan()
    house.compute()
    house.results[0] = house.results[0]._replace(faults=["", ""])
    house.deliver()
    house.run()
    ok(asked, SCRIPT)  # the step was begun again
    assert house.core.under_way.epoch == 2
