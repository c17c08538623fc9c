"""What the types of a message's fields leave open: sizes of columns that belong together, and ranges of numbers.

The checks raise ProtocolError before anything has changed. Without them such a message would end this process, and with
it the requests of all other peers.
"""

from tgi.microkernel.errors import ProtocolError
from tgi.microkernel.messages.codec import ITEM_BYTES, unpack_uint32
from tgi.microkernel.messages.protocol import (
    IMAGE_CHUNK_BYTES,
    MAX_PROMPT_TOP_TOKENS,
    Generate,
    ImageChunk,
    PromptLogprobs,
    Status,
    Tokens,
    limits_out_of_range,
)
from tgi.microkernel.recovery.work_register import FINGERPRINT_BYTES

MAX_INT32 = 2**31 - 1
RANGES = {
    "rid": 2**32 - 1,
    "max_new_tokens": MAX_INT32,
    "truncate": MAX_INT32,
    "prompt_logprobs_from": MAX_INT32,
    "prompt_top_n": MAX_PROMPT_TOP_TOKENS,
}


def check_generate(generate: Generate) -> None:
    """From an api."""
    for name in ("resume_ids", "stop_token_ids", "input_ids"):
        if len(getattr(generate, name)) % ITEM_BYTES:
            raise ProtocolError(f"`{name}` is not a column of int32")
    for name, most in RANGES.items():
        if (value := getattr(generate, name)) is not None and not 0 <= value <= most:
            raise ProtocolError(f"`{name}` is {value}")
    if fault := generate.context.out_of_range():
        raise ProtocolError(fault)
    if (pooling := generate.pooling) is not None and not 0 <= (pooling.truncate or 0) <= MAX_INT32:
        raise ProtocolError(f"`pooling.truncate` is {pooling.truncate}")


def check_image_chunk(chunk: ImageChunk) -> None:
    """From an api."""
    if len(chunk.data) > IMAGE_CHUNK_BYTES:
        raise ProtocolError(f"`data` has {len(chunk.data)} bytes")


def check_tokens(tokens: Tokens, ids: list[int], rids: list[int], counts: list[int]) -> None:
    """From the scheduler, with three columns that the caller has unpacked."""
    if len(rids) != len(counts) or sum(counts) != len(ids) or len(tokens.logprobs) != len(tokens.token_ids):
        raise ProtocolError(f"{len(rids)} rids, {len(counts)} counts and {len(ids)} tokens do not fit")
    if not -1 <= tokens.load <= MAX_INT32:
        raise ProtocolError(f"`load` is {tokens.load}")
    if tokens.top_counts:
        tops = unpack_uint32(tokens.top_counts)
        if len(tops) != len(ids) or not ITEM_BYTES * sum(tops) == len(tokens.top_ids) == len(tokens.top_logprobs):
            raise ProtocolError(f"{len(tops)} top counts do not fit {len(ids)} tokens, or the columns of top tokens")


def check_prompt_logprobs(logprobs: PromptLogprobs) -> None:
    """From the scheduler."""
    columns = (logprobs.logprobs, logprobs.top_ids, logprobs.top_logprobs)
    if any(len(column) % ITEM_BYTES for column in columns) or len(logprobs.top_ids) != len(logprobs.top_logprobs):
        raise ProtocolError(f"columns have {', '.join(str(len(column)) for column in columns)} bytes")


def check_status(status: Status) -> None:
    """From the scheduler."""
    if status.limits is not None and (fault := limits_out_of_range(status.limits)):
        raise ProtocolError(fault)
    if len(status.suspects) % FINGERPRINT_BYTES:
        raise ProtocolError(f"`suspects` has {len(status.suspects)} bytes")
