"""Bodies of calls that are not JSON, to JSON: values between tags, whose types the tool's schema says, and Python's
literals."""

import json
import re
from typing import Any, NamedTuple
from urllib.parse import unquote

JSON_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
# Depth of `$ref`, `anyOf`, `oneOf` and `allOf` in a property's schema, beyond which all types are assumed.
MAX_DEPTH = 8
# Python's constants, as templates and models write them where values are no texts.
CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def argument_types(schema: Any) -> dict[str, list[str]]:
    """The JSON types that each named argument may have, from the schema of a tool's arguments. Names and schemas that
    say nothing are left out."""
    target = resolve(schema, schema)
    properties = target.get("properties") if isinstance(target, dict) else None
    if not isinstance(properties, dict):
        return {}
    types = {name: value_types(value, schema) for name, value in properties.items()}
    return {name: found for name, found in types.items() if found is not None}


def value_types(schema: Any, root: Any) -> list[str] | None:
    """The JSON types that a schema within `root` allows; None: it does not say."""
    found = _types(schema, root, MAX_DEPTH)
    return None if found is None else [one for one in JSON_TYPES if one in found]


def _types(schema: Any, root: Any, depth: int) -> set[str] | None:
    """The types that a schema allows; None: it does not say."""
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or not depth:
        return None
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    found: set[str] | None = None
    if isinstance(names, list) and names and all(isinstance(one, str) and one in JSON_TYPES for one in names):
        found = set(names)
    elif "const" in schema or isinstance(schema.get("enum"), list):
        found = {_type_of(one) for one in (schema["enum"] if "enum" in schema else [schema["const"]])}
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list) and branches:
            parts = [_types(branch, root, depth - 1) for branch in branches]
            if all(part is not None for part in parts):
                together = {one for part in parts if part is not None for one in part}
                found = together if found is None else found & together or found
    if isinstance(branches := schema.get("allOf"), list):
        for branch in branches:
            part = _types(branch, root, depth - 1)
            found = part if found is None else found if part is None else found & part or found
    if schema.get("nullable") is True and found is not None:
        found = found | {"null"}
    return found


def resolve(schema: Any, root: Any) -> Any:
    """Follows references within a schema; a schema that refers elsewhere is returned as it is."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        target = root
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                return schema
        schema = target
    return schema


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def is_text(types: list[str] | None) -> bool:
    """Whether a value of these types is always a text."""
    return types == ["string"]


def is_never_text(types: list[str] | None) -> bool:
    """Whether a value of these types is always written as JSON."""
    return types is not None and "string" not in types


def value_json(text: str, types: list[str] | None) -> str:
    """The JSON text of a whole value between tags: what it is as JSON if that has one of these types, else a text."""
    stripped = text.strip()
    stripped = CONSTANTS.get(stripped, stripped)
    try:
        found = _type_of(json.loads(stripped, parse_constant=_reject))
    except (ValueError, RecursionError):
        found = "string"
    allowed = JSON_TYPES if types is None else types
    if found != "string" and (found in allowed or (found == "integer" and "number" in allowed)):
        return stripped
    return string_json(text)


def string_json(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A part of a text as a part of a JSON string."""
    return string_json(text)[1:-1]


def _reject(constant: str) -> None:
    raise ValueError(constant)


class JsonScan(NamedTuple):
    """Where a scan of a JSON text has come to."""

    depth: int = 0
    in_string: bool = False


# Characters that matter for the nesting of JSON. An escaped one is consumed with its backslash.
_STRUCTURAL = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def scan_json(text: str, scan: JsonScan) -> tuple[int, JsonScan]:
    """Scans the next part of a JSON object or list. Returns how much of the text belongs to it, and the new state; it
    is complete when `depth` is 0. A backslash at the end is left for the character that it escapes."""
    depth, in_string = scan
    at = 0
    for match in _STRUCTURAL.finditer(text):
        mark, at = match[0], match.end()
        if mark == '"':
            in_string = not in_string
        elif not in_string:
            depth += 1 if mark in "{[" else -1 if mark in "}]" else 0
        if depth == 0:
            return at, JsonScan(0, False)
    complete = len(text) - (in_string and text.endswith("\\", at))
    return complete, JsonScan(depth, in_string)


class PythonLiteral:
    """Converts a Python literal to JSON, piece by piece: lists, tuples, dictionaries, strings, numbers, constants."""

    __slots__ = ("_closing", "_quote", "ended")

    def __init__(self) -> None:
        self.ended = False  # the character that follows the value, a comma or bracket of what is around, has come
        self._quote = ""  # of the string that is open
        self._closing: list[str] = []  # brackets that are open

    def convert(self, text: str, over: bool = False) -> tuple[str, int]:
        """Returns JSON text and the number of characters that it took; the rest needs more text. `over`: no more comes.

        Raises ValueError for what is no such literal.
        """
        written: list[str] = []
        at = 0
        while at < len(text) and not self.ended:
            match = (_IN_STRING if self._quote else _OUTSIDE).match(text, at)
            if match is None:
                if over or not _INCOMPLETE.fullmatch(text, at):
                    raise ValueError(text[at:])
                break
            if match.lastgroup in ("word", "number") and match.end() == len(text) and not over:
                known = [*CONSTANTS, *CONSTANTS.values()]
                if len(match[0]) > MAX_NUMBER or (match.lastgroup == "word" and not _begins_any(match[0], known)):
                    raise ValueError(match[0])
                break  # it may go on
            piece = self._convert_piece(match)
            if self.ended:
                break
            written.append(piece)
            at = match.end()
        return "".join(written), at

    def _convert_piece(self, match: re.Match[str]) -> str:
        piece = match[0]
        if self._quote:
            if match.lastgroup == "escape":
                return escaped(_unescape(piece))
            if piece == self._quote:
                self._quote = ""
                return '"'
            return escaped(piece)
        if match.lastgroup == "quote":
            self._quote = piece
            return '"'
        if match.lastgroup == "word":
            if piece not in CONSTANTS and piece not in CONSTANTS.values():
                raise ValueError(piece)
            return CONSTANTS.get(piece, piece)
        if piece in _BRACKETS:
            self._closing.append(_BRACKETS[piece])
            return "{" if piece == "{" else "["
        if match.lastgroup == "mark":
            if self._closing and piece == self._closing[-1]:
                return "}" if self._closing.pop() == "}" else "]"
            if not self._closing and piece in ",)":
                self.ended = True
                return ""
            if not self._closing or piece not in ",:":
                raise ValueError(piece)
            return piece + " "
        return "" if match.lastgroup == "space" else piece


def _begins_any(text: str, words: list[str]) -> bool:
    return any(word.startswith(text) for word in words)


# Characters of a number; a grammar allows fewer.
MAX_NUMBER = 100
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_OUTSIDE = re.compile(
    r"""(?P<space>\s+)|(?P<quote>['"])|(?P<word>[A-Za-z_]\w*)|(?P<number>-?[0-9][0-9.eE+-]*)"""
    r"""|(?P<open>[\[({])|(?P<mark>[\])},:])""",
)
_IN_STRING = re.compile(
    r"""(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU]))|(?P<text>[^\\'"]+|['"])""", re.DOTALL
)
# What may become a piece: a sign without digits, an escape without its digits.
_INCOMPLETE = re.compile(r"-|\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}


def _unescape(piece: str) -> str:
    letter, digits = piece[1], piece[2:]
    if letter in "xuU":
        number = int(digits, 16)
        return "\ufffd" if number > 0x10FFFF or 0xD800 <= number < 0xE000 else chr(number)
    return _ESCAPES.get(letter, letter if letter in "'\"\\" else piece)
