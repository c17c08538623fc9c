"""The wire format: messages (typed NamedTuples) as msgpack arrays `[tag, *fields]`, and packed columns of numbers.

Decoding checks all types, so the rest of the program may trust a message's fields.
"""

import sys
import types
import typing
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import msgspec

from tgi.microkernel.errors import ProtocolError

# A frame is one message. A prompt of 200,000 tokens takes 0.8 MB, so no legitimate frame comes near this size.
MAX_FRAME_BYTES = 64 << 20

SCALARS = (int, float, bool, str, bytes)

# Returns its first argument, converted, if it has the right type. Otherwise raises ProtocolError; the second argument
# is the path of the field ("Cancel.rid") for its text.
Check = Callable[[Any, str], Any]


class Codec:
    """Encodes and decodes the message classes it was given; a class's tag is its index in the list.

    Fields may be int, float, bool, str, bytes, list[T], T | None, or another NamedTuple (nested as an array).
    A missing trailing field takes its default and a surplus trailing field is ignored, so processes of different
    versions understand each other as long as fields are only appended.
    """

    def __init__(self, classes: list[type]) -> None:
        self._classes = classes
        self._tags = {cls: tag for tag, cls in enumerate(classes)}
        # Each decodes the frames that have all fields of its class with the right types: those of equal versions.
        self._decoders = [_decoder(tag, cls) for tag, cls in enumerate(classes)]
        self._constructors = [_constructor(cls) for cls in classes]
        self._packer = msgpack.Packer(use_bin_type=True, autoreset=True)

    def encode(self, message: tuple[Any, ...]) -> bytes:
        """The frame of one message. Raises KeyError for a class that the codec was not given."""
        frame: bytes = self._packer.pack((self._tags[type(message)], *message))
        return frame

    def decode(self, frame: bytes | memoryview) -> Any:
        """The message of one frame. Raises ProtocolError for anything but a well-formed message."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        try:
            tag = frame[1 if frame[0] < ARRAY_16 else 3]
            return tuple.__new__(self._classes[tag], self._decoders[tag].decode(frame)[1:])
        except (IndexError, ValueError, RecursionError):  # msgspec's own errors are ValueErrors
            return self._decode_other(frame)

    def _decode_other(self, frame: bytes | memoryview) -> Any:
        """The message of a frame with fewer or more fields than this version's; tells what is wrong with any other."""
        try:
            array = msgspec.msgpack.decode(frame)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from error
        if type(array) is not list or not array:
            raise ProtocolError("expected a msgpack array [tag, *fields]")
        tag = array[0]
        if type(tag) is not int or not 0 <= tag < len(self._constructors):
            raise ProtocolError(f"unknown message tag {tag!r}")
        return self._constructors[tag](array[1:], "")


# The first byte of a msgpack array with a length of two bytes; that of a shorter one is below, and has the length.
ARRAY_16 = 0xDC


def _decoder(tag: int, cls: type) -> "msgspec.msgpack.Decoder[Any]":
    """Decodes frames of exactly this tag and the fields of this class."""
    hints = typing.get_type_hints(cls)
    names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    return msgspec.msgpack.Decoder(tuple[(typing.Literal[tag], *[hints[name] for name in names])])  # type: ignore


# --- checked constructors of messages ---


def _constructor(cls: type) -> Check:
    """The checked constructor of one NamedTuple class, from the list of its fields."""
    hints = typing.get_type_hints(cls)
    names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    required = len(names) - len(cls._field_defaults)  # type: ignore[attr-defined]
    checks = [_check(hints[name]) for name in names]
    paths = [f"{cls.__name__}.{name}" for name in names]

    def construct(value: Any, path: str) -> Any:
        if type(value) is not list:
            raise ProtocolError(f"{path or cls.__name__}: expected an array, got {type(value).__name__}")
        if len(value) < required:
            raise ProtocolError(f"{cls.__name__}: expected at least {required} fields, got {len(value)}")
        return cls(*[check(item, where) for check, item, where in zip(checks, value, paths, strict=False)])

    return construct


def _check(hint: Any) -> Check:
    """The check of one field of this type. Raises TypeError for a type that messages cannot carry."""
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
            return [check_item(entry, path) for entry in value]

        return check_list
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _constructor(hint)
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


# --- columns ----------------------------------------------------------------------------------------------------------
# Numbers of many rows as packed bytes: one memory copy for a whole step instead of one msgpack object per number.

# The wire is little-endian, and so is every platform that torch runs on.
if sys.byteorder != "little":
    raise ImportError("tgi needs a little-endian machine: step frames carry packed little-endian columns")

INT32, UINT32, FLOAT32, UINT8 = "i", "I", "f", "B"  # type codes of the modules array and struct
ITEM_BYTES = 4  # of an item of an int32, uint32 or float32 column


def pack_column(code: str, values: Iterable[int] | Iterable[float]) -> bytes:
    """The values as one little-endian column; `code` is INT32, UINT32, FLOAT32 or UINT8.

    Raises OverflowError for a value out of range.
    """
    return array(code, values).tobytes()


def column_slice(column: bytes, begin: int, end: int) -> bytes:
    """Items `begin` to `end` - 1 of a packed column of four-byte items."""
    return column[ITEM_BYTES * begin : ITEM_BYTES * end]


def unpack_int32(column: bytes) -> list[int]:
    """The numbers of an INT32 column. Raises ProtocolError if its length is not a multiple of 4."""
    return _unpack(INT32, column)


def unpack_uint32(column: bytes) -> list[int]:
    """The numbers of a UINT32 column. Raises ProtocolError if its length is not a multiple of 4."""
    return _unpack(UINT32, column)


def unpack_float32(column: bytes) -> list[float]:
    """The numbers of a FLOAT32 column. Raises ProtocolError if its length is not a multiple of 4."""
    return _unpack(FLOAT32, column)


def _unpack(code: str, column: bytes) -> list[Any]:
    try:
        return array(code, column).tolist()
    except ValueError as error:
        size = array(code).itemsize
        raise ProtocolError(f"column of {len(column)} bytes is not a whole number of {size}-byte items") from error
