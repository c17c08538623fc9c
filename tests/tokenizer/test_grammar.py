"""Accepted grammars and the texts they match; rejected grammars and their errors."""

import json
import re
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.schemas import validate
from tests.tokenizer.harness import API, PoolHarness, end_messages
from tests.tokenizer.vocabularies import KINDS, byte_level
from tgi.hub.llguidance_tables import new_matcher, piece_table, token_table
from tgi.hub.model_config import read_model_config
from tgi.hub.tokenizer_files import read_tokenizer
from tgi.microkernel.messages.protocol import FinishReason, Generate, decode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.encoding_jobs import ExecutorName
from tgi.tokenizer.structured_output.grammar import (
    MAX_CACHED_GRAMMARS,
    MAX_GRAMMAR_BYTES,
    GrammarError,
    GrammarValidator,
    _next_set_bit,
    checked_schema,
)
from tgi.tokenizer.structured_output.json_schema import KEYWORD_TYPES, UNENFORCED_KEYWORDS
from tgi.tokenizer.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

NOT_VALID, NOT_ENFORCED = "grammar is not valid: ", "cannot compile regex from schema: "
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
ONE_OF = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": {"Cat": CAT, "Dog": DOG}}


@pytest.fixture(scope="module")
def validator() -> GrammarValidator:
    return GrammarValidator(byte_level())


def read(validator: GrammarValidator, **grammar: Any) -> str:
    return validator.validate(json.dumps(grammar).encode()).text


def rejection(validator: GrammarValidator, **grammar: Any) -> str:
    with pytest.raises(GrammarError) as caught:
        read(validator, **grammar)
    return str(caught.value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "string"}}},
        {"enum": [1, "a", None, [2], {"b": 0.5}]},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "t", "deprecated": True, "unknown": 1},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "uniqueItems": False},
        {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"properties": {"a/b": {}, "c": {"$ref": "#/properties/a~1b"}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "string", "minLength": 2.0},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        ONE_OF,
        {"oneOf": ONE_OF["oneOf"], "$defs": ONE_OF["$defs"], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [{"const": "a"}, {"const": "b"}], "anyOf": [{"type": "string"}]},
        nested(60),
    ],
)
def test_schemas_that_are_accepted(validator: GrammarValidator, schema: dict[str, Any]) -> None:
    assert read(validator, schema=schema) == read(validator, schema_text=json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"type": "null"}}, "`not` cannot be enforced (at #)"),
        ({"propertyNames": {"format": "uri"}}, "`propertyNames` cannot be enforced (at #)"),
        ({"not": {}}, "schema is false"),
        (
            {"properties": {"a": {"items": {"uniqueItems": True}}}},
            "`uniqueItems` cannot be enforced (at #/properties/a",
        ),
        ({"if": {}, "then": {}}, "`if`"),
        ({"unevaluatedProperties": False}, "`unevaluatedProperties`"),
        ({"dependencies": {}}, "`dependencies`"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "`oneOf` cannot be enforced where its branches may"),
        ({"oneOf": [CAT, CAT]}, "`oneOf`"),
        ({"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}, "`oneOf`"),
        ({"type": "string", "pattern": "(?=a)[^a]"}, "`pattern` cannot be enforced: look-around, including"),
        (
            {"type": "string", "pattern": "a$b"},
            "`pattern` cannot be enforced: lookarounds not supported yet; End (at #)",
        ),
        ({"patternProperties": {"^a": {}, "^ab": {}}}, "`patternProperties` cannot be enforced"),
        ({"minProperties": 3}, "`minProperties` cannot be enforced"),
        ({"const": 2**60}, "`const` cannot be enforced with numbers beyond 2^53"),
        ({"$ref": "http://example.com/schema"}, "not present"),
        ({"$ref": "#/nowhere"}, "`$ref` leads to no schema that was read: #/nowhere"),
        ({"$ref": "#"}, "no text that this model's tokens can write matches it"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"x-guidance": {"lenient": True}, "not": {"type": "null"}}, "`not`"),
        ({"type": "integer", "minimum": 2**64}, "`minimum` cannot be enforced beyond 9223372036854774784 (at #)"),
    ],
)
def test_schemas_that_cannot_be_enforced(validator: GrammarValidator, schema: Any, words: str) -> None:
    error = rejection(validator, schema=schema)
    assert error.startswith(NOT_ENFORCED)
    assert words in error


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "text"}, "`type` must be the name of a type, or a list of such (at #)"),
        ({"properties": {"a": {"minLength": "3"}}}, "`minLength` must be a whole number >= 0 (at #/properties/a)"),
        ({"required": "a"}, "`required` must be a list of strings"),
        ({"items": 1}, "`items` must be a schema"),
        ({"exclusiveMinimum": "1"}, "`exclusiveMinimum` must be a number"),
        ({"enum": []}, "`enum` must be a list, and not empty"),
        ({"anyOf": {}}, "`anyOf` must be a list of schemas"),
        ({"properties": {"a": 1}}, "`properties` must be an object of schemas"),
    ],
)
def test_invalid_schemas(validator: GrammarValidator, schema: Any, words: str) -> None:
    error = rejection(validator, schema=schema)
    assert error.startswith(NOT_VALID)
    assert words in error


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "Expecting property name"), ("[]", "a schema is an object"), ('{"const":NaN}', "NaN is not JSON")],
)
def test_invalid_schema_texts(validator: GrammarValidator, text: str, words: str) -> None:
    error = rejection(validator, schema_text=text)
    assert error.startswith(NOT_VALID)
    assert words in error


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("(a", "unclosed group"),
        ("a(?=b)", "look-around"),
        ("a$b", "lookarounds not supported"),
        (r"[^\s\S]", "no text that this model's tokens can write matches it"),
        ("a)", "unopened group"),
        ("[a", "unclosed character class"),
        ("[^]", "unclosed character class"),
        ("a{2,1}", "invalid repetition count range"),
        ("a{", "unclosed counted repetition"),
        ("a{99999999999}", "a part is repeated 99999999999 times"),
        ("*a", "repetition operator missing expression"),
        ("+", "repetition operator missing expression"),
        ("\\", "incomplete escape sequence"),
        ("a\\\\\\", "incomplete escape sequence"),
        (r"\y", "unrecognized escape sequence"),
        (r"\xZZ", "invalid hexadecimal digit"),
        (r"\u{110000}", "hexadecimal literal is not a Unicode scalar value"),
        (r"\p{Nope}", "Unicode property not found"),
        ("(?<name", "unclosed capture group name"),
        ("(?P<n>a)(?P<n>b)", "duplicate capture group name"),
        ("(?z)a", "unrecognized flag"),
        ("[z-a]", "invalid character class range"),
        (r"[a-\d]", "invalid range boundary"),
        ("(?<=a)b", "look-around"),
        ("(?!a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        (r"a\b", "lookarounds not supported"),
        ("(?x) a # b\n c", "the flag `x` cannot be used together with line feeds"),
    ],
)
def test_rejected_regexes(validator: GrammarValidator, regex: str, words: str) -> None:
    error = rejection(validator, regex=regex)
    assert error.startswith(NOT_VALID)
    assert words in error
    assert "start:" not in error  # the generated grammar is not shown


def test_error_of_a_long_regex_names_the_cause(validator: GrammarValidator) -> None:
    for regex, words in ((r"\b" + "a" * 5000, "lookarounds not supported"), ("a" * 5000 + "(", "unclosed group")):
        error = rejection(validator, regex=regex)
        assert words in error
        assert len(error) < 1000


@pytest.mark.parametrize("regex", ["(", "a{2,1}", "\\", r"a\y", "(?=a)", r"(a)\1", "[z-a]", r"\p{Nope}", "(?x)a#\n"])
def test_rejected_patterns_in_schemas(validator: GrammarValidator, regex: str) -> None:
    for schema in ({"type": "string", "pattern": regex}, {"patternProperties": {regex: {}}}):
        error = rejection(validator, schema={"properties": {"a": schema}})
        assert error.startswith((NOT_VALID + "`pattern", NOT_ENFORCED + "`pattern"))


# Matching texts


BYTES = piece_table([bytes([byte]) for byte in range(256)])


@lru_cache(maxsize=8)
def start(grammar: str) -> LLMatcher:
    return new_matcher(BYTES, grammar)


def accepts(grammar: str, text: str) -> bool:
    found = start(grammar).deep_copy()
    assert not found.is_error(), found.get_error()
    tokens = [byte + 1 for byte in text.encode()]
    return found.try_consume_tokens(tokens) == len(tokens) and bool(found.is_accepting())


def tells_apart(grammar: str, texts: list[str], others: list[str]) -> None:
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("name", "reference"),
    [(name, name) for name in ("a b", "Ä", "F[int]", 'q"x', "L<s>", "a%b", "a#b", "a\\b", "a\nb", "a?b")]
    + [("a b", "a%20b"), ("a/b", "a~1b"), ("a~b", "a~0b"), ("F[int]", "F%5Bint%5D"), ("a%20b", "a%2520b")],
)
def test_references_with_characters_that_need_escapes(validator: GrammarValidator, name: str, reference: str) -> None:
    schema = {"$ref": f"#/$defs/{reference}", "$defs": {name: of("x", x={"enum": [7]}) | {"required": ["x"]}}}
    tells_apart(read(validator, schema=schema), ['{"x":7}'], ["7", "{}"])


def test_ipv6_addresses_may_end_in_an_ipv4_address(validator: GrammarValidator) -> None:
    right = ["::", "1::", "::1", "1:2:3:4:5:6:7:8", "1::3:4:5:6:7:8", "::ffff:1.2.3.4", "64:ff9b::192.0.2.33",
             "1:2:3:4:5:6:1.2.3.4", "::1.2.3.4", "1:2:3:4::6:1.2.3.4"]  # fmt: skip
    wrong = ["", ":", "1", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "::1::", ":::", "12345::", "::1.2.3", "::1.2.3.256",
             "1.2.3.4", "1.2.3.4::", "1:2:3:4:5:6:7:1.2.3.4", "g::", "::01.2.3.4"]  # fmt: skip
    grammar = read(validator, schema={"type": "string", "format": "ipv6"})
    tells_apart(grammar, [json.dumps(one) for one in right], [json.dumps(one) for one in wrong])


def of(*names: str, **words: Any) -> dict[str, Any]:
    """An object with integer properties of these names."""
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **words}


A = {"$defs": {"A": of("a", required=["a"])}}
TO_A = {"$ref": "#/$defs/A"}
NODE = {"type": "object", "properties": {"v": {}, "next": {"allOf": [{"$ref": "#/$defs/N"}], "title": "n"}}}
# (schema, matching texts, other texts)
OBJECTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (of("a"), ['{"a":1}', "{}"], ['{"b":1}', '{"a":1,"b":1}']),
    (of(), ["{}"], ['{"a":1}']),
    ({"type": "object"}, ['{"a":{"b":[]}}'], []),
    (of("a", additionalProperties=True), ['{"a":1,"b":1}'], []),
    (of("a", additionalProperties={"type": "string"}), ['{"a":1,"b":"x"}'], ['{"b":1}']),
    (of("a", required=["a", "z"]), ['{"a":1,"z":"x"}'], ['{"a":1}', '{"a":1,"z":1,"y":1}']),
    (of("a", patternProperties={"^x": {"type": "string"}}), ['{"a":1,"x1":"s"}'], ['{"y":"s"}', '{"x1":2}']),
    ({"patternProperties": {"^x": {"type": "string"}}}, ['{"x1":"s","y":1}'], ['{"x1":2}']),
    (of("a", patternProperties={"^a$": {"minimum": 3}}), ['{"a":3}', "{}"], ['{"a":2}', '{"b":3}']),
    (of("a", "b.c", "d", patternProperties={r"^(?:a|b\.c)$": {"minimum": 3}, "^a": {"maximum": 5}}),
     ['{"a":3,"b.c":6,"d":1}', '{"ax":1}'], ['{"a":2}', '{"a":6}', '{"b.c":2}', '{"ax":6}']),
    (of("a", patternProperties={"^a$": False}), ["{}"], ['{"a":1}']),
    (of("a", minProperties=1), ['{"a":1}'], ["{}"]),
    ({"type": ["object", "null"], "properties": {"a": {}}}, ["null", '{"a":1}'], ['{"b":1}']),
    ({"properties": {"a": {}}, "enum": [{"b": 1}, 3]}, ['{"b":1}', "3"], ['{"a":1}']),
    ({"items": of("a"), "prefixItems": [of("b")]}, ['[{"b":1},{"a":1}]'], ['[{"a":1}]', '[{"b":1},{"b":1}]']),
    ({"allOf": [of("a"), of("b", required=["b"])]}, ['{"a":1,"b":2}', '{"b":2}'], ['{"a":1}', '{"b":2,"c":3}']),
    ({"allOf": [TO_A, of("b", required=["b"])]} | A, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"c":3}']),
    ({"allOf": [of("a", additionalProperties=True), of("b")]}, ['{"a":1,"b":2,"c":3}'], []),
    ({"allOf": [of("a", additionalProperties=False), of("b")]}, ['{"a":1}'], ['{"b":1}']),
    ({"properties": {"x": TO_A, "y": {"allOf": [TO_A, of("b")]}}} | A, ['{"x":{"a":1},"y":{"a":1,"b":2}}'],
     ['{"x":{"a":1,"b":2}}', '{"y":{"a":1,"c":2}}']),
    ({"properties": {"x": {"allOf": [TO_A], "title": "t"}}} | A, ['{"x":{"a":1}}'], ['{"x":{"a":1,"b":1}}']),
    ({"anyOf": [of("a"), of("b")]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
    ({**of("k"), "anyOf": [TO_A, of("b")]} | A, ['{"k":1,"a":1}', '{"k":1,"b":1}'], ['{"k":1,"a":1,"b":1}', '{"z":1}']),
    ({"anyOf": [of("a"), of("b")], "allOf": [{"anyOf": [of("c"), of("d")]}]}, ['{"a":1,"c":1}', '{"b":1,"d":1}'],
     ['{"a":1,"b":1}', '{"c":1,"d":1}']),
    ({**of("a"), "anyOf": [{"required": ["a"]}, {"required": ["z"]}]}, ['{"a":1}', '{"a":1,"z":4}'], ["{}", '{"y":1}']),
    ({"oneOf": [of("a", required=["a"]), of("b", required=["b"])]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', "{}"]),
    ({"oneOf": [TO_A, of("b", required=["b"])]} | A, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
    ({"$ref": "#/$defs/N", "$defs": {"N": NODE}}, ['{"v":{"q":1},"next":{"next":{}}}'], ['{"next":{"w":1}}']),
]  # fmt: skip


LOW, HIGH = -(2**63), 2**63 - 1
COLOURS = {"$defs": {"C": {"enum": ["red", "blue"]}}}
# Keywords of older drafts, and forms of others that have an equivalent.
EQUIVALENTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"items": [{"type": "integer"}, {"type": "null"}]}, ["[]", "[1,null]", '[1,null,"x"]'], ["[null]", "[1,1]"]),
    ({"items": [{"type": "integer"}], "additionalItems": False, "minItems": 1}, ["[1]"], ["[]", "[1,1]", '["a"]']),
    ({"items": [{"type": "integer"}], "additionalItems": {"type": "null"}}, ["[1,null]"], ["[1,1]"]),
    ({"type": "array", "items": []}, ["[]", '[1,"a"]'], ["1"]),
    ({"items": {"type": "integer"}, "additionalItems": False}, ["[1,2]"], ['["a"]']),
    ({"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False},
     ["1", "9"], ["0", "10"]),
    ({"type": "integer", "exclusiveMinimum": True}, ["-5"], ["1.5"]),
    ({"type": "integer", "minimum": LOW, "maximum": HIGH}, ["-9223372036854774784", "9223372036854774784", "0"],
     ["9223372036854775808", "-9223372036854775809"]),
    ({"type": "integer", "minimum": 2**53 + 3, "exclusiveMaximum": 2**63}, [str(2**53 + 4)], [str(2**53 + 2), "7"]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0"], ["-1", str(2**64)]),
    ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, ["0.5", "-3"], ["x"]),
    ({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}}, ['{"a":null}'], ['{"a":1}']),
    ({"propertyNames": True, "type": "object"}, ['{"a":1}'], []),
    ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}, "required": ["b"]},
     ['{"a":null,"b":null}', '{"b":null}'], ['{"a":null}', '{"b":1}', '{"c":null}']),
    ({"propertyNames": {"$ref": "#/$defs/C"}} | COLOURS, ['{"red":1}', "{}"], ['{"green":1}']),
    ({"propertyNames": {"const": "a"}}, ['{"a":1}'], ['{"b":1}']),
    ({"propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "null"}}, ['{"ab":null}', "{}"],
     ['{"ab":1}', '{"d":null}']),
    ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab":1,"abc":2}'], ['{"a":1}', '{"abcd":1}']),
    ({"anyOf": [{"not": {}}, {"type": "null"}]}, ["null"], ["1"]),
    ({"properties": {"a": {"not": True}, "b": {"not": False}}}, ["{}", '{"b":1}'], ['{"a":1}']),
    ({"type": "object", "properties": []}, ["{}"], ['{"a":1}']),
    ({"type": "string", "enum": None, "pattern": None, "items": None, "not": None}, ['"a"'], ["1"]),
]  # fmt: skip


EQUIVALENTS += [
    (
        {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{reference}"}}, "required": ["x"]}
        | {"$defs": {name: of("n", required=["n"]) | {"description": name}}},
        ['{"x":{"n":1}}'],
        ['{"x":{"n":"a"}}', '{"x":1}'],
    )
    for name, reference in [
        ("F[int]", "F[int]"), ("L<s>", "L<s>"), ("a b", "a%20b"), ("a b", "a b"), ("a/b", "a~1b"), ("é", "é"),
        ("é", "%C3%A9"), ("a%b", "a%25b"), ('q"q', 'q"q'), ("a^b|c", "a^b|c"), ("a#b", "a#b"), ("a\\b", "a\\b"),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("schema", "texts", "others"), EQUIVALENTS)
def test_older_and_equivalent_keywords_are_enforced(
    validator: GrammarValidator, schema: dict[str, Any], texts: list[str], others: list[str]
) -> None:
    tells_apart(read(validator, schema=schema), texts, others)


def test_unknown_formats_are_annotations(validator: GrammarValidator) -> None:
    schema = {"properties": {"a/b": {"format": "path"}, "é,#": {"items": {"format": "binary", "type": "string"}}}}
    grammar = validator.validate(json.dumps({"schema": schema}).encode())
    tells_apart(grammar.text, ['{"a/b":"x","é,#":["y"]}'], ['{"é,#":[1]}'])
    assert grammar.not_enforced == ["#/properties/a~1b/format", "#/properties/%C3%A9%2C%23/items/format"]
    text = 'start: %json {"format": "path"}'
    assert validator.validate(json.dumps({"grammar": text}).encode()).not_enforced == ["#/format"]


WORDS = sorted(KEYWORD_TYPES.keys() | UNENFORCED_KEYWORDS | {"const", "additionalItems", "unknown"})
VALUES = st.recursive(
    st.sampled_from(
        [None, True, False, 0, -1, 2.5, 1e999, 10**400, "", "#/$defs/a", "#", "(", "string", "a", "\ud800"]
    ),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*WORDS, "a"]), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200)
@given(VALUES, st.booleans(), st.sets(st.sampled_from(["oneOf", "patternProperties", "$ref", "pattern"])))
def test_any_value_is_a_schema_or_an_error(value: Any, lenient: bool, ignored: set[str]) -> None:
    with suppress(GrammarError):
        _, not_enforced = checked_schema(value, lenient, ignored if lenient else ())
        assert all(pointer.isascii() and pointer.startswith("#/") for pointer in not_enforced)


@pytest.mark.parametrize(("schema", "texts", "others"), OBJECTS)
def test_objects_are_closed(
    validator: GrammarValidator, schema: dict[str, Any], texts: list[str], others: list[str]
) -> None:
    tells_apart(read(validator, schema=schema), texts, others)
    for text in texts:  # texts of the grammar are valid
        validate(text, schema)


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"type": "integer"}, ["0", "-5", "9" * 18], ["9" * 19, "1" * 20, "1.0", "1e5"]),
        ({"type": "integer", "minimum": 3}, ["3", "9" * 18], ["2", "1" * 20]),
        ({"type": "integer", "multipleOf": 5}, ["15", "1" * 17 + "0"], ["7", "1" * 20 + "0"]),
        ({"type": "number"}, ["1.5", "-6.02e-23", "1" * 20, "0." + "3" * 20], ["1" * 21, "0." + "3" * 21, "1e100"]),
        ({"type": "number", "minimum": 0}, ["0.12345678", "1" * 18], ["0." + "3" * 9, "1" * 20, "-1"]),
        ({"type": "number", "maximum": 2, "multipleOf": 0.01}, ["1.25"], ["1.255", "-" + "1" * 20]),
        ({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, ["0.0000000015"], ["1"]),
        ({"minimum": 3}, ["3.5", '"x"', "null"], ["2", "1" * 20]),
        ({"type": ["integer", "null"]}, ["3", "null"], ["2.0", "1" * 20]),
        ({}, ["1e5", '{"a":[1.5]}'], ["1" * 21, '{"a":[' + "1" * 21 + "]}"]),
        ({"type": "object"}, ['{"a":0.00005}', '{"a":5e-5}'], ['{"a":0.' + "3" * 21 + "}"]),
        (
            {"properties": {"n": {"type": "number"}, "o": {**of("k"), "anyOf": [of("a"), of("b")]}}, "type": "object"},
            ['{"n":1e9, "o":{"k":1, "a":2}}'],
            ['{"n":' + "1" * 21 + "}", '{"o":{"a":1,"b":2}}'],
        ),
        ({"type": "array", "items": {"type": "number"}}, ["[1, 2.5]"], ["[1,0." + "3" * 21 + "]"]),
        ({"const": 0.12345678901234}, ["0.12345678901234"], ["0.12345678"]),
    ],
)
def test_digits_of_numbers_are_limited(
    validator: GrammarValidator, schema: dict[str, Any], texts: list[str], others: list[str]
) -> None:
    tells_apart(read(validator, schema=schema), texts, others)


NUMBER = {"type": "number"}


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        (
            {"items": NUMBER, "minItems": 2, "maxItems": 3},
            ["[1,2]", "[1 , 2, 3]"],
            ["[]", "[1]", "[1,2,3,4]", "[1,  2]"],
        ),
        ({"type": "array", "items": NUMBER, "minItems": 1}, ["[1]", "[1,2]"], ["[]"]),
        ({"type": "array", "items": NUMBER, "maxItems": 1}, ["[]", "[1]"], ["[1,2]", "[,]"]),
        ({"prefixItems": [NUMBER, {"type": "null"}], "minItems": 2, "maxItems": 2}, ["[1,null]"], ["[1]", "[1,2]"]),
        (
            {"type": "object", "properties": dict.fromkeys("abc", NUMBER), "required": ["b"]},
            ['{"b":1}', '{"a":1,"b":1}', '{ "b" : 1 , "c":2}'],
            ["{}", '{"a":1}', '{"a":1,"c":1}', '{"b":1,"a":1}', '{"b":1,}', '{"b":1,  "c":2}'],
        ),
        (
            {"type": "object", "properties": dict.fromkeys("abc", NUMBER)},
            ["{}", '{"a":1,"c":1}', '{"b":1}', '{"b":1,"c":1}'],
            ['{"b":1,"a":1}', '{,"b":1}', '{"a":1,"a":1}'],
        ),
        (
            {"type": "object", "properties": {"a": NUMBER}, "additionalProperties": NUMBER, "required": ["a", "b"]},
            ['{"a":1,"b":1}', '{"a":1,"b":1,"c":2,"d":3}'],
            [
                '{"a":1}',
                '{"a":1,"b":1,"a":2}',
                '{"a":1,"b":1,"b":2}',
                '{"a":1,"b":1,"c":"x"}',
                '{"a":1,"b":1,"\\u0061":2}',
            ],
        ),
        (
            {"properties": {'é/"\\\x7f\n': NUMBER, "s": {"type": "string", "pattern": "^a+$"}}},
            ['{"é/\\"\\\\\x7f\\n":1}', '{"s":"aa"}', "true", '"\\n"'],
            ['{"s":"b"}', '"\n"'],
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}, NUMBER]}, ["1", '"1"', "1.5e3"], ["null"]),
        (
            {"$ref": "#/$defs/T", "$defs": {"T": {"properties": {"v": NUMBER, "t": {"$ref": "#/$defs/T"}}}}},
            ['{"v":1,"t":{"t":{"v":2}}}'],
            ['{"t":{"x":1}}'],
        ),
    ],
)
def test_schemas_with_numbers_are_written_in_lark(
    validator: GrammarValidator, schema: dict[str, Any], texts: list[str], others: list[str]
) -> None:
    assert "NUMBER" in read(validator, schema=schema)
    tells_apart(read(validator, schema=schema), texts, others)


def test_merged_schemas_have_limited_numbers(validator: GrammarValidator) -> None:
    part = of(*(f"a{number}" for number in range(9)))
    assert "join too many schemas" in rejection(
        validator, schema={"allOf": [{"$ref": "#/$defs/A"}] * 20000, "$defs": {"A": part}}
    )


# Lark and GBNF

GBNF = r"""
root   ::= object   # of llama.cpp
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
value  ::= object | string | ("true" | "false" | "null") ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SQL = """
?start: select
?select: "SELECT " column ("," column)* " FROM " NAME
?column: NAME
NAME: /[a-z_]+/  // max_tokens=1 and <|end|> are no more than words here
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (GBNF, ['{"a": {"b\\n":"c"}}', "{}"], ["[]", '{"a":1}']),
        ('root ::= "\\u00e9" [\\u00e8-\\u00ea] "\\x41" | "/"', ["ééA", "éèA", "/"], ["é"]),
        (SQL, ["SELECT a,b FROM c"], ["SELECT FROM c"]),
        ('start: "<b>" /<[a-z]>/', ["<b><x>"], ["<b>"]),
        ('start: "a"{2,3}\n', ["aa", "aaa"], ["a"]),
        ("%import common.INT\nstart: INT", ["12"], ["x"]),
        (
            'start: "is " %json {"properties": {"a": {"type": "integer"}}, "type": "object"} "."',
            ['is {"a":1}.'],
            ['is {"b":1}.'],
        ),
    ],
)
def test_grammars_in_gbnf_and_lark(
    validator: GrammarValidator, grammar: str, texts: list[str], others: list[str]
) -> None:
    tells_apart(read(validator, grammar=grammar), texts, others)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "no start rule found"),
        ("yes or no", "Expected token"),
        ('x: "a"', "no start rule found"),
        ("start: y", 'unknown name: "y"'),
        ('start: "a', "lexer error"),
        ("start: /(/", "unclosed group"),
        ("start: start", "no text that this model's tokens can write"),
        ("start: <|im_end|>", "a special token cannot be part of it: <|im_end|>"),
        ("start: <[5]>", "a special token cannot be part of it: <[5]>"),
        ("start: a\na[max_tokens=3]: /.*/", "the option `max_tokens` is not supported"),
        ('start: a "x"\na[stop = "x"]: /.*/', "the option `stop` is not supported"),
        ("start: @other", "unknown grammar @other"),
        ("start: %json", "Expecting value"),
        ('start: %json {"type": 1}', "`type` must be the name of a type"),
        ("root ::= b", "as GBNF: Rule 'b' not found"),
        ('root ::= "a', "as GBNF: Unexpected end of input"),
        ('rule ::= "a"', "as GBNF: No 'root' rule found"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("start: " + '"a" ' * 5000, "at most 16384 bytes"),
        ("start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(501)) + 'r501: "a"', "at most 500 rules"),
        ("root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(501)) + 'r501 ::= "a"', "at most 500 rules"),
        ("start: R0\n" + "".join(f"R{n}: R{n + 1} R{n + 1}\n" for n in range(30)) + 'R30: "a"', "too big"),
    ],
)
def test_rejected_grammars(validator: GrammarValidator, grammar: str, words: str) -> None:
    error = rejection(validator, grammar=grammar)
    assert error.startswith((NOT_VALID, NOT_ENFORCED))
    assert words in error
    assert len(error) < 3000


# Each is accepted or rejected; the test is that the check ends soon.
HOSTILE: dict[str, dict[str, Any]] = {
    "ambiguous repetitions": {"regex": "(x+x+)+y"},
    "repetitions in repetitions": {"regex": "((a{1,100}){1,100}){1,100}"},
    "optional letters": {"regex": "(?:(?:a?){50}){50}a{50}"},
    "a state for each subset": {"regex": ".*a.{300}b"},
    "a text of 100,000 letters": {"regex": "a{99999}"},
    "options of its own": {"grammar": '%llguidance {"no_forcing": false}\nstart: /a{99999}/'},
    "a text of 150,000 bytes": {"regex": "".join(chr(ord("α") + n % 23) for n in range(75_000))},
    "a value of 100,000 bytes": {"schema": {"const": "".join(chr(ord("a") + n % 23) for n in range(100_000))}},
    "a text of 2^40 letters": {
        "grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(40)) + 'r40: "a"'
    },
    "letters of all scripts": {"regex": r"(\p{L}{1,1000}){1,1000}"},
    "10,000 values": {"schema": {"enum": [f"value number {n}" for n in range(10000)]}},
    "1,000 properties": {"schema": {"properties": {f"p{n}": {"type": "string"} for n in range(1000)}}},
    "1,001 properties": {"schema": {"properties": {f"p{n}": {"type": "string"} for n in range(1001)}}},
    "a megabyte": {"schema": {"enum": ["x" * (1 << 20)]}},
    "patterns at once": {"schema": {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmn"]}},
    "all of any of": {
        "schema": {"allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(24)]}
    },
    "twice as many at each level": {
        "schema": {"$ref": "#/$defs/d0"}
        | {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {}}}
    },
    "a large prime": {"schema": {"type": "integer", "multipleOf": 982451653}},
    "a long string": {"schema": {"type": "string", "minLength": 100000, "maxLength": 100000}},
    "many branches": {"schema": {"oneOf": [{"const": f"{n}"} for n in range(2000)]}},
    "nested deeply": {"schema": nested(100)},
    "nested deeper": {"schema_text": '{"items":' * 20000 + "{}" + "}" * 20000},
    "a deep value": {"schema_text": '{"const":' + "[" * 900 + "]" * 900 + "}"},
}


# All compile within the limits. Those with True exceed them within a few tokens of a large vocabulary.
COUNTED = {
    r"(.{0,500}){0,500}": True,
    r"((a{1,100}){1,100}){1,100}": True,
    r"(\p{L}{1,1000}){1,1000}": True,
    r".*a.{300}b": True,
    r"(\w{1,50}\s?){1,500}": True,
    r".*(a|b).{20}(c|d).{20}": True,
    r"(a?){1000}a{1000}": False,
    r"(\S{1,100}\s{0,100}){1,100}": True,
    r"(.{1,200}[aeiou]){1,200}": True,
    r"(?i)(\p{Lu}\p{Ll}{0,300} ?){1,300}": True,
    r"(a{0,50}b{0,50}){0,200}": True,
    r"(.{0,50}e){40}": True,
    r"(a|b)*c(a|b){20}": False,
    r"(x+x+)+y": False,
    r"(.*)(.*)(.*)(.*)(.*)x": False,
    r"[^a]*a[^b]{100}b.*c.{50}": False,
    r"(([a-z]{1,30} ){1,30}\n){1,30}": False,
    r".{0,100000}": False,
    r"(.*foo.*bar.*){5}": False,
}


@pytest.fixture(scope="module")
def large(demo_model: Path) -> tuple[GrammarValidator, LLTokenizer, int]:
    """A validator for a vocabulary of 49,152 tokens, the worker's token table, and the mask of its EOS tokens."""
    config = read_model_config(demo_model)
    table = token_table(read_tokenizer(config), config.eos_token_ids, config.vocab_size)
    return GrammarValidator(Vocabulary.load(config)), table, sum(1 << number for number in config.eos_token_ids)


@pytest.mark.parametrize("regex", COUNTED)
def test_accepted_grammars_stay_within_worker_limits(
    large: tuple[GrammarValidator, LLTokenizer, int], regex: str
) -> None:
    """A request that passes the check does not fail later with the worker's table and limits."""
    large_validator, table, eos_bits = large
    if COUNTED[regex]:
        assert re.search("too many|is repeated", rejection(large_validator, regex=regex))
        return
    found, draw = new_matcher(table, read(large_validator, regex=regex)), Random(5)
    for _ in range(60):
        allowed = int.from_bytes(found.compute_bitmask(), "little") & ~eos_bits
        assert not found.is_error(), found.get_error()
        if found.is_stopped() or not allowed:
            return
        found.consume_token(_next_set_bit(allowed, draw.randrange(allowed.bit_length())))


REFUSED = {
    "repetitions in repetitions", "letters of all scripts", "1,001 properties", "a megabyte",
    "patterns at once", "all of any of", "a large prime", "nested deeply",
    "nested deeper", "a deep value",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end(validator: GrammarValidator, name: str) -> None:
    if name in REFUSED:
        assert rejection(validator, **HOSTILE[name]).startswith((NOT_VALID, NOT_ENFORCED))
    else:
        assert read(validator, **HOSTILE[name])


def test_other_threads_run_while_a_grammar_is_compiled(validator: GrammarValidator) -> None:
    looks = []
    thread = threading.Thread(target=read, args=(validator,), kwargs={"schema": {"properties": HOSTILE_NAMES}})
    thread.start()
    while thread.is_alive():
        looks.append(time.monotonic())
        time.sleep(0.001)
    assert len(looks) > 5


HOSTILE_NAMES = {f"q{n}": {"type": "string"} for n in range(900)}


def test_too_large_grammar_is_rejected(validator: GrammarValidator) -> None:
    assert f"at most {MAX_GRAMMAR_BYTES} bytes" in rejection(validator, regex="a" * MAX_GRAMMAR_BYTES)


def test_results_and_errors_are_cached() -> None:
    kept = GrammarValidator(byte_level())
    first = read(kept, regex="a")
    assert read(kept, regex="a") is first
    for number in range(MAX_CACHED_GRAMMARS + 10):
        read(kept, regex=f"b{number}")
    assert read(kept, regex="a") is not first
    for _ in range(2):
        assert "unclosed group" in rejection(kept, regex="(")


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokenizer_types_support_grammars(kind: str) -> None:
    kept = GrammarValidator(KINDS[kind]())
    for grammar in ({"schema": {"type": "object"}}, {"regex": "[a-z ]+"}):
        if kind in ("byte_level", "sentencepiece"):
            assert read(kept, **grammar)
        else:  # the text of a token depends on its neighbours, or is unknown
            assert "grammar is not supported: of this model's tokenizer, " in rejection(kept, **grammar)


# Through the pool


def asks(harness: PoolHarness, rid: int, grammar: dict[str, Any], **fields: Any) -> None:
    message = Generate(rid, "Hello", SamplingParams(5), grammar=json.dumps(grammar).encode(), **fields)
    harness.pool.handle(API, message)
    assert harness.received_by(harness.scheduler) == []
    assert harness.run_jobs() == [ExecutorName.GRAMMARS]  # so that texts do not wait for it


def test_grammar_is_sent_in_sampling_params() -> None:
    harness = PoolHarness()
    asks(harness, 1, {"regex": "[ab]+"})
    (add,) = harness.received_by(harness.scheduler)
    sampling = decode(add.sampling)
    assert sampling.grammar == read(GrammarValidator(byte_level()), regex="[ab]+")
    assert sampling._replace(grammar="") == SamplingParams(5)
    harness.disconnect_scheduler()
    harness.connect_scheduler()
    (again,) = harness.received_by(harness.scheduler)
    assert again.sampling == add.sampling


def test_rejected_grammar_ends_its_request() -> None:
    harness = PoolHarness()
    asks(harness, 1, {"schema": {"not": {"type": "null"}}})
    assert harness.received_by(harness.scheduler) == []
    (end,) = end_messages(harness.received_by(API))
    assert (end.rid, end.reason) == (1, FinishReason.INVALID)
    assert end.message == f"{NOT_ENFORCED}`not` cannot be enforced (at #)"
    assert harness.pool.idle


def test_token_limits_are_checked_before_the_grammar() -> None:
    harness = PoolHarness()
    harness.pool.handle(API, Generate(1, "Hello", SamplingParams(5), grammar=b'{"regex": "("}', truncate=0))
    assert len(harness.pool.jobs) == 0  # the grammar is not even compiled
    (end,) = end_messages(harness.received_by(API))
    assert end.message == "`inputs` cannot be empty"
