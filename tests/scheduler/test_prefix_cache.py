"""Equal prefixes share pages: as soon as they are computed, generated tokens included, and never across salts."""

import pytest

from tests.scheduler.house import House, ok
from tests.scheduler.tokenizers import Asked
from tgi.kernel.messages import Slot
from tgi.kernel.pack import ints
from tgi.scheduler.core import Config
from tgi.worker.scripted import Script

SCRIPT = Script(pages=32, page_size=4, slots=4, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=32)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # two full pages, and a half


@pytest.fixture
def house() -> House:
    house = House(SCRIPT)
    house.worker_up()
    return house


def cached(asked: Asked) -> int:
    assert asked.end is not None
    return asked.end.cached_tokens


def test_a_second_request_computes_only_what_is_new(house: House) -> None:
    first = house.add(PROMPT)
    house.run()
    steps = len(house.sent)
    second = house.add([*PROMPT[:8], 11])
    house.run()
    assert (cached(first), cached(second)) == (0, 8)
    assert (ints(house.sent[steps].starts), ints(house.sent[steps].counts)) == ([8], [1])
    ok(first, SCRIPT)
    ok(second, SCRIPT)


def test_pages_are_found_while_their_first_request_still_runs(house: House) -> None:
    first = house.add(PROMPT, 20)
    house.step()
    second = house.add(PROMPT, 3)
    house.run()
    assert cached(second) == 8
    ok(first, SCRIPT)
    ok(second, SCRIPT)


def test_two_that_come_together_both_compute_since_nothing_is_there_yet(house: House) -> None:
    both = [house.add(PROMPT), house.add(PROMPT)]
    house.run()
    assert [cached(asked) for asked in both] == [0, 0]
    for asked in both:
        ok(asked, SCRIPT)


def test_generated_tokens_are_found_in_the_next_turn(house: House) -> None:
    first = house.add(PROMPT, 7)
    house.run()
    second = house.add([*PROMPT, *first.ids, 11])  # 18 ids, of which 16 were computed
    house.run()
    assert cached(second) == 16
    ok(second, SCRIPT)


def test_the_last_id_is_always_computed(house: House) -> None:
    house.add(PROMPT[:8])
    house.run()
    again = house.add(PROMPT[:8])
    house.run()
    assert cached(again) == 4
    ok(again, SCRIPT)


def test_the_longest_unused_pages_give_way_first(house: House) -> None:
    old, new = [list(range(n, n + 13)) for n in (20, 60)]
    house.add(old)
    house.run()
    house.add(new)
    house.run()
    # Takes 24 of the 25 free pages; the rest come from the older prefix, its end first.
    big = house.add(list(range(100)[:50]), 14)
    house.run()
    ok(big, SCRIPT)
    other = house.add(list(range(50, 100)), 14)
    house.run()
    ok(other, SCRIPT)
    again = [house.add(new), house.add(old)]
    house.run()
    for asked in again:
        ok(asked, SCRIPT)
    assert cached(again[0]) >= cached(again[1])


def test_it_can_be_switched_off() -> None:
    house = House(SCRIPT, Config(prefix_caching=False))
    house.worker_up()
    for _ in range(2):
        asked = house.add(PROMPT)
        house.run()
        assert cached(asked) == 0
    assert house.core.counters.cache_hit_tokens == 0


def test_a_new_worker_starts_with_nothing_cached(house: House) -> None:
    house.add(PROMPT)
    house.run()
    house.worker_up()
    again = house.add(PROMPT)
    house.run()
    assert cached(again) == 0


def test_a_slot_is_told_all_its_pages_and_ids_once(house: House) -> None:
    house.add(PROMPT, 20)
    house.run()
    slots: list[Slot] = [slot for step in house.sent for slot in step.slots]
    assert [ints(slot.tokens) for slot in slots] == [PROMPT]
    pages = [page for step in house.sent for page in ints(step.page_ids)]
    assert len(pages) == len(set(pages)) == (10 + 20 - 1 + 3) // 4
