"""hypothesis strategies for request bodies, from the types of bodies: right, nearly right, and arbitrary JSON."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

Strategy = st.SearchStrategy[Any]

# Limits of parsers, float32 and integers of 32 and 64 bits; special names in JavaScript, Python and SQL.
NUMBERS = [
    0,
    1,
    -1,
    2,
    0.5,
    1.0,
    -0.0,
    5e-324,
    1e-46,
    3.5e38,
    2**31,
    2**32,
    2**53 + 1,
    2**63,
    2**64 - 1,
    2**64,
    10**300,
]
WORDS = [
    "",
    "a",
    "auto",
    "none",
    "tgi",
    "user",
    "assistant",
    "__proto__",
    "constructor",
    "\x00\x1b\x7f",
    "\ud800",
    "😀",
    "é",
]

words = st.sampled_from(WORDS) | st.text(max_size=5)
scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.integers() | st.floats() | words
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)


def right(shape: type[msgspec.Struct]) -> Strategy:
    """Bodies with fields of the right types."""
    return _of(inspect.type_info(shape), st.nothing())


def nearly(shape: type[msgspec.Struct]) -> Strategy:
    """The same with arbitrary JSON in some places."""
    return _of(inspect.type_info(shape), anything)


def _of(kind: Any, wrong: Strategy) -> Strategy:
    """Values of a type, at every level sometimes of `wrong`."""
    match kind:
        case inspect.Metadata():
            good = _of(kind.type, wrong)
        case inspect.UnionType():
            good = st.one_of([_of(member, wrong) for member in kind.types])
        case inspect.StructType():
            return _object(kind, wrong)
        case inspect.ListType():
            good = st.lists(_of(kind.item_type, wrong), max_size=3)
        case inspect.DictType():
            good = st.dictionaries(words, _of(kind.value_type, wrong), max_size=3)
        case inspect.LiteralType():
            good = st.sampled_from(kind.values)
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            good = st.booleans()
        case inspect.IntType():
            good = st.integers(kind.ge, kind.le) | st.integers(0, 5)
        case inspect.FloatType():
            good = st.floats(kind.ge, kind.le, width=32) | st.floats(-2, 2)
        case inspect.StrType():
            good = words
        case _:
            return anything
    return good if wrong.is_empty else st.one_of(*[good] * 9, wrong)


def _object(kind: Any, wrong: Strategy) -> Strategy:
    always, perhaps = {}, {}
    for field in kind.fields:
        (always if field.required else perhaps)[field.encode_name] = st.deferred(
            lambda kind=field.type: _of(kind, wrong)
        )
    if kind.tag_field is not None:
        always[kind.tag_field] = st.just(kind.tag)
    return st.fixed_dictionaries(always, optional=perhaps)
