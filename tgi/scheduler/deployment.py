"""The limits of a deployment: set by the first worker, held by every later one."""

from tgi.kernel.messages import Limits
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


def refusal(request: Request) -> str:
    """Why no worker can compute it, in TGI's words; "" if one can."""
    if not request.prompt_tokens:
        return "`inputs` cannot be empty"
    if request.limit <= request.prompt_tokens:
        return "`max_new_tokens` must be strictly positive"
    return ""


def misfit(limits: Limits, request: Request) -> str:
    """Why a worker of these limits can never compute it, in TGI's words; "" if it can."""
    total = min(limits.max_total_tokens, limits.pages * limits.page_size)
    prompt_tokens = request.prompt_tokens
    if request.limit > total:
        return (
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {prompt_tokens} `inputs` tokens and {request.limit - prompt_tokens} `max_new_tokens`"
        )
    if prompt_tokens > limits.max_input_tokens:
        return f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {prompt_tokens}"
    return ""
