"""LoRA adapters: updates and their answers, separate prefix caches, and what restarts of each process keep."""

import pytest

from tests.scheduler.adapter_updates import directory
from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tgi.microkernel.messages.protocol import MAX_ADAPTER_CHANGES, FinishReason, UpdateAdapter
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

WORKER_CONFIG = FakeWorkerConfig(
    pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=256
)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture
def sim() -> Simulation:
    sim = Simulation(WORKER_CONFIG, tokenizers=2)
    sim.adapters.preload("first", "one")
    sim.worker_up()
    return sim


def names(sim: Simulation, tokenizer: int = 0) -> list[str]:
    return [adapter.name for adapter in sim.adapters.loaded(tokenizer)]


def carry_out(sim: Simulation) -> list[str]:
    """The worker applies all updates. Returns their names, in order."""
    applied = []
    while updates := sim.adapters.queued_updates:
        applied.append(updates[0].name)
        sim.adapters.apply_next_update()
    return applied


def test_an_update_is_applied_and_reported_before_it_is_answered(sim: Simulation) -> None:
    assert names(sim) == names(sim, 1) == ["first"]
    sim.adapters.request_update("second", "two", tokenizer=1)
    assert (names(sim), sim.adapters.errors) == (["first"], [])
    sim.adapters.apply_next_update()
    assert names(sim) == names(sim, 1) == ["first", "second"]
    assert sim.adapters.errors == [""]
    sim.adapters.request_update("first", None)
    sim.adapters.apply_next_update()
    assert names(sim) == ["second"]
    assert not sim.adapters.pending


def test_of_two_changes_the_later_one_holds_in_whatever_order_they_come(sim: Simulation) -> None:
    early, late = (UpdateAdapter(rid, "name", str(directory(content)), stamp) for rid, content, stamp in
                   ((1, "one", 10), (2, "two", 11)))  # fmt: skip
    for update in (late, early):
        sim.handle(update, sim.tokenizers[0].peer)
    sim.adapters.pending |= {(0, 1): early, (0, 2): late}
    while sim.adapters.apply_next_update():
        pass
    (loaded,) = (one for one in sim.adapters.loaded() if one.name == "name")
    assert loaded.path == late.path
    assert sim.scheduler.worker.adapters.wanted == {"name": late._replace(rid=0)}


def test_a_change_that_a_tokenizer_tells_is_carried_out_before_the_worker_is_ready(sim: Simulation) -> None:
    """A scheduler that is added, or whose predecessor died with its worker, has only the adapters of the start."""
    changes = [UpdateAdapter(0, "first", "", 10), UpdateAdapter(0, "second", str(directory("two")), 11)]
    sim.worker_down()
    sim.restart_scheduler()
    for change in changes * 2:
        sim.handle(change, sim.tokenizers[0].peer)
    sim.worker_up()
    assert not sim.scheduler.ready
    while sim.adapters.apply_next_update():
        pass
    assert sim.scheduler.ready
    assert names(sim) == ["second"]
    assert [*sim.scheduler.worker.adapters.wanted.values()] == changes


def test_a_tokenizer_that_starts_while_no_worker_is_ready_learns_the_changes(sim: Simulation) -> None:
    """The one that has told them may end before a worker has carried them out."""
    changes = [UpdateAdapter(0, "first", "", 10), UpdateAdapter(0, "second", str(directory("two")), 11)]
    sim.worker_down()
    sim.restart_scheduler()
    for change in changes:
        sim.handle(change, sim.tokenizers[0].peer)
    sim.advance_time()
    assert sim.tokenizers[1].statuses[-1].adapter_changes == changes
    assert sim.tokenizer_up(0).statuses[-1].adapter_changes == changes
    sim.worker_up()
    sim.adapters.apply_next_update()
    sim.adapters.fail_next_update()
    assert sim.tokenizer_up(0).statuses[-1].adapter_changes == changes


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("told_last", [False, True])
@pytest.mark.parametrize("late_is_told", [False, True])
def test_the_later_of_a_told_and_a_requested_change_holds(
    sim: Simulation, ready: bool, told_last: bool, late_is_told: bool
) -> None:
    """In whatever order they come: changes and the worker's adapters agree."""
    stamps = (11, 10) if late_is_told else (10, 11)
    told, requested = (
        UpdateAdapter(0, "name", str(directory("two")), stamps[0]),
        UpdateAdapter(1, "name", "", stamps[1]),
    )
    sim.adapters.pending[0, 1] = requested
    if not ready:
        sim.worker_down()
    for update in (requested, told) if told_last else (told, requested):
        sim.handle(update, sim.tokenizers[0].peer)
    if not ready:
        sim.worker_up()
    while sim.adapters.apply_next_update():
        pass
    late = told if late_is_told else requested
    assert sim.scheduler.worker.adapters.wanted == {"name": late._replace(rid=0)}
    assert [one.path for one in sim.adapters.loaded() if one.name == "name"] == ([late.path] if late.path else [])
    assert sim.adapters.errors == [""]


def test_a_change_of_a_dead_tokenizer_is_recorded_if_the_worker_carries_it_out(sim: Simulation) -> None:
    """Perhaps no other scheduler has got it: tokenizers tell them."""
    update = UpdateAdapter(1, "second", str(directory("two")), 10)
    sim.handle(update, sim.tokenizers[0].peer)
    sim.tokenizer_up(0)
    assert sim.adapters.apply_next_update()
    assert names(sim, 1) == ["first", "second"]
    assert sim.scheduler.worker.adapters.wanted == {"second": update._replace(rid=0)}


def test_requests_with_different_adapters_share_steps_and_no_pages(sim: Simulation) -> None:
    sim.adapters.request_update("second", "two")
    sim.adapters.apply_next_update()
    choices = [None, *sim.adapters.loaded()]
    for cached in (0, 8):  # first nothing is cached, then each finds its own pages
        request = [sim.add(PROMPT, 12, adapter=adapter) for adapter in choices]
        sim.plan()
        assert len(sim.sent[-1].rows) == 4 * 3
        sim.run()
        for one in request:
            assert_as_if_alone(one, WORKER_CONFIG)
            assert one.end is not None
            assert one.end.cached_tokens == cached
        assert len({tuple(one.ids) for one in request}) == 3


def test_a_restarted_worker_gets_the_adapters_of_its_predecessor_before_any_step(sim: Simulation) -> None:
    sim.adapters.request_update("second", "two")
    sim.adapters.request_update("first", None)
    while sim.adapters.apply_next_update():
        pass
    (second,) = sim.adapters.loaded()
    request = sim.add(PROMPT, 12, adapter=second)
    for _ in range(5):
        sim.step()
    sim.worker_up()
    reported = len(sim.tokenizers[0].statuses)
    assert names(sim) == ["second"]
    assert sim.plan() == 0
    assert not sim.scheduler.ready
    assert carry_out(sim) == ["first", "second"]
    sim.run()
    assert_as_if_alone(request, WORKER_CONFIG)
    assert sim.scheduler.ready
    assert all(status.adapters == [second] for status in sim.tokenizers[0].statuses[reported - 1 :])
    assert sim.adapters.errors == ["", ""]  # updates that restore adapters have no answer to forward


def test_unanswered_updates_are_sent_to_the_next_worker(sim: Simulation) -> None:
    sim.adapters.request_update("second", "two")
    sim.worker_down()
    sim.adapters.request_update("third", "three", tokenizer=1)
    assert sim.adapters.errors == []
    sim.run()
    assert names(sim) == ["first", "second", "third"]
    assert sim.adapters.errors == ["", ""]


def test_a_restarted_scheduler_knows_the_adapters_that_are_wanted(sim: Simulation) -> None:
    sim.adapters.request_update("second", "two")
    sim.adapters.apply_next_update()
    request = [sim.add(PROMPT, 12, adapter=adapter) for adapter in sim.adapters.loaded()]
    sim.step()
    changes = dict(sim.scheduler.worker.adapters.wanted)
    sim.restart_scheduler()
    sim.step()
    assert names(sim) == ["first", "second"]
    assert sim.scheduler.worker.adapters.wanted == changes
    assert changes.keys() == {"second"}  # so other replicas learn it, but not what each has had at its start
    sim.worker_up()
    sim.run()
    assert names(sim) == ["first", "second"]
    sim.adapters.request_update("first", None)
    sim.adapters.apply_next_update()
    sim.worker_down()
    sim.restart_scheduler()  # both are gone, and no tokenizer tells the next one of changes
    sim.worker_up()
    assert not sim.scheduler.ready
    assert carry_out(sim) == ["first", "second"]
    assert sim.scheduler.ready
    sim.run()
    assert names(sim) == ["second"]
    for one in request:
        assert_as_if_alone(one, WORKER_CONFIG)


def test_a_dead_tokenizer_gets_no_answer(sim: Simulation) -> None:
    sim.adapters.request_update("second", "two")
    sim.tokenizer_up(0)  # the new tokenizer requests the update again
    sim.run()
    assert names(sim) == ["first", "second"]
    assert sim.adapters.errors == [""]


def test_a_request_whose_adapter_was_unloaded_fails(sim: Simulation) -> None:
    (first,) = sim.adapters.loaded()
    sim.adapters.request_update("first", None)
    sim.adapters.apply_next_update()
    late, other = sim.add(PROMPT, adapter=first), sim.add(PROMPT)
    sim.run()
    assert late.end is not None
    assert (late.end.reason, late.end.message) == (FinishReason.FAILED, "the adapter first is not loaded any more")
    assert_as_if_alone(other, WORKER_CONFIG)


@pytest.mark.parametrize("cancelled", [False, True])
def test_pages_computed_without_the_adapter_are_not_shared(sim: Simulation, cancelled: bool) -> None:
    """Even if an adapter with the same content is loaded before the failure is known."""
    (first,) = sim.adapters.loaded()
    sim.adapters.request_update("first", None)
    sim.adapters.apply_next_update()
    late = sim.add(PROMPT, adapter=first)
    sim.plan()
    if cancelled:
        sim.cancel(late)
    sim.adapters.request_update("first", "one")
    sim.run()
    assert late.end is not None
    assert late.end.reason == (FinishReason.CANCELLED if cancelled else FinishReason.FAILED)
    for cached in (0, 8):
        request = sim.add(PROMPT, adapter=first)
        sim.run()
        assert_as_if_alone(request, WORKER_CONFIG)
        assert request.end is not None
        assert request.end.cached_tokens == cached


def test_pages_are_found_again_after_unload_and_load(sim: Simulation) -> None:
    (first,) = sim.adapters.loaded()
    sim.add(PROMPT, adapter=first)
    sim.run()
    sim.adapters.request_update("first", None)
    sim.adapters.request_update("again", "one")
    sim.run()
    request = sim.add(PROMPT, adapter=sim.adapters.loaded()[0])
    sim.run()
    assert_as_if_alone(request, WORKER_CONFIG)
    assert request.end is not None
    assert request.end.cached_tokens == 8


def test_an_update_does_not_interrupt_steps(sim: Simulation) -> None:
    """A request that was planned while its adapter was loaded is computed with it. A step is planned while the worker
    has an update to answer; the pages of a new request are not shared, since it may come too late for the adapter."""
    (first,) = sim.adapters.loaded()
    request = sim.add(PROMPT, 20, adapter=first)
    planned = sim.plan()
    sim.adapters.request_update("first", None)
    late = sim.add(PROMPT, 20, adapter=first)
    assert not sim.adapters.queued_updates
    for _ in range(planned):
        sim.compute()
    sim.deliver()
    assert sim.plan() == 1
    assert carry_out(sim) == ["first"]
    sim.run()
    for one in (request, late):
        assert_as_if_alone(one, WORKER_CONFIG)
        assert one.end is not None
        assert one.end.cached_tokens == 0


def test_a_request_without_its_adapter_fails_in_its_first_step_without_prompt_logprobs() -> None:
    sim = Simulation(WORKER_CONFIG._replace(max_batch_prefill_tokens=4))
    sim.adapters.preload("first", "one")
    sim.worker_up()
    (first,) = sim.adapters.loaded()
    sim.adapters.request_update("first", None)
    sim.adapters.apply_next_update()
    late = sim.add(PROMPT, adapter=first, prompt_top_n=1)
    sim.plan()
    sim.compute()
    sim.deliver()
    assert late.end is not None
    assert late.end.reason == FinishReason.FAILED
    assert not late.prompt_logprobs
    sim.run()


def test_an_adapter_that_cannot_be_restored_is_reported_as_unloaded_and_tried_again(
    sim: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    sim.adapters.request_update("second", "two")
    sim.adapters.apply_next_update()
    sim.worker_up()
    sim.adapters.fail_next_update()
    assert names(sim) == ["first"]
    assert sim.scheduler.ready
    retry(sim)
    assert names(sim) == ["first", "second"]
    path = directory("two")
    assert [record.getMessage()[:77] for record in caplog.records if "adapter" in record.name] == [
        f"The worker could not load adapter second from {path}: no such directory. "[:77],
        "Adapter second is loaded now",
    ]


def let_it_send(sim: Simulation) -> None:
    """A turn of the scheduler's loop without messages."""
    sim.plan()
    sim.advance_time()


def retry(sim: Simulation, fails: bool = False) -> float:
    """Lets the worker try a postponed update again. Returns the seconds until then, in which nothing happens."""
    before = sim.now
    assert not sim.adapters.queued_updates
    sim.now = sim.scheduler.deadline(before)
    let_it_send(sim)
    assert sim.scheduler.ready
    assert len(sim.adapters.queued_updates) == 1
    if fails:
        sim.adapters.fail_next_update()
    else:
        sim.adapters.apply_next_update()
    return sim.now - before


def test_a_told_change_that_fails_is_tried_again_at_growing_intervals(
    sim: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    change = UpdateAdapter(0, "second", str(directory("two")), 10)
    sim.handle(change, sim.tokenizers[0].peer)
    sim.adapters.fail_next_update()
    sim.handle(change, sim.tokenizers[1].peer)  # is known
    waits = [round(retry(sim, fails=True)) for _ in range(8)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert caplog.text.count("could not load adapter second") == 1
    request = sim.add(PROMPT)
    sim.run()
    assert_as_if_alone(request, WORKER_CONFIG)
    retry(sim)
    assert names(sim) == ["first", "second"]
    assert sim.scheduler.worker.adapters.wanted == {"second": change}
    assert sim.scheduler.deadline(sim.now) - sim.now > 1000


@pytest.mark.parametrize("path", ["", "two"])
def test_a_later_change_ends_the_attempts(sim: Simulation, path: str) -> None:
    sim.handle(UpdateAdapter(0, "second", str(directory("one")), 10), sim.tokenizers[0].peer)
    sim.adapters.fail_next_update()
    later = UpdateAdapter(0, "second", path and str(directory(path)), 11)
    sim.handle(later, sim.tokenizers[0].peer)
    sim.adapters.apply_next_update()
    assert sim.scheduler.deadline(sim.now) - sim.now > 1000
    assert sim.scheduler.worker.adapters.wanted == {"second": later}


def test_a_retry_does_not_undo_a_later_change_that_is_pending(sim: Simulation) -> None:
    sim.handle(UpdateAdapter(0, "second", str(directory("one")), 10), sim.tokenizers[0].peer)
    sim.adapters.fail_next_update()
    later = UpdateAdapter(1, "second", "", 11)
    sim.adapters.pending[0, 1] = later
    sim.handle(later, sim.tokenizers[0].peer)
    sim.now += 10.0
    let_it_send(sim)
    assert len(sim.adapters.queued_updates) == 1
    sim.adapters.apply_next_update()
    let_it_send(sim)
    assert not sim.adapters.queued_updates
    assert names(sim) == ["first"]


def test_a_told_change_is_carried_out_if_the_later_one_that_was_pending_fails(sim: Simulation) -> None:
    later = UpdateAdapter(1, "second", str(directory("two")), 11)
    sim.adapters.pending[0, 1] = later
    sim.handle(later, sim.tokenizers[0].peer)
    told = UpdateAdapter(0, "second", str(directory("one")), 10)
    sim.handle(told, sim.tokenizers[1].peer)
    sim.adapters.fail_next_update()
    assert sim.adapters.errors == ["no such directory"]
    sim.adapters.apply_next_update()
    assert names(sim) == ["first", "second"]
    assert sim.scheduler.worker.adapters.wanted == {"second": told}


def test_what_has_failed_is_tried_by_the_next_worker_before_it_is_ready(sim: Simulation) -> None:
    sim.handle(UpdateAdapter(0, "second", str(directory("two")), 10), sim.tokenizers[0].peer)
    sim.adapters.fail_next_update()
    sim.worker_up()
    assert not sim.scheduler.ready
    sim.adapters.apply_next_update()
    assert sim.scheduler.ready
    assert names(sim) == ["first", "second"]
    sim.worker_up()
    sim.adapters.fail_next_update()
    sim.worker_up()  # which ends before it has answered
    sim.worker_up()
    sim.adapters.apply_next_update()
    assert names(sim) == ["first", "second"]


def test_the_updates_that_are_tried_again_are_bounded(sim: Simulation) -> None:
    for number in range(MAX_ADAPTER_CHANGES + 5):
        sim.handle(UpdateAdapter(0, f"name {number}", "/nowhere", 10 + number), sim.tokenizers[0].peer)
        sim.adapters.fail_next_update()
    sim.now += 1000.0
    tried = []
    let_it_send(sim)
    while updates := sim.adapters.queued_updates:
        tried.append(updates[0].name)
        sim.adapters.fail_next_update()
    assert tried == [f"name {number}" for number in range(5, MAX_ADAPTER_CHANGES + 5)]
    assert 1.0 < sim.scheduler.deadline(sim.now) - sim.now <= 2.0
