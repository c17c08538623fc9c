"""Request bodies from their types: hypothesis strategies for right, nearly right and arbitrary ones, and bodies with a
number, or with a long list, in each place that takes one."""

import json
from collections.abc import Iterator
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


NUMBER = "@number"  # stands for the number in what with_number yields
PLACEHOLDER = 987654321  # stands for the number of an item in the JSON of one


def smallest(kind: Any, number: int = 0) -> Any:
    """A value of a type without optional fields. `number` makes its strings different from those of others."""
    match kind:
        case inspect.Metadata():
            return smallest(kind.type, number)
        case inspect.UnionType():
            return smallest(kind.types[0], number)
        case inspect.StructType():
            # A message needs a text, although its field is optional.
            fields = (field for field in kind.fields if field.required or field.name == "content")
            tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
            return tag | {field.encode_name: smallest(field.type, number) for field in fields}
        case inspect.ListType():
            return [smallest(kind.item_type, number)]
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StrType():
            return f"a{number}"
        case inspect.IntType() | inspect.FloatType():
            return 1
        case inspect.BoolType():
            return False
        case _:
            return {}


def with_number(kind: Any) -> Iterator[Any]:
    """Values of a type with NUMBER in the place of one number, or of one name that may be a number."""
    yield from _with(kind, lambda kind: [NUMBER] if isinstance(kind, inspect.IntType | inspect.FloatType) else [])


def with_long_list(kind: Any, length: int) -> Iterator[Any]:
    """Values of a type with one list or map of this length, of right items, and with the same of which the last item is
    wrong."""

    def fill(kind: Any) -> list[Any]:
        match kind:
            case inspect.ListType():
                item = json.dumps(smallest(kind.item_type, PLACEHOLDER))
                items = json.loads(f"[{','.join(item.replace(str(PLACEHOLDER), str(n)) for n in range(length))}]")
                return [items, [*items, ["wrong"]]]
            case inspect.DictType():
                members = dict.fromkeys(map(str, range(length)), smallest(kind.value_type))
                return [members, members | {"wrong": ["wrong"]}]
        return []

    yield from _with(kind, fill)


def _with(kind: Any, fill: Any) -> Iterator[Any]:
    """Values of a type of which one part is one of those that `fill` returns for the type of the part."""
    yield from fill(kind)
    match kind:
        case inspect.Metadata():
            yield from _with(kind.type, fill)
        case inspect.UnionType():
            for member in kind.types:
                yield from _with(member, fill)
        case inspect.StructType():
            for field in kind.fields:
                for value in _with(field.type, fill):
                    yield smallest(kind) | {field.encode_name: value}
        case inspect.ListType():
            for value in _with(kind.item_type, fill):
                yield [value]
        case inspect.DictType():
            yield {NUMBER: smallest(kind.value_type)}
            for value in _with(kind.value_type, fill):
                yield {"1": value}


def written_with(template: Any, number: str) -> str:
    """The JSON of a value of with_number, with a JSON number in the place."""
    return json.dumps(template).replace(f'"{NUMBER}":', f'"{number}":').replace(f'"{NUMBER}"', number)
