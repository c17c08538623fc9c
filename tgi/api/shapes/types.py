"""The building blocks of request types: numbers with their ranges, and what shape errors call a thing.

In a type's metadata, `expected` is the name that a shape error gives it (that of TGI's Rust field). `untagged` marks a
choice between forms: an error anywhere inside it names that enum and not the place, since no form is the one that was
meant; with `owner` the error is the enclosing object's.
"""

from typing import Annotated

from msgspec import Meta

FLOAT32_MAX = 3.4028234663852886e38

Float32 = Annotated[float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX, extra={"expected": "f32"})]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, extra={"expected": "i32"})]
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1, extra={"expected": "u32"})]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1, extra={"expected": "usize"})]
UInt64 = Annotated[int, Meta(ge=0, extra={"expected": "u64"})]  # msgspec bounds end at 2**63 - 1: see check_seed


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
