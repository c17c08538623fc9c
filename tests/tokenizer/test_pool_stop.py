"""Stop strings in the pool: the text is cut, the scheduler hears at once, its End becomes the api's."""

import pytest

from tests.tokenizer.house import API, EOS, LIMITS, OTHER, READY, House, ends, ids_of, shown
from tests.tokenizer.vocabularies import byte_level
from tgi.kernel.answer import Texts
from tgi.kernel.link import Gone
from tgi.kernel.messages import Cancel, End, Reason, Stop, decode
from tgi.kernel.pack import INT32, pack


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
