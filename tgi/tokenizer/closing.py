"""Closes the objects of a JSON schema: one with `properties` admits no other names unless `additionalProperties` does.

Several schemas may hold for one object: `allOf`, `anyOf`, `oneOf` and `$ref` apply others in place. Closing each by
itself would forbid what the others ask for. So the object may have the names that any of them knows, but in a branch of
`anyOf` or `oneOf` not those that only other branches know; and every name if one of them has `additionalProperties`
other than false. A definition that is a part of such an object is replaced by a copy that stays open.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import unquote

# Schemas looked at, and names passed from one to another: 0.4 s at most.
MAX_STEPS = 200_000

UNIONS = ("anyOf", "oneOf")
IN_PLACE = ("allOf", *UNIONS)


class TooManySteps(Exception):
    """Too many schemas hold for the same objects."""


class Known(NamedTuple):
    """What schemas know of the names of one object. The names are keys, in their order."""

    names: dict[str, bool] = {}
    patterns: dict[str, bool] = {}
    listed: bool = False  # some schema has `properties`
    open: bool = False  # some schema has `additionalProperties` other than false


NOTHING = Known()


def close_objects(root: dict[str, Any], schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """Closes all objects in place. `schemas` are those within `root` by the references that lead to them. Returns the
    copies that have a `oneOf`. Raises TooManySteps."""
    closing = _Closing(root, schemas)
    closing.close(root, NOTHING)
    closing.descend(root)
    for schema, changes in closing.changes:
        schema |= changes
    if closing.copies:
        root["$defs"] = root.get("$defs", {}) | closing.copies
    return closing.one_ofs


class _Closing:
    """Collects the changes. Nothing is changed until all are known, since the copies are made of open schemas."""

    def __init__(self, root: dict[str, Any], schemas: dict[str, Any]) -> None:
        self.changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.copies: dict[str, Any] = {}  # by their names in `$defs`
        self.one_ofs: list[dict[str, Any]] = []
        self._taken = root.get("$defs", {})
        self._schemas = schemas
        self._copied: dict[str, str] = {}  # references to copies, by those to the originals
        self._steps = 0

    def descend(self, schema: Any) -> None:
        """Closes the objects within what a schema describes."""
        for word, inner in _subschemas(schema):
            if word not in IN_PLACE:
                self.close(inner, NOTHING)
            self.descend(inner)

    def close(self, schema: Any, around: Known, closed: bool = False) -> None:
        """Closes an object; `around` is known to the other schemas that hold for it. With `closed` one of these has
        closed it; only branches remain."""
        if not isinstance(schema, dict):
            return
        own = _own(schema)
        target = self._target(schema, set())
        parts = [self._known(part) for part in schema.get("allOf", ())]
        unions = {word: self._join(map(self._known, schema[word])) for word in UNIONS if word in schema}
        every = self._join([own, target, *parts, *unions.values(), around])
        alone = sum(known != NOTHING for known in (own, target, *parts, *unions.values(), around)) == 1
        listed = own.listed or (not alone and any(known.listed for known in (target, *parts)))
        changes: dict[str, Any] = {}
        if listed and not closed and not every.open and "additionalProperties" not in schema:
            for word, names in ("properties", every.names), ("patternProperties", every.patterns):
                if names:
                    changes[word] = names | schema.get(word, {})
            changes["additionalProperties"] = False
        if target != NOTHING and not alone:
            changes["$ref"] = self._opened(schema["$ref"])
        if changes:
            self.changes.append((schema, changes))
        for at, part in enumerate(schema.get("allOf", ())):
            others = self._join([around, own, target, *parts[:at], *parts[at + 1 :], *unions.values()])
            self.close(part, others, closed or listed)
        for union in unions:
            others = self._join(
                [around, own, target, *parts, *(known for word, known in unions.items() if word != union)]
            )
            for branch in schema[union]:
                self.close(branch, others)

    def _known(self, schema: Any, seen: set[str] | None = None) -> Known:
        """What a schema knows, with all that it applies in place."""
        if not isinstance(schema, dict):
            return NOTHING
        seen = set() if seen is None else seen
        inner = (self._known(one, seen) for word in IN_PLACE for one in schema.get(word, ()))
        return self._join([_own(schema), self._target(schema, seen), *inner])

    def _target(self, schema: dict[str, Any], seen: set[str]) -> Known:
        """What the schema knows that `$ref` leads to, unless it is among those `seen`."""
        reference = unquote(schema.get("$ref", ""))
        if not reference or reference in seen:
            return NOTHING
        seen.add(reference)
        return self._known(self._schemas[reference], seen) if reference in self._schemas else Known(open=True)

    def _join(self, known: Iterable[Known]) -> Known:
        names: dict[str, bool] = {}
        patterns: dict[str, bool] = {}
        listed = open = False
        for one in known:
            self._steps += 1 + len(one.names) + len(one.patterns)
            if self._steps > MAX_STEPS:
                raise TooManySteps
            names |= one.names
            patterns |= one.patterns
            listed |= one.listed
            open |= one.open
        return Known(names, patterns, listed, open)

    def _opened(self, reference: str) -> str:
        """A reference to an open copy of what this one leads to."""
        if reference not in self._copied:
            original = self._schemas.get(unquote(reference))
            if not self._known(original).listed:
                return reference
            names = (f"open-{number}" for number in count(len(self.copies)))
            name = next(name for name in names if name not in self._taken)
            self.copies[name] = {}  # now, since it may lead to itself
            self._copied[reference] = f"#/$defs/{name}"
            self.copies[name] = self._copy(original)
        return self._copied[reference]

    def _copy(self, schema: Any) -> Any:
        """The schema with those that it applies in place; what is within its values is shared."""
        if not isinstance(schema, dict):
            return schema
        copy = {word: value for word, value in schema.items() if word not in ("$id", "$anchor", "$defs", "definitions")}
        copy |= {word: [self._copy(one) for one in schema[word]] for word in IN_PLACE if word in schema}
        if "$ref" in schema:
            copy["$ref"] = self._opened(schema["$ref"])
        if "oneOf" in copy:
            self.one_ofs.append(copy)
        return copy


def _own(schema: dict[str, Any]) -> Known:
    """What the keywords of one schema know."""
    names = dict.fromkeys([*schema.get("properties", ()), *schema.get("required", ())], True)
    for value in [schema.get("const"), *schema.get("enum", ())]:
        names |= dict.fromkeys(value, True) if isinstance(value, dict) else {}
    patterns = dict.fromkeys(schema.get("patternProperties", ()), True)
    return Known(names, patterns, "properties" in schema, schema.get("additionalProperties", False) is not False)


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """All schemas directly in a schema, with the keywords that they stand behind."""
    for word, value in schema.items() if isinstance(schema, dict) else ():
        if word in ("items", "additionalProperties"):
            yield word, value
        elif word in ("prefixItems", *IN_PLACE):
            yield from ((word, one) for one in value)
        elif word in ("properties", "patternProperties", "$defs", "definitions"):
            yield from ((word, one) for one in value.values())
