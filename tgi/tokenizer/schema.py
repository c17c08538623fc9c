"""What of JSON Schema can be enforced: a schema is read as draft 2020-12 says, checked, and put into the words that the
grammar library takes. It then accepts nothing that the schema forbids.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

from tgi.tokenizer.one_of import exclusive

# Schemas in schemas, and all names of properties together: the time that a grammar takes grows with their square.
MOST_DEPTH = 64
MOST_PROPERTIES = 1000
# Whole numbers beyond it are not told apart where schemas are compiled.
MOST_EXACT = 2**53

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
        self._paths: set[str] = set()
        self._references: list[tuple[str, str]] = []
        self._one_ofs: list[dict[str, Any]] = []

    def read_all(self, root: Any) -> Any:
        read = self._read(root, "#", 0)
        for reference, path in self._references:
            if unquote(reference) not in self._paths:
                raise Unenforceable(f"`$ref` leads to no schema that was read: {reference} (at {path})")
        for schema in self._one_ofs:
            if exclusive(schema["oneOf"], read):
                # What stands behind `$ref` is not looked at where schemas are compiled. `anyOf` may be there already.
                schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": schema.pop("oneOf")}]
        return read

    def _read(self, schema: Any, path: str, depth: int) -> Any:
        self._paths.add(path)
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
        if "oneOf" in read:
            self._one_ofs.append(read)
        if (reference := read.get("$ref", "")) == "#" or reference.startswith("#/"):
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
        self._properties += len(read.get("properties", ()))
        if self._properties > MOST_PROPERTIES:
            raise Unenforceable(f"`properties` has more than {MOST_PROPERTIES} names in all")
        # Names that `properties` does not have may be written twice, and then count once.
        if read.get("minProperties", 0) > len(set(read.get("required", ()))) + 1:
            raise Unenforceable(f"`minProperties` cannot be enforced beyond the required ones and one more (at {path})")


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
