"""The building blocks of shapes: numbers with their ranges, what shape errors call a thing, and what the OpenAPI
document says about it.

In a type's metadata, `expected` is the name that a shape error gives it (that of TGI's Rust field). `untagged` marks a
choice between forms: an error anywhere inside it names that enum and not the place, since no form is the one that was
meant; with `owner` the error is the enclosing object's.

A `title` gives a type that is no Struct its name in the document.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

FLOAT32_MAX = 3.4028234663852886e38

# The document's formats are TGI's: int32 stands for both kinds of 32-bit integers.
_INT32 = {"format": "int32"}
# msgspec's own bounds end at 2**63 - 1: check_seed holds this one.
_INT64 = {"format": "int64", "maximum": 2**64 - 1}

Float32 = Annotated[
    float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX, extra={"expected": "f32"}, extra_json_schema={"format": "float"})
]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, extra={"expected": "i32"}, extra_json_schema=_INT32)]
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1, extra={"expected": "u32"}, extra_json_schema=_INT32)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1, extra={"expected": "usize"})]
UInt64 = Annotated[int, Meta(ge=0, extra={"expected": "u64"}, extra_json_schema=_INT64)]


class Answer(Struct, forbid_unknown_fields=True):
    """What a route answers with: nothing more than the fields that are named."""


def doc(description: str | None = None, *, example: Any = None, **schema: Any) -> Meta:
    """What the document says about a type or field. `schema` are JSON schema keywords that decoding does not look at:
    bounds that the rules of validation.py hold, with messages of their own."""
    return Meta(
        description=description,
        examples=None if example is None else [example],
        extra_json_schema=schema or None,
    )


def ref(name: str) -> dict[str, str]:
    """The JSON schema that points to a shape of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def any_of(title: str, *shapes: type[Struct] | dict[str, Any]) -> Meta:
    """The metadata of an `Any` that is one of several Structs (or JSON schemas) where no tag tells which: for the
    document alone."""
    refs = [shape if isinstance(shape, dict) else ref(shape.__name__) for shape in shapes]
    return Meta(title=title, extra_json_schema={"anyOf": refs})


class ShapeError(ValueError):
    """Raised in __post_init__: the object has another shape than its fields' types can tell. The text is the reason
    that the client reads; `field` is the field that it is about, if it is one."""

    def __init__(self, reason: str, field: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.field = field


def check_seed(seed: int | None) -> None:
    """Raises ShapeError for a seed that is no uint64."""
    if seed is not None and seed >= 2**64:
        raise ShapeError(f"invalid value: integer `{seed}`, expected u64", "seed")


def stop_strings(stop: list[str] | str | None) -> list[str]:
    """A request's stop strings as a list."""
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop
