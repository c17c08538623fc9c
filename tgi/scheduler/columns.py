"""Packed columns of tokens: `bytes` or an `array` of little-endian numbers of 4 bytes, one per row."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress, groupby
from operator import itemgetter
from typing import NamedTuple

from tgi.microkernel.messages.codec import FLOAT32, INT32, ITEM_BYTES, UINT32, pack_column, unpack_uint32
from tgi.microkernel.messages.protocol import StepResult, Tokens

ONE = pack_column(INT32, [1])  # also as uint32

SampledRow = tuple[int, int, float]  # rid, token id, logprob: a row that is not in columns yet


class SampledColumns(NamedTuple):
    """Columns of rows of one token each, as `Tokens` carries them."""

    rids: bytes  # uint32
    token_ids: bytes  # int32
    logprobs: bytes  # float32


class TopTokens(NamedTuple):
    """The top-n alternatives of one token."""

    n: int
    ids: bytes  # int32, `n` of them
    logprobs: bytes  # float32, `n` of them


NO_TOKENS = SampledColumns(b"", b"", b"")


def increment_each(column: "array[int]") -> "array[int]":
    """Returns an int32 column with 1 added to each item, which is 0 to 2**31 - 2: as one long integer, since no such
    item carries into the next one. Once a step, when other code has filled the processor's caches, a call of numpy
    takes three times as long for 1 or 64 items (61 and 44 us against 15 and 22), and about as long for 1024."""
    packed = column.tobytes()
    incremented = int.from_bytes(packed, "little") + int.from_bytes(ONE * len(column), "little")
    return array(INT32, incremented.to_bytes(len(packed), "little"))


def compress_columns(columns: SampledColumns, kept: Sequence[bool]) -> SampledColumns:
    """The rows for which `kept` is true."""
    return SampledColumns(*(array(UINT32, compress(memoryview(one).cast("I"), kept)).tobytes() for one in columns))


# --- messages ---------------------------------------------------------------------------------------------------------


def tokens_message(columns: SampledColumns, rows: list[SampledRow], top_tokens: list[TopTokens], load: int) -> Tokens:
    """One token for each request: those in `columns`, then those in `rows`. `top_tokens` is empty or has one item per
    row; then `columns` is empty. `load`: see Tokens."""
    rids, ids, logprobs = columns
    if rows:
        more_rids, more_ids, more_logprobs = zip(*rows, strict=True)
        rids += pack_column(UINT32, more_rids)
        ids += pack_column(INT32, more_ids)
        logprobs += pack_column(FLOAT32, more_logprobs)
    message = Tokens(rids, ONE * (len(rids) // ITEM_BYTES), ids, logprobs, load=load)
    counts = [one.n for one in top_tokens]
    if not any(counts):
        return message
    return message._replace(
        top_counts=pack_column(UINT32, counts),
        top_ids=b"".join([one.ids for one in top_tokens]),
        top_logprobs=b"".join([one.logprobs for one in top_tokens]),
    )


def token_runs_message(
    columns: SampledColumns, rows: list[SampledRow], top_tokens: list[TopTokens], load: int
) -> Tokens:
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
