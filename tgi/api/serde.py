"""Decoding a JSON body, with errors in the words that TGI's clients know (serde's), with path, line and column."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from tgi.api.errors import Rejection
from tgi.api.shapes.types import ShapeError

T = TypeVar("T", bound=msgspec.Struct)
Read_co = TypeVar("Read_co", covariant=True)

SYNTAX = "Failed to parse the request body as JSON: "
SHAPE = "Failed to deserialize the JSON body into the target type: "

_AT = re.compile(r"^(?P<reason>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field (?P<name>`.*`)")
_BYTE = re.compile(r"^(?:JSON is malformed: )?(?P<reason>.*) \(byte (?P<byte>\d+)\)$")
_SPACE = re.compile(r"[ \t\n\r]*")
# Python refuses integers of thousands of digits; no field takes one, so its size as a float says enough.
_JSON = json.JSONDecoder(parse_int=lambda text: int(text) if len(text) < 40 else float(text))

_NAMES: dict[type, str] = {
    msgspec.inspect.BoolType: "a boolean",
    msgspec.inspect.StrType: "a string",
    msgspec.inspect.ListType: "a sequence",
}


class Body(Generic[T]):
    """Decodes bodies of one request type. Raises Rejection: 400 for what is not JSON, 422 for another shape. `check`
    looks at each body of the right shape, and may raise ApiError."""

    def __init__(self, shape: type[T], check: Callable[[bytes], None] | None = None) -> None:
        self._decode = msgspec.json.Decoder(shape).decode
        self._type = msgspec.inspect.type_info(shape)
        self._check = check

    def decode(self, body: bytes) -> T:
        """The request in `body`."""
        try:
            request = self._decode(body)
            if self._check is not None:
                self._check(body)
            return request
        except msgspec.ValidationError as error:
            raise self._rejection(body, error) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _syntax(body, error) from None

    def _rejection(self, body: bytes, error: msgspec.ValidationError) -> Rejection:
        """The answer to a body of the wrong shape, unless it is no JSON behind the place where the shape broke."""
        try:
            msgspec.json.decode(body)
            text = body.decode()
            found = _AT.match(str(error))
            assert found is not None
            path, entry, _ = (found["path"] or "").partition("[...]")  # some entry of a map: msgspec names no key
            reason, steps = found["reason"], _steps(path)
            told = error.__cause__.reason if isinstance(error.__cause__, ShapeError) else ""
            if entry and not told:
                told = f"invalid entry: {reason}"
            if isinstance(error.__cause__, ShapeError) and error.__cause__.field:
                steps.append(error.__cause__.field)
            whole = len(steps)
            if (enum := _untagged(self._type, steps)) and not (told and len(steps) == whole):
                told = f"data did not match any variant of untagged enum {enum}"
            value, end = _locate(text, steps)
        except (ValueError, RecursionError) as broken:
            return _syntax(body, broken)
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
        param = where
        if not told and (missing := _MISSING.match(reason)):
            told = f"missing field `{missing['name']}`"
            param = f"{where}.{missing['name']}".removeprefix(".")
        told = told or self._reason(reason, steps, value)
        message = f"{SHAPE}{where + ': ' if where else ''}{told} at {_position(text, end)}"
        return Rejection(422, message, param=param or None)

    def _reason(self, reason: str, steps: list[str | int], value: Any) -> str:
        if unknown := _UNKNOWN.match(reason):
            return f"unknown field {unknown['name']}"
        kind = _resolve(self._type, steps)
        if reason.startswith("Invalid enum value") and isinstance(value, str):
            inner = _plain(kind)
            choices = inner.values if isinstance(inner, msgspec.inspect.LiteralType) else ()
            return f"unknown variant `{value}`, expected one of {', '.join(f'`{choice}`' for choice in choices)}"
        expected = _expected(kind)
        numeric = isinstance(_plain(kind), msgspec.inspect.IntType | msgspec.inspect.FloatType)
        in_kind = type(value) is int or (type(value) is float and expected == "f32")
        return f"invalid {'value' if numeric and in_kind else 'type'}: {_describe(value)}, expected {expected}"


class Reader(Protocol[Read_co]):
    """What makes a request of a body: Body and Untagged."""

    def decode(self, body: bytes) -> Read_co:
        """The request in `body`. Raises Rejection."""


class Untagged:
    """Decodes bodies of several request types: each is of the first one that it fits. Raises Rejection as Body does."""

    def __init__(self, enum: str, *bodies: Body[Any]) -> None:
        self._enum = enum  # the name of the choice in errors
        self._bodies = bodies

    def decode(self, body: bytes, path: str = "") -> Any:
        """The request in `body`, which stands at `path` of a larger one."""
        for one in self._bodies:
            try:
                return one.decode(body)
            except Rejection as rejection:
                if rejection.status != 422:
                    raise
        where = f"{path}: " if path else ""
        raise Rejection(422, f"{SHAPE}{where}data did not match any variant of untagged enum {self._enum}")


def _syntax(body: bytes, error: Exception) -> Rejection:
    return Rejection(400, f"{SYNTAX}{complaint(body, error)}")


def complaint(body: bytes, error: Exception) -> str:
    """Why a text is no JSON, and where, from what msgspec or Python has raised."""
    text = body.decode(errors="replace")
    if isinstance(error, RecursionError):
        return f"recursion limit exceeded at {_position(text, len(text))}"
    if found := _BYTE.match(str(error)):
        before = body[: int(found["byte"]) + 1].decode(errors="replace")
        return f"{found['reason']} at {_position(before, len(before))}"
    if str(error) == "Input data was truncated":
        told = "lone leading surrogate in hex escape" if _is_json(text) else "EOF while parsing a value"
        return f"{told} at {_position(text, len(text))}"
    reason = str(error).partition(" - at `")[0]  # the path is no more than $[...] here
    return f"{reason} at {_position(text, len(text))}"


def _is_json(text: str) -> bool:
    """Whether Python reads it, which takes half of a surrogate pair for a character."""
    try:
        _JSON.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _position(text: str, end: int) -> str:
    """Where the parser stood after reading text[:end], in bytes as serde counts."""
    line = text.count("\n", 0, end) + 1
    return f"line {line} column {len(text[text.rfind(chr(10), 0, end) + 1 : end].encode(errors='replace'))}"


def _steps(path: str) -> list[str | int]:
    return [int(step["index"]) if step["index"] else step["key"] for step in _STEP.finditer(path)]


def _locate(text: str, steps: list[str | int]) -> tuple[Any, int]:
    """The value at a path of a JSON text, and the offset just behind it. Raises ValueError if it is not there."""
    start = _skip(text, 0)
    for step in steps:
        start = next((place for name, place in _members(text, start) if name == step), -1)
        if start < 0:
            raise ValueError(f"no {step!r} in the body")
    return _JSON.raw_decode(text, start)


def _members(text: str, start: int) -> Iterator[tuple[str | int, int]]:
    """Key or index of each member of the object or array at `start`, and the offset of its value."""
    is_object = text[start] == "{"
    place, index = _skip(text, start + 1), 0
    while text[place] not in "}]":
        name: str | int = index
        if is_object:
            name, place = _JSON.raw_decode(text, place)
            place = _skip(text, _skip(text, place) + 1)
        yield name, place
        place = _skip(text, _JSON.raw_decode(text, place)[1])
        if text[place] == ",":
            place = _skip(text, place + 1)
        index += 1


def _skip(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    assert space is not None
    return space.end()


def _plain(kind: Any) -> Any:
    """The type without its metadata and its null."""
    while True:
        if isinstance(kind, msgspec.inspect.Metadata):
            kind = kind.type
        elif isinstance(kind, msgspec.inspect.UnionType):
            kind = kind.types[0]
        else:
            return kind


def _resolve(kind: Any, steps: list[str | int]) -> Any:
    """The type at a path below `kind`."""
    for step in steps:
        kind = _member(kind, step)
    return kind


def _member(kind: Any, step: str | int) -> Any:
    """The type of a member of `kind`."""
    kind = _plain(kind)
    if isinstance(kind, msgspec.inspect.StructType):
        return next(field.type for field in kind.fields if field.encode_name == step)
    return kind.item_type if isinstance(kind, msgspec.inspect.ListType) else kind


def _untagged(kind: Any, steps: list[str | int]) -> str:
    """The name of the outermost choice between forms that a path leads into, or ""; cuts `steps` back to it."""
    for at, step in enumerate([*steps, None]):
        extra = _extra(kind)
        if "untagged" in extra:
            del steps[at - 1 if extra.get("owner") else at :]
            return str(extra["untagged"])
        if step is not None:
            kind = _member(kind, step)
    return ""


def _extra(kind: Any) -> dict[str, Any]:
    """What the metadata of a type say, whether or not it may be null."""
    found: dict[str, Any] = {}
    while isinstance(kind, (msgspec.inspect.UnionType, msgspec.inspect.Metadata)):
        if isinstance(kind, msgspec.inspect.Metadata):
            found = (kind.extra or {}) | found
        kind = kind.type if isinstance(kind, msgspec.inspect.Metadata) else kind.types[0]
    return found


def _expected(kind: Any) -> str:
    if expected := _extra(kind).get("expected"):
        return str(expected)
    kind = _plain(kind)
    if isinstance(kind, msgspec.inspect.StructType):
        return f"struct {kind.cls.__name__}"
    return _NAMES.get(type(kind), "another type")


def _describe(value: Any) -> str:
    """A value as serde names it in `invalid type`."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{value!r}`"
        case str():
            return "string " + json.dumps(value, ensure_ascii=False)
        case list():
            return "sequence"
        case _:
            return "map"
