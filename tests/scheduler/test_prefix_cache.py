"""Equal prefixes share pages: as soon as they are computed, generated tokens included, and never across salts."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.counting import per_item
from tests.scheduler.house import House, ok
from tests.scheduler.tokenizers import Asked
from tgi.kernel.messages import Slot
from tgi.kernel.pack import INT32, ints, pack
from tgi.scheduler.core import Config
from tgi.scheduler.pages import PagePool
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


def computed(house: House, since: int = 0) -> int:
    """Tokens in the steps that were sent since so many."""
    return sum(sum(ints(step.counts)) for step in house.sent[since:])


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


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6])
def test_each_turn_of_a_chat_computes_only_what_is_new(house: House, new: int) -> None:
    """Wherever in a page the turn before ended. That one has computed all but its last token."""
    history = PROMPT
    known = 0
    for turn in range(5):
        sent = len(house.sent)
        asked = house.add(history, new)
        house.run()
        ok(asked, SCRIPT)
        found = known // 4 * 4
        assert (turn, cached(asked)) == (turn, found)
        assert computed(house, sent) == len(history) - found + new - 1
        known = len(history) + new - 1
        history = [*history, *asked.ids, 100 + turn]


def test_a_turn_that_an_end_token_or_its_client_has_ended_is_found(house: House) -> None:
    plain = house.add(PROMPT, 9)
    house.run()
    house.worker_up()  # with nothing cached
    ended = house.add(PROMPT, 30, stop_ids=[plain.ids[6]])
    house.run()
    stopped = house.add([50, *PROMPT], 30)
    for _ in range(9):
        house.step()
    house.cancel(stopped)
    house.run()
    for first, prompt in ((ended, PROMPT), (stopped, [50, *PROMPT])):
        assert len(first.ids) >= 6
        again = house.add([*prompt, *first.ids, 11])
        house.run()
        assert cached(again) >= (len(prompt) + len(first.ids) - 1) // 4 * 4
        ok(again, SCRIPT)


def test_who_gave_way_finds_what_is_left_of_its_pages() -> None:
    """It computes again what was in the page that was not full, and in those that others have taken."""
    script = SCRIPT._replace(pages=16)
    house = House(script)
    house.worker_up()
    both = [house.add([place, *range(10)], 31) for place in range(2)]
    house.run()
    for asked in both:
        ok(asked, script)
    counters = house.core.counters
    assert counters.preemptions > 0
    assert counters.cache_hit_tokens > 0
    once = sum(len(asked.prompt) + len(asked.ids) - 1 for asked in both)
    came_back = sum(len(ints(slot.tokens)) for step in house.sent for slot in step.slots) - 2 * 11
    assert computed(house) <= once + came_back - counters.cache_hit_tokens


def test_a_long_history_is_found_whole() -> None:
    script = SCRIPT._replace(pages=5000, max_total_tokens=20_000, max_batch_prefill_tokens=4096)
    house = House(script)
    house.worker_up()
    history = [place * place % 97 for place in range(12_345)]
    house.add(history, 1)
    house.run()
    sent = len(house.sent)
    again = house.add([*history, 3, 4, 5], 1)
    house.run()
    assert cached(again) == 12_344
    assert computed(house, sent) == 4


def test_what_a_page_costs() -> None:
    """To find one takes its key, a look into a dictionary and to count one holder more, whether it is held or idle; to
    make one known its key, the same look and a name."""
    pool = PagePool(2000, 16)
    column = pack(INT32, range(16 * 1000))
    _, prefix = pool.find(b"", column, 0)
    pages = pool.take(1000)
    made = per_item(lambda count: partial(pool.publish, prefix, pages[:count], column), 100, 900)
    pool.publish(prefix, pages, column)
    held = per_item(lambda count: partial(pool.find, b"", column, count), 100, 900)
    assert held.instructions <= 48

    def idle(count: int) -> Callable[[], object]:
        pool = PagePool(2000, 16)
        pages = pool.take(1000)
        pool.publish(prefix, pages, column)
        pool.release(pages)
        return partial(pool.find, b"", column, count)

    assert per_item(idle, 100, 900).instructions <= 48
    assert made.instructions <= 46
