"""What the rows of a step drew, on the way from the worker's columns to those of each tokenizer."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from tgi.kernel.messages import Result, Tokens
from tgi.kernel.pack import FLOAT32, INT32, UINT32, pack, uints

Row = tuple[int, int, float]  # rid, id, logprob
Top = tuple[int, bytes, bytes]  # beside one token: how many likeliest tokens, and its stretches of their two columns


class Columns(NamedTuple):
    """Rows of one token each, as they are sent."""

    rids: bytes  # uint32
    ids: bytes  # int32
    logprobs: bytes  # float32


NOTHING = Columns(b"", b"", b"")


def tokens(columns: Columns, rows: list[Row], tops: list[Top]) -> Tokens:
    """Rows behind columns as columns, with those of the likeliest tokens if any row has some. `tops` is empty or has
    one per row."""
    rids, ids, logprobs = columns
    if rows:
        more_rids, more_ids, more_logprobs = zip(*rows, strict=True)
        rids += pack(UINT32, more_rids)
        ids += pack(INT32, more_ids)
        logprobs += pack(FLOAT32, more_logprobs)
    plain = Tokens(rids, b"\1\0\0\0" * (len(rids) // 4), ids, logprobs)
    counts = [count for count, _, _ in tops]
    if not any(counts):
        return plain
    return plain._replace(
        top_counts=pack(UINT32, counts),
        top_ids=b"".join([ids for _, ids, _ in tops]),
        top_logprobs=b"".join([logprobs for _, _, logprobs in tops]),
    )


def runs(columns: Columns, rows: list[Row], tops: list[Top]) -> Tokens:
    """The same where neighbours may be of one request: those are its run."""
    counts = [(rid, len(list(run))) for rid, run in groupby(rows, itemgetter(0))]
    rids, lengths = zip(*counts, strict=True)
    return tokens(columns, rows, tops)._replace(rids=pack(UINT32, rids), counts=pack(UINT32, lengths))


def tops(result: Result) -> Iterator[Top]:
    """The likeliest tokens beside each token of a result that has some."""
    begin = 0
    for count in uints(result.top_counts):
        end = begin + 4 * count
        yield count, result.top_ids[begin:end], result.top_logprobs[begin:end]
        begin = end


def tops_fit(result: Result, tokens: int) -> bool:
    """Whether the columns of the likeliest tokens are those of so many tokens, or empty."""
    if not result.top_counts:
        return not result.top_ids and not result.top_logprobs
    if len(result.top_counts) != 4 * tokens:
        return False
    size = 4 * sum(uints(result.top_counts))
    return len(result.top_ids) == len(result.top_logprobs) == size
