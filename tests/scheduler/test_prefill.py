"""Chunked prefill: steps mix decode rows and prefill chunks, within the token limit and a target time."""

from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.protocol import Step
from tgi.scheduler.estimators import PrefillBudget
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

WORKER_CONFIG = FakeWorkerConfig(
    pages=64, page_size=4, slots=4, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=8
)


def rows(step: Step) -> list[tuple[int, int, int, int]]:
    """(slot, start, count, draw) of each row."""
    return list(
        zip(unpack_int32(step.rows), unpack_int32(step.starts), unpack_int32(step.counts), step.samples, strict=True)
    )


def running_simulation() -> Simulation:
    made = Simulation(WORKER_CONFIG)
    made.worker_up()
    return made


def test_a_long_prompt_is_computed_in_chunks_and_draws_once_at_its_end() -> None:
    sim = running_simulation()
    request = sim.add(list(range(20)), 1)
    sim.run()
    assert [rows(step) for step in sim.sent] == [[(0, 0, 8, 0)], [(0, 8, 8, 0)], [(0, 16, 4, 1)]]
    assert_as_if_alone(request, WORKER_CONFIG)


def test_several_prompts_share_a_step() -> None:
    sim = running_simulation()
    for _ in range(3):
        sim.add([1, 2, 3], 1)
    sim.plan()
    assert rows(sim.sent[0]) == [(0, 0, 3, 1), (1, 0, 3, 1), (2, 0, 2, 0)]
    assert rows(sim.sent[1]) == [(2, 2, 1, 1)]


def test_decode_rows_come_first_and_prompts_get_the_rest() -> None:
    sim = running_simulation()
    first = sim.add([1], 10)
    sim.step()
    second = sim.add(list(range(20)), 1)
    sim.plan()
    assert rows(sim.sent[-1]) == [(0, 2, 1, 1), (1, 0, 7, 0)]
    sim.run()
    assert_as_if_alone(first, WORKER_CONFIG)
    assert_as_if_alone(second, WORKER_CONFIG)


def test_a_step_is_planned_ahead_without_the_latest_id() -> None:
    sim = running_simulation()
    sim.add([1, 2], 4)
    assert sim.plan() == 2
    assert [rows(step) for step in sim.sent] == [[(0, 0, 2, 1)], [(0, 2, 1, 1)]]
    assert sim.plan() == 0  # two are in flight
    sim.compute()
    sim.deliver()
    assert sim.plan() == 1


def test_no_row_is_planned_after_the_last_token() -> None:
    sim = running_simulation()
    sim.add([1, 2], 2)
    sim.run()
    assert [rows(step) for step in sim.sent] == [[(0, 0, 2, 1)], [(0, 2, 1, 1)]]


def test_a_stop_id_ends_the_request_and_a_row_planned_ahead_is_dropped() -> None:
    sim = running_simulation()
    plain = sim.add([1, 2], 10)
    sim.run()
    before = len(sim.sent)
    eos = sim.add([1, 2], 10, stop_ids=[plain.ids[3]])
    sim.run()
    assert_as_if_alone(eos, WORKER_CONFIG)
    assert eos.ids == plain.ids[: plain.ids.index(plain.ids[3]) + 1]
    assert len(sim.sent) - before == len(eos.ids) + 1  # one step too many was in flight


def test_slot_and_pages_of_an_ended_request_are_reused_at_once() -> None:
    worker_config = WORKER_CONFIG._replace(slots=1, pages=16)
    sim = Simulation(worker_config)
    sim.worker_up()
    requests = [sim.add([n, 2, 3], 5) for n in range(5)]
    sim.run()
    for request in requests:
        assert_as_if_alone(request, worker_config)
    # The slot is idle only while the last token of its previous request is in flight.
    assert len(sim.sent) == 5 * 5


def test_first_come_first_served() -> None:
    worker_config = WORKER_CONFIG._replace(slots=1)
    sim = Simulation(worker_config)
    requests = [sim.add([n], 1) for n in range(4)]
    sim.worker_up()
    sim.run()
    assert [unpack_int32(slot.token_ids)[0] for step in sim.sent for slot in step.slots] == [0, 1, 2, 3]
    assert all(request.end is not None for request in requests)


def test_without_measurements_a_prompt_gets_the_whole_budget() -> None:
    assert PrefillBudget(200_000).target_tokens(16, 4096) == 4096


def test_a_chunk_fits_into_the_target_time() -> None:
    budget = PrefillBudget(200_000)
    budget.record_step(8, 0, 50_000)  # decode alone: 50 ms
    budget.record_step(8, 100, 150_000)  # 100 tokens more: 100 ms more, 1 ms each
    assert budget.target_tokens(16, 4096) == 150
    assert budget.target_tokens(16, 100) == 100


def test_a_chunk_has_at_least_a_page() -> None:
    budget = PrefillBudget(200_000)
    budget.record_step(8, 0, 300_000)
    budget.record_step(8, 16, 400_000)
    assert budget.target_tokens(16, 4096) == 16


def test_a_step_of_prompts_that_others_wait_for_fits_into_the_target_time() -> None:
    budget = PrefillBudget(200_000)
    assert budget.shared_tokens(4096) == 4096
    budget.record_step(0, 4096, 4_096_000)
    assert budget.shared_tokens(4096) == 200
    budget.record_step(8, 0, 50_000)  # 800 ms are worthwhile
    assert budget.shared_tokens(4096) == 800
    for _ in range(50):
        budget.record_step(100, 0, 500_000)  # with many rows, which cost nothing in a step without them
    assert budget.shared_tokens(4096) == 800


def test_amortizing_tokens_outweigh_the_fixed_cost_of_a_step() -> None:
    budget = PrefillBudget(200_000)
    budget.record_step(8, 0, 5_000)
    assert budget.amortizing_tokens(4096) == 4096  # the cost of a token is not measured yet
    budget.record_step(8, 100, 25_000)
    assert budget.amortizing_tokens(4096) == 16 * 5_000 // 200
    assert budget.amortizing_tokens(100) == 100


def test_a_prompt_begins_even_if_its_tokens_seem_expensive() -> None:
    """The first prompt may take long for its few tokens, because of what is initialized on first use."""
    sim = running_simulation()
    sim.scheduler._prefill_budget.record_step(0, 1, 1200)
    sim.scheduler._prefill_budget.record_step(1, 0, 30)
    assert sim.scheduler._prefill_budget.amortizing_tokens(8) == 1
    requests = [sim.add([n, 2, 3], 2) for n in range(3)]
    sim.run()
    for request in requests:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_prompts_that_come_together_finish_one_after_the_other() -> None:
    """Within a worthwhile step: here 32 tokens, which two of these prompts have."""
    worker_config = WORKER_CONFIG._replace(max_batch_prefill_tokens=64, slots=8, pages=128)
    sim = Simulation(worker_config)
    sim.position_us = 1000
    sim.worker_up()
    warm = sim.add(list(range(20)), 3)
    sim.run()
    sent = len(sim.sent)
    requests = [sim.add([n, *range(19)], 4) for n in range(5)]
    long = sim.add(list(range(50, 100)), 2)
    sim.run()
    for request in (warm, *requests, long):
        assert_as_if_alone(request, worker_config)
    prompts = [[count for _, _, count, _ in rows(step) if count > 1] for step in sim.sent[sent:]]
    assert [counts for counts in prompts if counts] == [[20, 20], [20, 20], [20, 40], [10]]


def test_the_token_cost_follows_recent_steps() -> None:
    budget = PrefillBudget(100_000)
    budget.record_step(0, 1000, 1_000_000)  # a first step, slow for other reasons
    assert budget.target_tokens(16, 4096) == 100
    for _ in range(40):
        budget.record_step(0, 1000, 100_000)
    assert 950 <= budget.target_tokens(16, 4096) <= 1000


def test_decoding_requests_get_tokens_while_a_long_prompt_is_computed() -> None:
    worker_config = WORKER_CONFIG._replace(max_batch_prefill_tokens=64)
    # The simulated worker takes 1 ms per step and 10 µs per token.
    sim = Simulation(worker_config, SchedulerConfig(step_target=0.0011))
    sim.worker_up()
    decoding = sim.add([1], 40)
    sim.step()
    sim.step()
    long = sim.add(list(range(60)), 1)
    sim.run()
    assert_as_if_alone(decoding, worker_config)
    assert_as_if_alone(long, worker_config)
    mixed = [step for step in sim.sent[3:] if len(step.samples) == 2]
    assert mixed
    assert all(max(unpack_int32(step.counts)) <= 10 for step in mixed)


def test_tokens_that_cost_nothing_fill_a_step() -> None:
    """An average that fades long enough is too small to divide by."""
    budget = PrefillBudget(200_000)
    budget.record_step(4, 0, 1_000)
    budget.record_step(4, 100, 1_200)
    for _ in range(4_000):
        budget.record_step(4, 100, 1_000)
    assert budget.amortizing_tokens(4096) == 4096
    assert budget.target_tokens(16, 4096) == 4096
