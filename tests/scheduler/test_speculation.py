"""Speculative decoding changes how fast tokens come and nothing else, and is skipped where it gains nothing."""

import pytest

from tests.scheduler.simulation import Simulation, assert_as_if_alone, expected_ids
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import FinishReason, StepResult
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.scheduler.speculation import INDEX_BUDGET
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

# Vocabulary sizes of the fake worker, which samples at random: with 1 id every draft is right, with 2 every other one.
SAME, EITHER, ANY = 1, 2, 128
WORKER_CONFIG = FakeWorkerConfig(
    pages=256, page_size=4, slots=8, vocab_size=SAME, max_total_tokens=256, max_batch_prefill_tokens=64
)
DRAFTS = SchedulerConfig(max_drafts=4)
BY_MODEL = SchedulerConfig(max_drafts=4, draft_model=True)


def started(config: SchedulerConfig = DRAFTS, worker_config: FakeWorkerConfig = WORKER_CONFIG) -> Simulation:
    sim = Simulation(worker_config, config)
    sim.worker_up()
    return sim


def drafts_of(sim: Simulation) -> list[list[int]]:
    """The draft counts of each step."""
    return [unpack_int32(step.drafts) for step in sim.sent]


@pytest.mark.parametrize("config", [DRAFTS, BY_MODEL], ids=["proposer", "model"])
@pytest.mark.parametrize("vocab_size", [SAME, EITHER, 5, ANY])
def test_drafts_do_not_change_tokens(config: SchedulerConfig, vocab_size: int) -> None:
    worker_config = WORKER_CONFIG._replace(vocab_size=vocab_size)
    sim = started(config, worker_config)
    requests = [
        sim.add([0] * (4 + n), 60, seed=n, top_n=n % 3, stop_ids=[1, *range(40, 44)] * (n == 3)) for n in range(6)
    ]
    sim.run()
    for request in requests:
        assert_as_if_alone(request, worker_config)
    counters = sim.scheduler.counters
    assert counters.accepted_draft_tokens <= counters.draft_tokens
    if vocab_size == SAME:
        assert sim.tokenizers[0].longest_run == 5
        assert len(sim.sent) < 20
        assert counters.accepted_draft_tokens == counters.draft_tokens
    elif vocab_size == EITHER or config is BY_MODEL:
        assert len(sim.sent) < 50
        assert 0 < counters.accepted_draft_tokens < counters.draft_tokens
    else:
        assert len(sim.sent) > 50


def test_a_text_without_repetitions_is_not_drafted() -> None:
    worker_config = WORKER_CONFIG._replace(vocab_size=ANY)
    depths: list[int] = []
    sim = started(worker_config=worker_config)
    request = sim.add([1, 2, 3], 100)
    while request.end is None:
        sim.plan()
        depths.append(len(sim.steps))
        sim.compute()
        sim.deliver()
    assert_as_if_alone(request, worker_config)
    assert not any(drafts_of(sim))
    assert depths.count(2) > 90


def test_a_repetition_of_resumed_ids_is_drafted() -> None:
    """The fake worker samples random ids, so the repetition is in the resumed ids."""
    worker_config = WORKER_CONFIG._replace(vocab_size=ANY)
    first = started(DRAFTS, worker_config).add([1, 2, 3], 40)
    text = expected_ids(first, worker_config)
    sim = started(DRAFTS, worker_config)
    request = sim.add([1, 2, 3], 40, resume=text[:20])
    sim.run()
    assert_as_if_alone(request, worker_config)
    assert request.ids == text


def test_drafts_that_cost_more_than_they_gain_are_omitted() -> None:
    expensive = started(worker_config=WORKER_CONFIG._replace(vocab_size=EITHER))
    expensive.position_us = 10_000
    request = expensive.add([0] * 5, 200)
    expensive.run()
    assert_as_if_alone(request, expensive.worker_config)
    assert 0 < sum(map(any, drafts_of(expensive))) < 40  # tried, and tried again now and then


def test_no_drafts_if_the_idle_time_costs_more_than_they_gain() -> None:
    """Although every draft is right."""
    sim = started()
    request = sim.add([0] * 5, 200)
    depths: list[int] = []
    while request.end is None:
        sim.plan()
        sim.compute()
        sim.advance_time(0.02)  # the result takes long to arrive
        sim.plan()
        depths.append(len(sim.steps) + len(sim.results))
        sim.deliver()
    assert_as_if_alone(request, sim.worker_config)
    assert sum(map(any, drafts_of(sim)[-60:])) < 4  # tried again now and then
    assert depths[-60:-2].count(2) > 48


def test_drafts_are_tried_again_after_one_long_pause() -> None:
    sim = started(worker_config=WORKER_CONFIG._replace(max_total_tokens=2048, pages=600))
    request = sim.add([0] * 5, 1500)
    while request.end is None:
        paused = len(sim.sent) == 5
        sim.plan()
        sim.compute()
        sim.advance_time(1.0 if paused else 0.0)
        sim.deliver()
    assert_as_if_alone(request, sim.worker_config)
    drafted = [bool(drafts) for drafts in drafts_of(sim)]
    assert drafted[:6].count(True) > 1
    assert not any(drafted[8:50])
    assert drafted[-20:-2] == [True] * 18


def test_a_draft_model_that_stops_gaining_is_tried_again_later() -> None:
    sim = started(BY_MODEL, WORKER_CONFIG._replace(vocab_size=ANY, max_total_tokens=2048, pages=600))
    sim.position_us = 3000  # three out of four are right: hardly worthwhile
    request = sim.add([1, 2, 3], 1500)
    sim.run()
    assert_as_if_alone(request, sim.worker_config)
    drafted = [bool(drafts) for drafts in drafts_of(sim)]
    assert 0 < sum(drafted) < len(drafted) / 2
    assert any(drafted[len(drafted) // 2 :])


def test_drafts_preempt_no_request_and_keep_the_limits() -> None:
    """Two requests of 12 tokens each, and exactly the pages that they need."""
    worker_config = WORKER_CONFIG._replace(pages=6, max_total_tokens=12, max_batch_prefill_tokens=12)
    sim = started(SchedulerConfig(max_drafts=16), worker_config)
    requests = [sim.add([0] * 5, 7), sim.add([0] * 3, 9)]
    sim.run()
    for request in requests:
        assert_as_if_alone(request, worker_config)
    assert sim.scheduler.counters.preemptions == 0
    assert sim.scheduler.counters.accepted_draft_tokens > 0


def test_fewer_drafts_if_pages_are_scarce() -> None:
    worker_config = WORKER_CONFIG._replace(pages=6, max_total_tokens=24, max_batch_prefill_tokens=24)
    sim = started(SchedulerConfig(max_drafts=16), worker_config)
    requests = [sim.add([0] * 5, 15), sim.add([0] * 3, 12)]
    sim.run()
    for request in requests:
        assert_as_if_alone(request, worker_config)
    assert sim.scheduler.counters.accepted_draft_tokens > 0


def test_drafts_keep_the_token_budget_of_a_step() -> None:
    worker_config = WORKER_CONFIG._replace(max_batch_prefill_tokens=10)
    sim = started(SchedulerConfig(max_drafts=4), worker_config)
    requests = [sim.add([0] * 5, 40) for _ in range(6)]
    sim.run()
    for request in requests:
        assert_as_if_alone(request, worker_config)
    sums = [sum(unpack_int32(step.counts) + unpack_int32(step.drafts)) for step in sim.sent if step.drafts]
    assert max(sums) == 10


def test_drafts_leave_budget_for_waiting_prompts() -> None:
    worker_config = WORKER_CONFIG._replace(max_batch_prefill_tokens=10)
    sim = started(SchedulerConfig(max_drafts=16), worker_config)
    first = [sim.add([0] * 5, 200), sim.add([0] * 5, 200)]
    while not sim.scheduler.counters.accepted_draft_tokens:
        sim.step()
    late = sim.add([0] * 40, 4)
    for _ in range(20):
        sim.step()
    assert late.end is not None
    sim.run()
    for request in (*first, late):
        assert_as_if_alone(request, worker_config)


def test_pages_of_accepted_drafts_are_shared_and_those_of_rejected_ones_are_not() -> None:
    """The fake worker checks the content of shared pages."""
    worker_config = WORKER_CONFIG._replace(vocab_size=EITHER)
    sim = started(SchedulerConfig(max_drafts=16), worker_config)
    first = sim.add([0] * 5, 60)
    sim.run()
    second = sim.add([0] * 5 + first.ids[:50], 20)
    sim.run()
    assert_as_if_alone(second, worker_config)
    assert sim.scheduler.counters.accepted_draft_tokens > 10
    assert second.end is not None
    assert second.end.cached_tokens == 52


@pytest.mark.parametrize("loss", ["worker_up", "worker_down", "restart_scheduler"])
def test_a_crash_during_drafts_loses_no_token(loss: str) -> None:
    sim = started()
    requests = [sim.add([0] * (3 + n), 60, seed=n) for n in range(3)]
    while not any(drafts_of(sim)[-1:]):
        sim.step()
        sim.plan()
    getattr(sim, loss)()
    before = 0 if loss == "restart_scheduler" else len(sim.sent)
    sim.run()
    for request in requests:
        assert_as_if_alone(request, WORKER_CONFIG)
    # A suspect does not draft any more.
    assert any(drafts_of(sim)[before:]) == (loss != "worker_down")


@pytest.mark.parametrize("kind", ["cancel", "stop"])
def test_the_drafts_of_a_cancelled_request_are_dropped(kind: str) -> None:
    sim = started()
    cancelled, other = sim.add([0] * 5, 60, top_n=1), sim.add([0] * 6, 60, top_n=2)
    while not any(drafts_of(sim)[-1:]):
        sim.step()
        sim.plan()
    getattr(sim, kind)(cancelled)
    sim.run()
    assert_as_if_alone(other, WORKER_CONFIG)
    assert cancelled.end is not None
    assert len(cancelled.ids) < 60


def test_a_row_error_in_a_step_with_drafts_ends_only_its_request() -> None:
    sim = started()
    broken, other = sim.add([0] * 5, 60), sim.add([0] * 6, 60)
    while not any(drafts_of(sim)[-1:]):
        sim.step()
        sim.plan()
    sim.compute()
    sim.results[0] = sim.results[0]._replace(row_errors=["no token is allowed", ""])
    sim.deliver()
    assert broken.end is not None
    assert (broken.end.reason, broken.end.message) == (FinishReason.FAILED, "no token is allowed")
    sim.run()
    assert_as_if_alone(other, WORKER_CONFIG)


@pytest.mark.parametrize("counts", [b"\1", b"\1\6", b"\0\1", b"\1\1\1", b""], ids=str)
def test_more_tokens_than_were_drafted_fail_the_step(counts: bytes) -> None:
    sim = started()
    for n in range(2):
        sim.add([0] * (5 + n), 60)
    while not any(drafts_of(sim)[-1:]):
        sim.step()
        sim.plan()
    assert len(drafts_of(sim)[-1]) == 2
    sim.steps.clear()
    step = sim.sent[-1]
    drawn = sum(counts)
    wrong = StepResult(
        step.number, step.epoch, counts, pack_column(INT32, [0] * drawn), pack_column(FLOAT32, [0.0] * drawn), 1000
    )
    sim.results.append(wrong)
    sim.deliver()
    assert sim.scheduler.counters.finished_steps[-1].failed


def test_a_long_prompt_is_indexed_in_pieces_before_it_is_drafted() -> None:
    worker_config = WORKER_CONFIG._replace(
        pages=8 * INDEX_BUDGET, max_total_tokens=8 * INDEX_BUDGET, max_batch_prefill_tokens=8 * INDEX_BUDGET
    )
    sim = started(worker_config=worker_config)
    request = sim.add([0] * (3 * INDEX_BUDGET), 60)
    sim.run()
    assert request.end is not None
    assert request.ids == [0] * 60
    first = next(index for index, drafts in enumerate(drafts_of(sim)) if drafts)
    assert 2 <= first <= 6
