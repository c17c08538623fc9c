"""The pool without sockets: texts and chats become prompts, tokens become texts, and every Generate gets one End."""

import pytest

from tests.tokenizer.house import API, EOS, LIMITS, OTHER, READY, House, ends, hello, ids_of, shown
from tgi.kernel.answer import Texts
from tgi.kernel.link import Gone, Peer
from tgi.kernel.messages import Cancel, End, Generate, Reason, Sampling, Tokenize, Tokenized, decode
from tgi.kernel.pack import ints
from tgi.kernel.presence import Status
from tgi.tokenizer.jobs import LONG_TEXT

TOGETHER = "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: "


def test_a_request_from_text_to_text() -> None:
    house = House()
    add = house.ask(70, "Hello", trace="t")
    assert ints(add.prompt) == ids_of("Hello")
    assert ints(add.stop_ids) == [EOS]
    assert (add.max_new_tokens, add.resume, add.trace) == (2048 - len(ids_of("Hello")), b"", "t")
    assert decode(add.sampling) == Sampling(5, temperature=0.5)
    answer = ids_of("Größe 👍🏽!")
    for number in answer:
        house.tokens((add.rid, [number]))
    house.tokens((add.rid, [EOS]))
    house.end(add.rid, Reason.EOS)
    said = house.said(API)
    assert [type(message) for message in said] == [Texts, Texts, End]  # the last token with its End
    assert shown(said, 70) == ([*answer, EOS], "Größe 👍🏽!<|eos|>")
    assert [*said[0].special, *said[1].special] == [0] * len(answer) + [1]
    assert said[2] == End(70, Reason.EOS, "", "Größe 👍🏽!", 5, len(answer) + 1, 16, 1000, 30, 70)
    assert house.pool.idle


def test_several_apis_and_requests_in_one_step() -> None:
    house = House()
    one, two = house.ask(1), house.ask(1, api=OTHER)
    three = house.ask(2)
    assert len({one.rid, two.rid, three.rid}) == 3
    house.tokens((one.rid, ids_of("a")), (two.rid, ids_of("b")), (three.rid, ids_of("c d")))
    house.end(three.rid)
    at_api, at_other = house.said(API), house.said(OTHER)
    assert [type(message) for message in at_api] == [Texts, End]
    assert (shown(at_api, 1)[1], shown(at_api, 2)[1], shown(at_other, 1)[1]) == ("a", "c d", "b")
    assert [type(message) for message in at_other] == [Texts]


@pytest.mark.parametrize(
    ("n_in", "asked", "expected"),
    [
        (10, 5, 5),
        (10, None, 2038),
        (10, 5000, 2038),
        (1024, 1024, 1024),
        (2000, None, 48),
        (1025, 1024, TOGETHER + "1025 `inputs` tokens and 1024 `max_new_tokens`"),
        (1025, 9999, TOGETHER + "1025 `inputs` tokens and 1024 `max_new_tokens`"),
        (2001, 100, TOGETHER + "2001 `inputs` tokens and 100 `max_new_tokens`"),
        (2001, 10, "`inputs` must have less than 2000 tokens. Given: 2001"),
        (2048, None, "`inputs` must have less than 2000 tokens. Given: 2048"),
        (2049, None, TOGETHER + "2049 `inputs` tokens and 0 `max_new_tokens`"),
    ],
)  # fmt: skip
def test_limits(n_in: int, asked: int | None, expected: int | str) -> None:
    house = House()
    text = "\n" * n_in
    if len(ids_of(text)) != n_in:
        text = "<|pad|>" * n_in
    house.pool.handle(API, Generate(1, text, Sampling(1), asked))
    adds, said = house.said(house.scheduler), house.said(API)
    if isinstance(expected, int):
        assert [add.max_new_tokens for add in adds] == [expected]
        assert said == []
    else:
        assert adds == []
        assert [(end.rid, end.reason, end.message) for end in said] == [(1, Reason.INVALID, expected)]
        assert house.pool.idle


def test_truncate_counts_before_the_limits() -> None:
    add = House().ask(1, "<|pad|>" * 1000 + "x", truncate=3)
    assert ints(add.prompt) == [0, 0, *ids_of("x")]


def test_a_prompt_without_tokens_or_that_is_no_text_is_refused() -> None:
    house = House()
    for inputs, text in (("", "cannot be empty"), ("\ud800", "tokenizer error")):
        house.pool.handle(API, Generate(1, inputs, Sampling(1)))
        (end,) = house.said(API)
        assert end.reason == Reason.INVALID
        assert text in end.message


def test_requests_wait_for_the_limits_and_for_the_scheduler() -> None:
    house = House(scheduler=False)
    house.pool.handle(API, Generate(1, "a", Sampling(1)))
    house.pool.handle(API, Generate(2, "b", Sampling(1)))
    house.pool.handle(API, Cancel(2))
    assert [(end.rid, end.reason) for end in house.said(API)] == [(2, Reason.CANCELLED)]
    house.scheduler_up()
    assert house.said(house.scheduler) == []
    house.pool.handle(house.scheduler, Status(False, True, "loading weights", 40))
    assert house.said(house.scheduler) == []
    house.pool.handle(house.scheduler, READY)
    (add,) = house.said(house.scheduler)
    assert ints(add.prompt) == ids_of("a")


def test_status_reaches_every_api_and_says_when_the_scheduler_is_gone() -> None:
    house = House(scheduler=False)
    house.scheduler_up()
    house.pool.handle(house.scheduler, READY)
    assert house.said(API) == house.said(OTHER) == [READY]
    house.scheduler_gone()
    (status,) = house.said(API)
    assert (status.ready, status.stage, status.limits) == (False, "waiting for the scheduler", LIMITS)
    late = Peer("api", 2, b"c")
    house.pool.handle(late, hello(late))
    assert house.said(late) == [status]


# Encoding


def test_long_texts_are_jobs_and_others_go_on_meanwhile() -> None:
    house = House()
    long = "a b " * LONG_TEXT
    house.pool.handle(API, Generate(1, long, Sampling(1), truncate=9))
    house.pool.handle(API, Tokenize(2, long))
    house.pool.handle(API, Generate(3, long, Sampling(1)))
    house.pool.handle(API, Generate(4, long, Sampling(1)))
    house.pool.handle(API, Cancel(3))
    house.pool.handle(OTHER, Generate(1, long, Sampling(1)))
    house.pool.handle(OTHER, Gone())
    assert house.ask(5)
    assert [end.rid for end in ends(house.said(API))] == [3]
    results = [(job.key, job.result()) for job in house.pool.jobs]
    house.pool.jobs.clear()
    for key, result in results:
        house.pool.finished(key, result)
    (add,) = house.said(house.scheduler)
    assert len(ints(add.prompt)) == 9
    tokenized, refused = house.said(API)
    assert isinstance(tokenized, Tokenized)
    assert ints(tokenized.stops)[-1] == len(long)
    assert (refused.rid, refused.reason) == (4, Reason.INVALID)


def test_tokenize() -> None:
    house = House()
    house.pool.handle(API, Tokenize(8, "é<|eos|>"))
    house.pool.handle(API, Tokenize(9, "\ud800"))
    good, bad = house.said(API)
    assert (good.rid, ints(good.ids)[-1], ints(good.stops)[-1], good.special[-1]) == (8, EOS, 9, 1)
    assert bad.error.startswith("tokenizer error")


def test_messages_that_do_not_belong_here_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    house.pool.handle(API, READY)
    house.pool.handle(house.scheduler, Generate(1, "x", Sampling(1)))
    house.end(99)
    house.tokens((99, [1]))
    assert house.said(API) == house.said(house.scheduler) == []
    assert len(caplog.records) == 3
