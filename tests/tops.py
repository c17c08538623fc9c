"""Reads the columns of likeliest tokens back, for the tests of every floor."""

from itertools import pairwise

import numpy as np

from tgi.kernel.messages import Result, Tokens
from tgi.kernel.pack import floats, ints, uints

Tops = list[tuple[int, float]]  # (id, logprob) beside one token


def split_tops(message: Tokens | Result) -> list[Tops]:
    """What stands beside each token; nothing if nobody asked."""
    ids, logprobs = ints(message.top_ids), floats(message.top_logprobs)
    if not message.top_counts:
        assert not ids
        assert not logprobs
        return []
    ends = np.cumsum([0, *uints(message.top_counts)])
    assert ends[-1] == len(ids)
    entries = list(zip(ids, logprobs, strict=True))
    return [entries[begin:end] for begin, end in pairwise(ends)]
