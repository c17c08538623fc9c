"""Cancelled requests, disconnected apis and schedulers, and requests resumed from another tokenizer."""

from typing import Any

import pytest

from tests.tokenizer.harness import API, EOS, OTHER, PoolHarness, end_messages, hello, ids_of, streamed_output
from tests.tokenizer.vocabularies import byte_level, sentencepiece
from tgi.microkernel.links.link import PeerDisconnected, PeerResponds, PeerSilent
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import Add, Beat, Cancel, End, FinishReason, Generate, RequestContext, Status
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.recovery.assignments import RESUBMISSION_BURST
from tgi.tokenizer.schedulers import SCHEDULER_SILENT
from tgi.tokenizer.vocabulary import Vocabulary


def test_cancel_waits_for_the_schedulers_end() -> None:
    harness = PoolHarness()
    add = harness.submit(5)
    harness.send_tokens((add.rid, ids_of("a")))
    harness.pool.handle(API, Cancel(5))
    harness.pool.handle(API, Cancel(5))
    harness.pool.handle(API, Cancel(6))
    assert harness.received_by(harness.scheduler) == [Cancel(add.rid)]
    harness.send_tokens((add.rid, ids_of("b")))
    assert end_messages(received := harness.received_by(API)) == []
    assert streamed_output(received, 5)[1] == "a"
    harness.send_end(add.rid, FinishReason.LENGTH)  # sent before the Cancel arrived
    (end,) = harness.received_by(API)
    assert (end.reason, end.text, end.queue_us) == (FinishReason.CANCELLED, "a", 30)
    assert harness.pool.idle


def test_disconnected_api_cancels_its_requests() -> None:
    harness = PoolHarness()
    gone, kept = harness.submit(1), harness.submit(1, api=OTHER)
    harness.send_tokens((gone.rid, ids_of("a")), (kept.rid, ids_of("a")))
    harness.pool.handle(API, PeerDisconnected())
    assert harness.received_by(harness.scheduler) == [Cancel(gone.rid)]
    harness.send_tokens((gone.rid, ids_of("a")))
    harness.send_end(gone.rid, FinishReason.CANCELLED)
    assert harness.received_by(API) == []
    assert streamed_output(harness.received_by(OTHER), 1)[1] == "a"
    harness.send_end(kept.rid)
    assert len(end_messages(harness.received_by(OTHER))) == 1
    assert harness.pool.idle


def test_messages_for_a_lost_connection_do_not_reach_the_next() -> None:
    harness = PoolHarness()
    add = harness.submit(1)
    harness.send_tokens((add.rid, ids_of("a")))
    harness.send_end(add.rid)
    harness.pool.handle(API, PeerDisconnected())
    harness.pool.handle(API, hello(API))
    assert [type(message) for message in harness.received_by(API)] == [Status]
    harness.submit(2)
    harness.pool.handle(API, Cancel(2))
    harness.pool.handle(OTHER, Generate(3, "Hello", SamplingParams(5)))
    harness.disconnect_scheduler()
    harness.pool.handle(harness.scheduler, hello(harness.scheduler))
    assert [type(message) for message in harness.received_by(harness.scheduler)] == [Add]


def test_failed_end_carries_message_and_text_so_far() -> None:
    harness = PoolHarness()
    add = harness.submit(1)
    harness.send_tokens((add.rid, ids_of("a")))
    harness.send_end(add.rid, FinishReason.FAILED, "worker burnt")
    (end,) = end_messages(harness.received_by(API))
    assert (end.reason, end.message, end.text) == (FinishReason.FAILED, "worker burnt", "a")


# Scheduler restarts


def test_new_scheduler_gets_live_requests_with_their_ids() -> None:
    harness = PoolHarness()
    add = harness.submit(1, "Hello", max_new_tokens=20)
    waiting = harness.submit(2)
    emoji = ids_of("👍🏽")
    harness.send_tokens((add.rid, emoji[:-1]))
    harness.disconnect_scheduler()
    before = harness.received_by(API)
    harness.send_tokens()  # an empty step from the old scheduler
    harness.connect_scheduler()
    again = harness.received_by(harness.scheduler)
    assert again[0].context.waited_ms > add.context.waited_ms
    assert again[1].context.waited_ms > waiting.context.waited_ms
    again = [one._replace(context=RequestContext()) for one in again]
    resumed = add._replace(resume_ids=pack_column(INT32, emoji[:-1]))
    assert again == [one._replace(context=RequestContext()) for one in (resumed, waiting)]
    harness.send_tokens((add.rid, emoji[-1:]))
    harness.send_end(add.rid)
    after = harness.received_by(API)
    ids, text = streamed_output([*before, *after], 1)
    assert (ids, text) == (emoji, "👍🏽")
    assert end_messages(after)[0].generated_tokens == len(emoji)


def test_ended_and_cancelled_requests_are_not_sent_again() -> None:
    harness = PoolHarness()
    stopped, cancelled, finished = (
        harness.submit(1, stop_strings=["a"]),
        harness.submit(2),
        harness.submit(3, max_new_tokens=1),
    )
    harness.send_tokens((stopped.rid, ids_of("a")), (finished.rid, ids_of("b")))
    harness.pool.handle(API, Cancel(2))
    harness.disconnect_scheduler()
    ended = {end.rid: (end.reason, end.text) for end in end_messages(harness.received_by(API))}
    assert ended == {1: (FinishReason.STOP, "a"), 2: (FinishReason.CANCELLED, ""), 3: (FinishReason.LENGTH, "b")}
    harness.received_by(harness.scheduler)
    harness.connect_scheduler()
    assert harness.received_by(harness.scheduler) == []
    assert harness.pool.idle
    assert cancelled


def test_cancel_without_scheduler() -> None:
    harness = PoolHarness()
    harness.submit(1)
    harness.disconnect_scheduler()
    harness.pool.handle(API, Cancel(1))
    assert [end.reason for end in end_messages(harness.received_by(API))] == [FinishReason.CANCELLED]
    harness.connect_scheduler()
    assert harness.received_by(harness.scheduler) == []


# Requests resumed from another tokenizer


@pytest.mark.parametrize("vocabulary", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
@pytest.mark.parametrize("shown_before", range(1, 8))
def test_resumed_stream_continues_after_text_of_another_tokenizer(vocabulary: Vocabulary, shown_before: int) -> None:
    ids = ids_of("x Größe 👍🏽 und mehr", vocabulary)

    def run(resumed: list[int]) -> tuple[str, End]:
        harness = PoolHarness(vocabulary)
        add = harness.submit(1, "Hello", resume_ids=pack_column(INT32, resumed), stop_strings=["hr"])
        assert unpack_int32(add.resume_ids) == resumed
        assert add.max_new_tokens == 2048 - len(unpack_int32(add.prompt_ids))
        harness.send_tokens((add.rid, ids[len(resumed) :]))
        harness.send_end(add.rid, FinishReason.STOP)
        received = harness.received_by(API)
        return streamed_output(received, 1)[1], end_messages(received)[0]

    whole, end = run([])
    rest, resumed_end = run(ids[:shown_before])
    assert whole.endswith(rest)
    harness = PoolHarness(vocabulary)
    add = harness.submit(1, "Hello", stop_strings=["hr"])
    harness.send_tokens((add.rid, ids[:shown_before]))
    assert streamed_output(harness.received_by(API), 1)[1] + rest == whole
    assert resumed_end.text == end.text == whole
    assert resumed_end.generated_tokens == end.generated_tokens


@pytest.mark.parametrize(
    ("resume", "fields", "reason", "text"),
    [
        ([EOS], {}, FinishReason.EOS, ""),
        (ids_of("ab"), {"max_new_tokens": 2}, FinishReason.LENGTH, "ab"),
        (ids_of("ab"), {"stop_strings": ["b"]}, FinishReason.STOP, "ab"),
    ],
)
@pytest.mark.parametrize("scheduler", [True, False])
def test_resumed_request_that_is_complete_ends_at_once(
    resume: list[int], fields: dict[str, Any], reason: FinishReason, text: str, scheduler: bool
) -> None:
    harness = PoolHarness()
    if not scheduler:
        harness.disconnect_scheduler()
        harness.received_by(API)
    harness.pool.handle(API, Generate(1, "Hello", SamplingParams(1), resume_ids=pack_column(INT32, resume), **fields))
    assert harness.received_by(harness.scheduler) == []
    (end,) = harness.received_by(API)
    assert (end.reason, end.text, end.generated_tokens) == (reason, text, len(resume))
    assert harness.pool.idle


def test_resumed_ids_after_a_stop_string_are_ignored() -> None:
    harness = PoolHarness()
    harness.pool.handle(
        API, Generate(1, "Hello", SamplingParams(1), stop_strings=["b"], resume_ids=pack_column(INT32, ids_of("abc")))
    )
    (end,) = harness.received_by(API)
    assert (end.reason, end.text, end.generated_tokens) == (FinishReason.STOP, "ab", 2)


# Scheduler restarts: rate of resubmission; silent schedulers


def test_requests_are_submitted_again_at_a_limited_rate() -> None:
    harness = PoolHarness()
    count = RESUBMISSION_BURST + 50
    rids = {harness.submit(number, max_new_tokens=5).rid for number in range(count)}
    harness.disconnect_scheduler()
    harness.connect_scheduler()
    at_once = [message.rid for message in harness.received_by(harness.scheduler)]
    assert RESUBMISSION_BURST <= len(at_once) < count
    assert harness.pool.deadline() is not None
    cancelled = count - 1  # it was not sent yet
    harness.pool.handle(API, Cancel(cancelled))
    (end,) = end_messages(harness.received_by(API))
    assert (end.rid, end.reason) == (cancelled, FinishReason.CANCELLED)
    again = list(at_once)
    while (deadline := harness.pool.deadline()) is not None:
        harness.now = max(harness.now, deadline)
        again += [message.rid for message in harness.received_by(harness.scheduler)]
    assert len(again) == len(set(again)) == count - 1
    assert set(again) < rids
    for rid in again:
        harness.send_end(rid)
    assert harness.pool.idle


def test_requests_of_a_lost_api_are_not_submitted_again() -> None:
    harness = PoolHarness()
    for number in range(RESUBMISSION_BURST + 50):
        harness.submit(number, max_new_tokens=5)
    harness.disconnect_scheduler()
    harness.connect_scheduler()
    at_once = harness.received_by(harness.scheduler)
    harness.pool.handle(API, PeerDisconnected())
    cancels = harness.received_by(harness.scheduler)
    assert [type(message) for message in cancels] == [Cancel] * len(at_once)
    assert harness.pool.deadline() is None
    for message in at_once:
        harness.send_end(message.rid, FinishReason.CANCELLED)
    assert harness.pool.idle


def test_a_silent_scheduler_makes_the_status_unhealthy_until_it_responds() -> None:
    harness = PoolHarness()
    assert harness.received_by(API) == []
    harness.pool.handle(harness.scheduler, PeerSilent())
    (status,) = harness.received_by(API)
    assert (status.ready, status.healthy, status.stage) == (True, False, SCHEDULER_SILENT)
    harness.pool.handle(harness.scheduler, PeerResponds())
    (status,) = harness.received_by(API)
    assert (status.ready, status.healthy) == (True, True)


def test_progress_of_the_scheduler_counts_for_its_tokenizers() -> None:
    harness = PoolHarness()
    assert harness.pool.beat().progress_age_ms is None
    add = harness.submit(1)
    harness.pool.beat()
    harness.now += 1.0
    age = harness.pool.beat().progress_age_ms
    assert age is not None
    assert age >= 900
    harness.pool.handle(harness.scheduler, Beat(100, 4000, "step 3"))
    beat = harness.pool.beat()
    assert beat.progress_age_ms is not None
    assert beat.progress_age_ms < 150
    assert beat.limit_ms == 4000
    harness.send_tokens((add.rid, ids_of("a")))
    assert harness.pool.beat().progress_age_ms == 0
