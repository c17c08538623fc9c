"""Repetition in grammars: counted with its nesting, and bounded before anything is compiled."""

import json
from typing import Any

import pytest

from tests.tokenizer.vocabularies import byte_level
from tgi.tokenizer.structured_output.grammar import GrammarError, GrammarValidator, checked_schema, ebnf_to_lark
from tgi.tokenizer.structured_output.repetition import (
    MAX_REPETITION,
    gbnf_repetition,
    lark_repetition,
    regex_repetition,
    repetition_error,
)


@pytest.mark.parametrize(
    ("regex", "repetition"),
    [
        ("", 1),
        ("abc*(d|e+)?", 1),
        ("a{7}", 7),
        ("a{2,7}b{3,}", 7),
        ("a{0}", 1),
        ("a{ 2 , 7 }", 7),
        ("(a{5}b){6}", 30),
        ("(?:a{5}|(?P<x>b{2}c){4})", 8),
        ("((a{50}){50}){50}", 125_000),
        ("(a){5}{6}", 30),
        (r"\(a{5}\){6}", 6),
        (r"\{5}{6}", 6),
        (r"\p{L}{5}\x{41}{9}", 9),
        (r"[(]{5}[^]({]{4}[\]{9]{3}", 5),
        ("{5}", 5),
        ("a{,5}", 1),
        ("a{b}", 1),
        (")){4}(", 4),
        ("a{1000000001}", 1_000_000_001),
        ("(ab){1000000}", 1_000_000),
        ("a{" + "9" * 10_000 + "}", 10**15),
    ],
)
def test_repetition_in_a_regex(regex: str, repetition: int) -> None:
    assert regex_repetition(regex) == repetition


@pytest.mark.parametrize(
    ("lark", "repetition"),
    [
        ('start: "a{9}" b{4}\nb: /c{5}/', 5),
        ('start: ("a"{3} | /b{4}/{5}){6}  # x{9999}', 120),
        ('start: ["a"{3} b ~ 4..7]\n', 7),
        ('start: b ~ 2000000\nb: "x"', 2_000_000),
    ],
)
def test_repetition_in_lark(lark: str, repetition: int) -> None:
    assert lark_repetition(lark) == repetition


def test_repetition_in_gbnf() -> None:
    assert gbnf_repetition('root ::= ([a-z(]{20} "x{9}" | item-1{2}){30,40} # {7777}\nitem-1 ::= "a"') == 800


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a{1000000001}"}, "grammar is not valid: a part is repeated 1000000001 times"),
    ({"regex": "((a{50}){50}){50}"}, "grammar is not valid: a part is repeated 125000 times"),
    ({"grammar": 'start: ("ab"){1000000}'}, "grammar is not valid: a part is repeated 1000000 times"),
    ({"grammar": 'root ::= "ab"{1000000}'}, "grammar is not valid: a part is repeated 1000000 times"),
    (
        {"schema": {"properties": {"a": {"type": "string", "pattern": "a{1000000001}"}}}},
        "cannot compile regex from schema: `pattern` cannot be enforced: a part is repeated 1000000001 times",
    ),
    ({"schema": {"patternProperties": {"(ab){1000000}": {}}}}, "`patternProperties` cannot be enforced: a part is"),
    ({"schema": {"items": {}, "minItems": 100_001}}, "`minItems` cannot be enforced beyond 100000. Given: 100001"),
    ({"schema": {"type": "string", "minLength": 10**9}}, "`minLength` cannot be enforced beyond 100000"),
    ({"schema": {"type": "integer", "multipleOf": 99_999_989}}, "`multipleOf` cannot be enforced beyond 65535"),
]


@pytest.mark.parametrize(("grammar", "message"), REJECTED)
def test_too_much_repetition_is_rejected_with_the_limit_and_the_count(grammar: dict[str, Any], message: str) -> None:
    validator = GrammarValidator(byte_level())
    with pytest.raises(GrammarError) as error:
        validator._convert(json.dumps(grammar).encode())
    assert message in str(error.value)
    assert validator._token_table is None  # nothing was compiled


def test_largest_repetition_is_accepted() -> None:
    assert repetition_error(MAX_REPETITION) == ""
    assert "at most 100000" in repetition_error(MAX_REPETITION + 1)
    assert "an unlimited number of" in repetition_error(10**15)
    assert ebnf_to_lark(f'start: "a"{{{MAX_REPETITION}}}', str)


def test_upper_bounds_that_no_text_reaches_are_lowered() -> None:
    schema = {"type": "array", "maxItems": 2**31 - 1, "items": {"type": "string", "maxLength": 10_000}}
    assert checked_schema(schema).schema == schema | {"maxItems": MAX_REPETITION}
