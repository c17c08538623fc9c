"""Writes JSON schemas in Lark, where the number of digits can be limited.

llguidance compiles JSON schemas itself, but without a limit on digits, and a small model may not stop writing 1/3. So
objects, arrays, unions and references are written as rules here, down to the numbers. Strings with a pattern, integers
and other leaves stay `%json`, and so do schemas that must be merged (`allOf`, keywords next to `anyOf`): in these the
digits are not limited. If one of them contains a `$ref`, the whole schema is left to the library.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

# Of the integer part, and of the fraction. An exponent has at most two digits, so that clients can parse the number.
MAX_DIGITS = 20

_HEAD = rf"""%llguidance {{"ignore_once": true}}
%ignore / /
NUMBER: /-?(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})(\.[0-9]{{1,{MAX_DIGITS}}})?([eE][+-]?[0-9]{{1,2}})?/
STRING: /"([^"\\\x00-\x1F\x7F]|\\(["\\bfnrt]|u00[01][0-9a-fA-F]|u007[fF]))*"/
any: "null" | "true" | "false" | NUMBER | STRING | "[" (any ("," any)*)? "]" | "{{" (pair ("," pair)*)? "}}"
pair: STRING ":" any
"""
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_VALUES = {"enum", "const"}
_STRING = {"minLength", "maxLength", "pattern", "format"}
_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_ARRAY = {"items", "prefixItems", "minItems", "maxItems"}
_OBJECT = {"properties", "required", "additionalProperties"}
_MERGED = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties"}
_KEYWORDS = {"type"} | _VALUES | _STRING | _NUMBER | _ARRAY | _OBJECT | _MERGED


class NotExpressible(Exception):
    """The schema cannot be written as rules, and is left to the library."""


def schema_to_lark(root: dict[str, Any], options: dict[str, Any]) -> str:
    """Writes a schema (from `enforceable_schema`) in Lark, with these options for `%json`.

    Returns "" if that is not possible, or if the schema has no numbers to limit.
    """
    writer = _LarkWriter(root, options)
    try:
        text = writer.write()
    except NotExpressible:
        return ""
    return text if writer.limits_digits else ""


def any_object_lark(excluded: Iterable[str]) -> str:
    """Any object whose first name is none of these, which are written as JSON strings."""
    key = " & ".join(["STRING", *(f"~{json.dumps(name)}" for name in excluded)])
    return _HEAD + f'start: "{{" (first ("," pair)*)? "}}"\nfirst: FIRST_KEY ":" any\nFIRST_KEY: {key}\n'


class _LarkWriter:
    def __init__(self, root: dict[str, Any], options: dict[str, Any]) -> None:
        self.limits_digits = False  # whether there is a number whose digits the library would not limit
        self._root = root
        self._options = options
        self._names: dict[str, str] = {}  # of rules and terminals, by body
        self._references: dict[str, str] = {}  # names of rules, by `$ref`

    def write(self) -> str:
        lines = [f"start: {self._value(self._root)}"]
        written = 0
        while written < len(self._references):  # writing a target may add others
            reference, name = [*self._references.items()][written]
            lines.append(f"{name}: {self._value(self._resolve(reference))}")
            written += 1
        return _HEAD + "\n".join([*lines, *(f"{name}: {body}" for body, name in self._names.items())]) + "\n"

    def _value(self, schema: Any) -> str:
        if schema is True:
            schema = {}
        if schema is False or ("$id" in schema and schema is not self._root):
            raise NotExpressible
        keywords = _KEYWORDS & schema.keys()
        if not keywords:
            self.limits_digits = True
            return "any"
        if keywords == {"$ref"}:
            return self._references.setdefault(schema["$ref"], f"d{len(self._references)}")
        if keywords == {"anyOf"} or (keywords == {"allOf"} and len(schema["allOf"]) == 1):
            (word,) = keywords
            return self._rule(" | ".join(map(self._value, schema[word])))
        if keywords & (_MERGED | _VALUES):
            return self._json(schema)
        types = schema.get("type", _TYPES)
        return self._rule(
            " | ".join(self._typed_value(schema, name) for name in ([types] if isinstance(types, str) else types))
        )

    def _typed_value(self, schema: dict[str, Any], name: str) -> str:
        match name:
            case "null":
                return '"null"'
            case "boolean":
                return '"true" | "false"'
            case "string" if not _STRING & schema.keys():
                return "STRING"
            case "string":
                return self._json({"type": name} | {word: schema[word] for word in schema if word in _STRING})
            case "number" if not _NUMBER & schema.keys():
                self.limits_digits = True
                return "NUMBER"
            case "number" | "integer":
                return self._json({"type": name} | {word: schema[word] for word in schema if word in _NUMBER})
            case "array":
                return self._array(schema)
            case _:
                return self._object(schema)

    def _array(self, schema: dict[str, Any]) -> str:
        min_items, max_items = schema.get("minItems", 0), schema.get("maxItems")
        if prefix := schema.get("prefixItems"):
            if not len(prefix) == min_items == max_items:
                raise NotExpressible
            items = ' "," '.join(map(self._value, prefix))
            return f'"[" {items} "]"'
        if max_items is not None and (min_items > max_items or max_items == 0):
            raise NotExpressible
        item = self._value(schema.get("items", True))
        items = item
        if max_items != 1:
            items += f' ("," {item}){{{max(0, min_items - 1)},{"" if max_items is None else max_items - 1}}}'
        return f'"[" {items} "]"' if min_items else f'"[" ({items})? "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        properties, required = schema.get("properties", {}), dict.fromkeys(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        fields = []
        for name in properties | required:
            value = properties.get(name, others)
            if value is not False:
                fields.append((f'{_quoted(name)} ":" {self._value(value)}', name in required))
            elif name in required:
                raise NotExpressible
        if others is not False:
            key = "STRING"
            if taken := " | ".join(map(_quoted, properties | required)):
                key = self._rule(f"STRING & ~({taken})", "K")
            pair = self._rule(f'{key} ":" {self._value(others)}')
            fields.append((f'{pair} ("," {pair})*', False))
        sequence = field_sequence(fields, '","', self._rule)
        return f'"{{" {sequence} "}}"'

    def _json(self, schema: dict[str, Any]) -> str:
        """A schema as `%json`. Raises NotExpressible if it contains a `$ref`, which could not be resolved there."""
        if '"$ref"' in (text := json.dumps({**schema, "x-guidance": self._options})):
            raise NotExpressible
        return self._rule(f"%json {text}")

    def _rule(self, body: str, kind: str = "r") -> str:
        return self._names.setdefault(body, f"{kind}{len(self._names)}")

    def _resolve(self, reference: str) -> Any:
        found: Any = self._root
        if reference != "#" and not reference.startswith("#/"):
            raise NotExpressible
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                raise NotExpressible
        return found


def field_sequence(fields: Iterable[tuple[str, bool]], comma: str, rule: Callable[[str], str]) -> str:
    """Fields (body, whether it is required) in order, separated by commas. `rule` names the body of a rule."""
    after_field = ""  # the remaining fields, if one was written already
    at_start = ""  # the remaining fields, if none was written yet
    for field, is_required in reversed([*fields]):
        with_field = f"{field} {after_field}"
        at_start = with_field if is_required else rule(f"{with_field} | {at_start}")
        after_field = f"{comma} {with_field}" if is_required else rule(f"({comma} {field})? {after_field}")
    return at_start


def _quoted(name: str) -> str:
    """A JSON string as a terminal of Lark."""
    return json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False).replace("\x7f", r"\u007f")
