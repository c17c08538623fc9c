"""The operations on whole columns agree with their definition item by item."""

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tgi.microkernel.messages.codec import (
    FLOAT32,
    INT32,
    UINT32,
    column_slice,
    pack_column,
    unpack_int32,
    unpack_uint32,
)
from tgi.microkernel.messages.protocol import StepResult
from tgi.scheduler.columns import (
    NO_TOKENS,
    SampledColumns,
    TopTokens,
    compress_columns,
    increment_each,
    split_top_tokens,
    token_runs_message,
    tokens_message,
)

MAX_POSITION = 2**31 - 2
LIST_OF_UINT32 = st.lists(st.integers(0, 2**32 - 1), max_size=50)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), st.integers(0, 50), st.integers(0, 50))
def test_column_slice(values: list[int], begin: int, end: int) -> None:
    assert unpack_int32(column_slice(pack_column(INT32, values), begin, end)) == values[begin:end]


@given(LIST_OF_UINT32, st.data())
def test_compress_columns(rids: list[int], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.booleans(), min_size=len(rids), max_size=len(rids)))
    column = pack_column(UINT32, rids)
    expected = [rid for rid, keep in zip(rids, kept, strict=True) if keep]
    for one in compress_columns(SampledColumns(column, column, column), kept):
        assert unpack_uint32(one) == expected


@given(st.lists(st.integers(0, MAX_POSITION) | st.sampled_from([0, 0xFF, 0xFFFF, MAX_POSITION]), max_size=50))
def test_increment_each(positions: list[int]) -> None:
    column = array(INT32, positions)
    assert increment_each(column).tolist() == [position + 1 for position in positions]
    assert column.tolist() == positions


def test_messages() -> None:
    columns = SampledColumns(pack_column(UINT32, [7]), pack_column(INT32, [70]), pack_column(FLOAT32, [-1.0]))
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
