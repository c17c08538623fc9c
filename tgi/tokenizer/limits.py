"""The rules on token counts that a prompt must keep, in their order, with TGI's messages, and what is generated."""

from tgi.kernel.presence import Limits

# TGI generates in chunks of this many tokens and admits a request if its first chunk fits. Longer generations are
# served in one go here, but a client that asks for more than the context still gets what fits, as it does there.
CHUNK = 1024


def refusal(limits: Limits, prompt_tokens: int, max_new_tokens: int | None) -> str:
    """Why a prompt of this length is refused, for the client; "" if it is not.

    `max_input_tokens` leaves room for a generated token: where none is generated, the prompt may have one token more.
    """
    room = max(limits.max_total_tokens - prompt_tokens, 0)
    asked = min(room if max_new_tokens is None else max_new_tokens, CHUNK)
    if prompt_tokens == 0:
        return "`inputs` cannot be empty"
    if prompt_tokens + asked > limits.max_total_tokens:
        return (
            f"`inputs` tokens + `max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {prompt_tokens} `inputs` tokens and {asked} `max_new_tokens`"
        )
    if prompt_tokens - (max_new_tokens == 0) > limits.max_input_tokens:
        return f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {prompt_tokens}"
    return ""


def new_tokens(limits: Limits, prompt_tokens: int, max_new_tokens: int | None) -> int:
    """How many tokens are generated at most: what was asked for, or all that the context has room for."""
    room = limits.max_total_tokens - prompt_tokens
    return room if max_new_tokens is None else min(max_new_tokens, room)
