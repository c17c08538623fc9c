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
MAX_RID = 2**32 - 1


def check_generate(generate: Generate) -> None:
    """From an api."""
    if len(generate.resume_ids) % ITEM_BYTES:
        raise ProtocolError("`resume_ids` is not a column of int32")
    if len(generate.stop_token_ids) % ITEM_BYTES:
        raise ProtocolError("`stop_token_ids` is not a column of int32")
    if len(generate.input_ids) % ITEM_BYTES:
        raise ProtocolError("`input_ids` is not a column of int32")
    if not 0 <= generate.rid <= MAX_RID:
        raise ProtocolError(f"`rid` is {generate.rid}")
    if not 0 <= (generate.max_new_tokens or 0) <= MAX_INT32:
        raise ProtocolError(f"`max_new_tokens` is {generate.max_new_tokens}")
    if not 0 <= (generate.truncate or 0) <= MAX_INT32:
        raise ProtocolError(f"`truncate` is {generate.truncate}")
    if not 0 <= (generate.prompt_logprobs_from or 0) <= MAX_INT32:
        raise ProtocolError(f"`prompt_logprobs_from` is {generate.prompt_logprobs_from}")
    if not 0 <= generate.prompt_top_n <= MAX_PROMPT_TOP_TOKENS:
        raise ProtocolError(f"`prompt_top_n` is {generate.prompt_top_n}")
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
