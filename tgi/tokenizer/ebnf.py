"""Grammars as clients write them: in llguidance's Lark, or in GBNF as llama.cpp and xgrammar read it."""

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

# The library's time grows with the square of both, and it follows references between rules on its stack.
MAX_BYTES = 16 << 10
MAX_RULES = 500

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# What the converter writes as Lark cannot read it: it drops leading zeros.
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_LARK_PIECE = re.compile(
    r"""
      (?P<quoted> "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\])+/ | (?:\#|//)[^\n]* )
    | (?P<schema> %json\b )
    | (?P<token> <[^<>\s]+> )
    | (?P<option> \b(?:max_tokens|temperature|stop) (?=\s*=) )
    | (?P<rule> : )
    """,
    re.VERBOSE,
)
_SPACE = re.compile(r"\s*")


def to_lark(text: str, read_schema: Callable[[Any], str]) -> str:
    """The grammar in Lark; `read_schema` reads the JSON schemas in it. Raises ValueError."""
    if (size := len(text.encode())) > MAX_BYTES:
        raise ValueError(f"it must have at most {MAX_BYTES} bytes. Given: {size}")
    return _converted(text) if _GBNF_RULE.search(text) else _checked(text, read_schema)


def _converted(text: str) -> str:
    _limit(len(_GBNF_RULE.findall(text)))
    try:
        return str(gbnf_to_lark(_GBNF_ESCAPE.sub(_escape, text)))
    except RecursionError:
        raise
    except Exception as error:  # the converter's errors have no other class
        raise ValueError(f"as GBNF: {error}") from None


def _escape(found: re.Match[str]) -> str:
    digits = found[1] or found[2]
    code = int(digits, 16) if digits else -1
    if code < 0 or 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        return found[0]
    return chr(code) if code > 0x7F else f"\\x{code:02x}"


def _checked(text: str, read_schema: Callable[[Any], str]) -> str:
    """Lark without what would act on other things than the text: ids of tokens, and how they are drawn."""
    parts, at, rules = [], 0, 0
    while found := _LARK_PIECE.search(text, at):
        parts.append(text[at : found.end()])
        at = found.end()
        match found.lastgroup:
            case "token":
                raise ValueError(f"a special token cannot be part of it: {found[0]}")
            case "option":
                raise ValueError(f"the option `{found[0]}` is not supported")
            case "rule":
                rules += 1
            case "schema":
                begin = _SPACE.match(text, at)
                assert begin is not None
                schema, at = json.JSONDecoder().raw_decode(text, begin.end())
                parts.append(f" {read_schema(schema)}")
    _limit(rules)
    return "".join(parts) + text[at:]


def _limit(rules: int) -> None:
    if rules > MAX_RULES:
        raise ValueError(f"it must have at most {MAX_RULES} rules. Given: {rules}")
