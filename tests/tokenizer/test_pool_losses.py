"""Requests that are cancelled, apis and schedulers that die, and a tokenizer that takes over from another."""

from typing import Any

import pytest

from tests.tokenizer.house import API, EOS, OTHER, House, ends, ids_of, shown
from tests.tokenizer.vocabularies import byte_level, sentencepiece
from tgi.kernel.link import Gone
from tgi.kernel.messages import Cancel, End, Generate, Reason, Sampling
from tgi.kernel.pack import INT32, ints, pack
from tgi.tokenizer.vocabulary import Vocabulary


def test_a_cancel_waits_for_the_schedulers_end() -> None:
    house = House()
    add = house.ask(5)
    house.tokens((add.rid, ids_of("a")))
    house.pool.handle(API, Cancel(5))
    house.pool.handle(API, Cancel(5))
    house.pool.handle(API, Cancel(6))
    assert house.said(house.scheduler) == [Cancel(add.rid)]
    house.tokens((add.rid, ids_of("b")))
    assert ends(said := house.said(API)) == []
    assert shown(said, 5)[1] == "a"
    house.end(add.rid, Reason.LENGTH)  # it crossed the Cancel
    (end,) = house.said(API)
    assert (end.reason, end.text, end.queue_us) == (Reason.CANCELLED, "a", 30)
    assert house.pool.idle


def test_an_api_that_dies_takes_its_requests_with_it() -> None:
    house = House()
    gone, kept = house.ask(1), house.ask(1, api=OTHER)
    house.tokens((gone.rid, ids_of("a")), (kept.rid, ids_of("a")))
    house.pool.handle(API, Gone())
    assert house.said(house.scheduler) == [Cancel(gone.rid)]
    house.tokens((gone.rid, ids_of("a")))
    house.end(gone.rid, Reason.CANCELLED)
    assert house.said(API) == []
    assert shown(house.said(OTHER), 1)[1] == "a"
    house.end(kept.rid)
    assert len(ends(house.said(OTHER))) == 1
    assert house.pool.idle


def test_an_end_of_failure_carries_its_message_and_the_text_so_far() -> None:
    house = House()
    add = house.ask(1)
    house.tokens((add.rid, ids_of("a")))
    house.end(add.rid, Reason.FAILED, "worker burnt")
    (end,) = ends(house.said(API))
    assert (end.reason, end.message, end.text) == (Reason.FAILED, "worker burnt", "a")


# The scheduler dies


def test_a_new_scheduler_gets_every_live_request_with_its_ids() -> None:
    house = House()
    add = house.ask(1, "Hello", max_new_tokens=20)
    waiting = house.ask(2)
    emoji = ids_of("👍🏽")
    house.tokens((add.rid, emoji[:-1]))
    house.scheduler_gone()
    before = house.said(API)
    house.tokens()  # nothing, from nobody
    house.scheduler_up()
    again = house.said(house.scheduler)
    assert again == [add._replace(resume=pack(INT32, emoji[:-1])), waiting]
    house.tokens((add.rid, emoji[-1:]))
    house.end(add.rid)
    after = house.said(API)
    ids, text = shown([*before, *after], 1)
    assert (ids, text) == (emoji, "👍🏽")
    assert ends(after)[0].generated_tokens == len(emoji)


def test_what_was_over_or_cancelled_does_not_come_back() -> None:
    house = House()
    stopped, cancelled, finished = house.ask(1, stop=["a"]), house.ask(2), house.ask(3, max_new_tokens=1)
    house.tokens((stopped.rid, ids_of("a")), (finished.rid, ids_of("b")))
    house.pool.handle(API, Cancel(2))
    house.scheduler_gone()
    told = {end.rid: (end.reason, end.text) for end in ends(house.said(API))}
    assert told == {1: (Reason.STOP, "a"), 2: (Reason.CANCELLED, ""), 3: (Reason.LENGTH, "b")}
    house.said(house.scheduler)
    house.scheduler_up()
    assert house.said(house.scheduler) == []
    assert house.pool.idle
    assert cancelled


def test_cancelled_while_there_is_no_scheduler() -> None:
    house = House()
    house.ask(1)
    house.scheduler_gone()
    house.pool.handle(API, Cancel(1))
    assert [end.reason for end in ends(house.said(API))] == [Reason.CANCELLED]
    house.scheduler_up()
    assert house.said(house.scheduler) == []


# This tokenizer is the new one


@pytest.mark.parametrize("vocabulary", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
@pytest.mark.parametrize("shown_before", range(1, 8))
def test_a_stream_goes_on_behind_what_another_tokenizer_showed(vocabulary: Vocabulary, shown_before: int) -> None:
    ids = ids_of("x Größe 👍🏽 und mehr", vocabulary)

    def run(resumed: list[int]) -> tuple[str, End]:
        house = House(vocabulary)
        add = house.ask(1, "Hello", resume=pack(INT32, resumed), stop=["hr"])
        assert ints(add.resume) == resumed
        assert add.max_new_tokens == 2048 - len(ints(add.prompt))
        house.tokens((add.rid, ids[len(resumed) :]))
        house.end(add.rid, Reason.STOP)
        said = house.said(API)
        return shown(said, 1)[1], ends(said)[0]

    whole, end = run([])
    rest, resumed_end = run(ids[:shown_before])
    assert whole.endswith(rest)
    house = House(vocabulary)
    add = house.ask(1, "Hello", stop=["hr"])
    house.tokens((add.rid, ids[:shown_before]))
    assert shown(house.said(API), 1)[1] + rest == whole
    assert resumed_end.text == end.text == whole
    assert resumed_end.generated_tokens == end.generated_tokens


@pytest.mark.parametrize(
    ("resume", "fields", "reason", "text"),
    [
        ([EOS], {}, Reason.EOS, ""),
        (ids_of("ab"), {"max_new_tokens": 2}, Reason.LENGTH, "ab"),
        (ids_of("ab"), {"stop": ["b"]}, Reason.STOP, "ab"),
    ],
)
@pytest.mark.parametrize("scheduler", [True, False])
def test_ids_that_are_already_complete_end(
    resume: list[int], fields: dict[str, Any], reason: Reason, text: str, scheduler: bool
) -> None:
    house = House()
    if not scheduler:
        house.scheduler_gone()
        house.said(API)
    house.pool.handle(API, Generate(1, "Hello", Sampling(1), resume=pack(INT32, resume), **fields))
    assert house.said(house.scheduler) == []
    (end,) = house.said(API)
    assert (end.reason, end.text, end.generated_tokens) == (reason, text, len(resume))
    assert house.pool.idle


def test_ids_behind_the_end_of_what_was_shown_do_not_count() -> None:
    house = House()
    house.pool.handle(API, Generate(1, "Hello", Sampling(1), stop=["b"], resume=pack(INT32, ids_of("abc"))))
    (end,) = house.said(API)
    assert (end.reason, end.text, end.generated_tokens) == (Reason.STOP, "ab", 2)
