"""Any neighbour may die. Requests go on where they were; the one that kills workers is found and ended."""

import logging

import pytest

from tests.scheduler.house import House, ok
from tgi.kernel.link import Gone, Peer
from tgi.kernel.messages import End, Reason, Result
from tgi.kernel.pack import ints
from tgi.kernel.presence import PROTOCOL, Hello, Status
from tgi.worker.scripted import Script, ScriptedWorker

SCRIPT = Script(pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=256)


def house(requests: int = 8, new: int = 20, script: Script = SCRIPT) -> House:
    made = House(script, tokenizers=2)
    made.worker_up()
    for n in range(requests):
        made.add([n, 2, 3], new, place=n % 2, seed=n if n % 2 else None)
    return made


# --- the worker -------------------------------------------------------------------------------------------------------


def test_what_was_generated_comes_back_as_prefill() -> None:
    one = house()
    for _ in range(10):
        one.step()
    shown = [len(asked.ids) for asked in one.asked]
    assert min(shown) >= 8
    sent = len(one.sent)
    one.worker_up()
    assert one.core.counters.resumed_tokens == sum(shown)
    one.run()
    prefill, *decode = one.sent[sent:]
    assert sum(ints(prefill.counts)) == sum(shown) + 8 * 3
    assert sum(sum(ints(step.counts)) for step in decode) == sum(20 - count - 1 for count in shown)
    for asked in one.asked:
        ok(asked, SCRIPT)


def test_a_restarted_worker_gets_a_new_epoch_from_step_one() -> None:
    one = house()
    one.step()
    old = one.sent[-1]
    late = ScriptedWorker(SCRIPT).run_step(one.sent[0])
    one.worker_up()
    one.plan()
    assert one.sent[-2].epoch == old.epoch + 1
    assert [step.number for step in one.sent[-2:]] == [1, 2]
    before = [list(asked.ids) for asked in one.asked]
    assert one.worker is not None
    one.handle(late, one.worker)
    assert [asked.ids for asked in one.asked] == before


def test_requests_wait_while_there_is_no_worker() -> None:
    one = House(SCRIPT)
    asked = one.add([1, 2, 3])
    assert one.plan() == 0
    one.worker_up()
    one.run()
    ok(asked, SCRIPT)


def test_the_culprit_is_tried_alone_and_refused_and_others_never_notice() -> None:
    one = house(requests=5)
    for _ in range(6):
        one.step()
    one.poison.add(99)
    culprit = one.add([99, 2, 3], 20)
    one.run()
    assert culprit.end is not None
    assert culprit.end.reason == Reason.FAILED
    assert culprit.end.message == "Server error: the worker died while it computed this request alone"
    assert one.core.counters.worker_losses == 3
    for asked in one.asked:
        if asked is not culprit:
            ok(asked, SCRIPT)


def test_suspects_that_make_progress_alone_are_cleared() -> None:
    one = house(requests=3)
    for _ in range(2):
        one.step()
        one.worker_up()
    alone = []
    while one.asked[0].end is None and len(alone) < 12:
        sent = len(one.sent)
        one.plan()
        alone += [ints(step.rows) for step in one.sent[sent:]]
        one.compute()
        one.deliver()
    assert [len(rows) for rows in alone[:6]] == [1] * 6
    while one.core.queued:
        one.step()
    one.step()
    one.worker_up()  # a first strike again
    one.plan()
    assert len(ints(one.sent[-2].rows)) == 3
    one.run()
    for asked in one.asked:
        ok(asked, SCRIPT)


def test_streams_that_get_on_between_deaths_are_never_suspected() -> None:
    one = house(requests=8)
    for _ in range(4):
        for _ in range(3):
            one.step()
        one.worker_up()
        one.plan()
        assert len(ints(one.sent[-1].rows)) == 8
    one.run()
    for asked in one.asked:
        ok(asked, SCRIPT)


def test_a_request_that_survives_prefill_and_kills_in_decode_is_tried_alone_and_refused() -> None:
    one = house(requests=3)
    for _ in range(4):
        one.step()
    culprit = one.add([99, 2, 3], 20)
    while culprit.end is None:
        if one.worker is None:
            one.worker_up()
        one.plan()
        step = one.steps[0]
        rows = zip(ints(step.rows), ints(step.counts), strict=True)
        if any(count == 1 and one.firsts.get(slot) == 99 for slot, count in rows):
            one.worker_down()
        else:
            one.compute()
            one.deliver()
    assert culprit.end.reason == Reason.FAILED
    assert one.core.counters.worker_losses == 3
    one.run()
    for asked in one.asked:
        if asked is not culprit:
            ok(asked, SCRIPT)


def test_who_was_not_being_computed_gets_no_blame() -> None:
    script = SCRIPT._replace(slots=1)
    one = house(requests=3, script=script)
    one.poison.add(0)
    one.run()
    first, *others = one.asked
    assert first.end is not None
    assert first.end.reason == Reason.FAILED
    for asked in others:
        ok(asked, script)
    assert one.core.counters.worker_losses == 3


def test_a_failed_step_is_retried_one_by_one_and_its_cause_told() -> None:
    one = house(requests=4)
    one.broken.add(99)
    culprit = one.add([99, 2, 3], 20)
    one.run()
    assert culprit.end is not None
    assert (culprit.end.reason, culprit.end.message) == (Reason.FAILED, "Server error: ValueError: broken")
    for asked in one.asked:
        if asked is not culprit:
            ok(asked, SCRIPT)
    assert one.core.counters.worker_losses == 0


def test_nobody_is_blamed_for_a_death_by_the_step_behind_a_failed_one() -> None:
    one = house(requests=2)
    one.plan()
    failing, behind = one.steps
    assert one.worker is not None
    one.handle(Result(failing.number, failing.epoch, b"", b"", b"", error="ValueError: broken"), one.worker)
    assert one.plan() == 0  # the step behind is still at the worker
    one.worker_up()
    one.run()
    for asked in one.asked:
        ok(asked, SCRIPT)
    assert behind.epoch < one.core.under_way.epoch


def test_a_result_of_the_wrong_shape_counts_as_a_failed_step() -> None:
    one = house(requests=2)
    one.plan()
    one.compute()
    result = one.results.popleft()
    assert one.worker is not None
    one.handle(result._replace(counts=b"\1", ids=b"\0" * 4, logprobs=b"\0" * 4), one.worker)
    one.failed = result.epoch
    one.run()
    for asked in one.asked:
        ok(asked, SCRIPT)


def test_a_worker_with_smaller_limits_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    one = house(requests=1)
    one.step()
    with caplog.at_level(logging.ERROR):
        one.worker_up(SCRIPT._replace(pages=32))
    assert "pages is 32, at least 64 is needed" in caplog.text
    assert one.plan() == 0
    told = one.tokenizers[0].statuses[-1]
    assert (told.ready, told.healthy) == (False, False)
    one.worker_up()
    one.run()
    ok(one.asked[0], SCRIPT)


def test_of_a_worker_with_larger_limits_only_the_old_ones_are_used() -> None:
    one = house()
    one.worker_up(SCRIPT._replace(pages=128, slots=100))
    assert one.core.below.limits == SCRIPT.limits()
    one.run()
    assert max(page for step in one.sent for page in ints(step.page_ids)) < 64


def test_a_second_worker_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    one = house(requests=1)
    second = Peer("worker", 1, b"second")
    with caplog.at_level(logging.ERROR):
        one.handle(Hello(PROTOCOL, *second), second)
    assert "is ignored" in caplog.text
    one.handle(Status(False, False, "broken", 0), second)
    one.handle(Gone(), second)
    one.run()
    ok(one.asked[0], SCRIPT)


# --- tokenizers and the scheduler itself ------------------------------------------------------------------------------


def test_the_requests_of_a_dead_tokenizer_are_cancelled_and_others_go_on() -> None:
    one = house()
    one.step()
    assert one.core.running == 8
    one.tokenizer_up(0)
    assert one.core.running == 4
    one.check()
    one.run()
    for asked in one.asked:
        ok(asked, SCRIPT)


def test_a_new_scheduler_goes_on_with_what_the_tokenizers_resume() -> None:
    one = house()
    for _ in range(7):
        one.step()
    shown = sum(len(asked.ids) for asked in one.asked)
    one.new_core()
    assert one.core.counters.resumed_tokens == shown
    one.run()
    for asked in one.asked:
        ok(asked, SCRIPT)
        assert asked.end is not None
        assert asked.end.generated_tokens == 20


@pytest.mark.parametrize(("new", "stop_ids", "reason"), [(3, [], Reason.LENGTH), (9, [42], Reason.EOS)])
def test_who_missed_only_its_end_gets_it_at_once(new: int, stop_ids: list[int], reason: Reason) -> None:
    one = House(SCRIPT)
    asked = one.add([1, 2], new, stop_ids=stop_ids, resume=[40, 41, 42])
    assert isinstance(asked.end, End)
    assert asked.end.reason == reason
    assert asked.end.generated_tokens == 3
    one.check()
