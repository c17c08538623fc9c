"""Whether the branches of a `oneOf` exclude each other, so that any of them means exactly one of them."""

import json
from typing import Any
from urllib.parse import unquote

# So many branches are compared, each with each; and so many `$ref` followed, one behind the other.
MOST_BRANCHES = 100
MOST_REFERENCES = 16

_ALL = frozenset({"null", "boolean", "number", "string", "array", "object"})


def exclusive(branches: list[Any], root: Any) -> bool:
    """Whether no value can match two of the branches: by their types, by required properties with fixed values, or by a
    required property that the other branch does not admit. `$ref` within `root` are followed. False where these do not
    prove it."""
    if len(branches) > MOST_BRANCHES:
        return False
    resolved = [_resolve(branch, root) for branch in branches]
    return all(_apart(one, other, root) for at, one in enumerate(resolved) for other in resolved[:at])


def _apart(one: Any, other: Any, root: Any) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    common = _types(one) & _types(other)
    if not common:
        return True
    if (values := _values(one)) is not None and (others := _values(other)) is not None and not values & others:
        return True
    if common != {"object"}:
        return False
    if any(_excludes(b, name) for a, b in ((one, other), (other, one)) for name in a.get("required", ())):
        return True
    for name in {*one.get("required", ()), *other.get("required", ())}:
        values = _values(_resolve(one.get("properties", {}).get(name), root))
        others = _values(_resolve(other.get("properties", {}).get(name), root))
        if values is not None and others is not None and not values & others:
            return True
    return False


def _excludes(schema: dict[str, Any], name: str) -> bool:
    """Whether its objects cannot have a property of this name."""
    if name in schema.get("properties", ()) or "patternProperties" in schema:
        return False
    return schema.get("additionalProperties") is False


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """The types that its values can have; whole numbers are numbers."""
    given = schema.get("type", _ALL)
    names = {given} if isinstance(given, str) else set(given)
    return frozenset("number" if name == "integer" else name for name in names)


def _values(schema: Any) -> set[str] | None:
    """The only values that it can have, as text; None if they are not listed. Numbers that are written differently
    may be equal, so a list with numbers does not count."""
    if not isinstance(schema, dict):
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if listed is None or not all(isinstance(value, str | bool | None) for value in listed):
        return None
    return {json.dumps(value) for value in listed}


def _resolve(schema: Any, root: Any) -> Any:
    """What a schema that is no more than a reference within `root` stands for."""
    for _ in range(MOST_REFERENCES):
        if not (isinstance(schema, dict) and "$ref" in schema):
            return schema
        if set(schema) - {"$ref", "title", "description", "default"} or not schema["$ref"].startswith("#/"):
            return None
        found = root
        for step in unquote(schema["$ref"][2:]).split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and "$id" not in found and name in found:
                found = found[name]
            else:
                return None
        schema = found
    return None
