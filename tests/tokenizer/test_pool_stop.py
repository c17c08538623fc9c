"""Stop strings in the pool: the text is cut, the scheduler hears at once, its End becomes the api's."""

import pytest

from tests.tokenizer.house import API, EOS, LIMITS, OTHER, READY, House, ends, ids_of, shown
from tests.tokenizer.vocabularies import byte_level
from tgi.kernel.answer import Texts
from tgi.kernel.link import Gone
from tgi.kernel.messages import Cancel, End, Generate, Reason, Sampling, Stop, decode
from tgi.kernel.pack import INT32, ints, pack
from tgi.tokenizer.encode import bad_words


def test_a_stop_string_ends_at_once_and_cuts_inside_a_token() -> None:
    house = House()
    plain = [piece for piece in byte_level().pieces if isinstance(piece, str) and "<" not in piece]
    word = max(plain, key=len)
    assert len(word) >= 4
    add = house.ask(9, stop=["nowhere", "x" + word[:2]])
    number = byte_level().pieces.index(word)
    house.tokens((add.rid, ids_of("of")))
    house.tokens((add.rid, ids_of("x")), (add.rid, [number]))
    assert house.said(house.scheduler) == [Stop(add.rid)]
    house.tokens((add.rid, [number]))
    before = house.said(API)
    assert shown(before, 9) == ([*ids_of("of"), *ids_of("x")], "ofx")
    house.end(add.rid, Reason.STOP)
    said = house.said(API)
    assert shown([*before, *said], 9) == ([*ids_of("of"), *ids_of("x"), number], "ofx" + word[:2])
    (end,) = ends(said)
    assert (end.reason, end.text) == (Reason.STOP, "ofx" + word[:2])
    assert (end.queue_us, end.cached_tokens, end.inference_us) == (30, 16, 70)
    assert end.generated_tokens == len(ids_of("of")) + 2
    assert house.pool.idle


@pytest.mark.parametrize("reason", [Reason.LENGTH, Reason.EOS, Reason.FAILED])
def test_an_end_that_crosses_the_stop_changes_nothing(reason: Reason) -> None:
    house = House()
    add = house.ask(9, stop=["b"])
    house.tokens((add.rid, ids_of("a") + ids_of("b")))
    house.end(add.rid, reason, "worker burnt" if reason is Reason.FAILED else "")
    (end,) = ends(house.said(API))
    assert (end.reason, end.message, end.text) == (Reason.STOP, "", "ab")


def test_cancelled_or_abandoned_between_stop_and_end() -> None:
    house = House()
    mine, other = house.ask(9, stop=["b"]), house.ask(9, stop=["b"], api=OTHER)
    house.tokens((mine.rid, ids_of("b")), (other.rid, ids_of("b")))
    house.pool.handle(API, Cancel(9))
    house.pool.handle(OTHER, Gone())
    house.end(mine.rid, Reason.STOP)
    house.end(other.rid, Reason.STOP)
    assert len(ends(house.said(API))) == 1
    assert house.pool.idle


def test_the_last_tokens_go_with_the_end_even_if_the_scheduler_dies_between() -> None:
    house = House()
    stopped, full = house.ask(1, stop=["b"]), house.ask(2, max_new_tokens=1)
    house.tokens((stopped.rid, ids_of("b")), (full.rid, ids_of("c")))
    assert house.said(API) == []
    house.scheduler_gone()
    said = house.said(API)
    assert [type(message) for message in said[:4]] == [Texts, End, Texts, End]
    assert (shown(said, 1)[1], shown(said, 2)[1]) == ("b", "c")


def test_tokens_after_the_stop_in_the_same_row_are_not_billed() -> None:
    house = House()
    add = house.ask(9, stop=["b"])
    house.tokens((add.rid, ids_of("a") + ids_of("b") + ids_of("c")))
    house.end(add.rid, Reason.STOP)
    said = house.said(API)
    assert shown(said, 9) == (ids_of("a") + ids_of("b"), "ab")
    assert ends(said)[0].generated_tokens == 2


def test_length_and_eos_come_before_a_stop_string() -> None:
    house = House()
    add = house.ask(1, max_new_tokens=2, stop=["b", "<|eos|>"])
    house.tokens((add.rid, ids_of("a") + ids_of("b")))
    house.tokens((add.rid, ids_of("c")))  # more than was asked for
    house.end(add.rid, Reason.LENGTH)
    said = house.said(API)
    assert shown(said, 1)[1] == "ab"
    (end,) = ends(said)
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
    house.end(add.rid, Reason.STOP)
    (end,) = ends(house.said(API))
    assert (end.reason, end.text) == (Reason.STOP, "a")


def test_ignore_eos_sends_no_stop_ids_and_goes_on() -> None:
    house = House()
    add = house.ask(1, ignore_eos=True)
    assert add.stop_ids == b""
    house.tokens((add.rid, [EOS]), (add.rid, ids_of("a")))
    assert shown(house.said(API), 1) == ([EOS, *ids_of("a")], "<|eos|>a")


def test_what_ends_a_text_is_sent_where_a_least_length_asks_for_it() -> None:
    """And nothing that the model cannot draw anyway; no ids where they do not end the request."""
    house = House()
    assert [decode(house.ask(rid, least=rid).sampling).end_ids for rid in (0, 1)] == [b"", pack(INT32, [EOS])]
    assert decode(house.ask(3, least=5, ignore_eos=True).sampling).end_ids == b""
    narrow = House()
    narrow.pool.handle(narrow.scheduler, READY._replace(limits=LIMITS._replace(vocab_size=EOS)))
    assert decode(narrow.ask(1, least=1).sampling).end_ids == b""


@pytest.mark.parametrize("hide_stop", [False, True])
def test_a_stop_string_counts_from_the_least_length_on(hide_stop: bool) -> None:
    """One that began before is found, one that was complete is not; what is hidden is held back in time."""
    a, b, c = ids_of("a") + ids_of("b") + ids_of("c")
    house = House()
    add = house.ask(1, stop=["ab"], least=4, hide_stop=hide_stop)
    house.tokens((add.rid, [a, b]), (add.rid, [a, b, c]))
    house.end(add.rid, Reason.STOP)
    (end,) = ends(house.said(API))
    assert (end.reason, end.generated_tokens, end.text) == (Reason.STOP, 4, "ab" if hide_stop else "abab")
    house.said(house.scheduler)
    again = house.ask(2, stop=["ab"], least=4, hide_stop=hide_stop, resume=pack(INT32, [a, b, a]))
    house.tokens((again.rid, [b]))
    house.end(again.rid, Reason.STOP)
    (end,) = ends(house.said(API))
    assert (end.reason, end.generated_tokens, end.text) == (Reason.STOP, 4, "ab" if hide_stop else "abab")


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


A, B, C = ids_of("a") + ids_of("b") + ids_of("c")


def test_stop_token_ids_end_the_text_before_their_own() -> None:
    """At the scheduler, too, which is told them; in logprobs and usage the token counts."""
    house = House()
    add = house.ask(1, hide_stop=True, stop_token_ids=pack(INT32, [B, 400]))
    assert ints(add.stop_ids) == sorted({EOS, B, 400})
    house.tokens((add.rid, [A, B, C]))
    house.end(add.rid, Reason.EOS)
    said = house.said(API)
    (columns,) = [message for message in said if isinstance(message, Texts)]
    assert (columns.texts, columns.special) == (["a", "b"], b"\x00\x01")
    (end,) = ends(said)
    assert (end.reason, end.text, end.generated_tokens) == (Reason.EOS, "a", 2)


def test_stop_token_ids_hold_with_ignore_eos_and_behind_a_least_length() -> None:
    house = House()
    add = house.ask(1, ignore_eos=True, hide_stop=True, stop_token_ids=pack(INT32, [B]))
    assert ints(add.stop_ids) == [B]
    house.tokens((add.rid, [EOS, A, B]))
    house.end(add.rid, Reason.EOS)
    (end,) = ends(house.said(API))
    assert (end.reason, end.text, end.generated_tokens) == (Reason.EOS, "a", 3)
    house.said(house.scheduler)
    sampling = decode(house.ask(2, least=4, stop_token_ids=pack(INT32, [B])).sampling)
    assert ints(sampling.end_ids) == sorted([EOS, B])
    sampling = decode(house.ask(3, least=4, ignore_eos=True, stop_token_ids=pack(INT32, [B])).sampling)
    assert ints(sampling.end_ids) == [B]


def test_a_stop_token_as_the_last_allowed_one_is_a_stop() -> None:
    """An EOS there is still a length, as in TGI."""
    house = House()
    for number, reason in ((B, Reason.EOS), (EOS, Reason.LENGTH)):
        add = house.ask(number, max_new_tokens=2, hide_stop=True, stop_token_ids=pack(INT32, [B]))
        house.tokens((add.rid, [A, number]))
        house.end(add.rid, Reason.LENGTH)
        (end,) = ends(house.said(API))
        assert (end.reason, end.text) == (reason, "a")
        house.said(house.scheduler)


@pytest.mark.parametrize(("resume", "left"), [([A], [B]), ([A, B], [])])
def test_stop_token_ids_count_in_what_is_resumed(resume: list[int], left: list[int]) -> None:
    house = House()
    asked = Generate(
        1, "Hello", Sampling(5), hide_stop=True, resume=pack(INT32, resume), stop_token_ids=pack(INT32, [B])
    )
    house.pool.handle(API, asked)
    if left:
        (add,) = house.said(house.scheduler)
        house.tokens((add.rid, left))
        house.end(add.rid, Reason.EOS)
    (end,) = ends(house.said(API))
    assert (end.reason, end.text, end.generated_tokens) == (Reason.EOS, "a", 2)


def test_what_a_stop_string_held_back_is_shown_when_a_stop_token_comes() -> None:
    """Unless the token completes the string."""
    house = House()
    for stop, text in (("bcx", "ab"), ("bc", "a")):
        add = house.ask(1, stop=[stop], hide_stop=True, stop_token_ids=pack(INT32, [C]))
        house.tokens((add.rid, [A, B]))
        house.tokens((add.rid, [C]))
        house.end(add.rid, Reason.EOS)
        assert [end.text for end in ends(house.said(API))] == [text]
        house.said(house.scheduler)


def test_included_stops() -> None:
    """`include_stop_str_in_output`: as on native routes."""
    house = House()
    add = house.ask(1, stop=["xb"], stop_token_ids=pack(INT32, [B]))
    house.tokens((add.rid, [A, B]))
    house.end(add.rid, Reason.EOS)
    (end,) = ends(house.said(API))
    assert (end.reason, end.text) == (Reason.EOS, "ab")


@pytest.mark.parametrize(("hide_stop", "text"), [(True, "a<|user|>b"), (False, "a<|user|>b<|eos|>")])
def test_special_tokens_are_shown_on_request(hide_stop: bool, text: str) -> None:
    """But the one that ends the text only with the other stops."""
    house = House()
    add = house.ask(1, hide_stop=hide_stop, skip_special_tokens=False)
    (user,) = ids_of("<|user|>")
    house.tokens((add.rid, [A, user, B, EOS]))
    house.end(add.rid, Reason.EOS)
    said = house.said(API)
    (columns,) = [message for message in said if isinstance(message, Texts)]
    assert [*columns.special] == [0, 0, 0, int(hide_stop)]
    assert [end.text for end in ends(said)] == [text]


def test_bad_words_go_down_as_ids_and_nothing_that_cannot_be_drawn() -> None:
    house = House()
    sampling = decode(house.ask(1, bad_words=["river", "a"]).sampling)
    sequences = bad_words(byte_level(), ["river", "a"])
    assert ints(sampling.bad_word_lengths) == [len(word) for word in sequences]
    assert ints(sampling.bad_word_ids) == [number for word in sequences for number in word]
    assert decode(house.ask(2).sampling).bad_word_ids == b""
    house.pool.handle(house.scheduler, READY._replace(limits=LIMITS._replace(vocab_size=A)))
    assert decode(house.ask(3, bad_words=["a"]).sampling).bad_word_ids == b""


def test_many_bad_words_are_encoded_in_a_thread() -> None:
    house = House()
    for words, jobs in (([], 0), (["word"] * 20, 0), (["word"] * 256, 1), (["x" * 4096], 1)):
        house.pool.handle(API, Generate(1, "Hello", Sampling(5), bad_words=words))
        assert len(house.pool.jobs) == jobs
        if jobs:
            job = house.pool.jobs.popleft()
            house.pool.finished(job.key, job.result())
        (add,) = house.said(house.scheduler)
        assert bool(decode(add.sampling).bad_word_ids) == bool(words)
