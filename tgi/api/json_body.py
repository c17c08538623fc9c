"""Decoding JSON bodies, and the errors for those that cannot be decoded.

The messages are those of TGI, whose parser is Rust's serde_json: a prefix, the path of the field, the reason, line and
column. Clients and the golden files (tests/golden/cases/rejections.http) know the reasons word by word, so msgspec's
are translated: `invalid type: string "a", expected f32`. A reason that is not translated is msgspec's own.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from tgi.api.errors import Rejection
from tgi.api.shapes.types import ShapeError

T = TypeVar("T", bound=msgspec.Struct)
Decoded_co = TypeVar("Decoded_co", covariant=True)
Path = list[str | int]  # keys and indices

SYNTAX = "Failed to parse the request body as JSON: "
SHAPE = "Failed to deserialize the JSON body into the target type: "

# msgspec's messages.
_REASON_AND_PATH = re.compile(r"^(?P<reason>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_PATH_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*)`")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field (?P<name>`.*`)")
_SYNTAX_ERROR = re.compile(r"^(?:JSON is malformed: )?(?P<reason>.*) \(byte (?P<byte>\d+)\)$")
_GOT_FLOAT = "got `float`"
# A string, which may lack its end, a whole number, or any other one: each is matched where it begins and nowhere else,
# so the time grows with the length of the body.
_TEXT_OR_WHOLE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|(-?[0-9]++)\.0++(?![0-9.eE])|-?[0-9][-+0-9.eE]*+', re.DOTALL)
_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
# Python rejects integers of thousands of digits. No field takes one, so an approximate value is enough here.
_JSON = json.JSONDecoder(parse_int=lambda text: int(text) if len(text) < 40 else float(text))

# serde's names of types.
_TYPE_NAMES: dict[type, str] = {
    msgspec.inspect.BoolType: "a boolean",
    msgspec.inspect.StrType: "a string",
    msgspec.inspect.ListType: "a sequence",
}


class BodyDecoder(Protocol[Decoded_co]):
    """What decodes a request body: JsonBody and UntaggedJsonBody."""

    @property
    def shape(self) -> Any:
        """The type that the OpenAPI document describes."""

    def decode(self, body: bytes) -> Decoded_co:
        """Decodes a body. Raises Rejection: 400 if it is not JSON, 422 if it has another shape."""


# Types of parts of messages that have neither text nor an image.
OTHER_MEDIA = ("audio", "audio_url", "file", "input_audio", "input_file", "input_video", "video", "video_url")


class JsonBody(Generic[T]):
    """Decodes the bodies of one request type. `check` is called with each body of the right shape, and may raise
    ApiError."""

    def __init__(self, shape: type[T], check: Callable[[bytes], None] | None = None) -> None:
        self.shape = shape
        self._decode = msgspec.json.Decoder(shape).decode
        self._type = msgspec.inspect.type_info(shape)
        self._check = check

    def decode(self, body: bytes) -> T:
        """Decodes a body. Raises Rejection: 400 if it is not JSON, 422 if it has another shape."""
        try:
            return self._decode_and_check(body)
        except msgspec.ValidationError as error:
            integers = _with_integers(body) if _GOT_FLOAT in str(error) else body
            if integers != body:
                return self.decode(integers)
            raise self._shape_rejection(body, error) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _syntax_rejection(body, error) from None

    def _decode_and_check(self, body: bytes) -> T:
        request = self._decode(body)
        if self._check is not None:
            self._check(body)
        return request

    def _shape_rejection(self, body: bytes, error: msgspec.ValidationError) -> Rejection:
        """The error for a body of the wrong shape; that for a syntax error if one follows the wrong field."""
        try:
            msgspec.json.decode(body)
            text = body.decode()
            match = _REASON_AND_PATH.match(str(error))
            assert match is not None
            # msgspec does not name the key of a map entry.
            msgspec_path, map_entry, _ = (match["path"] or "").partition("[...]")
            msgspec_reason, path = match["reason"], _parse_path(msgspec_path)
            reason = error.__cause__.reason if isinstance(error.__cause__, ShapeError) else ""
            if map_entry and not reason:
                reason = f"invalid entry: {msgspec_reason}"
            if isinstance(error.__cause__, ShapeError) and error.__cause__.field and not map_entry:
                path.append(error.__cause__.field)
            depth, other_media = len(path), _other_media(msgspec_reason, path, text)
            if (enum := _cut_to_untagged_enum(self._type, path)) and not (reason and len(path) == depth):
                reason = f"data did not match any variant of untagged enum {enum}"
            reason = other_media or reason
            value, end = _find_value(text, path)
        except (ValueError, RecursionError) as syntax_error:
            return _syntax_rejection(body, syntax_error)
        field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
        param = field
        if not reason and (missing := _MISSING_FIELD.match(msgspec_reason)):
            reason = f"missing field `{missing['name']}`"
            param = f"{field}.{missing['name']}".removeprefix(".")
        reason = reason or self._translate_reason(msgspec_reason, path, value)
        message = f"{SHAPE}{field + ': ' if field else ''}{reason} at {_line_and_column(text, end)}"
        return Rejection(422, message, param=param or None)

    def _translate_reason(self, reason: str, path: Path, value: Any) -> str:
        """serde's words for msgspec's reason about the value at a path."""
        if unknown := _UNKNOWN_FIELD.match(reason):
            return f"unknown field {unknown['name']}"
        kind = _type_at(self._type, path)
        tags = [
            one.tag for one in _variants(kind) if isinstance(one, msgspec.inspect.StructType) and one.tag is not None
        ]
        if reason.startswith("Invalid value ") and tags:
            return f"unknown variant `{value}`, expected one of {', '.join(f'`{tag}`' for tag in tags)}"
        if reason.startswith("Invalid enum value") and isinstance(value, str):
            literal = _without_null(kind)
            choices = literal.values if isinstance(literal, msgspec.inspect.LiteralType) else ()
            return f"unknown variant `{value}`, expected one of {', '.join(f'`{choice}`' for choice in choices)}"
        expected = _type_name(kind)
        is_number_field = isinstance(_without_null(kind), msgspec.inspect.IntType | msgspec.inspect.FloatType)
        value_is_number = type(value) is int or (type(value) is float and expected == "f32")
        wrong = "value" if is_number_field and value_is_number else "type"
        return f"invalid {wrong}: {_describe(value)}, expected {expected}"


def _other_media(reason: str, path: Path, text: str) -> str:
    """Why a part of a message is not taken, if it is of a kind that other servers take; "" for all other values."""
    if not reason.startswith("Invalid value") or path[-1:] != ["type"] or "content" not in path:
        return ""
    kind, _ = _find_value(text, path)
    return f"`{kind}` parts are not supported: models read text and images here" if kind in OTHER_MEDIA else ""


def _with_integers(body: bytes) -> bytes:
    """The body with `4.0` written as an integer, as which some clients mean it. Positions stay the same."""
    return _TEXT_OR_WHOLE.sub(lambda match: match[1].ljust(len(match[0])) if match[1] else match[0], body)


class UntaggedJsonBody:
    """Decodes bodies that may be of several request types ("untagged enum" in serde): the first that fits. `shape` is
    their union, for the OpenAPI document."""

    def __init__(self, enum: str, *bodies: JsonBody[Any], shape: Any = None) -> None:
        self.shape = shape
        self._enum = enum  # serde's name of the union
        self._bodies = bodies

    def decode(self, body: bytes, path: str = "") -> Any:
        """Decodes a body, or a part of one at `path`. Raises Rejection: 400 if it is not JSON, 422 if no type fits."""
        for candidate in self._bodies:
            try:
                return candidate.decode(body)
            except Rejection as rejection:
                if rejection.status != 422:
                    raise
        field = f"{path}: " if path else ""
        raise Rejection(422, f"{SHAPE}{field}data did not match any variant of untagged enum {self._enum}")


def describe_syntax_error(body: bytes, error: Exception) -> str:
    """Why a text is not JSON, with line and column, from an exception of msgspec or Python."""
    text = body.decode(errors="replace")
    if isinstance(error, RecursionError):
        return f"recursion limit exceeded at {_line_and_column(text, len(text))}"
    if match := _SYNTAX_ERROR.match(str(error)):
        before = body[: int(match["byte"]) + 1].decode(errors="replace")
        return f"{match['reason']} at {_line_and_column(before, len(before))}"
    if str(error) == "Input data was truncated":
        reason = "lone leading surrogate in hex escape" if _is_json(text) else "EOF while parsing a value"
        return f"{reason} at {_line_and_column(text, len(text))}"
    reason = str(error).partition(" - at `")[0]  # its path is "$[...]" here, which tells nothing
    return f"{reason} at {_line_and_column(text, len(text))}"


def _syntax_rejection(body: bytes, error: Exception) -> Rejection:
    return Rejection(400, f"{SYNTAX}{describe_syntax_error(body, error)}")


def _is_json(text: str) -> bool:
    """Whether Python decodes it. Unlike msgspec, Python accepts half of a surrogate pair."""
    try:
        _JSON.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def _line_and_column(text: str, end: int) -> str:
    """The position behind text[:end]. Columns count bytes, as serde's."""
    line = text.count("\n", 0, end) + 1
    return f"line {line} column {len(text[text.rfind(chr(10), 0, end) + 1 : end].encode(errors='replace'))}"


# --- finding a value in the text of a body ---


def _parse_path(path: str) -> Path:
    return [int(step["index"]) if step["index"] else step["key"] for step in _PATH_STEP.finditer(path)]


def _find_value(text: str, path: Path) -> tuple[Any, int]:
    """The value at a path, and the offset of its end. Raises ValueError if the path leads nowhere."""
    start = _skip_white_space(text, 0)
    for step in path:
        start = next((offset for name, offset in _members(text, start) if name == step), -1)
        if start < 0:
            raise ValueError(f"no {step!r} in the body")
    return _JSON.raw_decode(text, start)


def _members(text: str, start: int) -> Iterator[tuple[str | int, int]]:
    """Key or index of each member of the object or array at `start`, and the offset of its value."""
    is_object = text[start] == "{"
    offset, index = _skip_white_space(text, start + 1), 0
    while text[offset] not in "}]":
        name: str | int = index
        if is_object:
            name, offset = _JSON.raw_decode(text, offset)
            offset = _skip_white_space(text, _skip_white_space(text, offset) + 1)
        yield name, offset
        offset = _skip_white_space(text, _JSON.raw_decode(text, offset)[1])
        if text[offset] == ",":
            offset = _skip_white_space(text, offset + 1)
        index += 1


def _skip_white_space(text: str, offset: int) -> int:
    match = _WHITE_SPACE.match(text, offset)
    assert match is not None
    return match.end()


# --- types, as msgspec.inspect describes them ---


def _without_null(kind: Any) -> Any:
    """The type without its metadata and its null."""
    while True:
        if isinstance(kind, msgspec.inspect.Metadata):
            kind = kind.type
        elif isinstance(kind, msgspec.inspect.UnionType):
            kind = kind.types[0]
        else:
            return kind


def _type_at(kind: Any, path: Path) -> Any:
    """The type at a path below `kind`."""
    for step in path:
        kind = _member_type(kind, step)
    return kind


def _variants(kind: Any) -> list[Any]:
    """The types of a union, or the type itself, without metadata."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return _variants(kind.type)
    return (
        [one for each in kind.types for one in _variants(each)]
        if isinstance(kind, msgspec.inspect.UnionType)
        else [kind]
    )


def _member_type(kind: Any, step: str | int) -> Any:
    """The type of a member: of the first type of a union that has it."""
    for one in _variants(kind):
        if isinstance(one, msgspec.inspect.StructType):
            if (found := next((field.type for field in one.fields if field.encode_name == step), None)) is not None:
                return found
        elif isinstance(one, msgspec.inspect.ListType) and isinstance(step, int):
            return one.item_type
        elif isinstance(one, msgspec.inspect.DictType):
            return one.value_type
    return kind


def _cut_to_untagged_enum(kind: Any, path: Path) -> str:
    """serde's name of the outermost union that a path leads into, or "". Cuts `path` to that of the union: serde tells
    no more about its members."""
    for depth, step in enumerate([*path, None]):
        extra = _metadata(kind)
        if "untagged" in extra:
            del path[depth - 1 if extra.get("owner") else depth :]
            return str(extra["untagged"])
        if step is not None:
            kind = _member_type(kind, step)
    return ""


def _metadata(kind: Any) -> dict[str, Any]:
    """The `extra` metadata of a type, which may allow null."""
    extra: dict[str, Any] = {}
    while isinstance(kind, (msgspec.inspect.UnionType, msgspec.inspect.Metadata)):
        if isinstance(kind, msgspec.inspect.Metadata):
            extra = (kind.extra or {}) | extra
        kind = kind.type if isinstance(kind, msgspec.inspect.Metadata) else kind.types[0]
    return extra


def _type_name(kind: Any) -> str:
    """serde's name of a type, as in `expected f32`."""
    if expected := _metadata(kind).get("expected"):
        return str(expected)
    kind = _without_null(kind)
    if isinstance(kind, msgspec.inspect.StructType):
        return f"struct {kind.cls.__name__}"
    return _TYPE_NAMES.get(type(kind), "another type")


def _describe(value: Any) -> str:
    """serde's description of a value, as in `invalid type: string "a"`."""
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
