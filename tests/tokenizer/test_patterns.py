"""Patterns and formats of strings: the texts of a grammar are exactly those whose parsed string matches."""

import json
import re
from datetime import date
from ipaddress import IPv6Address
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.test_grammar import BYTES
from tgi.hub.llguidance_tables import new_matcher
from tgi.tokenizer.structured_output.grammar import checked_schema, schema_grammars
from tgi.tokenizer.structured_output.patterns import FORMAT_PATTERNS, json_safe_pattern

CHARACTERS = ['"', "\\", "/", "a", "b", "1", " ", "\n", "\t", "\x02", "\x0b", "-", "é", "😀", "]", "x"]
# What a class may consist of, and what else matches one character. `\s` and `\S` of `re` have four characters more.
MEMBERS = ["a-b", '"', r"\\", r"\"", "/", r"\w", r"\d", r"\W", r"\n", r"\x02-\x1f", r"\x00-\x1f", r"\x01", " -~", r"\]"]
CLASSES = st.builds(
    lambda negated, members: f"[{negated}{''.join(members)}]",
    st.sampled_from(["", "^"]),
    st.lists(st.sampled_from(MEMBERS), min_size=1, max_size=3),
)
ATOMS = CLASSES | st.sampled_from([".", r"\w", r"\W", r"\D", "a", '"', r"\\", r"\x01", r"\n", "(?:a|b)"])
PIECES = st.builds(lambda atom, count: atom + count, ATOMS, st.sampled_from(["", "", "*", "{1,2}", "?"]))
PATTERNS = st.recursive(
    st.lists(PIECES, min_size=1, max_size=3).map("".join),
    lambda inner: st.builds("(?:{}|{})".format, inner, inner),
    max_leaves=3,
)


def string_matcher(schema: dict[str, Any]) -> Any:
    body = schema_grammars(checked_schema({"type": "string", **schema}).schema)[0]
    return new_matcher(BYTES, json.dumps({"grammars": [body]}))


def admits(matcher: Any, text: str) -> bool:
    ids = [byte + 1 for byte in json.dumps(text, ensure_ascii=False).encode()]
    walk = matcher.deep_copy()
    return walk.try_consume_tokens(ids) == len(ids) and bool(walk.is_accepting())


@settings(max_examples=100)
@given(PATTERNS, st.lists(st.lists(st.sampled_from(CHARACTERS), max_size=4).map("".join), min_size=8, max_size=8))
def test_patterns_admit_what_re_matches(pattern: str, texts: list[str]) -> None:
    matcher = string_matcher({"pattern": f"^(?:{pattern})$"})
    if matcher.is_error():
        assert "Unsatisfiable" in matcher.get_error()
        return
    for text in [*texts, '"', "\\", 'a"', "a\\"]:
        assert admits(matcher, text) == (re.fullmatch(pattern, text, re.ASCII) is not None), (pattern, text)


@pytest.mark.parametrize(
    "regex",
    ['[^"]', r"\P{Po}", r'[^<>:"/\\|?*]', r"[[^\"]--[a]]", "[^[:punct:]]", r'[^"\x01]|[\x01]', r'[^"\x01]|\x01'],
)
def test_classes_without_the_quote(regex: str) -> None:
    pattern = f"^(?:{regex})$"
    matcher = string_matcher({"pattern": pattern})
    assert not admits(matcher, '"')
    names = checked_schema({"patternProperties": {pattern: {}}}).schema["patternProperties"]
    assert [*names] == [json_safe_pattern(pattern)] != [pattern]


DATES = ["2024-02-29", "2000-02-29", "0001-01-01", "1990-12-31", "2023-04-30"]
NO_DATES = ["2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "0000-01-01", "2024-13-01", "2024-00-10"]
TIMES = ["00:00:00Z", "23:59:59.5+01:00", "12:00:00-11:30"]
NO_TIMES = ["24:00:00Z", "23:59:60Z", "12:00:00", "12:00:00+24:00", "12:00:00." + "1" * 10 + "Z"]


@pytest.mark.parametrize("pattern", [{}, {"pattern": "[0-9]$|Z$|0$"}])
def test_dates_and_times_exist(pattern: dict[str, str]) -> None:
    days, times, both = (string_matcher({"format": name, **pattern}) for name in ("date", "time", "date-time"))
    draw = Random(1)
    for _ in range(200):
        year, month, day = draw.randrange(1, 9999), draw.randrange(1, 13), draw.randrange(1, 32)
        text = f"{year:04}-{month:02}-{day:02}"
        assert admits(days, text) == (re.fullmatch(FORMAT_PATTERNS["date"], text) is not None) == exists(text)
    assert all(admits(days, text) and admits(both, f"{text}T12:00:00Z") for text in DATES)
    assert not any(admits(days, text) or admits(both, f"{text}T12:00:00Z") for text in NO_DATES)
    assert all(admits(times, text) and admits(both, f"2024-02-29T{text}") for text in TIMES)
    assert not any(admits(times, text) or admits(both, f"2024-02-29T{text}") for text in NO_TIMES)


GROUPS = st.lists(st.sampled_from(["", "0", "ffff", "1A", "12345", "1.2.3.4", "255.0.0.256"]), min_size=1, max_size=9)


@settings(max_examples=100)
@given(GROUPS)
def test_ipv6_addresses_are_those_of_ipaddress(groups: list[str]) -> None:
    matcher = string_matcher({"format": "ipv6"})
    for text in (":".join(groups), "::" + ":".join(groups), "1:2:3:4:5:6:" + ":".join(groups)):
        try:
            valid = bool(IPv6Address(text))
        except ValueError:
            valid = False
        assert admits(matcher, text) == valid, text


def exists(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False
