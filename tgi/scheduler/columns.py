"""Packed columns of tokens, and the operations that handle a whole column at once, in C.

A column is `bytes` or an `array` of little-endian numbers of 4 bytes, one per row. A step of many decode rows has no
time for a Python statement per row: with these operations a decode row costs 19 bytecode instructions per step, its
share of a page every 16 steps included. `scripts/bench costs` watches it.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress, groupby
from operator import itemgetter
from typing import NamedTuple

from tgi.microkernel.codec import FLOAT32, INT32, ITEM_BYTES, UINT32, pack_column, unpack_uint32
from tgi.microkernel.protocol import StepResult, Tokens

ONE = pack_column(INT32, [1])
UINT32_ONE = b"\1\0\0\0"

DrawnToken = tuple[int, int, float]  # rid, token id, logprob: a row that is not in columns yet


class DrawnTokens(NamedTuple):
    """Columns of rows of one token each, as `Tokens` carries them."""

    rids: bytes  # uint32
    token_ids: bytes  # int32
    logprobs: bytes  # float32


class TopTokens(NamedTuple):
    """The top-n alternatives of one token."""

    n: int
    ids: bytes  # int32, `n` of them
    logprobs: bytes  # float32, `n` of them


NO_TOKENS = DrawnTokens(b"", b"", b"")


# --- operations on whole columns --------------------------------------------------------------------------------------


def increment_each(column: "array[int]") -> "array[int]":
    """Returns an int32 column with 1 added to each item. Every item must be at least 0 and less than 2^31 - 1.

    The column is added as one long integer; no item is large enough to carry into the next one. That takes a sixth of
    the time of a comprehension at 1024 items.
    """
    packed = column.tobytes()
    incremented = int.from_bytes(packed, "little") + _ones(len(column))
    return array(INT32, incremented.to_bytes(len(packed), "little"))


@lru_cache(maxsize=8)
def _ones(count: int) -> int:
    """An int32 column of ones as one long integer."""
    return int.from_bytes(ONE * count, "little")


def all_below(column: "array[int]", limit: int) -> bool:
    """Whether each item of an int32 column is at least 0 and less than `limit`, which is from 1 to 2^31.

    Every negative item has its highest bit set, and if none is negative, adding 2^31 - `limit` sets the highest bit of
    those that are too large. The column is added as one long integer, which takes a quarter of the time of `max`.
    """
    highest_bits, distances = _bounds((len(column) - 1).bit_length(), limit)
    items = int.from_bytes(column.tobytes(), "little")
    return not items & highest_bits and not (items + distances) & highest_bits


@lru_cache(maxsize=32)
def _bounds(bits: int, limit: int) -> tuple[int, int]:
    """For `all_below`: columns of 2^31 and of 2^31 - `limit` as long integers, for columns of up to 2^bits items. They
    serve shorter columns as well: behind their end the sum has no highest bit."""
    columns = (pack_column(UINT32, [item]) * (1 << bits) for item in (1 << 31, (1 << 31) - limit))
    highest_bits, distances = (int.from_bytes(column, "little") for column in columns)
    return highest_bits, distances


def append_each(arrays: "Iterable[array[int]]", values: Iterable[int]) -> None:
    """Appends value k to array k, until one of the two ends.

    `array.append` returns None, so `any` consumes the whole map, in C. That takes half the time of a `for` statement at
    1024 arrays.
    """
    any(map(array.append, arrays, values))


def compress_columns(columns: DrawnTokens, kept: Sequence[bool]) -> DrawnTokens:
    """The rows for which `kept` is true."""
    return DrawnTokens(*(array(UINT32, compress(memoryview(one).cast("I"), kept)).tobytes() for one in columns))


# --- messages ---------------------------------------------------------------------------------------------------------


def tokens_message(columns: DrawnTokens, rows: list[DrawnToken], top_tokens: list[TopTokens], load: int) -> Tokens:
    """One token for each request: those in `columns`, then those in `rows`. `top_tokens` is empty or has one item per
    row; then `columns` is empty. `load`: see Tokens."""
    rids, ids, logprobs = columns
    if rows:
        more_rids, more_ids, more_logprobs = zip(*rows, strict=True)
        rids += pack_column(UINT32, more_rids)
        ids += pack_column(INT32, more_ids)
        logprobs += pack_column(FLOAT32, more_logprobs)
    message = Tokens(rids, UINT32_ONE * (len(rids) // ITEM_BYTES), ids, logprobs, load=load)
    counts = [one.n for one in top_tokens]
    if not any(counts):
        return message
    return message._replace(
        top_counts=pack_column(UINT32, counts),
        top_ids=b"".join([one.ids for one in top_tokens]),
        top_logprobs=b"".join([one.logprobs for one in top_tokens]),
    )


def token_runs_message(columns: DrawnTokens, rows: list[DrawnToken], top_tokens: list[TopTokens], load: int) -> Tokens:
    """The same where a request may have several tokens: its rows are adjacent."""
    counts = [(rid, len(list(run))) for rid, run in groupby(rows, itemgetter(0))]
    rids, lengths = zip(*counts, strict=True)
    message = tokens_message(columns, rows, top_tokens, load)
    return message._replace(rids=pack_column(UINT32, rids), counts=pack_column(UINT32, lengths))


# --- top-n tokens of a result -----------------------------------------------------------------------------------------


def split_top_tokens(result: StepResult) -> Iterator[TopTokens]:
    """The top-n alternatives of each token of a result that has such columns."""
    begin = 0
    for count in unpack_uint32(result.top_counts):
        end = begin + ITEM_BYTES * count
        yield TopTokens(count, result.top_ids[begin:end], result.top_logprobs[begin:end])
        begin = end


def top_tokens_fit(result: StepResult, tokens: int) -> bool:
    """Whether the top-n columns are empty or have the sizes that belong to this number of tokens."""
    if not result.top_counts:
        return not result.top_ids and not result.top_logprobs
    if len(result.top_counts) != ITEM_BYTES * tokens:
        return False
    size = ITEM_BYTES * sum(unpack_uint32(result.top_counts))
    return len(result.top_ids) == len(result.top_logprobs) == size
