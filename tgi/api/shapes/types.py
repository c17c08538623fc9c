"""The building blocks of request and response types: numbers with their ranges, and metadata for errors and OpenAPI.

Keys of a type's metadata (`Meta.extra`), which json_body.py reads for error messages:

- `expected`: the name of the type in messages, that of TGI's Rust type.
- `untagged`: the type is a choice between several forms. An error inside of it names this Rust enum and not the member,
  because none of the forms fits.
- `owner`: with `untagged`, the error is located at the enclosing object.

`Meta.title` is the name in the OpenAPI document of a type that is not a Struct.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta, Struct

T = TypeVar("T")

FLOAT32_MAX = 3.4028234663852886e38

# Formats in the OpenAPI document are TGI's, where int32 also stands for unsigned 32-bit integers.
_INT32 = {"format": "int32"}
# The bounds of msgspec end at 2**63 - 1; check_seed checks the larger seeds.
_INT64 = {"format": "int64", "maximum": 2**64 - 1}

Float32 = Annotated[
    float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX, extra={"expected": "f32"}, extra_json_schema={"format": "float"})
]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, extra={"expected": "i32"}, extra_json_schema=_INT32)]
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1, extra={"expected": "u32"}, extra_json_schema=_INT32)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1, extra={"expected": "usize"})]
UInt64 = Annotated[int, Meta(ge=0, extra={"expected": "u64"}, extra_json_schema=_INT64)]
# As which clients of Ollama and llama.cpp send "no limit" and "any seed".
ABSENT = -1
UInt32OrAbsent = Annotated[
    int, Meta(ge=ABSENT, le=2**32 - 1, extra={"expected": "u32"}, extra_json_schema=_INT32 | {"minimum": ABSENT})
]
UInt64OrAbsent = Annotated[
    int, Meta(ge=ABSENT, extra={"expected": "u64"}, extra_json_schema=_INT64 | {"minimum": ABSENT})
]


class ResponseBody(Struct, forbid_unknown_fields=True):
    """The base of response types. A response has no other fields than those of its type."""


class Page(ResponseBody, Generic[T]):
    """Some members of a list."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"

    @classmethod
    def first(cls, members: Sequence[T], limit: int, id_of: Callable[[T], str]) -> "Page[T]":
        """The first `limit` members."""
        shown = [*members[:limit]]
        ids: list[str | None] = [id_of(member) for member in shown] or [None]
        return cls(shown, ids[0], ids[-1], len(members) > limit)


def doc(description: str | None = None, *, example: Any = None, **schema: Any) -> Meta:
    """The description of a type or field in the OpenAPI document.

    `schema` are JSON schema keywords that decoding ignores: bounds that validation.py checks, with TGI's messages.
    """
    return Meta(
        description=description,
        examples=None if example is None else [example],
        extra_json_schema=schema or None,
    )


def ref(name: str) -> dict[str, str]:
    """The JSON schema that refers to a component of the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{name}"}


def any_of(title: str, *shapes: type[Struct] | dict[str, Any]) -> Meta:
    """The metadata of an `Any` that is one of several Structs (or JSON schemas) without a tag. Decoding ignores it."""
    refs = [shape if isinstance(shape, dict) else ref(shape.__name__) for shape in shapes]
    return Meta(title=title, extra_json_schema={"anyOf": refs})


class ShapeError(ValueError):
    """Raised in __post_init__ for an error that the types of the fields do not express.

    `reason` is for the client; `field` is the field that is wrong, "" for the object as a whole.
    """

    def __init__(self, reason: str, field: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.field = field


class MissingField(ValueError):
    """Raised in __post_init__ for a field that the value of another one requires, in msgspec's words for any field."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Object missing required field `{name}`")


def check_seed(seed: int | None) -> None:
    """Raises ShapeError for a seed above the range of uint64."""
    if seed is not None and seed >= 2**64:
        digits = str(seed)
        shown = digits if len(digits) < 40 else f"{digits[:20]}..."
        raise ShapeError(f"invalid value: integer `{shown}`, expected u64", "seed")


def stop_strings(stop: list[str] | str | None) -> list[str]:
    """A request's stop strings as a list."""
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop
