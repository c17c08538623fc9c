"""A step mixes decode rows and chunks of prompts, within the limit of tokens and within a learned time."""

from tests.scheduler.house import House, ok
from tgi.kernel.messages import Step
from tgi.kernel.pack import ints
from tgi.scheduler.core import Config
from tgi.scheduler.pace import Pace
from tgi.worker.scripted import Script

SCRIPT = Script(pages=64, page_size=4, slots=4, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=8)


def rows(step: Step) -> list[tuple[int, int, int, int]]:
    """(slot, start, count, draw) of each row."""
    return list(zip(ints(step.rows), ints(step.starts), ints(step.counts), step.draws, strict=True))


def house() -> House:
    made = House(SCRIPT)
    made.worker_up()
    return made


def test_a_long_prompt_is_computed_in_chunks_and_draws_once_at_its_end() -> None:
    one = house()
    asked = one.add(list(range(20)), 1)
    one.run()
    assert [rows(step) for step in one.sent] == [[(0, 0, 8, 0)], [(0, 8, 8, 0)], [(0, 16, 4, 1)]]
    ok(asked, SCRIPT)


def test_several_prompts_share_a_step() -> None:
    one = house()
    for _ in range(3):
        one.add([1, 2, 3], 1)
    one.plan()
    assert rows(one.sent[0]) == [(0, 0, 3, 1), (1, 0, 3, 1), (2, 0, 2, 0)]
    assert rows(one.sent[1]) == [(2, 2, 1, 1)]


def test_decode_rows_go_first_and_leave_the_rest_to_prompts() -> None:
    one = house()
    first = one.add([1], 10)
    one.step()
    second = one.add(list(range(20)), 1)
    one.plan()
    assert rows(one.sent[-1]) == [(0, 2, 1, 1), (1, 0, 7, 0)]
    one.run()
    ok(first, SCRIPT)
    ok(second, SCRIPT)


def test_one_step_ahead_needs_no_id() -> None:
    one = house()
    one.add([1, 2], 4)
    assert one.plan() == 2
    assert [rows(step) for step in one.sent] == [[(0, 0, 2, 1)], [(0, 2, 1, 1)]]
    assert one.plan() == 0  # two are under way
    one.compute()
    one.deliver()
    assert one.plan() == 1


def test_a_row_whose_last_token_is_planned_is_planned_no_further() -> None:
    one = house()
    one.add([1, 2], 2)
    one.run()
    assert [rows(step) for step in one.sent] == [[(0, 0, 2, 1)], [(0, 2, 1, 1)]]


def test_an_end_token_ends_its_row_and_what_was_ahead_is_dropped() -> None:
    one = house()
    plain = one.add([1, 2], 10)
    one.run()
    before = len(one.sent)
    eos = one.add([1, 2], 10, stop_ids=[plain.ids[3]])
    one.run()
    ok(eos, SCRIPT)
    assert eos.ids == plain.ids[: plain.ids.index(plain.ids[3]) + 1]
    assert len(one.sent) - before == len(eos.ids) + 1  # one step too many was under way


def test_new_ones_take_the_slot_and_pages_of_an_ended_row_at_once() -> None:
    script = SCRIPT._replace(slots=1, pages=16)
    one = House(script)
    one.worker_up()
    everybody = [one.add([n, 2, 3], 5) for n in range(5)]
    one.run()
    for asked in everybody:
        ok(asked, script)
    # The slot is idle only while the last token of its old occupant is under way.
    assert len(one.sent) == 5 * 5


def test_first_come_first_served() -> None:
    script = SCRIPT._replace(slots=1)
    one = House(script)
    everybody = [one.add([n], 1) for n in range(4)]
    one.worker_up()
    one.run()
    assert [ints(slot.tokens)[0] for step in one.sent for slot in step.slots] == [0, 1, 2, 3]
    assert all(asked.end is not None for asked in everybody)


def test_without_measurements_a_prompt_takes_what_it_may() -> None:
    assert Pace(200_000).prefill_tokens(16, 4096) == 4096


def test_the_chunk_is_what_the_target_leaves() -> None:
    pace = Pace(200_000)
    pace.learn(8, 0, 50_000)  # decode alone: 50 ms
    pace.learn(8, 100, 150_000)  # 100 tokens more: 100 ms more, 1 ms each
    assert pace.prefill_tokens(16, 4096) == 150
    assert pace.prefill_tokens(16, 100) == 100


def test_a_chunk_is_never_under_a_page() -> None:
    pace = Pace(200_000)
    pace.learn(8, 0, 300_000)
    pace.learn(8, 16, 400_000)
    assert pace.prefill_tokens(16, 4096) == 16


def test_enough_is_what_makes_a_step_s_own_cost_small() -> None:
    pace = Pace(200_000)
    pace.learn(8, 0, 5_000)
    assert pace.enough_tokens(4096) == 4096  # what a token costs is not known
    pace.learn(8, 100, 25_000)
    assert pace.enough_tokens(4096) == 16 * 5_000 // 200
    assert pace.enough_tokens(100) == 100


def test_a_prompt_begins_however_much_its_tokens_seem_to_cost() -> None:
    """The first prompt of all may take long for its few tokens: what is used for the first time is slow."""
    one = house()
    one.core._pace.learn(0, 1, 1200)
    one.core._pace.learn(1, 0, 30)
    assert one.core._pace.enough_tokens(8) == 1
    everybody = [one.add([n, 2, 3], 2) for n in range(3)]
    one.run()
    for asked in everybody:
        ok(asked, SCRIPT)


def test_prompts_that_come_together_finish_one_after_the_other() -> None:
    """As far as a step stays worth it: here 32 tokens, which two of these prompts have."""
    script = SCRIPT._replace(max_batch_prefill_tokens=64, slots=8, pages=128)
    one = House(script)
    one.position_us = 1000
    one.worker_up()
    warm = one.add(list(range(20)), 3)
    one.run()
    sent = len(one.sent)
    everybody = [one.add([n, *range(19)], 4) for n in range(5)]
    long = one.add(list(range(50, 100)), 2)
    one.run()
    for asked in (warm, *everybody, long):
        ok(asked, script)
    prompts = [[count for _, _, count, _ in rows(step) if count > 1] for step in one.sent[sent:]]
    assert [counts for counts in prompts if counts] == [[20, 20], [20, 20], [20, 40], [10]]


def test_the_estimate_follows_the_machine() -> None:
    pace = Pace(100_000)
    pace.learn(0, 1000, 1_000_000)  # a first step that was slow for other reasons
    assert pace.prefill_tokens(16, 4096) == 100
    for _ in range(40):
        pace.learn(0, 1000, 100_000)
    assert 950 <= pace.prefill_tokens(16, 4096) <= 1000


def test_others_keep_getting_tokens_while_a_long_prompt_is_computed() -> None:
    script = SCRIPT._replace(max_batch_prefill_tokens=64)
    one = House(script, Config(step_target=0.0011))  # the house's worker: 1 ms a step and 10 µs a token
    one.worker_up()
    decoding = one.add([1], 40)
    one.step()
    one.step()
    long = one.add(list(range(60)), 1)
    one.run()
    ok(decoding, script)
    ok(long, script)
    mixed = [step for step in one.sent[3:] if len(step.draws) == 2]
    assert mixed
    assert all(max(ints(step.counts)) <= 10 for step in mixed)


def test_tokens_that_cost_nothing_fill_a_step() -> None:
    """An average that fades long enough is too small to divide by."""
    pace = Pace(200_000)
    pace.learn(4, 0, 1_000)
    pace.learn(4, 100, 1_200)
    for _ in range(4_000):
        pace.learn(4, 100, 1_000)
    assert pace.enough_tokens(4096) == 4096
    assert pace.prefill_tokens(16, 4096) == 4096
