"""The JSON Schema test suite, and validation of texts against a schema."""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema

# [keyword, what it tests, schema, [[value, whether it is valid], …]]
SUITE: list[list[Any]] = json.loads((Path(__file__).parent / "json_schema_suite.json").read_text())["cases"]


def validate(text: str, schema: Any) -> None:
    """Raises if the text is not JSON or not valid. Skips schemas with patterns that Python's `re` does not support."""
    value = json.loads(text, parse_float=_number)
    written = json.dumps(schema)
    if r"\\p{" not in written:
        jsonschema.Draft202012Validator(json.loads(written, parse_float=_number)).validate(value)


def _number(text: str) -> Decimal | float:
    """Decimal, for an exact `multipleOf`; infinity for numbers outside the range of a double."""
    return Decimal(text) if math.isfinite(float(text)) else math.inf


def has_unlisted_names(value: Any, schemas: list[Any], root: Any) -> bool:
    """Whether an object in a value has a property name that is not in these schemas, though one has `properties`.

    The standard allows that; this server treats such objects as closed. All schemas and branches of unions count.
    False if there are references that are not followed here; patterns that Python's `re` does not support match every
    name.
    """
    here = [part for schema in schemas for part in _in_place(schema, root, set())]
    if any(part is None for part in here):
        return False
    if isinstance(value, list):
        return any(has_unlisted_names(inner, _of_item(here, at), root) for at, inner in enumerate(value))
    if not isinstance(value, dict):
        return False
    closed = any("properties" in part for part in here)
    closed &= not any(part.get("additionalProperties", False) is not False for part in here)
    for name, inner in value.items():
        known = any(name in part.get("required", ()) or name in _fixed(part) for part in here)
        below = [part["properties"][name] for part in here if name in part.get("properties", ())]
        patterns = [item for part in here for item in part.get("patternProperties", {}).items()]
        below += [schema for pattern, schema in patterns if "\\p{" in pattern or re.search(pattern, name)]
        if closed and not known and not below:
            return True
        below += [part["additionalProperties"] for part in here if "additionalProperties" in part]
        if has_unlisted_names(inner, below, root):
            return True
    return False


def _in_place(schema: Any, root: Any, seen: set[str]) -> Iterator[Any]:
    """Yields a schema and the subschemas that it applies in place; None for a reference that is not followed."""
    if not isinstance(schema, dict):
        return
    yield schema
    for word in ("allOf", "anyOf", "oneOf"):
        for one in schema.get(word, ()):
            yield from _in_place(one, root, seen)
    if (reference := schema.get("$ref")) is not None and reference not in seen:
        found: Any = root
        for step in reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ():
            step = step.replace("%25", "%").replace("%22", '"').replace("~1", "/").replace("~0", "~")
            found = found[int(step) if isinstance(found, list) else step] if step in found or step.isdecimal() else None
            if found is None:
                break
        ids = json.dumps(root).count('"$id"') > ("$id" in root)
        if found is None or ids or not (reference == "#" or reference.startswith("#/")):
            yield None
        else:
            yield from _in_place(found, root, seen | {reference})


def _of_item(here: list[Any], at: int) -> list[Any]:
    found = []
    for part in here:
        prefix = part.get("prefixItems", [])
        found += [prefix[at]] if at < len(prefix) else [part["items"]] if "items" in part else []
    return found


def _fixed(schema: Any) -> set[str]:
    """The property names in the objects of `const` and `enum`."""
    values = [schema.get("const"), *schema.get("enum", ())]
    return {name for value in values if isinstance(value, dict) for name in value}
