"""Hidden stop strings: nothing is shown that is taken back later, and nothing is held back without need."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizer.house import API, EOS, House, ends, ids_of
from tgi.kernel.answer import Texts
from tgi.kernel.messages import End, Reason, Stop
from tgi.kernel.pack import INT32, pack, uints
from tgi.tokenizer.stop import Curtain

Piece = tuple[str, bool]  # a token's text, and whether it is special


def visible(pieces: list[Piece], length: int) -> str:
    """The visible part of the first `length` characters."""
    text = ""
    for piece, special in pieces:
        text += "" if special else piece[: max(length, 0)]
        length -= len(piece)
    return text


def first_match(text: str, stops: list[str]) -> int | None:
    """Where the stop string begins that is complete first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        sizes = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if sizes:
            return end - max(sizes)
    return None


def open_at(text: str, stops: list[str]) -> int:
    """How much of a stop string, not all, stands at the end of the text."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


SHORT = st.text("ab<", max_size=5)
PIECES = st.lists(st.one_of(st.tuples(SHORT, st.just(False)), st.tuples(st.sampled_from(["<", "<a>"]), st.just(True))))


@given(st.lists(SHORT, max_size=3), PIECES)
def test_what_is_shown_is_never_taken_back(stops: list[str], pieces: list[Piece]) -> None:
    curtain = Curtain(stops)
    whole, seen, shown = "", "", ""
    for at, (piece, special) in enumerate(pieces):
        length = curtain.feed(piece, special)
        whole += piece
        seen += "" if special else piece
        now = seen[: len(seen) - curtain.held]
        assert now.startswith(shown)
        shown = now
        start = first_match(whole, stops)
        if start is not None:
            assert shown == seen[:length] == visible(pieces, start)
            return
        assert length is None
        assert shown == visible(pieces[: at + 1], len(whole) - open_at(whole, stops))


def test_a_long_string_that_almost_comes() -> None:
    stop = "ab" * 100_000 + "c"
    curtain = Curtain([stop, "x" * 1_000_000])
    for _ in range(100_000):
        assert curtain.feed("ab", False) is None
    assert curtain.held == 200_000
    assert curtain.feed("abd", False) is None
    assert curtain.held == 0
    assert curtain.feed("zz" + stop, False) == 200_005


# Through the pool


def parse(said: list[Any]) -> tuple[str, str, End | None]:
    """What an api shows of this: before the End, and then; and the End. Each token's text is whole."""
    seen, shown, final = "", "", None
    for message in said:
        if isinstance(message, Texts):
            assert len(message.held) in (0, 4 * len(message.texts))
            held = uints(message.held) or [0] * len(message.texts)
            for text, special, hold in zip(message.texts, message.special, held, strict=True):
                seen += "" if special else text
                shown = seen[: len(seen) - hold]
        elif isinstance(message, End):
            final = message
    return seen, shown, final


def test_the_text_ends_before_a_stop_string_that_began_in_an_earlier_token() -> None:
    house = House()
    add = house.ask(1, stop=["cde"], hide_stop=True)
    for character in "abcd":
        house.tokens((add.rid, ids_of(character)))
    first = house.said(API)
    assert parse(first)[:2] == ("abcd", "ab")
    house.tokens((add.rid, ids_of("e") + ids_of("f")))
    house.end(add.rid, Reason.STOP)
    seen, shown, end = parse([*first, *house.said(API)])
    assert (seen, shown) == ("abcde", "ab")
    assert end is not None
    assert (end.reason, end.text, end.generated_tokens) == (Reason.STOP, "ab", 5)
    assert house.said(house.scheduler) == [Stop(add.rid)]


def test_what_was_held_is_shown_in_the_end() -> None:
    house = House()
    add = house.ask(1, stop=["bcd"], hide_stop=True)
    house.tokens((add.rid, ids_of("a") + ids_of("b")))
    house.tokens((add.rid, [EOS]))
    house.end(add.rid, Reason.EOS)
    seen, shown, end = parse(house.said(API))
    assert end is not None
    assert (seen, shown, end.text, end.reason) == ("ab", "ab", "ab", Reason.EOS)


@pytest.mark.parametrize("stop", ["b", "<|user|>", "b<|user|>", "<|user|>b"])
def test_special_tokens_are_looked_at_and_not_shown(stop: str) -> None:
    house = House()
    add = house.ask(1, stop=[stop], hide_stop=True)
    house.tokens((add.rid, ids_of("a")), (add.rid, ids_of("b<|user|>b")))
    house.end(add.rid, Reason.STOP)
    _, shown, end = parse(house.said(API))
    assert end is not None
    assert shown == end.text == ("a" if stop.startswith("b") else "ab")


def test_a_stop_string_in_the_last_token_is_hidden_too() -> None:
    house = House()
    add = house.ask(1, stop=["b"], hide_stop=True, max_new_tokens=2)
    house.tokens((add.rid, ids_of("a") + ids_of("b")))
    house.end(add.rid, Reason.LENGTH)
    (end,) = ends(house.said(API))
    assert (end.reason, end.text) == (Reason.STOP, "a")


def test_a_resumed_request_holds_back_what_its_first_life_held() -> None:
    house = House()
    ids = [number for character in "abcd" for number in ids_of(character)]
    add = house.ask(1, stop=["bcde"], hide_stop=True, resume=pack(INT32, ids[:2]))
    house.tokens((add.rid, ids[2:]))
    (texts,) = house.said(API)
    assert (texts.texts, uints(texts.held)) == (["c", "d"], [2, 3])


def test_nothing_is_held_for_others() -> None:
    house = House()
    hides, shows = house.ask(1, stop=["bc"], hide_stop=True), house.ask(2, stop=["bc"])
    house.tokens((shows.rid, ids_of("b")), (hides.rid, ids_of("a")))
    (texts,) = house.said(API)
    assert texts.held == b""
    house.tokens((shows.rid, ids_of("a")), (hides.rid, ids_of("b")), (shows.rid, ids_of("b")))
    (texts,) = house.said(API)
    assert uints(texts.held) == [0, 1, 0]
