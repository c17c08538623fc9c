"""From the grammar of a request, in TGI's forms and those of /v1, to what the tokenizer checks."""

import re
from typing import Any

import msgspec

from tgi.api.shapes.native import GrammarType

ANY_OBJECT = {"type": "object"}
_KEYS = {"regex": "regex", "choice": "regex", "grammar": "grammar"}
# What has a meaning in a regular expression.
_LITERAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def wanted(grammar: GrammarType | None) -> bool:
    """Whether there is anything to hold the text to."""
    return grammar is not None and grammar.type != "text"


def readable(grammar: GrammarType) -> bool:
    """Whether its value is of a type that a grammar can be in: schemas are objects, or such as strings."""
    return grammar.type in _KEYS or isinstance(_value(grammar), dict | str)


def encoded(grammar: GrammarType | None) -> bytes:
    """A readable grammar as the tokenizer takes it (tokenizer/grammar.py names the keys); empty for none."""
    if grammar is None or not wanted(grammar):
        return b""
    value = _value(grammar)
    if grammar.type == "choice":
        value = "|".join(_LITERAL.sub(r"\\\g<0>", one) for one in value)
    key = _KEYS.get(grammar.type, "schema_text" if isinstance(value, str) else "schema")
    return msgspec.json.encode({key: value})


def _value(grammar: GrammarType) -> Any:
    if grammar.type == "json_schema":
        config = grammar.value if grammar.json_schema is None else grammar.json_schema
        return config["schema"]
    if grammar.type == "json_object" and grammar.value is None:
        return ANY_OBJECT
    return grammar.value
