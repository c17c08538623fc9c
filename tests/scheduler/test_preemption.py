"""When pages run out the youngest gives way: it comes back with all its ids, and nobody can tell from its tokens."""

import pytest

from tests.scheduler.house import House, ok
from tgi.kernel.pack import ints
from tgi.scheduler.core import Config
from tgi.worker.scripted import Script

# Four requests of 20 tokens want 20 pages; there are 8.
SCRIPT = Script(pages=8, page_size=4, slots=4, vocab_size=128, max_total_tokens=32, max_batch_prefill_tokens=16)


@pytest.mark.parametrize("caching", [True, False])
def test_tokens_do_not_change(caching: bool) -> None:
    house = House(SCRIPT, Config(prefix_caching=caching))
    house.worker_up()
    everybody = [house.add([n, 2, 3, 4], 16) for n in range(4)]
    house.run()
    assert house.core.counters.preemptions > 0
    for asked in everybody:
        ok(asked, SCRIPT)


def test_the_youngest_gives_way_and_the_oldest_never_does() -> None:
    house = House(SCRIPT, Config(prefix_caching=False))
    house.worker_up()
    everybody = [house.add([n, 2, 3, 4], 16) for n in range(4)]
    house.run()
    admitted = [ints(slot.tokens)[0] for step in house.sent for slot in step.slots]
    assert admitted.count(0) == 1
    assert admitted.count(3) > 1
    ends = [peer_message[1].rid for peer_message in house.heard if type(peer_message[1]).__name__ == "End"]
    assert ends == sorted(ends)
    assert all(asked.end is not None for asked in everybody)


def test_who_comes_back_brings_its_ids_as_prefill() -> None:
    house = House(SCRIPT, Config(prefix_caching=False))
    house.worker_up()
    house.add([0, 2, 3, 4], 16)
    young = house.add([1, 2, 3, 4], 16)
    house.run()
    _, second = [slot for step in house.sent for slot in step.slots if ints(slot.tokens)[0] == 1]
    generated = len(ints(second.tokens)) - second.prompt_tokens
    assert generated > 0
    assert house.core.counters.resumed_tokens == generated
    assert ints(second.tokens) == [*young.prompt, *young.ids[:generated]]
    ok(young, SCRIPT)


def test_admission_preempts_nobody() -> None:
    house = House(SCRIPT)
    house.worker_up()
    house.add(list(range(20)), 5)  # five pages, six in the end
    house.step()
    late = house.add(list(range(50, 70)), 1)
    while house.core.queued:
        house.step()
    assert house.core.counters.preemptions == 0
    house.run()
    ok(late, SCRIPT)


def test_a_request_that_needs_every_page_is_served() -> None:
    house = House(SCRIPT)
    house.worker_up()
    small = house.add([1], 20)
    big = house.add(list(range(31)), 1)
    house.run()
    ok(small, SCRIPT)
    ok(big, SCRIPT)


def test_it_is_the_youngest_that_goes_first() -> None:
    house = House(SCRIPT)
    house.worker_up()
    everybody = [house.add([n, 2, 3, 4], 16) for n in range(4)]
    while not house.core.counters.preemptions:
        house.step()
    shown = len(everybody[3].ids)
    while len(everybody[0].ids) < shown + 2:
        house.step()
    assert len(everybody[3].ids) == shown
    assert min(len(asked.ids) for asked in everybody[:3]) > shown


def test_what_admission_spares_for_others_keeps_nobody_waiting_for_ever() -> None:
    script = SCRIPT._replace(pages=200, max_total_tokens=800, max_batch_prefill_tokens=800)
    house = House(script)
    house.worker_up()
    small = house.add([1], 8)
    house.step()
    everything = house.add([5] * 799, 1)
    house.run()
    ok(small, script)
    ok(everything, script)
