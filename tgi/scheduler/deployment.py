"""The limits of a deployment: set by the first worker, held by every later one."""

from tgi.kernel.presence import Limits
from tgi.scheduler.request import Request

AT_LEAST = ("max_total_tokens", "max_input_tokens", "max_batch_prefill_tokens", "max_batch_size", "pages")
EQUAL = ("page_size", "vocab_size", "dtype")


def shortfall(held: Limits, offered: Limits) -> str:
    """In what a restarted worker falls short of the deployment's limits, in words; "" if it meets them."""
    faults = [
        f"{name} is {getattr(offered, name)}, at least {getattr(held, name)} is needed"
        for name in AT_LEAST
        if getattr(offered, name) < getattr(held, name)
    ]
    faults += [
        f"{name} is {getattr(offered, name)} instead of {getattr(held, name)}"
        for name in EQUAL
        if getattr(offered, name) != getattr(held, name)
    ]
    return "; ".join(faults)


def refusal(request: Request, limits: Limits | None) -> str:
    """Why a worker of these limits, or of any if there are none, can never compute it, in TGI's words; "" if it can.

    `max_input_tokens` leaves room for a generated token: a prompt that is only scored may have one token more.
    """
    tokens, limit = request.prompt_tokens, request.limit
    if not tokens:
        return "`inputs` cannot be empty"
    if limit <= tokens and not (request.scored and request.tells):
        return "`max_new_tokens` must be strictly positive"
    if limits is None:
        return ""
    if limit > limits.max_total_tokens or limit > limits.pages * limits.page_size:
        total = min(limits.max_total_tokens, limits.pages * limits.page_size)
        return (
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {tokens} `inputs` tokens and {limit - tokens} `max_new_tokens`"
        )
    if tokens > limits.max_input_tokens and not (request.scored and tokens == limits.max_input_tokens + 1):
        return f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {tokens}"
    return ""
