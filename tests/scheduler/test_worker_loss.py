"""Crashes of the worker, a tokenizer or the scheduler: requests continue, and one that crashes workers is isolated."""

import logging
from pathlib import Path
from random import Random

import pytest

from tests.scheduler.simulation import FailingWorker, Simulation, assert_as_if_alone, fingerprint_of
from tgi.microkernel.host.rundir import successor_path
from tgi.microkernel.links.link import PeerDisconnected, PeerId, PeerResponds, PeerSilent
from tgi.microkernel.messages.codec import unpack_int32
from tgi.microkernel.messages.kv_groups import GroupKind, KVGroup
from tgi.microkernel.messages.protocol import (
    PROTOCOL,
    End,
    FinishReason,
    Hello,
    LastExit,
    Status,
    Step,
    StepResult,
    UpdateAdapter,
)
from tgi.microkernel.recovery.crash_isolation import MEMORY_SECONDS, TRIAL_TOKENS
from tgi.microkernel.recovery.work_register import split_in_progress
from tgi.scheduler.estimators import GROWTH_STEPS
from tgi.scheduler.main import SuccessorFile
from tgi.worker.fake_worker.fake_worker import FakeWorker, FakeWorkerConfig

WORKER_CONFIG = FakeWorkerConfig(
    pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=256
)


def running_simulation(
    requests: int = 8, new: int = 20, worker_config: FakeWorkerConfig = WORKER_CONFIG, named: bool = False
) -> Simulation:
    made = Simulation(worker_config, tokenizers=2)
    made.names_requests = named
    made.worker_up()
    for n in range(requests):
        made.add([n, 2, 3], new, tokenizer=n % 2, seed=n if n % 2 else None)
    return made


# --- the worker -------------------------------------------------------------------------------------------------------


def test_generated_ids_are_prefilled_after_a_crash() -> None:
    sim = running_simulation()
    for _ in range(10):
        sim.step()
    shown = [len(request.ids) for request in sim.requests]
    assert min(shown) >= 8
    sent = len(sim.sent)
    sim.worker_up()
    assert sim.scheduler.counters.recomputed_tokens == sum(shown)
    sim.run()
    prefill, *decode = sim.sent[sent:]
    assert sum(unpack_int32(prefill.counts)) == sum(shown) + 8 * 3
    assert sum(sum(unpack_int32(step.counts)) for step in decode) == sum(20 - count - 1 for count in shown)
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_a_restarted_worker_starts_a_new_epoch_at_step_one() -> None:
    sim = running_simulation()
    sim.step()
    old = sim.sent[-1]
    late = FakeWorker(WORKER_CONFIG).run_step(sim.sent[0])
    sim.worker_up()
    sim.plan()
    assert sim.sent[-2].epoch == old.epoch + 1
    assert [step.number for step in sim.sent[-2:]] == [1, 2]
    before = [list(request.ids) for request in sim.requests]
    assert sim.worker is not None
    sim.handle(late, sim.worker)
    assert [request.ids for request in sim.requests] == before


def test_requests_wait_while_there_is_no_worker() -> None:
    sim = Simulation(WORKER_CONFIG)
    request = sim.add([1, 2, 3])
    assert sim.plan() == 0
    sim.worker_up()
    sim.run()
    assert_as_if_alone(request, WORKER_CONFIG)


def test_the_crashing_request_is_computed_alone_and_fails_and_others_are_not_affected() -> None:
    sim = running_simulation(requests=5)
    for _ in range(6):
        sim.step()
    sim.poison.add(99)
    crashing = sim.add([99, 2, 3], 20)
    sim.run()
    assert crashing.end is not None
    assert crashing.end.reason == FinishReason.QUARANTINED
    assert crashing.end.message == "the worker crashed while it worked on this request alone, after 2 similar deaths"
    assert sim.scheduler.counters.worker_losses == 3
    for request in sim.requests:
        if request is not crashing:
            assert_as_if_alone(request, WORKER_CONFIG)


def test_suspects_run_alone_by_turns_until_each_has_made_enough_tokens() -> None:
    sim = running_simulation(requests=3)
    sim.step()
    sim.worker_down()
    sim.worker_up()
    sent = len(sim.sent)
    for _ in range(60):
        sim.step()
    trial = [unpack_int32(step.rows) for step in sim.sent[sent:]]
    turns = 3 * TRIAL_TOKENS
    assert [len(rows) for rows in trial[:turns]] == [1] * turns
    each = [rows[0] for rows in trial[:6]]
    assert each[::2] == each[1::2]  # two steps a turn
    assert len({*each}) == 3
    assert {len(rows) for rows in trial[turns : turns + 4]} == {3}
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_other_requests_continue_during_a_trial() -> None:
    sim = running_simulation(requests=3, new=40)
    sim.step()
    sim.worker_down()
    sim.worker_up()
    late = sim.add([77, 2, 3], 4)
    for _ in range(20):
        sim.step()
    assert late.end is not None
    assert max(len(request.ids) for request in sim.requests[:3]) < 10
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_requests_in_progress_when_the_worker_is_killed_are_no_suspects() -> None:
    sim = running_simulation(requests=8)
    for _ in range(2):
        for _ in range(TRIAL_TOKENS):
            sim.step()
        sim.worker_up()
        sim.plan()
        assert len(unpack_int32(sim.sent[-1].rows)) == 8
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_a_request_that_crashes_the_worker_in_decode_is_found() -> None:
    sim = running_simulation(requests=3)
    for _ in range(4):
        sim.step()
    crashing = sim.add([99, 2, 3], 20)
    while crashing.end is None:
        if sim.worker is None:
            sim.worker_up()
        sim.plan()
        step = sim.steps[0]
        rows = zip(unpack_int32(step.rows), unpack_int32(step.counts), strict=True)
        if any(count == 1 and sim.first_ids.get(slot) == 99 for slot, count in rows):
            sim.worker_down()
        else:
            sim.compute()
            sim.deliver()
    assert crashing.end.reason == FinishReason.QUARANTINED
    assert sim.scheduler.counters.worker_losses == 3
    sim.run()
    for request in sim.requests:
        if request is not crashing:
            assert_as_if_alone(request, WORKER_CONFIG)


def suspects(sim: Simulation, later: float = 0.0) -> set[int]:
    """The first ids of the prompts of those that the tokenizers are told of."""
    told = split_in_progress(sim.scheduler.suspects(sim.now + later))
    return {request.prompt[0] for request in sim.requests if fingerprint_of(request) in told}


def test_tokenizers_are_told_which_requests_may_have_ended_the_worker() -> None:
    """They send the others to another replica."""
    sim = running_simulation(requests=3, new=40, named=True)
    for outside in (True, False):
        for _ in range(TRIAL_TOKENS):
            sim.step()
        sim.worker_down(outside)
        waiting = sim.add([9, 2, 3])
        assert suspects(sim) == {0, 1, 2}  # as long as the cause is unknown
        sim.worker_up()
        assert suspects(sim) == (set() if outside else {0, 1, 2})
        sim.cancel(waiting)
    sim.run()
    assert suspects(sim) == set()


def test_a_request_is_told_of_after_its_quarantine() -> None:
    """It would crash the workers of other replicas."""
    sim = running_simulation(requests=2, named=True)
    sim.poison.add(0)
    sim.run()
    assert suspects(sim) == {0}


def test_a_step_in_flight_is_suspected_while_it_is_overdue() -> None:
    sim = running_simulation(requests=2, named=True)
    sim.step()
    sim.plan()
    assert (suspects(sim), suspects(sim, later=3600)) == (set(), {0, 1})


def test_waiting_requests_are_not_blamed() -> None:
    worker_config = WORKER_CONFIG._replace(slots=1)
    sim = running_simulation(requests=3, worker_config=worker_config)
    sim.poison.add(0)
    sim.run()
    first, *others = sim.requests
    assert first.end is not None
    assert first.end.reason == FinishReason.QUARANTINED
    for request in others:
        assert_as_if_alone(request, worker_config)
    assert sim.scheduler.counters.worker_losses == 3


def test_requests_of_a_failed_step_are_retried_alone_and_the_cause_is_reported() -> None:
    sim = running_simulation(requests=4)
    sim.broken.add(99)
    crashing = sim.add([99, 2, 3], 20)
    sim.run()
    assert crashing.end is not None
    assert (crashing.end.reason, crashing.end.message) == (FinishReason.QUARANTINED, "Server error: ValueError: broken")
    for request in sim.requests:
        if request is not crashing:
            assert_as_if_alone(request, WORKER_CONFIG)
    assert sim.scheduler.counters.worker_losses == 0


@pytest.mark.parametrize("fault", ["poison", "broken"])
def test_a_request_that_is_cancelled_while_it_is_computed_is_blamed_and_others_are_not(fault: str) -> None:
    worker_config = WORKER_CONFIG._replace(max_total_tokens=256)
    sim = running_simulation(requests=1, new=200, worker_config=worker_config)
    sim.names_requests = True
    (innocent,) = sim.requests
    getattr(sim, fault).add(99)
    for _ in range(3):
        for _ in range(45):  # the innocent request shows its innocence in a trial each time
            if sim.worker is None:
                sim.worker_up()
            sim.step()
        crashing = sim.add([99, 2, 3], 20)
        while crashing.end is None and 99 not in first_ids_at_worker(sim):
            sim.compute()
            sim.deliver()
            sim.plan()
        if crashing.end is None:
            sim.cancel(crashing)
        for _ in range(3):
            if sim.worker is not None:
                sim.compute()
    again = sim.add([99, 2, 3], 20)
    sim.run()
    assert again.end is not None
    assert again.end.reason == FinishReason.QUARANTINED
    assert sim.scheduler.counters.worker_losses <= 3
    assert_as_if_alone(innocent, worker_config)


def test_a_lack_of_memory_makes_steps_smaller_and_blames_no_request() -> None:
    """Whatever is cancelled, preempted or cached meanwhile."""
    draw = Random(3)
    worker_config = WORKER_CONFIG._replace(pages=40)  # too few for all
    sim = running_simulation(requests=3, new=30, worker_config=worker_config)
    for round_ in range(60):
        sim.memory = draw.choice([5, 9, 20, 1 << 30])
        shared = draw.choice([[1] * 9, [2] * 13, [3] * 5])
        added = sim.add([*shared, *draw.choices(range(4), k=draw.randint(0, 9))], draw.randint(1, 12))
        for _ in range(draw.randint(0, 6)):
            sim.plan()
            sim.compute()
            if draw.random() < 0.8:
                sim.deliver()
            sim.check()
        if round_ % 9 == 0:
            sim.cancel(added)
    sim.run()
    for request in sim.requests:
        if not request.cancelled_by_client:
            assert_as_if_alone(request, worker_config)
    assert (sim.scheduler.counters.worker_losses, sim.scheduler.suspects(sim.now)) == (0, b"")
    sim.memory = 1 << 30
    for _ in range(4 * GROWTH_STEPS):
        sim.add([4, 5], 2)
        sim.run()
    before = len(sim.sent)
    sim.add(list(range(40)), 1)
    sim.run()
    assert len(unpack_int32(sim.sent[before].counts)) == 1
    assert unpack_int32(sim.sent[before].counts) == [min(40, worker_config.max_batch_prefill_tokens)]


def test_pages_of_earlier_steps_stay_after_a_lack_of_memory() -> None:
    sim = running_simulation(requests=0)
    prompt = list(range(12))
    sim.add(prompt, 1)
    sim.run()
    sim.memory = 3
    larger = sim.add([9, 8, 7, 6, 5, 4], 1)
    sim.run()
    sim.memory = 1 << 30
    again, hits = sim.add(prompt, 1), sim.scheduler.counters.cache_hit_tokens
    sim.run()
    assert sim.scheduler.counters.cache_hit_tokens - hits == 8
    for request in (larger, again):
        assert_as_if_alone(request, WORKER_CONFIG)


def test_a_request_that_lacks_memory_alone_and_in_the_smallest_step_fails() -> None:
    sim = running_simulation(requests=5)
    sim.exhausting.add(99)
    for _ in range(4):
        sim.step()
    crashing = [sim.add([99, *range(20)], 5) for _ in range(2)]
    sim.run()
    for request in sim.requests:
        if request in crashing:
            assert request.end is not None
            assert request.end.reason == FinishReason.FAILED
            assert request.end.message.startswith("too little memory to compute this request")
        else:
            assert_as_if_alone(request, WORKER_CONFIG)
    assert sum(step.epoch for step in sim.sent[-1:]) < 30  # failed steps


def first_ids_at_worker(sim: Simulation) -> set[int]:
    """The first ids of the prompts that begin in steps on their way to the worker."""
    return {unpack_int32(slot.token_ids)[0] for step in sim.steps for slot in step.slots}


def test_a_crash_by_the_step_after_a_failed_one_is_not_blamed_on_requests() -> None:
    sim = running_simulation(requests=2)
    sim.plan()
    failing, later = sim.steps
    assert sim.worker is not None
    sim.handle(StepResult(failing.number, failing.epoch, b"", b"", b"", error="ValueError: broken"), sim.worker)
    assert sim.plan() == 0  # the later step is still at the worker
    sim.worker_up()
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)
    assert later.epoch < sim.scheduler.pipeline.epoch


def test_a_result_of_the_wrong_shape_counts_as_a_failed_step() -> None:
    sim = running_simulation(requests=2)
    sim.plan()
    sim.compute()
    result = sim.results.popleft()
    assert sim.worker is not None
    sim.handle(result._replace(counts=b"\1", token_ids=b"\0" * 4, logprobs=b"\0" * 4), sim.worker)
    sim.failed_epoch = result.epoch
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_a_worker_with_smaller_limits_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    sim = running_simulation(requests=1)
    sim.step()
    with caplog.at_level(logging.ERROR):
        sim.worker_up(WORKER_CONFIG._replace(pages=32))
    assert "pages is 32, at least 64 is needed" in caplog.text
    assert sim.plan() == 0
    status = sim.tokenizers[0].statuses[-1]
    assert (status.ready, status.healthy) == (False, False)
    sim.worker_up()
    sim.run()
    assert_as_if_alone(sim.requests[0], WORKER_CONFIG)


def test_larger_limits_of_a_restarted_worker_are_not_used() -> None:
    sim = running_simulation()
    sim.worker_up(WORKER_CONFIG._replace(pages=128, slots=100))
    assert sim.scheduler.worker.limits == WORKER_CONFIG.limits()
    sim.run()
    assert max(page for step in sim.sent for page in unpack_int32(step.page_ids)) < 64


# --- a worker that waits ----------------------------------------------------------------------------------------------

SECOND, THIRD = PeerId("worker", 1, b"second"), PeerId("worker", 2, b"third")


def status_of(config: FakeWorkerConfig) -> Status:
    return Status(ready=True, healthy=True, stage="ready", percent=100, limits=config.limits())


def lose_worker(sim: Simulation) -> None:
    sim.worker_down()
    sim.engine = FailingWorker(WORKER_CONFIG)
    sim.worker = sim.scheduler.worker.peer  # that which has waited, if there is one


def test_a_second_worker_changes_nothing_while_the_first_serves(caplog: pytest.LogCaptureFixture) -> None:
    sim = running_simulation(requests=1)
    first = sim.worker
    with caplog.at_level(logging.WARNING):
        sim.handle(Hello(PROTOCOL, *SECOND), SECOND)
    assert "worker-1 (7365636f) waits" in caplog.text
    sim.handle(Status(ready=False, healthy=False, stage="broken", percent=0), SECOND)
    sim.handle(status_of(WORKER_CONFIG._replace(pages=8)), SECOND)
    sim.handle(PeerSilent(), SECOND)
    assert sim.scheduler.worker.peer == first
    assert sim.scheduler.ready
    sim.handle(PeerDisconnected(), SECOND)
    sim.plan()
    step = sim.sent[-1]
    for peer in (SECOND, PeerId("worker", 0, b"stranger")):  # one that has left, and one that has said no Hello
        sim.handle(StepResult(step.number, step.epoch, b"", b"", b"", error="of another worker"), peer)
        sim.handle(status_of(WORKER_CONFIG), peer)
    assert not sim.scheduler._isolation.suspects
    sim.run()
    assert_as_if_alone(sim.requests[0], WORKER_CONFIG)
    sim.worker_down()
    assert sim.scheduler.worker.peer is None


def test_a_report_that_comes_twice_counts_once_and_a_death_while_loading_ends_the_row() -> None:
    sim = running_simulation(requests=1)
    sim.plan()
    sim.worker_down(outside=True)
    sim.handle(Hello(PROTOCOL, *SECOND, last_exit=sim.last_exit), SECOND)
    isolation = sim.scheduler._isolation
    assert [suspect.outside_deaths for suspect in isolation.suspects.values()] == [1]
    sim.handle(PeerDisconnected(), SECOND)
    sim.handle(Hello(PROTOCOL, *THIRD, last_exit=sim.last_exit), THIRD)
    assert not isolation.suspects


def test_a_crash_is_blamed_if_only_the_second_successor_reports_it() -> None:
    sim = running_simulation(requests=1)
    sim.plan()
    sim.worker_down()
    sim.handle(Hello(PROTOCOL, *THIRD, last_exit=sim.last_exit), THIRD)  # one before it has never connected
    assert [suspect.strikes for suspect in sim.scheduler._isolation.suspects.values()] == [1]


def test_a_worker_that_waits_takes_the_place_of_one_that_is_lost() -> None:
    sim = running_simulation()
    sim.handle(Hello(PROTOCOL, *SECOND, last_exit=LastExit(b"another", "crashed", False)), SECOND)
    sim.handle(status_of(WORKER_CONFIG), SECOND)
    for _ in range(5):
        sim.step()
    lose_worker(sim)
    assert sim.worker == SECOND
    assert sim.scheduler.ready
    assert len(sim.scheduler._isolation.suspects) == 8  # how the lost one ended is not known
    sim.handle(Hello(PROTOCOL, *THIRD), THIRD)  # its successor waits
    sim.handle(status_of(WORKER_CONFIG), THIRD)
    assert sim.scheduler.worker.peer == SECOND
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)
    lose_worker(sim)
    assert sim.worker == THIRD


@pytest.mark.parametrize("fault", ["loading", "too small", "silent"])
def test_a_worker_that_cannot_compute_waits_until_it_can(fault: str) -> None:
    sim = running_simulation()
    sim.handle(Hello(PROTOCOL, *SECOND), SECOND)
    if fault == "too small":
        sim.handle(status_of(WORKER_CONFIG._replace(pages=8)), SECOND)
    elif fault == "silent":
        sim.handle(status_of(WORKER_CONFIG), SECOND)
        sim.handle(PeerSilent(), SECOND)
    lose_worker(sim)
    assert sim.worker is None
    if fault == "silent":
        sim.handle(PeerResponds(), SECOND)
    else:
        sim.handle(status_of(WORKER_CONFIG), SECOND)
    assert sim.scheduler.worker.peer == SECOND
    sim.worker = SECOND
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)


# --- tokenizers and the scheduler itself ------------------------------------------------------------------------------


def test_the_requests_of_a_dead_tokenizer_are_cancelled() -> None:
    sim = running_simulation()
    sim.step()
    assert sim.scheduler.running == 8
    sim.tokenizer_up(0)
    assert sim.scheduler.running == 4
    sim.check()
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_a_restarted_scheduler_continues_resumed_requests() -> None:
    sim = running_simulation()
    for _ in range(7):
        sim.step()
    shown = sum(len(request.ids) for request in sim.requests)
    sim.restart_scheduler()
    assert sim.scheduler.counters.recomputed_tokens == shown
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)
        assert request.end is not None
        assert request.end.generated_tokens == 20


@pytest.mark.parametrize(("new", "stop_ids", "reason"), [(3, [], FinishReason.LENGTH), (9, [42], FinishReason.EOS)])
def test_a_resumed_request_that_is_complete_ends_at_once(new: int, stop_ids: list[int], reason: FinishReason) -> None:
    sim = Simulation(WORKER_CONFIG)
    request = sim.add([1, 2], new, stop_ids=stop_ids, resume=[40, 41, 42])
    assert isinstance(request.end, End)
    assert request.end.reason == reason
    assert request.end.generated_tokens == 3
    sim.check()


# --- requests that crash the scheduler --------------------------------------------------------------------------------


def named_simulation(requests: int) -> Simulation:
    made = Simulation(WORKER_CONFIG, tokenizers=2)
    made.names_requests = True
    made.worker_up()
    for n in range(requests):
        made.add([n, 2, 3], 30, tokenizer=n % 2)
    return made


def test_a_request_that_crashes_the_scheduler_when_it_arrives_is_refused_after_the_third_time() -> None:
    sim = named_simulation(5)
    sim.step()
    crashing = sim.add([99, 2, 3], 20)
    for _ in range(3):
        assert crashing.end is None
        sim.restart_scheduler(outside=False, in_progress=[fingerprint_of(crashing)])
    assert crashing.end is not None
    assert crashing.end.reason == FinishReason.QUARANTINED
    assert crashing.end.message.startswith("the scheduler crashed while it worked on this request alone")
    sim.restart_scheduler()
    again = sim.add([99, 2, 3], 20)
    assert again.end is not None
    sim.run()
    for request in [one for one in sim.requests if one.prompt != crashing.prompt]:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_a_quarantined_request_is_tried_again_after_an_hour_and_quarantined_by_one_more_crash() -> None:
    sim = named_simulation(3)
    sim.poison.add(99)
    quarantined = sim.add([99, 2, 3], 20)
    sim.run()
    sim.advance_time(MEMORY_SECONDS - 1)
    early = sim.add([99, 2, 3], 20)
    sim.advance_time(2)
    late = sim.add([99, 2, 3], 20)
    others = [sim.add([n, 2, 3], 20) for n in range(4)]
    losses = sim.scheduler.counters.worker_losses
    assert early.end is not None
    assert late.end is None
    sim.run()
    assert sim.scheduler.counters.worker_losses <= losses + 2  # the first may have others in progress
    for request in (quarantined, early, late):
        assert request.end is not None
        assert request.end.reason == FinishReason.QUARANTINED
    for request in others:
        assert_as_if_alone(request, WORKER_CONFIG)


@pytest.mark.parametrize("innocent", [0, 3, 7, 20])
def test_a_request_that_crashes_the_scheduler_in_a_plan_is_found_by_its_third_crash(innocent: int) -> None:
    sim = named_simulation(innocent)
    sim.step()
    crashing = sim.add([99, 2, 3], 20)
    crashes = 0
    while crashing.end is None:
        sim.plan()
        register = sim.scheduler.work_register
        register.working_on_batch()
        in_progress = split_in_progress(register.in_progress())
        if fingerprint_of(crashing) in in_progress:
            crashes += 1
            sim.restart_scheduler(outside=False, in_progress=in_progress)
        else:
            sim.compute()
            sim.deliver()
    assert crashing.end.reason == FinishReason.QUARANTINED
    assert crashes == 3
    sim.run()
    for request in sim.requests:
        if request is not crashing:
            assert_as_if_alone(request, WORKER_CONFIG)


def test_requests_of_a_scheduler_that_is_killed_from_outside_are_no_suspects() -> None:
    sim = named_simulation(6)
    for _ in range(20):
        sim.step()
        sim.restart_scheduler(in_progress=[fingerprint_of(request) for request in sim.requests])
    assert sim.scheduler.suspect_records == []
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_a_trial_goes_on_in_the_next_scheduler() -> None:
    sim = named_simulation(4)
    crashing = sim.add([99, 2, 3], 20)
    sim.poison.add(99)
    while crashing.end is None:
        if sim.worker is None:
            sim.worker_up()
        sim.step()
        if sim.worker is None:
            sim.worker_up()
            sim.restart_scheduler()
    assert crashing.end.reason == FinishReason.QUARANTINED
    sim.run()
    for request in sim.requests:
        if request is not crashing:
            assert_as_if_alone(request, WORKER_CONFIG)


def test_the_register_states_the_requests_of_this_turn_only() -> None:
    sim = named_simulation(3)
    register = sim.scheduler.work_register
    sim.step()
    register.working_on_batch()
    assert set(split_in_progress(register.in_progress())) == {fingerprint_of(request) for request in sim.requests}
    sim.worker_down()
    sim.worker_up()
    seen = set()
    for _ in range(12):
        sim.step()
        seen.add(register.in_progress())
    assert seen >= {fingerprint_of(request) for request in sim.requests}
    assert max(map(len, seen)) == 8
    sim.run()
    assert register.in_progress() == b""


def test_a_request_after_which_schedulers_are_killed_at_once_is_refused_in_the_end() -> None:
    sim = named_simulation(3)
    crashing = sim.add([99, 2, 3], 20)
    kills = 0
    while crashing.end is None:
        kills += 1
        sim.restart_scheduler(in_progress=[fingerprint_of(crashing)])
    assert crashing.end.reason == FinishReason.QUARANTINED
    assert kills <= 15
    sim.run()


def test_suspects_and_changes_of_adapters_survive_in_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = SuccessorFile(successor_path(tmp_path, "scheduler-0"))
    assert kept.read().suspects == []
    sim = named_simulation(3)
    kept.write_changes(sim.scheduler)
    assert not successor_path(tmp_path, "scheduler-0").exists()
    sim.step()
    sim.worker_down()
    sim.worker_up()
    kept.write_changes(sim.scheduler)
    records = SuccessorFile(successor_path(tmp_path, "scheduler-0")).read().suspects
    assert [record.strikes for record in records] == [1, 1, 1]
    assert records == sim.scheduler.suspect_records
    sim.run()
    kept.write_changes(sim.scheduler)
    assert kept.read().suspects == []
    change = UpdateAdapter(0, "name", "", 5)
    sim.handle(change, sim.tokenizers[0].peer)
    kept.write_changes(sim.scheduler)
    assert kept.read().adapter_changes == [change]
    successor_path(tmp_path, "scheduler-0").write_bytes(b"damaged")
    assert kept.read().suspects == []
    assert "damaged" in caplog.text


def test_a_scheduler_that_cannot_write_the_file_for_its_successor_works_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    successor_path(tmp_path, "scheduler-0").with_suffix(".draft").mkdir()  # where the new file would be written first
    sim = named_simulation(3)
    sim.step()
    sim.worker_down()
    sim.worker_up()
    SuccessorFile(successor_path(tmp_path, "scheduler-0")).write_changes(sim.scheduler)
    assert "the next scheduler does not know the suspects" in caplog.text


# --- pages that outlive the worker ------------------------------------------------------------------------------------


def test_the_next_worker_goes_on_from_the_pages_of_one_that_was_killed() -> None:
    """Only the last page of each request is computed again, although a request ends while its row is in flight."""
    sim = running_simulation(requests=4)
    for n in range(1, 4):
        sim.add([50, *range(n)], 20)  # of other lengths, so that steps in flight fill pages
    for _ in range(10):
        sim.step()
    sim.plan()
    sent = len(sim.sent)
    *others, cancelled = sim.requests
    sim.cancel(cancelled)
    known = [len(request.prompt) + len(request.ids) for request in others]
    sim.worker_up(keeps_pages=True)
    sim.plan()
    size = WORKER_CONFIG.page_size
    assert sum(unpack_int32(sim.sent[sent].counts)) == sum(count - (count - 1) // size * size for count in known)
    sim.run()
    for request in others:
        assert_as_if_alone(request, WORKER_CONFIG)


@pytest.mark.parametrize("case", ["crashed", "of another life", "connected again"])
def test_pages_are_computed_again_that_another_worker_may_not_have(case: str) -> None:
    sim = running_simulation()
    for _ in range(10):
        sim.step()
    assert sim.worker is not None
    sent, worker = len(sim.sent), sim.worker
    sim.worker_down(outside=case != "crashed")
    assert sim.last_exit is not None
    if case == "of another life":
        sim.last_exit = sim.last_exit._replace(boot=b"another")
    elif case == "connected again":
        sim.last_exit = None
    sim.worker_up(keeps_pages=True)
    assert worker != sim.worker
    sim.scheduler._isolation.suspects.clear()
    sim.run()
    assert sum(unpack_int32(sim.sent[sent].starts)) == 0


def test_the_next_worker_goes_on_from_the_states_of_one_that_was_killed() -> None:
    """Those of which the steps in flight were to take snapshots are computed again."""
    states = KVGroup(GroupKind.RECURRENT, snapshots=20, interval=4, drafts=6)
    config = WORKER_CONFIG._replace(groups=(*WORKER_CONFIG.groups, states))
    sim = running_simulation(requests=4, worker_config=config)
    for n in range(1, 4):
        sim.add([50, *range(n)], 20)
    for _ in range(10):
        sim.step()
    sim.plan()
    assert any(one.state_copies for one in sim.steps if isinstance(one, Step))
    sent = len(sim.sent)
    sim.worker_up(keeps_pages=True)
    sim.plan()
    assert min(unpack_int32(sim.sent[sent].starts)) >= config.page_size
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, config)
