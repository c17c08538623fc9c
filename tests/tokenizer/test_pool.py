"""The pool without sockets: every Generate gets one End, tokens become texts, and losses below are made good."""

from typing import Any

import pytest

from tests.tokenizer.vocabularies import byte_level, sentencepiece
from tgi.kernel.link import Gone, Peer
from tgi.kernel.messages import (
    PROTOCOL,
    Add,
    Cancel,
    End,
    Generate,
    Hello,
    Limits,
    Reason,
    Sampling,
    Status,
    Stop,
    Texts,
    Tokenize,
    Tokenized,
    Tokens,
    decode,
)
from tgi.kernel.pack import FLOAT32, INT32, UINT32, floats, ints, pack, uints
from tgi.tokenizer.pool import LONG_TEXT, Pool
from tgi.tokenizer.vocabulary import Vocabulary

LIMITS = Limits(2048, 2000, 32768, 4096, 64, 2048, 16, 512, "float32", "cpu")
READY = Status(True, True, "", 100, LIMITS, 3, 4)
TOGETHER = "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: "
API, OTHER = Peer("api", 0, b"a"), Peer("api", 1, b"b")
EOS = 2


def hello(peer: Peer) -> Hello:
    return Hello(PROTOCOL, *peer)


def ids_of(text: str, vocabulary: Vocabulary | None = None) -> list[int]:
    return list((vocabulary or byte_level()).tokenizer.encode(text, add_special_tokens=False).ids)


class House:
    """A pool between two apis and a scheduler, all played by the test. The clock ticks once per look at it."""

    def __init__(self, vocabulary: Vocabulary | None = None, scheduler: bool = True) -> None:
        self.now = 0.0
        self.pool = Pool(vocabulary or byte_level(), self.tick)
        self.lives = 0
        self.told: dict[Peer, list[Any]] = {}
        for api in (API, OTHER):
            self.pool.handle(api, hello(api))
        if scheduler:
            self.scheduler_up()
            self.pool.handle(self.scheduler, READY)
        self.pool.outgoing()

    def tick(self) -> float:
        self.now += 0.001
        return self.now

    def scheduler_up(self) -> None:
        self.lives += 1
        self.scheduler = Peer("scheduler", 0, bytes([self.lives]))
        self.pool.handle(self.scheduler, hello(self.scheduler))

    def scheduler_gone(self) -> None:
        self.pool.handle(self.scheduler, Gone())

    def take(self) -> None:
        for peer, message in self.pool.outgoing():
            self.told.setdefault(peer, []).append(message)

    def said(self, peer: Peer) -> list[Any]:
        """What this peer has been sent since the last time."""
        self.take()
        return self.told.pop(peer, [])

    def ask(self, rid: int, inputs: str = "Hello", api: Peer = API, **fields: Any) -> Add:
        """A Generate, and the one Add that comes of it."""
        self.pool.handle(api, Generate(rid, inputs, Sampling(5, temperature=0.5), **fields))
        (add,) = self.said(self.scheduler)
        assert isinstance(add, Add)
        return add

    def tokens(self, *rows: tuple[int, list[int]]) -> None:
        """A step: (rid, ids) per request."""
        ids = [number for _, row in rows for number in row]
        self.pool.handle(
            self.scheduler,
            Tokens(
                pack(UINT32, [rid for rid, _ in rows]),
                pack(UINT32, [len(row) for _, row in rows]),
                pack(INT32, ids),
                pack(FLOAT32, [-number / 4 for number in ids]),
            ),
        )

    def end(self, rid: int, reason: Reason = Reason.LENGTH, message: str = "") -> None:
        self.pool.handle(self.scheduler, End(rid, reason, message, "", 0, 0, 16, 0, 30, 70))


def shown(messages: list[Any], rid: int) -> tuple[list[int], str]:
    """The ids and the text that the Texts among these messages give to a request."""
    ids, text = [], ""
    for message in messages:
        if isinstance(message, Texts):
            at = 0
            for one, count in zip(uints(message.rids), uints(message.counts), strict=True):
                if one == rid:
                    ids += ints(message.ids)[at : at + count]
                    text += "".join(message.texts[at : at + count])
                at += count
            assert at == len(message.texts) == len(message.special) == len(ints(message.ids))
            assert floats(message.logprobs) == [-number / 4 for number in ints(message.ids)]
    return ids, text


def ends(messages: list[Any]) -> list[End]:
    return [message for message in messages if isinstance(message, End)]


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
    assert [type(message) for message in said] == [Texts, End]
    assert shown(said, 70) == ([*answer, EOS], "Größe 👍🏽!<|eos|>")
    assert [*said[0].special] == [0] * len(answer) + [1]
    assert said[1] == End(70, Reason.EOS, "", "Größe 👍🏽!", 5, len(answer) + 1, 16, 1000, 30, 70)
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


# Stop strings


def test_a_stop_string_ends_at_once_and_cuts_inside_a_token() -> None:
    house = House()
    plain = [piece for piece in byte_level().pieces if isinstance(piece, str) and "<" not in piece]
    word = max(plain, key=len)
    assert len(word) >= 4
    add = house.ask(9, stop=["nowhere", "x" + word[:2]])
    number = byte_level().pieces.index(word)
    house.tokens((add.rid, ids_of("of")))
    house.tokens((add.rid, ids_of("x")), (add.rid, [number]))
    said = house.said(API)
    assert shown(said, 9) == ([*ids_of("of"), *ids_of("x"), number], "ofx" + word[:2])
    (end,) = ends(said)
    assert (end.reason, end.text) == (Reason.STOP, "ofx" + word[:2])
    assert end.generated_tokens == len(ids_of("of")) + 2
    assert house.said(house.scheduler) == [Stop(add.rid)]
    house.tokens((add.rid, [number]))
    house.pool.handle(API, Cancel(9))
    assert (house.said(API), house.said(house.scheduler)) == ([], [])
    assert not house.pool.idle
    house.end(add.rid, Reason.STOP)
    assert house.said(API) == []
    assert house.pool.idle


def test_tokens_after_the_stop_in_the_same_row_are_not_billed() -> None:
    house = House()
    add = house.ask(9, stop=["b"])
    house.tokens((add.rid, ids_of("a") + ids_of("b") + ids_of("c")))
    said = house.said(API)
    assert shown(said, 9) == (ids_of("a") + ids_of("b"), "ab")
    assert ends(said)[0].generated_tokens == 2


def test_length_and_eos_come_before_a_stop_string() -> None:
    house = House()
    add = house.ask(1, max_new_tokens=2, stop=["b", "<|eos|>"])
    house.tokens((add.rid, ids_of("a") + ids_of("b")))
    assert shown(house.said(API), 1)[1] == "ab"
    house.tokens((add.rid, ids_of("c")))  # more than was asked for
    house.end(add.rid, Reason.LENGTH)
    (end,) = house.said(API)
    assert (end.reason, end.text) == (Reason.LENGTH, "ab")
    add = house.ask(2, stop=["<|eos|>"])
    house.tokens((add.rid, [EOS]))
    house.end(add.rid, Reason.EOS)
    assert [end.reason for end in ends(house.said(API))] == [Reason.EOS]


def test_the_prompt_is_not_searched_and_specials_are() -> None:
    house = House()
    add = house.ask(1, "stop here", stop=["stop", "<|user|>"])
    house.tokens((add.rid, ids_of("a")))
    assert ends(house.said(API)) == []
    house.tokens((add.rid, ids_of("<|user|>")))
    (end,) = ends(house.said(API))
    assert (end.reason, end.text) == (Reason.STOP, "a")


def test_ignore_eos_sends_no_stop_ids_and_goes_on() -> None:
    house = House()
    add = house.ask(1, ignore_eos=True)
    assert add.stop_ids == b""
    house.tokens((add.rid, [EOS]), (add.rid, ids_of("a")))
    assert shown(house.said(API), 1) == ([EOS, *ids_of("a")], "<|eos|>a")


def test_an_unfinished_character_is_never_shown() -> None:
    house = House()
    add = house.ask(1)
    emoji = ids_of("👍")
    assert len(emoji) > 1
    house.tokens((add.rid, ids_of("a") + emoji[:-1]))
    house.end(add.rid)
    said = house.said(API)
    assert shown(said, 1)[1] == "a"
    assert ends(said)[0].text == "a"


# Leaving


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
