"""StopStringMatcher: stop strings within tokens and across them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.tokenizer.stop_strings import StopStringMatch, StopStringMatcher

SHORT = st.text("ab", max_size=4)


def shown(stops: list[str], pieces: list[str]) -> str | None:
    """The text up to the end of the first stop string; None if there is none."""
    matcher = StopStringMatcher(stops)
    before = ""
    for piece in pieces:
        match = matcher.match_piece(piece)
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
def test_single_stop_string(pieces: list[str], expected: str | None) -> None:
    assert shown(["/test;"], pieces) == expected


def test_match_has_start_in_an_earlier_piece() -> None:
    matcher = StopStringMatcher(["abc"])
    assert matcher.match_piece("xxa") is None
    assert matcher.match_piece("bcd") == StopStringMatch(-1, 2)


def test_first_complete_stop_string_wins() -> None:
    assert StopStringMatcher(["long one", "on"]).match_piece("a long one") == StopStringMatch(3, 5)
    assert StopStringMatcher(["c", "bc", "abc"]).match_piece("zabcabc") == StopStringMatch(1, 4)


@given(SHORT.filter(bool), st.lists(SHORT, max_size=12), st.integers(0, 12))
def test_matches_before_min_new_tokens_are_skipped(stop: str, pieces: list[str], early: int) -> None:
    """A skipped match may overlap with one that counts."""
    matcher, text = StopStringMatcher([stop]), ""
    for place, piece in enumerate(pieces):
        match = matcher.match_piece(piece, enabled=place >= early)
        ends = [len(text) + end for end in range(1, len(piece) + 1) if (text + piece[:end]).endswith(stop)]
        if place >= early and ends:
            assert match is not None
            assert len(text) + match.end == ends[0]
            return
        assert match is None
        text += piece
        opened = next(n for n in range(len(stop) - 1, -1, -1) if text.endswith(stop[:n]))
        assert matcher.partial_match_length == opened


def test_empty_strings_never_match() -> None:
    assert shown(["", ""], ["a", "", "b"]) is None
    assert shown(["", "b"], ["a", "bc"]) == "ab"


def test_long_stop_string_in_single_characters() -> None:
    stop = "ab" * 5000 + "c"
    assert shown([stop], [*("ab" * 100 + stop + "rest")]) == "ab" * 100 + stop


@given(st.lists(SHORT, max_size=3), st.lists(SHORT, max_size=12))
def test_matches_a_search_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop and stop in text]
    assert shown(stops, pieces) == (text[: min(ends)] if ends else None)
