"""Decodes the columns of top-n tokens, for the tests of scheduler and worker."""

from itertools import pairwise

import numpy as np

from tgi.microkernel.messages.codec import unpack_float32, unpack_int32, unpack_uint32
from tgi.microkernel.messages.protocol import StepResult, Tokens

Tops = list[tuple[int, float]]  # (id, logprob) of the top tokens at one position


def split_tops(message: Tokens | StepResult) -> list[Tops]:
    """The top tokens at each position; [] if no request asks for them."""
    ids, logprobs = unpack_int32(message.top_ids), unpack_float32(message.top_logprobs)
    if not message.top_counts:
        assert not ids
        assert not logprobs
        return []
    ends = np.cumsum([0, *unpack_uint32(message.top_counts)])
    assert ends[-1] == len(ids)
    entries = list(zip(ids, logprobs, strict=True))
    return [entries[begin:end] for begin, end in pairwise(ends)]
