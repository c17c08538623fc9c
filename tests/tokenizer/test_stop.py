"""Stop strings across and inside tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.tokenizer.stop import Match, StopMatcher

SHORT = st.text("ab", max_size=4)


def shown(stops: list[str], pieces: list[str]) -> str | None:
    """The text up to the end of the first stop string; None if there is none."""
    matcher = StopMatcher(stops)
    before = ""
    for piece in pieces:
        match = matcher.feed(piece)
        if match is not None:
            return before + piece[: match.end]
        before += piece
    return None


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["/"], None),
        (["/", "test"], None),
        (["/test; "], "/test;"),
        (["/", "test", ";"], "/test;"),
        (["x/te", "st;y"], "x/test;"),
        (["/test/test;"], "/test/test;"),
        ([*"//test;z"], "//test;"),
        (["", "/test", "", ";"], "/test;"),
    ],
)
def test_one_stop_string(pieces: list[str], expected: str | None) -> None:
    assert shown(["/test;"], pieces) == expected


def test_the_match_says_where_the_string_began() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.feed("xxa") is None
    assert matcher.feed("bcd") == Match(-1, 2)


def test_the_string_that_is_complete_first_wins() -> None:
    assert StopMatcher(["long one", "on"]).feed("a long one") == Match(3, 5)
    assert StopMatcher(["c", "bc", "abc"]).feed("zabcabc") == Match(1, 4)


@given(SHORT.filter(bool), st.lists(SHORT, max_size=12), st.integers(0, 12))
def test_what_is_complete_too_early_is_passed_over(stop: str, pieces: list[str], early: int) -> None:
    """Also where it overlaps with one that counts."""
    matcher, text = StopMatcher([stop]), ""
    for place, piece in enumerate(pieces):
        match = matcher.feed(piece, counts=place >= early)
        ends = [len(text) + end for end in range(1, len(piece) + 1) if (text + piece[:end]).endswith(stop)]
        if place >= early and ends:
            assert match is not None
            assert len(text) + match.end == ends[0]
            return
        assert match is None
        text += piece
        opened = next(n for n in range(len(stop) - 1, -1, -1) if text.endswith(stop[:n]))
        assert matcher.open == opened


def test_empty_strings_never_match() -> None:
    assert shown(["", ""], ["a", "", "b"]) is None
    assert shown(["", "b"], ["a", "bc"]) == "ab"


def test_a_long_string_in_single_characters() -> None:
    stop = "ab" * 5000 + "c"
    assert shown([stop], [*("ab" * 100 + stop + "rest")]) == "ab" * 100 + stop


@given(st.lists(SHORT, max_size=3), st.lists(SHORT, max_size=12))
def test_same_as_searching_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop and stop in text]
    assert shown(stops, pieces) == (text[: min(ends)] if ends else None)
