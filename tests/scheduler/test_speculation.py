"""Drafts change how fast tokens come, and nothing else; and where they gain nothing they cost nothing."""

import pytest

from tests.scheduler.house import House, expected, ok
from tgi.kernel.messages import Reason, Result
from tgi.kernel.pack import FLOAT32, INT32, ints, pack
from tgi.scheduler.core import Config
from tgi.scheduler.speculation import READ
from tgi.worker.scripted import Script

# The worker says at random one of these ids. Of one id the next is always known, of two every other time.
SAME, EITHER, ANY = 1, 2, 128
SCRIPT = Script(pages=256, page_size=4, slots=8, vocab_size=SAME, max_total_tokens=256, max_batch_prefill_tokens=64)
DRAFTS = Config(drafts=4)
BY_MODEL = Config(drafts=4, draft_model=True)


def a_house(config: Config = DRAFTS, script: Script = SCRIPT) -> House:
    house = House(script, config)
    house.worker_up()
    return house


def drafts_of(house: House) -> list[list[int]]:
    """The drafts of each step."""
    return [ints(step.drafts) for step in house.sent]


@pytest.mark.parametrize("config", [DRAFTS, BY_MODEL], ids=["lookup", "model"])
@pytest.mark.parametrize("vocab_size", [SAME, EITHER, 5, ANY])
def test_the_tokens_are_those_without(config: Config, vocab_size: int) -> None:
    script = SCRIPT._replace(vocab_size=vocab_size)
    house = a_house(config, script)
    everybody = [
        house.add([0] * (4 + n), 60, seed=n, top_n=n % 3, stop_ids=[1, *range(40, 44)] * (n == 3)) for n in range(6)
    ]
    house.run()
    for asked in everybody:
        ok(asked, script)
    counters = house.core.counters
    assert counters.accepted_tokens <= counters.drafted_tokens
    if vocab_size == SAME:
        assert house.tokenizers[0].longest == 5
        assert len(house.sent) < 20
        assert counters.accepted_tokens == counters.drafted_tokens
    elif vocab_size == EITHER or config is BY_MODEL:
        assert len(house.sent) < 50
        assert 0 < counters.accepted_tokens < counters.drafted_tokens
    else:
        assert len(house.sent) > 50


def test_a_text_that_does_not_repeat_itself_runs_as_without() -> None:
    script = SCRIPT._replace(vocab_size=ANY)
    depths: list[int] = []
    house = a_house(script=script)
    asked = house.add([1, 2, 3], 100)
    while asked.end is None:
        house.plan()
        depths.append(len(house.steps))
        house.compute()
        house.deliver()
    ok(asked, script)
    assert not any(drafts_of(house))
    assert depths.count(2) > 90


def test_the_text_that_repeats_the_prompt_is_drafted() -> None:
    """The worker cannot be made to say a given text; the ids of an earlier life can."""
    script = SCRIPT._replace(vocab_size=ANY)
    first = a_house(DRAFTS, script).add([1, 2, 3], 40)
    text = expected(first, script)
    house = a_house(DRAFTS, script)
    asked = house.add([1, 2, 3], 40, resume=text[:20])
    house.run()
    ok(asked, script)
    assert asked.ids == text


def test_drafts_that_cost_as_much_as_they_bring_are_left_out() -> None:
    dear = a_house(script=SCRIPT._replace(vocab_size=EITHER))
    dear.position_us = 10_000
    asked = dear.add([0] * 5, 200)
    dear.run()
    ok(asked, dear.script)
    assert 0 < sum(map(any, drafts_of(dear))) < 40  # tried, and now and then tried again


def test_a_wait_that_costs_more_than_the_drafts_bring_is_not_made() -> None:
    """Though every draft is right."""
    house = a_house()
    asked = house.add([0] * 5, 200)
    depths: list[int] = []
    while asked.end is None:
        house.plan()
        depths.append(len(house.steps))
        house.compute()
        house.tick(0.02)  # the result is long on its way
        house.deliver()
    ok(asked, house.script)
    assert sum(map(any, drafts_of(house)[-60:])) == 0
    assert depths[-60:-2] == [2] * 58


def test_a_model_that_stops_gaining_is_asked_again_later() -> None:
    house = a_house(BY_MODEL, SCRIPT._replace(vocab_size=ANY, max_total_tokens=2048, pages=600))
    house.position_us = 3000  # three out of four are right: hardly worth it
    asked = house.add([1, 2, 3], 1500)
    house.run()
    ok(asked, house.script)
    drafted = [bool(drafts) for drafts in drafts_of(house)]
    assert 0 < sum(drafted) < len(drafted) / 2
    assert any(drafted[len(drafted) // 2 :])


def test_nobody_is_preempted_for_drafts_and_the_limits_are_kept() -> None:
    """Two requests of 12 tokens each in exactly the pages that they need."""
    script = SCRIPT._replace(pages=6, max_total_tokens=12, max_batch_prefill_tokens=12)
    house = a_house(Config(drafts=16), script)
    everybody = [house.add([0] * 5, 7), house.add([0] * 3, 9)]
    house.run()
    for asked in everybody:
        ok(asked, script)
    assert house.core.counters.preemptions == 0
    assert house.core.counters.accepted_tokens > 0


def test_where_pages_are_short_less_is_drafted() -> None:
    script = SCRIPT._replace(pages=6, max_total_tokens=24, max_batch_prefill_tokens=24)
    house = a_house(Config(drafts=16), script)
    everybody = [house.add([0] * 5, 15), house.add([0] * 3, 12)]
    house.run()
    for asked in everybody:
        ok(asked, script)
    assert house.core.counters.accepted_tokens > 0


def test_a_step_computes_no_more_than_it_may() -> None:
    script = SCRIPT._replace(max_batch_prefill_tokens=10)
    house = a_house(Config(drafts=4), script)
    everybody = [house.add([0] * 5, 40) for _ in range(6)]
    house.run()
    for asked in everybody:
        ok(asked, script)
    sums = [sum(ints(step.counts) + ints(step.drafts)) for step in house.sent if step.drafts]
    assert max(sums) == 10


def test_drafts_leave_room_for_prompts_that_wait() -> None:
    script = SCRIPT._replace(max_batch_prefill_tokens=10)
    house = a_house(Config(drafts=16), script)
    first = [house.add([0] * 5, 200), house.add([0] * 5, 200)]
    while not house.core.counters.accepted_tokens:
        house.step()
    late = house.add([0] * 40, 4)
    for _ in range(20):
        house.step()
    assert late.end is not None
    house.run()
    for asked in (*first, late):
        ok(asked, script)


def test_a_page_of_accepted_drafts_is_found_by_others_and_one_of_wrong_ones_is_not() -> None:
    """The worker itself looks whether a page that is shared holds what it should."""
    script = SCRIPT._replace(vocab_size=EITHER)
    house = a_house(Config(drafts=16), script)
    first = house.add([0] * 5, 60)
    house.run()
    second = house.add([0] * 5 + first.ids[:50], 20)
    house.run()
    ok(second, script)
    assert house.core.counters.accepted_tokens > 10
    assert second.end is not None
    assert second.end.cached_tokens == 52


@pytest.mark.parametrize("loss", ["worker_up", "new_core"])
def test_a_loss_in_the_middle_of_drafts_loses_no_token(loss: str) -> None:
    house = a_house()
    everybody = [house.add([0] * (3 + n), 60, seed=n) for n in range(3)]
    while not any(drafts_of(house)[-1:]):
        house.step()
        house.plan()
    getattr(house, loss)()
    before = len(house.sent) if loss == "worker_up" else 0
    house.run()
    for asked in everybody:
        ok(asked, SCRIPT)
    # Under whom a worker died, drafts no more: what clears it is what it goes on with.
    assert any(drafts_of(house)[before:]) == (loss == "new_core")


@pytest.mark.parametrize("kind", ["cancel", "stop"])
def test_a_run_that_nobody_waits_for_is_dropped(kind: str) -> None:
    house = a_house()
    gone, stays = house.add([0] * 5, 60, top_n=1), house.add([0] * 6, 60, top_n=2)
    while not any(drafts_of(house)[-1:]):
        house.step()
        house.plan()
    getattr(house, kind)(gone)
    house.run()
    ok(stays, SCRIPT)
    assert gone.end is not None
    assert len(gone.ids) < 60


def test_a_row_that_cannot_draw_ends_and_the_others_get_their_runs() -> None:
    house = a_house()
    broken, other = house.add([0] * 5, 60), house.add([0] * 6, 60)
    while not any(drafts_of(house)[-1:]):
        house.step()
        house.plan()
    house.compute()
    house.results[0] = house.results[0]._replace(faults=["no token is allowed", ""])
    house.deliver()
    assert broken.end is not None
    assert (broken.end.reason, broken.end.message) == (Reason.FAILED, "no token is allowed")
    house.run()
    ok(other, SCRIPT)


@pytest.mark.parametrize("counts", [b"\1", b"\1\6", b"\0\1", b"\1\1\1", b""], ids=str)
def test_more_tokens_than_were_drafted_fail_the_step(counts: bytes) -> None:
    house = a_house()
    for n in range(2):
        house.add([0] * (5 + n), 60)
    while not any(drafts_of(house)[-1:]):
        house.step()
        house.plan()
    assert len(drafts_of(house)[-1]) == 2
    house.steps.clear()
    step = house.sent[-1]
    drawn = sum(counts)
    wrong = Result(step.number, step.epoch, counts, pack(INT32, [0] * drawn), pack(FLOAT32, [0.0] * drawn), 1000)
    house.results.append(wrong)
    house.deliver()
    assert house.core.counters.done[-1].failed


def test_a_long_prompt_is_read_in_pieces_and_not_drafted_before() -> None:
    script = SCRIPT._replace(pages=8 * READ, max_total_tokens=8 * READ, max_batch_prefill_tokens=8 * READ)
    house = a_house(script=script)
    asked = house.add([0] * (3 * READ), 60)
    house.run()
    assert asked.end is not None
    assert asked.ids == [0] * 60
    first = next(place for place, drafts in enumerate(drafts_of(house)) if drafts)
    assert 2 <= first <= 6
