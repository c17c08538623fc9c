"""Reads JSON schemas as draft 2020-12 says, checks them, and writes them as the grammar library takes them.

The result accepts nothing that the schema forbids, and less where the standard lets a model ramble: objects with
`properties` have no other names unless the schema asks for them, and numbers have a bounded count of digits.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

from tgi.tokenizer.closing import TooManySteps, close_objects
from tgi.tokenizer.one_of import exclusive

# Schemas in schemas, and all names of properties together: the time that a grammar takes grows with their square.
MOST_DEPTH = 64
MOST_PROPERTIES = 1000
# Whole numbers beyond it are not told apart where schemas are compiled.
MOST_EXACT = 2**53
# Numbers that have a bound lie within this one, too: the largest double that is an int64, of 19 digits. They have
# DECIMALS digits behind the point: with one more the library's arithmetic overflows.
MAX_WHOLE = 2**63 - 1024
DECIMALS = 8

TYPES = {"null", "boolean", "number", "integer", "string", "array", "object"}
# Draft 2020-12 has these, and nothing here can hold a text to them; or older drafts have them, with other meanings.
UNENFORCED = {
    "$dynamicRef", "$recursiveRef", "additionalItems", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "if", "not", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
}  # fmt: skip
# They mean something only beside one of those.
IDLE = {"then", "else", "minContains", "maxContains"}
# Schemas are read as draft 2020-12 whatever they say; the second is the library's own, and could undo a schema.
DROPPED = {"$schema", "x-guidance"} | IDLE
BOUNDS = (("minimum", "exclusiveMinimum", -MAX_WHOLE), ("maximum", "exclusiveMaximum", MAX_WHOLE))


# Sets a regular expression's flag x: white space and comments mean nothing.
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")


class SchemaError(Exception):
    """A schema that is none. The text says where and why."""


class Unenforceable(Exception):
    """A schema that asks for what no mask can hold a text to. The text names the keyword."""


class Kind(NamedTuple):
    """What the value of a keyword must be."""

    words: str
    fits: Callable[[Any], bool]


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_STRING = Kind("a string", lambda value: isinstance(value, str))
_NUMBER = Kind("a number", _is_number)
_COUNT = Kind("a whole number >= 0", _is_count)
_SCHEMA = Kind("a schema", _is_schema)
_SCHEMAS = Kind("a list of schemas", lambda value: isinstance(value, list) and all(map(_is_schema, value)))
_CHOICES = Kind("a list of schemas, and not empty", lambda value: _SCHEMAS.fits(value) and bool(value))
_NAMED = Kind("an object of schemas", lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())))
_NAMES = Kind("a list of strings", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value))

KINDS: dict[str, Kind] = {
    "type": Kind("the name of a type, or a list of such", _is_type),
    "enum": Kind("a list, and not empty", lambda value: isinstance(value, list) and bool(value)),
    "multipleOf": Kind("a number > 0", lambda value: _is_number(value) and value > 0),
    "required": _NAMES,
    **dict.fromkeys(("$ref", "$id", "$anchor", "pattern", "format"), _STRING),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("items", "additionalProperties"), _SCHEMA),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), _CHOICES),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _NAMED),
}


def enforceable(schema: Any) -> dict[str, Any]:
    """The schema as the library takes it. Raises SchemaError and Unenforceable."""
    if not _is_schema(schema):
        raise SchemaError("a schema is an object")
    read = _Reader().read_all(schema)
    return {} if read is True else {"anyOf": [False]} if read is False else read


class _Reader:
    """Reads one schema from its root down."""

    def __init__(self) -> None:
        self._properties = 0
        self._schemas: dict[str, Any] = {}  # by path, and by anchor
        self._references: list[tuple[str, str]] = []
        self._one_ofs: list[dict[str, Any]] = []
        self._numbers: list[dict[str, Any]] = []
        self._multiples = False  # whether there is a `multipleOf`
        self._resources = False  # whether a `$ref` may lead to a schema by its `$id`

    def read_all(self, root: Any) -> Any:
        read = self._read(root, "#", 0)
        for reference, path in self._references:
            if unquote(reference) not in self._schemas:
                raise Unenforceable(f"`$ref` leads to no schema that was read: {reference} (at {path})")
        for number in self._numbers:
            _bound(number, decimals=not self._multiples)
        self._replace_one_ofs(read)
        if isinstance(read, dict) and not self._resources:
            try:
                self._one_ofs += close_objects(read, self._schemas)
            except TooManySteps:
                raise Unenforceable("`allOf`, `anyOf`, `oneOf` and `$ref` join too many schemas") from None
            self._replace_one_ofs(read)  # closed branches may exclude each other where open ones do not
        return read

    def _replace_one_ofs(self, root: Any) -> None:
        """Each `oneOf` whose branches exclude each other becomes an `anyOf`."""
        for schema in self._one_ofs:
            if "oneOf" in schema and exclusive(schema["oneOf"], root):
                # What stands behind `$ref` is not looked at where schemas are compiled. `anyOf` may be there already.
                schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": schema.pop("oneOf")}]

    def _read(self, schema: Any, path: str, depth: int) -> Any:
        self._schemas[path] = schema
        if isinstance(schema, bool):
            return schema
        if depth > MOST_DEPTH:
            raise Unenforceable(f"schemas are nested deeper than {MOST_DEPTH} levels")
        read = {}
        for word, value in schema.items():
            if word in DROPPED or (word == "uniqueItems" and value is False):
                continue
            if word in UNENFORCED:
                raise Unenforceable(f"`{word}` cannot be enforced (at {path})")
            kind = KINDS.get(word)
            if kind is not None and not kind.fits(value):
                raise SchemaError(f"`{word}` must be {kind.words} (at {path})")
            read[word] = self._value(kind, value, f"{path}/{word}", depth + 1)
        self._check(read, path)
        # The library reads the keywords in their order, and those before a union without those behind it.
        read |= {word: read.pop(word) for word in ("patternProperties", "additionalProperties") if word in read}
        self._schemas[path] = read
        if "$anchor" in read:
            self._schemas[f"#{read['$anchor']}"] = read
        if "oneOf" in read:
            self._one_ofs.append(read)
        if _is_bounded(read):
            self._numbers.append(read)
        self._multiples |= "multipleOf" in read
        reference = read.get("$ref", "#")
        self._resources |= ("$id" in read and depth > 0) or not reference.startswith("#")
        if "$ref" in read and (reference == "#" or reference.startswith("#/")):
            self._references.append((reference, path))
        return read

    def _value(self, kind: Kind | None, value: Any, path: str, depth: int) -> Any:
        if kind is _SCHEMA:
            return self._read(value, path, depth)
        if kind is _CHOICES:
            return [self._read(one, f"{path}/{at}", depth) for at, one in enumerate(value)]
        if kind is _NAMED:
            return {name: self._read(one, f"{path}/{_escaped(name)}", depth) for name, one in value.items()}
        return int(value) if kind is _COUNT else value

    def _check(self, read: dict[str, Any], path: str) -> None:
        """What the library would take and not hold to."""
        for word in ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if word in read and not _exact(read[word]):
                raise Unenforceable(f"`{word}` cannot be enforced with numbers beyond 2^53 (at {path})")
        for word, regexes in (
            ("pattern", [read.get("pattern", "")]),
            ("patternProperties", read.get("patternProperties", ())),
        ):
            for fault in filter(None, map(regex_fault, regexes)):
                raise SchemaError(f"`{word}` must be a regular expression: {fault} (at {path})")
        self._properties += len(read.get("properties", ()))
        if self._properties > MOST_PROPERTIES:
            raise Unenforceable(f"`properties` has more than {MOST_PROPERTIES} names in all")
        # Names that `properties` does not have may be written twice, and then count once.
        if read.get("minProperties", 0) > len(set(read.get("required", ()))) + 1:
            raise Unenforceable(f"`minProperties` cannot be enforced beyond the required ones and one more (at {path})")


def regex_fault(regex: str) -> str:
    """What is wrong with a regular expression that the library would not notice; "" if nothing is.

    It writes the expression into a grammar first. Then a backslash at the end is lost, and a line feed becomes an
    escape, which does not end a comment.
    """
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        return "incomplete escape sequence, reached end of pattern prematurely"
    if "\n" in regex and _VERBOSE.search(regex):
        return "the flag `x` cannot be used together with line feeds"
    return ""


def _is_bounded(schema: dict[str, Any]) -> bool:
    """Whether its numbers are written without an exponent: whole ones, and those that a keyword speaks of."""
    words = {"multipleOf", *(word for lower, upper, _ in BOUNDS for word in (lower, upper))}
    types = schema.get("type", ())
    return bool(words & set(schema)) or ("integer" in types and "number" not in types)


def _bound(schema: dict[str, Any], decimals: bool) -> None:
    """Limits the digits of such numbers."""
    for inclusive, exclusive_word, limit in BOUNDS:
        if inclusive not in schema and exclusive_word not in schema:
            schema[inclusive] = limit
    given = [schema[word] for lower, upper, _ in BOUNDS for word in (lower, upper) if word in schema]
    if decimals and "number" in schema.get("type", "number") and all(round(end, DECIMALS) == end for end in given):
        schema["multipleOf"] = 10**-DECIMALS


def _escaped(name: str) -> str:
    """As one step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _exact(value: Any) -> bool:
    """Whether all numbers in it are small enough."""
    if isinstance(value, dict):
        return all(map(_exact, value.values()))
    if isinstance(value, list):
        return all(map(_exact, value))
    return not _is_number(value) or abs(value) <= MOST_EXACT
