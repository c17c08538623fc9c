"""From the grammar of a request, in TGI's forms and OpenAI's, to what the tokenizer checks."""

from typing import Any

import msgspec

from tgi.api.shapes.native import GrammarType

ANY_OBJECT = {"type": "object"}


def wanted(grammar: GrammarType | None) -> bool:
    """Whether there is anything to hold the text to."""
    return grammar is not None and grammar.type != "text"


def readable(grammar: GrammarType) -> bool:
    """Whether its value is of a type that a grammar can be in: schemas are objects, or such as strings."""
    return isinstance(_value(grammar), str if grammar.type == "regex" else dict | str)


def encoded(grammar: GrammarType | None) -> bytes:
    """A readable grammar as the tokenizer takes it (tokenizer/grammar.py names the keys); empty for none."""
    if grammar is None or not wanted(grammar):
        return b""
    value = _value(grammar)
    key = "regex" if grammar.type == "regex" else "schema_text" if isinstance(value, str) else "schema"
    return msgspec.json.encode({key: value})


def _value(grammar: GrammarType) -> Any:
    if grammar.type == "json_schema":
        config = grammar.value if grammar.json_schema is None else grammar.json_schema
        return config["schema"]
    if grammar.type == "json_object" and grammar.value is None:
        return ANY_OBJECT
    return grammar.value
