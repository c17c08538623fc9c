"""StopStringFilter: shown text is never retracted, and no more is held back than necessary."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizer.harness import API, EOS, PoolHarness, end_messages, ids_of
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_uint32
from tgi.microkernel.messages.protocol import End, FinishReason, Stop, Texts
from tgi.tokenizer.stop_strings import StopStringFilter

Piece = tuple[str, bool]  # a token's text, and whether it is special


def visible(pieces: list[Piece], length: int) -> str:
    """The visible part of the first `length` characters."""
    text = ""
    for piece, special in pieces:
        text += "" if special else piece[: max(length, 0)]
        length -= len(piece)
    return text


def first_match(text: str, stops: list[str]) -> int | None:
    """Start of the stop string that is complete first; of those with equal end, of the longest."""
    for end in range(1, len(text) + 1):
        sizes = [len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if sizes:
            return end - max(sizes)
    return None


def open_at(text: str, stops: list[str]) -> int:
    """Length of the longest proper prefix of a stop string at the end of the text."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


SHORT = st.text("ab<", max_size=5)
PIECES = st.lists(st.one_of(st.tuples(SHORT, st.just(False)), st.tuples(st.sampled_from(["<", "<a>"]), st.just(True))))


@given(st.lists(SHORT, max_size=3), PIECES)
def test_shown_text_is_never_retracted(stops: list[str], pieces: list[Piece]) -> None:
    stop_filter = StopStringFilter(stops)
    whole, seen, shown = "", "", ""
    for at, (piece, special) in enumerate(pieces):
        length = stop_filter.filter_piece(piece, special)
        whole += piece
        seen += "" if special else piece
        now = seen[: len(seen) - stop_filter.held_characters]
        assert now.startswith(shown)
        shown = now
        start = first_match(whole, stops)
        if start is not None:
            assert shown == seen[:length] == visible(pieces, start)
            return
        assert length is None
        assert shown == visible(pieces[: at + 1], len(whole) - open_at(whole, stops))


def test_long_partial_match() -> None:
    stop = "ab" * 100_000 + "c"
    stop_filter = StopStringFilter([stop, "x" * 1_000_000])
    for _ in range(100_000):
        assert stop_filter.filter_piece("ab", False) is None
    assert stop_filter.held_characters == 200_000
    assert stop_filter.filter_piece("abd", False) is None
    assert stop_filter.held_characters == 0
    assert stop_filter.filter_piece("zz" + stop, False) == 200_005


# Through the pool


def parse(received: list[Any]) -> tuple[str, str, End | None]:
    """The visible text, its part that may be shown, and the End."""
    seen, shown, final = "", "", None
    for message in received:
        if isinstance(message, Texts):
            assert len(message.held_chars) in (0, 4 * len(message.texts))
            held = unpack_uint32(message.held_chars) or [0] * len(message.texts)
            for text, special, hold in zip(message.texts, message.special, held, strict=True):
                seen += "" if special else text
                shown = seen[: len(seen) - hold]
        elif isinstance(message, End):
            final = message
    return seen, shown, final


def test_hidden_stop_string_across_tokens() -> None:
    harness = PoolHarness()
    add = harness.submit(1, stop_strings=["cde"], hide_stop=True)
    for character in "abcd":
        harness.send_tokens((add.rid, ids_of(character)))
    first = harness.received_by(API)
    assert parse(first)[:2] == ("abcd", "ab")
    harness.send_tokens((add.rid, ids_of("e") + ids_of("f")))
    harness.send_end(add.rid, FinishReason.STOP)
    seen, shown, end = parse([*first, *harness.received_by(API)])
    assert (seen, shown) == ("abcde", "ab")
    assert end is not None
    assert (end.reason, end.text, end.generated_tokens) == (FinishReason.STOP, "ab", 5)
    assert harness.received_by(harness.scheduler) == [Stop(add.rid)]


def test_held_text_is_released_at_the_end() -> None:
    harness = PoolHarness()
    add = harness.submit(1, stop_strings=["bcd"], hide_stop=True)
    harness.send_tokens((add.rid, ids_of("a") + ids_of("b")))
    harness.send_tokens((add.rid, [EOS]))
    harness.send_end(add.rid, FinishReason.EOS)
    seen, shown, end = parse(harness.received_by(API))
    assert end is not None
    assert (seen, shown, end.text, end.reason) == ("ab", "ab", "ab", FinishReason.EOS)


@pytest.mark.parametrize("stop", ["b", "<|user|>", "b<|user|>", "<|user|>b"])
def test_stop_strings_match_hidden_special_tokens(stop: str) -> None:
    harness = PoolHarness()
    add = harness.submit(1, stop_strings=[stop], hide_stop=True)
    harness.send_tokens((add.rid, ids_of("a")), (add.rid, ids_of("b<|user|>b")))
    harness.send_end(add.rid, FinishReason.STOP)
    _, shown, end = parse(harness.received_by(API))
    assert end is not None
    assert shown == end.text == ("a" if stop.startswith("b") else "ab")


def test_stop_string_in_the_last_token_is_hidden() -> None:
    harness = PoolHarness()
    add = harness.submit(1, stop_strings=["b"], hide_stop=True, max_new_tokens=2)
    harness.send_tokens((add.rid, ids_of("a") + ids_of("b")))
    harness.send_end(add.rid, FinishReason.LENGTH)
    (end,) = end_messages(harness.received_by(API))
    assert (end.reason, end.text) == (FinishReason.STOP, "a")


def test_resumed_request_holds_the_same_characters() -> None:
    harness = PoolHarness()
    ids = [number for character in "abcd" for number in ids_of(character)]
    add = harness.submit(1, stop_strings=["bcde"], hide_stop=True, resume_ids=pack_column(INT32, ids[:2]))
    harness.send_tokens((add.rid, ids[2:]))
    (texts,) = harness.received_by(API)
    assert (texts.texts, unpack_uint32(texts.held_chars)) == (["c", "d"], [2, 3])


def test_other_requests_hold_nothing() -> None:
    harness = PoolHarness()
    hides, shows = harness.submit(1, stop_strings=["bc"], hide_stop=True), harness.submit(2, stop_strings=["bc"])
    harness.send_tokens((shows.rid, ids_of("b")), (hides.rid, ids_of("a")))
    (texts,) = harness.received_by(API)
    assert texts.held_chars == b""
    harness.send_tokens((shows.rid, ids_of("a")), (hides.rid, ids_of("b")), (shows.rid, ids_of("b")))
    (texts,) = harness.received_by(API)
    assert unpack_uint32(texts.held_chars) == [0, 1, 0]
