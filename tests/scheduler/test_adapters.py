"""Adapters through the scheduler: changes go down and answers up, caches are kept apart, and no death forgets them."""

import pytest

from tests.scheduler.house import House, ok
from tgi.kernel.messages import Adapted, Reason
from tgi.worker.scripted import Script

SCRIPT = Script(pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=256)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture
def house() -> House:
    house = House(SCRIPT, tokenizers=2)
    house.adapters.start_with("first", "one")
    house.worker_up()
    return house


def names(house: House, place: int = 0) -> list[str]:
    return [adapter.name for adapter in house.adapters.loaded(place)]


def test_a_change_goes_down_and_its_answer_up_behind_the_news(house: House) -> None:
    assert names(house) == names(house, 1) == ["first"]
    house.adapters.ask("second", "two", place=1)
    assert (names(house), house.adapters.errors) == (["first"], [])
    house.adapters.work()
    assert names(house) == names(house, 1) == ["first", "second"]
    assert house.adapters.errors == [""]
    house.adapters.ask("first", None)
    house.adapters.work()
    assert names(house) == ["second"]
    assert not house.adapters.asked


def test_requests_with_several_share_steps_and_no_pages(house: House) -> None:
    house.adapters.ask("second", "two")
    house.adapters.work()
    choices = [None, *house.adapters.loaded()]
    for cached in (0, 8):  # cold, then each finds its own pages
        asked = [house.add(PROMPT, 12, adapter=adapter) for adapter in choices]
        house.plan()
        assert len(house.sent[-1].rows) == 4 * 3
        house.run()
        for one in asked:
            ok(one, SCRIPT)
            assert one.end is not None
            assert one.end.cached_tokens == cached
        assert len({tuple(one.ids) for one in asked}) == 3


def test_the_next_worker_becomes_what_the_last_one_was_before_it_computes(house: House) -> None:
    house.adapters.ask("second", "two")
    house.adapters.ask("first", None)
    while house.adapters.work():
        pass
    (second,) = house.adapters.loaded()
    asked = house.add(PROMPT, 12, adapter=second)
    for _ in range(5):
        house.step()
    house.worker_up()
    told = len(house.tokenizers[0].statuses)
    assert names(house) == ["second"]
    assert house.plan() == 0
    assert not house.core.ready
    assert [order.name for order in house.adapters.orders] == ["first", "second"]
    house.run()
    ok(asked, SCRIPT)
    assert house.core.ready
    assert all(status.adapters == [second] for status in house.tokenizers[0].statuses[told - 1 :])
    assert house.adapters.errors == ["", ""]  # nobody hears of what nobody asked for


def test_what_is_asked_of_a_worker_that_dies_is_asked_of_the_next(house: House) -> None:
    house.adapters.ask("second", "two")
    house.worker_down()
    house.adapters.ask("third", "three", place=1)
    assert house.adapters.errors == []
    house.run()
    assert names(house) == ["first", "second", "third"]
    assert house.adapters.errors == ["", ""]


def test_a_new_scheduler_learns_of_them_from_the_worker(house: House) -> None:
    house.adapters.ask("second", "two")
    house.adapters.work()
    asked = [house.add(PROMPT, 12, adapter=adapter) for adapter in house.adapters.loaded()]
    house.step()
    house.new_core()
    house.step()
    assert names(house) == ["first", "second"]
    house.worker_up()
    house.run()
    assert names(house) == ["first", "second"]
    for one in asked:
        ok(one, SCRIPT)


def test_a_tokenizer_that_dies_hears_nothing(house: House) -> None:
    house.adapters.ask("second", "two")
    house.tokenizer_up(0)  # whoever asked it asks its successor
    house.run()
    assert names(house) == ["first", "second"]
    assert house.adapters.errors == [""]


def test_a_request_whose_adapter_is_gone_says_so(house: House) -> None:
    (first,) = house.adapters.loaded()
    house.adapters.ask("first", None)
    house.adapters.work()
    late, other = house.add(PROMPT, adapter=first), house.add(PROMPT)
    house.run()
    assert late.end is not None
    assert (late.end.reason, late.end.message) == (Reason.FAILED, "the adapter first is not loaded any more")
    ok(other, SCRIPT)


@pytest.mark.parametrize("cancelled", [False, True])
def test_nobody_finds_what_was_computed_for_lack_of_an_adapter(house: House, cancelled: bool) -> None:
    """Even where the same content comes back before anybody has noticed."""
    (first,) = house.adapters.loaded()
    house.adapters.ask("first", None)
    house.adapters.work()
    late = house.add(PROMPT, adapter=first)
    house.plan()
    if cancelled:
        house.cancel(late)
    house.adapters.ask("first", "one")
    house.run()
    assert late.end is not None
    assert late.end.reason == (Reason.CANCELLED if cancelled else Reason.FAILED)
    for cached in (0, 8):
        asked = house.add(PROMPT, adapter=first)
        house.run()
        ok(asked, SCRIPT)
        assert asked.end is not None
        assert asked.end.cached_tokens == cached


def test_what_was_computed_before_an_unload_is_found_after_a_load(house: House) -> None:
    (first,) = house.adapters.loaded()
    house.add(PROMPT, adapter=first)
    house.run()
    house.adapters.ask("first", None)
    house.adapters.ask("again", "one")
    house.run()
    asked = house.add(PROMPT, adapter=house.adapters.loaded()[0])
    house.run()
    ok(asked, SCRIPT)
    assert asked.end is not None
    assert asked.end.cached_tokens == 8


def test_a_change_waits_for_the_steps_under_way_and_they_for_it(house: House) -> None:
    """A request that was planned while an adapter was there finds it at the worker."""
    (first,) = house.adapters.loaded()
    asked = house.add(PROMPT, 20, adapter=first)
    house.plan()
    house.adapters.ask("first", None)
    assert not house.adapters.orders
    assert house.plan() == 0
    while house.steps:
        house.compute()
        house.deliver()
    assert [order.name for order in house.adapters.orders] == ["first"]
    assert house.plan() > 0
    house.run()
    ok(asked, SCRIPT)


def test_a_request_without_its_adapter_ends_in_its_first_step_and_tells_nothing() -> None:
    house = House(SCRIPT._replace(max_batch_prefill_tokens=4))
    house.adapters.start_with("first", "one")
    house.worker_up()
    (first,) = house.adapters.loaded()
    house.adapters.ask("first", None)
    house.adapters.work()
    late = house.add(PROMPT, adapter=first, prompt_top_n=1)
    house.plan()
    house.compute()
    house.deliver()
    assert late.end is not None
    assert late.end.reason == Reason.FAILED
    assert not late.told
    house.run()


def test_an_adapter_that_cannot_be_had_again_is_gone_for_all(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.adapters.ask("second", "two")
    house.adapters.work()
    house.worker_up()
    (order,) = house.adapters.orders
    house.adapters.orders.clear()
    assert house.worker is not None
    house.handle(Adapted(order.rid, "no such directory"), house.worker)
    assert names(house) == ["first"]
    assert "has not got adapter second again: no such directory" in caplog.text
    assert house.core.ready
