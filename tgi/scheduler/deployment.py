"""The limits of a deployment: set by the first worker, held by every later one."""

from tgi.kernel.messages import Limits

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


def misfit(limits: Limits, prompt_tokens: int, max_new_tokens: int) -> str:
    """Why a request can never be computed under these limits, in TGI's words; "" if it can."""
    total = min(limits.max_total_tokens, limits.pages * limits.page_size)
    if prompt_tokens + max_new_tokens > total:
        return (
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {prompt_tokens} `inputs` tokens and {max_new_tokens} `max_new_tokens`"
        )
    if prompt_tokens > limits.max_input_tokens:
        return f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {prompt_tokens}"
    return ""
