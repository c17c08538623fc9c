"""Checks JSON schemas (draft 2020-12), and rewrites them so that llguidance enforces all of their keywords.

The result accepts nothing that the schema forbids. It is stricter than the standard in two points, where a model could
generate without end: objects with `properties` have no other names unless the schema allows them, and numbers have a
limited number of digits.

Three steps: _SchemaReader checks keywords and limits numbers; _ObjectCloser closes objects; `oneOf` becomes `anyOf`
where its branches exclude each other.

The schemas of tools are read leniently: a keyword that cannot be enforced is left out, so the result accepts more.
"""

import json
import math
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from tgi.tokenizer.structured_output.patterns import (
    FORMAT_PATTERNS,
    LIBRARY_FORMATS,
    json_safe_pattern,
    literal_names,
    pattern_error,
    regex_error,
)
from tgi.tokenizer.structured_output.repetition import MAX_REPETITION, regex_repetition, repetition_error

# Levels of nested schemas, and names of all `properties` together. The compile time of a grammar is quadratic in both.
MAX_DEPTH = 64
MAX_PROPERTIES = 1000
# The library compiles numbers as doubles, which cannot represent all larger integers. Larger bounds become the next
# double within them.
MAX_EXACT_INTEGER = 2**53
# Added as bounds to numbers that have some bound: the largest double that is an int64 (19 digits). Such numbers have at
# most DECIMALS digits after the point; with one more the library's arithmetic overflows.
MAX_INTEGER = 2**63 - 1024
DECIMALS = 8
# The library needs as many states as `multipleOf` has residues.
MAX_MULTIPLE = 65_535

TYPES = {"null", "boolean", "number", "integer", "string", "array", "object"}
# A grammar cannot enforce these keywords, except the forms that _current_keywords replaces.
UNENFORCED_KEYWORDS = {
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
}  # fmt: skip
# Without effect unless one of UNENFORCED_KEYWORDS is present, or `items` is a list.
INEFFECTIVE_KEYWORDS = {"then", "else", "minContains", "maxContains", "additionalItems"}
# Every schema is read as draft 2020-12, whatever `$schema` says. `x-guidance` are options of the library.
DROPPED_KEYWORDS = {"$schema", "x-guidance"} | INEFFECTIVE_KEYWORDS
# (inclusive keyword, exclusive keyword, default)
BOUNDS = (("minimum", "exclusiveMinimum", -MAX_INTEGER), ("maximum", "exclusiveMaximum", MAX_INTEGER))

# Without one of these the other keywords would accept less, not more.
_NEVER_LEFT_OUT = {"properties", "patternProperties", "prefixItems", "$defs", "definitions"}


class SchemaError(Exception):
    """Not a valid JSON schema. The message says where and why."""


class UnenforceableSchema(Exception):
    """A valid schema that a grammar cannot enforce. The message names the keyword."""


class KeywordType(NamedTuple):
    """The type of a keyword's value."""

    description: str
    matches: Callable[[Any], bool]


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_STRING = KeywordType("a string", lambda value: isinstance(value, str))
_NUMBER = KeywordType("a number", _is_number)
_COUNT = KeywordType("a whole number >= 0", _is_count)
_SCHEMA = KeywordType("a schema", _is_schema)
_SCHEMA_LIST = KeywordType(
    "a list of schemas, and not empty",
    lambda value: isinstance(value, list) and all(map(_is_schema, value)) and bool(value),
)
_SCHEMA_MAP = KeywordType(
    "an object of schemas", lambda value: isinstance(value, dict) and all(map(_is_schema, value.values()))
)
_STRING_LIST = KeywordType(
    "a list of strings", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value)
)

KEYWORD_TYPES: dict[str, KeywordType] = {
    "type": KeywordType("the name of a type, or a list of such", _is_type),
    "enum": KeywordType("a list, and not empty", lambda value: isinstance(value, list) and bool(value)),
    "multipleOf": KeywordType("a number > 0", lambda value: _is_number(value) and value > 0),
    "required": _STRING_LIST,
    **dict.fromkeys(("$ref", "$id", "$anchor", "pattern", "format"), _STRING),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("items", "additionalProperties"), _SCHEMA),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), _SCHEMA_LIST),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _SCHEMA_MAP),
}


class EnforceableSchema(NamedTuple):
    """A schema that the library enforces, and what of the original it leaves out."""

    schema: dict[str, Any]
    not_enforced: list[str]  # keywords of the original, as JSON pointers in URI fragments: "#/properties/a/format"


def enforceable_schema(schema: Any, lenient: bool = False, ignored: Container[str] = ()) -> EnforceableSchema:
    """Returns an equivalent or stricter schema that the library enforces, except `format`s that it does not know.

    With `lenient` other keywords that cannot be enforced, or whose values are invalid, are left out as well, and so are
    those in `ignored`. Raises SchemaError, UnenforceableSchema.
    """
    if not _is_schema(schema):
        raise SchemaError("a schema is an object")
    reader = _SchemaReader(schema, lenient, ignored)
    read = reader.read_root()
    if isinstance(read, bool):
        read = {} if read else {"anyOf": [False]}
    return EnforceableSchema(read, reader.not_enforced)


class _SchemaReader:
    """Checks and copies one schema, from its root down."""

    def __init__(self, root: Any, lenient: bool, ignored: Container[str]) -> None:
        self.not_enforced: list[str] = []
        self._root = root
        self._lenient = lenient
        self._ignored = ignored
        self._property_count = 0
        self._schemas: dict[str, Any] = {}  # copies by JSON pointer ("#/…"), and by anchor
        self._references: list[tuple[str, str]] = []  # (`$ref`, JSON pointer of the schema that has it)
        self._one_ofs: list[dict[str, Any]] = []  # schemas with `oneOf`
        self._bounded_numbers: list[dict[str, Any]] = []
        self._has_multiple_of = False
        self._has_resources = False  # a `$ref` may lead to a schema by its `$id`

    def read_root(self) -> Any:
        read = self._read(self._root, "#", 0)
        for reference, path in self._references:
            if unquote(reference) not in self._schemas:
                text = f"`$ref` leads to no schema that was read: {reference} (at {path})"
                self._leave_out(self._schemas[path], "$ref", path, UnenforceableSchema(text))
        for number in self._bounded_numbers:
            _limit_digits(number, decimals=not self._has_multiple_of)
        self._replace_one_ofs(read)
        if isinstance(read, dict) and not self._has_resources:
            try:
                self._one_ofs += close_objects(read, self._schemas)
            except SchemaTooComplex:
                raise UnenforceableSchema("`allOf`, `anyOf`, `oneOf` and `$ref` join too many schemas") from None
            self._replace_one_ofs(read)  # closed branches may exclude each other where open ones do not
        return read

    def _leave_out(self, schema: dict[str, Any], keyword: str, path: str, error: Exception) -> None:
        """Leaves a keyword out of a lenient schema. Raises the error otherwise."""
        if not self._lenient or keyword in _NEVER_LEFT_OUT:
            raise error
        schema.pop(keyword, None)
        if keyword == "additionalProperties":
            schema[keyword] = True
        self._report(path, keyword)

    def _report(self, path: str, keyword: str) -> None:
        pointer = f"{path}/{keyword}".removeprefix("#")
        self.not_enforced.append("#" + quote(pointer, safe="/~$:@!*()+;=&?", errors="replace"))

    def _replace_one_ofs(self, root: Any) -> None:
        """Replaces each `oneOf` whose branches exclude each other by an `anyOf`."""
        for schema in self._one_ofs:
            if "oneOf" in schema and branches_exclude_each_other(schema["oneOf"], root):
                # Within `allOf`: the schema may have an `anyOf` already, and the library ignores one after `$ref`.
                schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": schema.pop("oneOf")}]

    def _read(self, schema: Any, path: str, depth: int) -> Any:
        schema = self._without_ignored(_current_keywords(schema, self._root), path)
        self._schemas[path] = schema
        if isinstance(schema, bool):
            return schema
        if depth > MAX_DEPTH:
            raise UnenforceableSchema(f"schemas are nested deeper than {MAX_DEPTH} levels")
        read: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in DROPPED_KEYWORDS or (keyword == "uniqueItems" and value is False):
                continue
            keyword_type = KEYWORD_TYPES.get(keyword)
            if keyword in UNENFORCED_KEYWORDS:
                text = f"`{keyword}` cannot be enforced (at {path})"
                self._leave_out(read, keyword, path, UnenforceableSchema(text))
            elif keyword_type is not None and not keyword_type.matches(value):
                text = f"`{keyword}` must be {keyword_type.description} (at {path})"
                self._leave_out(read, keyword, path, SchemaError(text))
            else:
                read[keyword] = self._read_value(keyword_type, value, f"{path}/{keyword}", depth + 1)
        self._check_patterns(read, path)
        self._check_limits(read, path)
        # The library processes keywords in their order, and would apply these two before a union of later keywords.
        read |= {word: read.pop(word) for word in ("patternProperties", "additionalProperties") if word in read}
        self._schemas[path] = read
        if "$anchor" in read:
            self._schemas[f"#{read['$anchor']}"] = read
        if "oneOf" in read:
            self._one_ofs.append(read)
        if _is_bounded_number(read):
            self._bounded_numbers.append(read)
        self._has_multiple_of |= "multipleOf" in read
        if read.get("$ref", "").startswith("#/"):
            read["$ref"] = "#" + quote(unquote(read["$ref"][1:]), errors="replace")  # the library reads URIs only
        reference = read.get("$ref", "#")
        self._has_resources |= ("$id" in read and depth > 0) or not reference.startswith("#")
        if "$ref" in read and (reference == "#" or reference.startswith("#/")):
            self._references.append((reference, path))
        return read

    def _without_ignored(self, schema: Any, path: str) -> Any:
        """Leaves the ignored keywords out, so that the schema accepts more."""
        if isinstance(schema, bool) or not (ignored := [word for word in schema if word in self._ignored]):
            return schema
        kept = {word: value for word, value in schema.items() if word not in ignored}
        for word in ignored:
            self._report(path, word)
            if word == "oneOf":
                kept["allOf"] = [*kept.get("allOf", ()), {"anyOf": schema[word]}]
            elif word == "patternProperties":
                kept["additionalProperties"] = True
        return kept

    def _read_value(self, keyword_type: KeywordType | None, value: Any, path: str, depth: int) -> Any:
        if keyword_type is _SCHEMA:
            return self._read(value, path, depth)
        if keyword_type is _SCHEMA_LIST:
            return [self._read(one, f"{path}/{at}", depth) for at, one in enumerate(value)]
        if keyword_type is _SCHEMA_MAP:
            return {name: self._read(one, f"{path}/{_pointer_token(name)}", depth) for name, one in value.items()}
        return int(value) if keyword_type is _COUNT else value

    def _check_patterns(self, read: dict[str, Any], path: str) -> None:
        """Rejects regular expressions that the library would misread, and replaces those that it would not enforce."""
        for word in ("pattern", "patternProperties"):
            for regex in [read[word]] if word == "pattern" and word in read else [*read.get(word, ())]:
                if text := regex_error(regex):
                    text = f"`{word}` must be a regular expression: {text} (at {path})"
                    self._leave_out_pattern(read, word, regex, path, SchemaError(text))
                elif text := repetition_error(regex_repetition(regex)) or pattern_error(regex):
                    text = f"`{word}` cannot be enforced: {text} (at {path})"
                    self._leave_out_pattern(read, word, regex, path, UnenforceableSchema(text))
        if "pattern" in read:
            read["pattern"] = json_safe_pattern(read["pattern"])
        if "patternProperties" in read:
            _assign_patterns(read)
            read["patternProperties"] = {
                json_safe_pattern(name): value for name, value in read["patternProperties"].items()
            }
        if (name := read.get("format")) is not None and name not in LIBRARY_FORMATS:
            del read["format"]
            if name not in FORMAT_PATTERNS:
                self._report(path, "format")
            elif "pattern" not in read:
                read["pattern"] = FORMAT_PATTERNS[name]
            else:
                read["allOf"] = [*read.get("allOf", ()), {"pattern": FORMAT_PATTERNS[name]}]

    def _leave_out_pattern(
        self, read: dict[str, Any], word: str, regex: str, path: str, error: SchemaError | UnenforceableSchema
    ) -> None:
        if word == "pattern" or not self._lenient:
            self._leave_out(read, word, path, error)
            return
        del read[word][regex]
        read["additionalProperties"] = True  # what the pattern admits must stay possible
        self._report(f"{path}/{word}", _pointer_token(regex))

    def _check_limits(self, read: dict[str, Any], path: str) -> None:
        """Rejects what the library would accept without enforcing it."""
        for lower, upper, limit in BOUNDS:
            for word in (lower, upper):
                if word in read and abs(read[word]) > MAX_EXACT_INTEGER:
                    self._limit_bound(read, word, limit, path)
        for word in ("const", "enum", "multipleOf"):
            if word in read and not _has_exact_numbers(read[word]):
                text = f"`{word}` cannot be enforced with numbers beyond 2^53 (at {path})"
                self._leave_out(read, word, path, UnenforceableSchema(text))
        for word in ("minItems", "minLength"):
            if read.get(word, 0) > MAX_REPETITION:
                text = f"`{word}` cannot be enforced beyond {MAX_REPETITION}. Given: {read[word]} (at {path})"
                self._leave_out(read, word, path, UnenforceableSchema(text))
        for word in {"maxItems", "maxLength", "maxProperties"} & read.keys():
            read[word] = min(read[word], MAX_REPETITION)
        if read.get("multipleOf", 1) > MAX_MULTIPLE:
            text = f"`multipleOf` cannot be enforced beyond {MAX_MULTIPLE}. Given: {read['multipleOf']} (at {path})"
            self._leave_out(read, "multipleOf", path, UnenforceableSchema(text))
        properties = read.get("properties", {})
        if self._lenient and any(properties.get(name) is False for name in read.get("required", ())):
            read["required"] = [name for name in read["required"] if properties.get(name) is not False]
            self._report(path, "required")
        self._property_count += len(properties)
        if self._property_count > MAX_PROPERTIES:
            raise UnenforceableSchema(f"`properties` has more than {MAX_PROPERTIES} names in all")
        # A text may repeat a name that is not in `properties`; a client's JSON parser counts it once.
        if read.get("minProperties", 0) > len(set(read.get("required", ()))) + 1:
            text = f"`minProperties` cannot be enforced beyond the required ones and one more (at {path})"
            self._leave_out(read, "minProperties", path, UnenforceableSchema(text))

    def _limit_bound(self, read: dict[str, Any], word: str, limit: int, path: str) -> None:
        """Replaces a bound beyond 2^53 by the next double within it and within `limit`, the end of the other side."""
        sign = -1 if limit < 0 else 1  # -1: a lower bound
        bound = _double_up_to(sign * read[word])
        if bound < -MAX_INTEGER:
            text = f"`{word}` cannot be enforced beyond {-limit} (at {path})"
            self._leave_out(read, word, path, UnenforceableSchema(text))
        else:
            read[word] = sign * min(bound, MAX_INTEGER)


def _double_up_to(number: float) -> int:
    """The largest double that is at most this number, which is beyond 2^53; that of the longest numbers if larger."""
    limited = min(max(number, -(2 * MAX_INTEGER)), 2 * MAX_INTEGER)
    double = float(limited)
    return int(math.nextafter(double, -math.inf) if double > limited else double)


# Older drafts, and forms of keywords that others can express


def _current_keywords(schema: Any, root: Any) -> Any:
    """Writes a schema with the keywords that are enforced, where older drafts and some forms of UNENFORCED_KEYWORDS
    have an equivalent. Null, as some serializers write it, means absent."""
    if isinstance(schema, bool) or not isinstance(schema, dict):
        return schema
    known = KEYWORD_TYPES.keys() | UNENFORCED_KEYWORDS
    current = {word: value for word, value in schema.items() if value is not None or word not in known}
    for inclusive, exclusive, _ in BOUNDS:
        if isinstance(current.get(exclusive), bool) and current.pop(exclusive) and inclusive in current:  # draft 4
            current[exclusive] = current.pop(inclusive)
    if isinstance(current.get("items"), list):  # up to draft 2019-09
        if tuple_items := current.pop("items"):
            current["prefixItems"] = tuple_items
        current["items"] = current.get("additionalItems", True)
    for word in ("properties", "patternProperties", "$defs", "definitions"):
        if current.get(word) == []:  # what PHP writes for an empty object
            current[word] = {}
    excluded = current.get("not")
    if excluded is True or excluded == {}:
        return False
    if excluded is False:
        del current["not"]
    if "propertyNames" in current:
        _replace_property_names(current, root)
    return current


def _replace_property_names(schema: dict[str, Any], root: Any) -> None:
    """Replaces `propertyNames` by other keywords, in place, where they say the same."""
    names = _resolve_reference(schema["propertyNames"], root)
    if names is True:
        names = {}
    if not isinstance(names, dict):
        return
    words = (KEYWORD_TYPES.keys() | UNENFORCED_KEYWORDS | {"const"}) & names.keys()
    if names.get("type", "string") != "string":
        return
    words -= {"type"}
    values = schema.get("additionalProperties", True)
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if not words:
        replaced = {}
    elif schema.keys() & {"properties", "patternProperties"}:
        return
    elif words <= {"enum", "const"} and isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        replaced = {"properties": dict.fromkeys(listed, values), "additionalProperties": False}
    elif words == {"pattern"} and isinstance(names["pattern"], str):
        replaced = {"patternProperties": {names["pattern"]: values}, "additionalProperties": False}
    elif words <= {"minLength", "maxLength"} and all(_is_count(names[word]) for word in words):
        least, most = int(names.get("minLength", 0)), names.get("maxLength")
        counts = f"{least},{'' if most is None else int(most)}"
        replaced = {"patternProperties": {f"^(?s:.{{{counts}}})$": values}, "additionalProperties": False}
    else:
        return
    del schema["propertyNames"]
    schema |= replaced


def _is_bounded_number(schema: dict[str, Any]) -> bool:
    """Whether the library writes the numbers of a schema without exponent: integers, and numbers with some bound."""
    words = {"multipleOf", *(word for lower, upper, _ in BOUNDS for word in (lower, upper))}
    types = schema.get("type", ())
    return bool(words & set(schema)) or ("integer" in types and "number" not in types)


def _limit_digits(schema: dict[str, Any], decimals: bool) -> None:
    """Adds the missing bounds to a bounded number and, with `decimals`, a limit on its decimals."""
    for inclusive, exclusive, limit in BOUNDS:
        if inclusive not in schema and exclusive not in schema:
            schema[inclusive] = limit
    bounds = [schema[word] for lower, upper, _ in BOUNDS for word in (lower, upper) if word in schema]
    if decimals and "number" in schema.get("type", "number") and all(round(end, DECIMALS) == end for end in bounds):
        schema["multipleOf"] = 10**-DECIMALS


def _pointer_token(name: str) -> str:
    """Escapes a name as one reference token of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _assign_patterns(read: dict[str, Any]) -> None:
    """Adds patterns that admit names of `properties` alone, such as `^name$`, to the schemas of these: the library
    finds no text for what is left of them."""
    properties = read.get("properties", {})
    for regex in [*read["patternProperties"]]:
        names = literal_names(regex)
        if names is not None and properties.keys() >= set(names):
            schema = read["patternProperties"].pop(regex)
            read["properties"] = properties = properties | {
                name: {"allOf": [properties[name], schema]} for name in names
            }


def _has_exact_numbers(value: Any) -> bool:
    """Whether all numbers in a value are at most MAX_EXACT_INTEGER."""
    if isinstance(value, dict):
        return all(map(_has_exact_numbers, value.values()))
    if isinstance(value, list):
        return all(map(_has_exact_numbers, value))
    return not _is_number(value) or abs(value) <= MAX_EXACT_INTEGER


# Closing of objects: an object with `properties` admits no other names unless `additionalProperties` allows them.
#
# Several schemas may apply to one object: `allOf`, `anyOf`, `oneOf` and `$ref` apply further schemas in place. Closing
# each of them separately would forbid names that another one requires. So the object may have all names that any of
# them knows, except that a branch of `anyOf` or `oneOf` does not admit names that only other branches know. It may
# have any name if one of them has `additionalProperties` other than false. A definition that is part of such an object
# is replaced by a copy that is not closed.

# Schemas visited plus names copied from one schema to another: 0.4 s at most.
MAX_CLOSING_STEPS = 200_000

UNIONS = ("anyOf", "oneOf")
IN_PLACE = ("allOf", *UNIONS)


class SchemaTooComplex(Exception):
    """Closing the objects of a schema takes more than MAX_CLOSING_STEPS."""


class KnownNames(NamedTuple):
    """The property names that a set of schemas defines for one object. Names are dict keys, to keep their order."""

    names: dict[str, bool] = {}
    patterns: dict[str, bool] = {}
    has_properties: bool = False  # some schema has `properties`
    open: bool = False  # some schema has `additionalProperties` other than false


NO_NAMES = KnownNames()


def close_objects(root: dict[str, Any], schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """Closes all objects in place.

    `schemas` are the schemas within `root` by the references that lead to them. Returns the new copies of definitions
    that have a `oneOf`. Raises SchemaTooComplex.
    """
    closer = _ObjectCloser(root, schemas)
    closer.close(root, NO_NAMES)
    closer.close_inner(root)
    for schema, changes in closer.changes:
        schema |= changes
    if closer.copies:
        root["$defs"] = root.get("$defs", {}) | closer.copies
    return closer.one_ofs


class _ObjectCloser:
    """Collects the changes. They are applied when all are known, since copies are made of the original schemas."""

    def __init__(self, root: dict[str, Any], schemas: dict[str, Any]) -> None:
        self.changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.copies: dict[str, Any] = {}  # by name in `$defs`
        self.one_ofs: list[dict[str, Any]] = []
        self._used_names = root.get("$defs", {})
        self._schemas = schemas
        self._copy_references: dict[str, str] = {}  # by the reference to the original
        self._steps = 0

    def close_inner(self, schema: Any) -> None:
        """Closes the objects within the values that a schema describes."""
        for keyword, inner in _subschemas(schema):
            if keyword not in IN_PLACE:
                self.close(inner, NO_NAMES)
            self.close_inner(inner)

    def close(self, schema: Any, others: KnownNames, closed: bool = False) -> None:
        """Closes an object.

        `others` are the names known to the other schemas that apply to it. With `closed` one of these closes it
        already, and only branches remain to be closed.
        """
        if not isinstance(schema, dict):
            return
        own = _own_names(schema)
        target = self._target_names(schema, set())
        parts = [self._known_names(part) for part in schema.get("allOf", ())]
        unions = {word: self._join(map(self._known_names, schema[word])) for word in UNIONS if word in schema}
        every = self._join([own, target, *parts, *unions.values(), others])
        alone = sum(known != NO_NAMES for known in (own, target, *parts, *unions.values(), others)) == 1
        has_properties = own.has_properties or (not alone and any(known.has_properties for known in (target, *parts)))
        changes: dict[str, Any] = {}
        if has_properties and not closed and not every.open and "additionalProperties" not in schema:
            for word, names in ("properties", every.names), ("patternProperties", every.patterns):
                if names:
                    changes[word] = names | schema.get(word, {})
            changes["additionalProperties"] = False
        if target != NO_NAMES and not alone:
            changes["$ref"] = self._reference_to_open_copy(schema["$ref"])
        if changes:
            self.changes.append((schema, changes))
        for at, part in enumerate(schema.get("allOf", ())):
            siblings = self._join([others, own, target, *parts[:at], *parts[at + 1 :], *unions.values()])
            self.close(part, siblings, closed or has_properties)
        for union in unions:
            siblings = self._join(
                [others, own, target, *parts, *(known for word, known in unions.items() if word != union)]
            )
            for branch in schema[union]:
                self.close(branch, siblings)

    def _known_names(self, schema: Any, seen: set[str] | None = None) -> KnownNames:
        """The names that a schema knows, with those of all schemas that it applies in place."""
        if not isinstance(schema, dict):
            return NO_NAMES
        seen = set() if seen is None else seen
        inner = (self._known_names(one, seen) for word in IN_PLACE for one in schema.get(word, ()))
        return self._join([_own_names(schema), self._target_names(schema, seen), *inner])

    def _target_names(self, schema: dict[str, Any], seen: set[str]) -> KnownNames:
        """The names that the target of `$ref` knows, unless the reference is in `seen`."""
        reference = unquote(schema.get("$ref", ""))
        if not reference or reference in seen:
            return NO_NAMES
        seen.add(reference)
        if reference not in self._schemas:
            return KnownNames(open=True)
        return self._known_names(self._schemas[reference], seen)

    def _join(self, known: Iterable[KnownNames]) -> KnownNames:
        names: dict[str, bool] = {}
        patterns: dict[str, bool] = {}
        has_properties = open = False
        for one in known:
            self._steps += 1 + len(one.names) + len(one.patterns)
            if self._steps > MAX_CLOSING_STEPS:
                raise SchemaTooComplex
            names |= one.names
            patterns |= one.patterns
            has_properties |= one.has_properties
            open |= one.open
        return KnownNames(names, patterns, has_properties, open)

    def _reference_to_open_copy(self, reference: str) -> str:
        """Copies the target of a reference, so that the copy stays open. Returns the reference to the copy."""
        if reference not in self._copy_references:
            original = self._schemas.get(unquote(reference))
            if not self._known_names(original).has_properties:
                return reference
            names = (f"open-{number}" for number in count(len(self.copies)))
            name = next(name for name in names if name not in self._used_names)
            self.copies[name] = {}  # reserves the name: the original may refer to itself
            self._copy_references[reference] = f"#/$defs/{name}"
            self.copies[name] = self._copy(original)
        return self._copy_references[reference]

    def _copy(self, schema: Any) -> Any:
        """Copies a schema with those that it applies in place; schemas of its values are shared."""
        if not isinstance(schema, dict):
            return schema
        copy = {word: value for word, value in schema.items() if word not in ("$id", "$anchor", "$defs", "definitions")}
        copy |= {word: [self._copy(one) for one in schema[word]] for word in IN_PLACE if word in schema}
        if "$ref" in schema:
            copy["$ref"] = self._reference_to_open_copy(schema["$ref"])
        if "oneOf" in copy:
            self.one_ofs.append(copy)
        return copy


def _own_names(schema: dict[str, Any]) -> KnownNames:
    """The names in the keywords of one schema."""
    names = dict.fromkeys([*schema.get("properties", ()), *schema.get("required", ())], True)
    for value in [schema.get("const"), *schema.get("enum", ())]:
        names |= dict.fromkeys(value, True) if isinstance(value, dict) else {}
    return KnownNames(
        names=names,
        patterns=dict.fromkeys(schema.get("patternProperties", ()), True),
        has_properties="properties" in schema,
        open=schema.get("additionalProperties", False) is not False,
    )


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields (keyword, subschema) for all direct subschemas."""
    for word, value in schema.items() if isinstance(schema, dict) else ():
        if word in ("items", "additionalProperties"):
            yield word, value
        elif word in ("prefixItems", *IN_PLACE):
            yield from ((word, one) for one in value)
        elif word in ("properties", "patternProperties", "$defs", "definitions"):
            yield from ((word, one) for one in value.values())


# Exclusive `oneOf`: if no value can match two branches, `anyOf` means the same

# Each branch is compared with each other one.
MAX_COMPARED_BRANCHES = 100
# Length of a chain of `$ref`.
MAX_FOLLOWED_REFERENCES = 16

_ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


def branches_exclude_each_other(branches: list[Any], root: Any) -> bool:
    """Whether it is proven that no value can match two of the branches.

    The proof uses types, required properties with fixed values, and required properties that the other branch does not
    admit. It follows `$ref` within `root`.
    """
    if len(branches) > MAX_COMPARED_BRANCHES:
        return False
    resolved = [_resolve_reference(branch, root) for branch in branches]
    return all(_disjoint(one, other, root) for at, one in enumerate(resolved) for other in resolved[:at])


def _disjoint(one: Any, other: Any, root: Any) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    common_types = _value_types(one) & _value_types(other)
    if not common_types:
        return True
    if _disjoint_values(one, other):
        return True
    if common_types != {"object"}:
        return False
    if any(_forbids_property(b, name) for a, b in ((one, other), (other, one)) for name in a.get("required", ())):
        return True
    return any(
        _disjoint_values(
            _resolve_reference(one.get("properties", {}).get(name), root),
            _resolve_reference(other.get("properties", {}).get(name), root),
        )
        for name in {*one.get("required", ()), *other.get("required", ())}
    )


def _disjoint_values(one: Any, other: Any) -> bool:
    """Whether both schemas list their values, and none in common."""
    values = _listed_values(one)
    other_values = _listed_values(other)
    return values is not None and other_values is not None and not values & other_values


def _forbids_property(schema: dict[str, Any], name: str) -> bool:
    """Whether objects of this schema cannot have a property of this name."""
    if name in schema.get("properties", ()) or "patternProperties" in schema:
        return False
    return schema.get("additionalProperties") is False


def _value_types(schema: dict[str, Any]) -> frozenset[str]:
    """The types that values of a schema can have, with "number" for "integer"."""
    given = schema.get("type", _ALL_TYPES)
    names = {given} if isinstance(given, str) else set(given)
    return frozenset("number" if name == "integer" else name for name in names)


def _listed_values(schema: Any) -> set[str] | None:
    """The values of `const` or `enum` as JSON; None if there are none.

    None also if one is a number, an array or an object: numbers that are written differently may be equal.
    """
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None or not all(isinstance(value, str | bool | None) for value in values):
        return None
    return {json.dumps(value) for value in values}


def _resolve_reference(schema: Any, root: Any) -> Any:
    """Follows `$ref` from schemas that consist of it only. Returns None if that is not possible."""
    for _ in range(MAX_FOLLOWED_REFERENCES):
        if not (isinstance(schema, dict) and "$ref" in schema):
            return schema
        reference = schema["$ref"]
        if set(schema) - {"$ref", "title", "description", "default"} or not str(reference).startswith("#/"):
            return None
        found = root
        for step in unquote(reference[2:]).split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and "$id" not in found and name in found:
                found = found[name]
            else:
                return None
        schema = found
    return None
