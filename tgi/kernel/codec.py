"""Turns messages (typed NamedTuples) into msgpack arrays `[tag, *fields]` and back, checking types on the way in."""

import types
import typing
from collections.abc import Callable
from typing import Any

import msgpack

from tgi.kernel.errors import ProtocolError

# A frame is one message. A 200,000-token prompt is 0.8 MB; nothing legitimate comes near this.
MAX_FRAME_BYTES = 64 << 20

SCALARS = (int, float, bool, str, bytes)

Check = Callable[[Any, str], Any]


class Codec:
    """Encodes and decodes the message classes it was given; a class's tag is its place in the list.

    Fields may be int, float, bool, str, bytes, list[T], T | None, or another NamedTuple (nested as an array).
    A missing trailing field takes its default and a surplus trailing field is ignored, so an older and a newer
    peer understand each other as long as fields are only appended.
    """

    def __init__(self, classes: list[type]) -> None:
        self._tags = {cls: tag for tag, cls in enumerate(classes)}
        self._builders = [_record(cls) for cls in classes]
        self._packer = msgpack.Packer(use_bin_type=True, autoreset=True)

    def encode(self, message: tuple[Any, ...]) -> bytes:
        """The frame of one message."""
        frame: bytes = self._packer.pack((self._tags[type(message)], *message))
        return frame

    def decode(self, frame: bytes | memoryview) -> Any:
        """The message of one frame. Raises ProtocolError on anything but a well-formed one."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        try:
            array = msgpack.unpackb(frame, raw=False, use_list=True, strict_map_key=True)
        except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError and its own, by case
            raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from error
        if type(array) is not list or not array:
            raise ProtocolError("expected a msgpack array [tag, *fields]")
        tag = array[0]
        if type(tag) is not int or not 0 <= tag < len(self._builders):
            raise ProtocolError(f"unknown message tag {tag!r}")
        del array[0]
        return self._builders[tag](array, "")


def _record(cls: type) -> Check:
    """The checked constructor of one NamedTuple class."""
    hints = typing.get_type_hints(cls)
    names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    required = len(names) - len(cls._field_defaults)  # type: ignore[attr-defined]
    checks = [_check(hints[name]) for name in names]
    paths = [f"{cls.__name__}.{name}" for name in names]
    kinds = [hints[name] if hints[name] in SCALARS else list for name in names]
    nested = [place for place, kind in enumerate(kinds) if kind is list]

    def build(value: Any, path: str) -> Any:
        if type(value) is list and [*map(type, value)] == kinds:  # the usual case: only what is nested is looked into
            for place in nested:
                value[place] = checks[place](value[place], paths[place])
            return cls(*value)
        if type(value) is not list:
            raise ProtocolError(f"{path or cls.__name__}: expected an array, got {type(value).__name__}")
        if len(value) < required:
            raise ProtocolError(f"{cls.__name__}: expected at least {required} fields, got {len(value)}")
        return cls(*[check(item, where) for check, item, where in zip(checks, value, paths, strict=False)])

    return build


def _check(hint: Any) -> Check:
    """A function that returns its argument if it has the type `hint`, and raises ProtocolError otherwise."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        check = _check(inner)
        return lambda value, path: None if value is None else check(value, path)
    if origin is list:
        (item,) = typing.get_args(hint)
        check_item = _check(item)

        def check_list(value: Any, path: str) -> Any:
            if type(value) is not list:
                raise ProtocolError(f"{path}: expected an array, got {type(value).__name__}")
            if {item}.issuperset(map(type, value)):  # all of them scalars of the right type, or none at all
                return value
            return [check_item(entry, path) for entry in value]

        return check_list
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _record(hint)
    if hint not in SCALARS:
        raise TypeError(f"messages cannot carry {hint!r}")

    def check_scalar(value: Any, path: str) -> Any:
        kind = type(value)
        if kind is hint:
            return value
        if hint is float and kind is int:
            return float(value)
        raise ProtocolError(f"{path}: expected {hint.__name__}, got {kind.__name__}")

    return check_scalar
