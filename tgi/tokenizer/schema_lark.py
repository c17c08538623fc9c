"""Writes JSON schemas in Lark, where the digits of a number can be bounded.

llguidance compiles JSON schemas by itself, but has no such bound, and a small model may not find the end of 1/3. So
objects, arrays, unions and references are written as rules here, down to the numbers. Strings with a pattern, whole
numbers and other leaves stay `%json`, and so do schemas that must be joined (`allOf`, keywords next to `anyOf`): their
numbers are the library's. With a `$ref` in one of these all is left to the library.
"""

import json
from typing import Any
from urllib.parse import unquote

# Of the whole part, and of the fraction. An exponent has up to two, so that the number is one for a client, too.
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
_JOINED = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties"}
_MEANT = {"type"} | _VALUES | _STRING | _NUMBER | _ARRAY | _OBJECT | _JOINED


class NotPlain(Exception):
    """A schema that is left to the library."""


def plain_lark(root: dict[str, Any], options: dict[str, Any]) -> str:
    """A schema as `enforceable` makes it, in Lark, with these options for `%json`; "" if the library can do as well."""
    writer = _Writer(root, options)
    try:
        text = writer.write()
    except NotPlain:
        return ""
    return text if writer.bounded else ""


class _Writer:
    def __init__(self, root: dict[str, Any], options: dict[str, Any]) -> None:
        self.bounded = False  # whether there is a number that the library would not bound
        self._root = root
        self._options = options
        self._names: dict[str, str] = {}  # of rules and terminals, by what stands behind them
        self._references: dict[str, str] = {}  # names of rules

    def write(self) -> str:
        lines = [f"start: {self._value(self._root)}"]
        written = 0
        while written < len(self._references):  # each may bring others
            reference, name = [*self._references.items()][written]
            lines.append(f"{name}: {self._value(self._target(reference))}")
            written += 1
        return _HEAD + "\n".join([*lines, *(f"{name}: {body}" for body, name in self._names.items())]) + "\n"

    def _value(self, schema: Any) -> str:
        if schema is True:
            schema = {}
        if schema is False or ("$id" in schema and schema is not self._root):
            raise NotPlain
        meant = _MEANT & schema.keys()
        if not meant:
            self.bounded = True
            return "any"
        if meant == {"$ref"}:
            return self._references.setdefault(schema["$ref"], f"d{len(self._references)}")
        if meant == {"anyOf"} or (meant == {"allOf"} and len(schema["allOf"]) == 1):
            (word,) = meant
            return self._rule(" | ".join(map(self._value, schema[word])))
        if meant & (_JOINED | _VALUES):
            return self._json(schema)
        types = schema.get("type", _TYPES)
        return self._rule(
            " | ".join(self._typed(schema, name) for name in ([types] if isinstance(types, str) else types))
        )

    def _typed(self, schema: dict[str, Any], name: str) -> str:
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
                self.bounded = True
                return "NUMBER"
            case "number" | "integer":
                return self._json({"type": name} | {word: schema[word] for word in schema if word in _NUMBER})
            case "array":
                return self._array(schema)
            case _:
                return self._object(schema)

    def _array(self, schema: dict[str, Any]) -> str:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if prefix := schema.get("prefixItems"):
            if not len(prefix) == fewest == most:
                raise NotPlain
            items = ' "," '.join(map(self._value, prefix))
            return f'"[" {items} "]"'
        if most is not None and (fewest > most or most == 0):
            raise NotPlain
        item = self._value(schema.get("items", True))
        items = item
        if most != 1:
            items += f' ("," {item}){{{max(0, fewest - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {items} "]"' if fewest else f'"[" ({items})? "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        properties, required = schema.get("properties", {}), dict.fromkeys(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        fields = []
        for name in properties | required:
            value = properties.get(name, others)
            if value is not False:
                fields.append((f'{_quoted(name)} ":" {self._value(value)}', name in required))
            elif name in required:
                raise NotPlain
        if others is not False:
            key = "STRING"
            if taken := " | ".join(map(_quoted, properties | required)):
                key = self._rule(f"STRING & ~({taken})", "K")
            pair = self._rule(f'{key} ":" {self._value(others)}')
            fields.append((f'{pair} ("," {pair})*', False))
        return f'"{{" {self._sequence(fields)} "}}"'

    def _sequence(self, fields: list[tuple[str, bool]]) -> str:
        """Fields in their order with commas between them; what is not required may be left out."""
        behind = ""  # what may follow a field
        first = ""  # … and what may come where no field was yet
        for field, is_required in reversed(fields):
            first = f"{field} {behind}" if is_required else self._rule(f"{field} {behind} | {first}")
            behind = f'"," {field} {behind}' if is_required else self._rule(f'("," {field})? {behind}')
        return first

    def _json(self, schema: dict[str, Any]) -> str:
        """A schema as it is. References in it would lead to nothing."""
        if '"$ref"' in (text := json.dumps({**schema, "x-guidance": self._options})):
            raise NotPlain
        return self._rule(f"%json {text}")

    def _rule(self, body: str, kind: str = "r") -> str:
        return self._names.setdefault(body, f"{kind}{len(self._names)}")

    def _target(self, reference: str) -> Any:
        found: Any = self._root
        if reference != "#" and not reference.startswith("#/"):
            raise NotPlain
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                raise NotPlain
        return found


def _quoted(name: str) -> str:
    """A JSON string as a terminal."""
    return json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False).replace("\x7f", r"\u007f")
