"""The message codec: every message is decoded as it was encoded, and invalid bytes raise ProtocolError only."""

import types
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.microkernel.errors import ProtocolError
from tgi.microkernel.messages.codec import pack_column, unpack_float32, unpack_int32, unpack_uint32
from tgi.microkernel.messages.protocol import MESSAGES, Cancel, Hello, decode, encode

pytestmark = pytest.mark.fuzz

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    bytes: st.binary(max_size=20),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if arg is type(None) else values(arg) for arg in typing.get_args(hint)])
    if origin is list:
        return st.lists(values(typing.get_args(hint)[0]), max_size=3)
    return SCALARS[hint] if hint in SCALARS else messages(hint)


def messages(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: values(hints[name]) for name in cls._fields})  # type: ignore[attr-defined]


ANY_MESSAGE = st.one_of([messages(cls) for cls in MESSAGES])
JSON_LIKE = st.recursive(
    st.one_of(st.none(), *SCALARS.values()),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_message_is_decoded_as_encoded(cls: type) -> None:
    @given(messages(cls))
    def holds(message: Any) -> None:
        back = decode(encode(message))
        assert back == message
        assert type(back) is cls

    holds()


@given(ANY_MESSAGE, st.data())
def test_a_peer_with_fewer_or_more_fields_is_understood(message: Any, data: st.DataObject) -> None:
    frame = msgpack.unpackb(encode(message), strict_map_key=True)
    defaults = type(message)._field_defaults
    gone = data.draw(st.integers(0, len(defaults)))
    older = frame[: len(frame) - gone]
    kept = len(message._fields) - gone
    expected = message._replace(**{name: defaults[name] for name in message._fields[kept:]})
    assert decode(msgpack.packb(older)) == expected
    assert decode(msgpack.packb([*frame, "a field of the future", 7])) == message


def survives(frame: bytes) -> None:
    """Decodes to a message, or raises ProtocolError; any other exception fails the test."""
    try:
        message = decode(frame)
    except ProtocolError:
        return
    assert type(message) in MESSAGES


@given(st.binary(max_size=200))
def test_random_bytes_decode_or_raise_protocol_error(frame: bytes) -> None:
    survives(frame)


@given(ANY_MESSAGE, st.data())
def test_damaged_messages_decode_or_raise_protocol_error(message: Any, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(frame))
    survives(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


@given(st.integers(-1, len(MESSAGES)), st.lists(JSON_LIKE, max_size=12))
def test_wrong_fields_of_any_tag_raise_protocol_error(tag: int, fields: list[Any]) -> None:
    survives(msgpack.packb([tag, *fields]))


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "msgpack"),
        (b"\xc1", "msgpack"),
        (msgpack.packb({}), "array"),
        (msgpack.packb([]), "array"),
        (msgpack.packb([True, 1]), "tag"),
        (msgpack.packb([len(MESSAGES)]), "tag"),
        (msgpack.packb([-1]), "tag"),
        (msgpack.packb([MESSAGES.index(Cancel)]), "Cancel"),
        (msgpack.packb([MESSAGES.index(Cancel), "7"]), "Cancel.rid"),
        (msgpack.packb([MESSAGES.index(Cancel), True]), "Cancel.rid"),
        (msgpack.packb([MESSAGES.index(Cancel), None]), "Cancel.rid"),
        (msgpack.packb([MESSAGES.index(Hello), 1, "api", 0, "text"]), "Hello.boot"),
        (b"\xdd\xff\xff\xff\xff", "msgpack"),  # an array that claims four billion items
        (b"\x91" * 100_000, "msgpack"),  # nested as deep as the frame is long
        (encode(Cancel(1)) + b"\x00", "msgpack"),
        (bytes(65 << 20), "limit"),
    ],
    ids=range(16),
)
def test_protocol_errors_name_the_fault(frame: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(frame)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.integers(0, 2**32 - 1)))
def test_columns_are_unpacked_as_packed(signed: list[int], unsigned: list[int]) -> None:
    assert unpack_int32(pack_column("i", signed)) == signed
    assert unpack_uint32(pack_column("I", unsigned)) == unsigned


@given(st.binary(max_size=50))
def test_columns_of_any_length(column: bytes) -> None:
    for read in (unpack_int32, unpack_uint32, unpack_float32):
        if len(column) % 4:
            with pytest.raises(ProtocolError):
                read(column)
        else:
            assert len(read(column)) == len(column) // 4
