"""The operations on whole columns agree with their definition item by item."""

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.counting import per_item
from tgi.microkernel.codec import FLOAT32, INT32, UINT32, column_slice, pack_column, unpack_int32, unpack_uint32
from tgi.microkernel.protocol import StepResult
from tgi.scheduler.columns import (
    NO_TOKENS,
    DrawnTokens,
    TopTokens,
    all_below,
    append_each,
    compress_columns,
    increment_each,
    split_top_tokens,
    token_runs_message,
    tokens_message,
)

POSITIONS = st.lists(st.integers(0, 2**31 - 2), max_size=50)
LIST_OF_UINT32 = st.lists(st.integers(0, 2**32 - 1), max_size=50)


@given(POSITIONS)
def test_increment_each(positions: list[int]) -> None:
    column = array(INT32, positions)
    assert increment_each(column).tolist() == [position + 1 for position in positions]
    assert column.tolist() == positions


@given(
    st.lists(st.sampled_from([0, 1, 99, 100, 101, 65_536, 2**31 - 1, -1, -(2**31)]) | st.integers(0, 99), max_size=40),
    st.sampled_from([1, 99, 100, 49_152, 2**31 - 1, 2**31]),
)
def test_all_below(items: list[int], limit: int) -> None:
    assert all_below(array(INT32, items), limit) == all(0 <= item < limit for item in items)


@pytest.mark.parametrize("item", [-(2**31), -1, 100, 2**31 - 1])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65])
def test_all_below_finds_an_item_at_any_index(length: int, item: int) -> None:
    for index in range(length):
        column = array(INT32, [99] * length)
        assert all_below(column, 100)
        column[index] = item
        assert not all_below(column, 100)


@given(st.lists(st.lists(st.integers(0, 9)), max_size=20), st.lists(st.integers(0, 9), max_size=20))
def test_append_each(lists: list[list[int]], values: list[int]) -> None:
    arrays = [array(INT32, items) for items in lists]
    append_each(arrays, values)
    expected = [[*items, *values[k : k + 1]] for k, items in enumerate(lists)]
    assert [one.tolist() for one in arrays] == expected


@given(POSITIONS, st.integers(0, 50), st.integers(0, 50))
def test_column_slice(values: list[int], begin: int, end: int) -> None:
    assert unpack_int32(column_slice(pack_column(INT32, values), begin, end)) == values[begin:end]


@given(LIST_OF_UINT32, st.data())
def test_compress_columns(rids: list[int], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(rids), max_size=len(rids)))
    column = pack_column(UINT32, rids)
    expected = [rid for rid, keep in zip(rids, kept, strict=True) if keep]
    for one in compress_columns(DrawnTokens(column, column, column), kept):
        assert unpack_uint32(one) == expected


def test_no_instructions_per_item() -> None:
    """The point of these operations: their items are handled in C."""

    def increment(count: int) -> object:
        column = array(INT32, range(count))
        return lambda: increment_each(column)

    def append(count: int) -> object:
        arrays, values = [array(INT32) for _ in range(count)], list(range(count))
        return lambda: append_each(arrays, values)

    for operation in (increment, append):
        assert per_item(operation, 100, 900).instructions < 0.1  # type: ignore[arg-type]


def test_messages() -> None:
    columns = DrawnTokens(pack_column(UINT32, [7]), pack_column(INT32, [70]), pack_column(FLOAT32, [-1.0]))
    message = tokens_message(columns, [(8, 80, -2.0)], [], 3)
    assert message.load == 3
    assert unpack_uint32(message.rids) == [7, 8]
    assert unpack_uint32(message.counts) == [1, 1]
    assert unpack_int32(message.token_ids) == [70, 80]
    assert message.top_counts == b""
    runs = token_runs_message(NO_TOKENS, [(8, 80, -2.0), (8, 81, -2.0), (9, 90, -3.0)], [], 3)
    assert unpack_uint32(runs.rids) == [8, 9]
    assert unpack_uint32(runs.counts) == [2, 1]
    assert unpack_int32(runs.token_ids) == [80, 81, 90]


@pytest.mark.parametrize("counts", [[2, 0, 1], [0], []])
def test_top_tokens_are_split_and_joined(counts: list[int]) -> None:
    ids, logprobs = pack_column(INT32, range(sum(counts))), pack_column(FLOAT32, [-1.0] * sum(counts))
    result = StepResult(1, 1, b"", b"", b"", top_counts=pack_column(UINT32, counts), top_ids=ids, top_logprobs=logprobs)
    tops = list(split_top_tokens(result))
    assert [one.n for one in tops] == counts
    rows = [(rid, 0, 0.0) for rid in range(len(counts))]
    message = tokens_message(NO_TOKENS, rows, tops, 3)
    assert message.top_ids == ids
    assert message.top_counts == (pack_column(UINT32, counts) if any(counts) else b"")
    assert all(isinstance(one, TopTokens) for one in tops)
