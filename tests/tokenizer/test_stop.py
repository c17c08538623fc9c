"""Stop strings across and inside tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.tokenizer.stop import Match, StopMatcher


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


def test_empty_strings_never_match() -> None:
    assert shown(["", ""], ["a", "", "b"]) is None
    assert shown(["", "b"], ["a", "bc"]) == "ab"


def test_a_long_string_in_single_characters() -> None:
    stop = "ab" * 5000 + "c"
    assert shown([stop], [*("ab" * 100 + stop + "rest")]) == "ab" * 100 + stop


SHORT = st.text("ab", max_size=4)


@given(st.lists(SHORT, max_size=3), st.lists(SHORT, max_size=12))
def test_same_as_searching_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop and stop in text]
    assert shown(stops, pieces) == (text[: min(ends)] if ends else None)
