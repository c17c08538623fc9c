"""The logprobs of prompts, for the requests that ask: which rows tell them, and which of a result are whose."""

from collections.abc import Iterator
from typing import NamedTuple

from tgi.kernel.messages import PromptLogprobs, Result
from tgi.scheduler.request import Request


class Telling(NamedTuple):
    """A row of a step that tells the logprobs of so many of its prompt's tokens."""

    request: Request
    tokens: int


def telling(request: Request, start: int, end: int) -> Telling | None:
    """What a row that computes positions `start` to `end` - 1 tells: each position the token behind it. None: nothing.

    Whatever was told since the request got its slot stands before `start`, so the worker counts the same.
    """
    tokens = min(end, request.prompt_tokens - 1) - max(start, request.prompt_from - 1)
    return Telling(request, tokens) if tokens > 0 else None


def told_fit(result: Result, rows: list[Telling], vocab_size: int) -> bool:
    """Whether the prompt columns of a result are those of these rows."""
    if not rows:
        return not (result.prompt_logprobs or result.prompt_top_ids or result.prompt_top_logprobs)
    told = 4 * sum(tokens for _, tokens in rows)
    tops = 4 * sum(tokens * min(request.prompt_top_n, vocab_size) for request, tokens in rows)
    sizes = (len(result.prompt_logprobs), len(result.prompt_top_ids), len(result.prompt_top_logprobs))
    return sizes == (told, tops, tops)


def pieces(rows: list[Telling], result: Result, vocab_size: int) -> Iterator[tuple[Request, PromptLogprobs]]:
    """What each of these rows has told."""
    end = top_end = 0
    for request, tokens in rows:
        begin, end = end, end + 4 * tokens
        top_begin, top_end = top_end, top_end + 4 * tokens * min(request.prompt_top_n, vocab_size)
        yield (
            request,
            PromptLogprobs(
                request.rid,
                result.prompt_logprobs[begin:end],
                result.prompt_top_ids[top_begin:top_end],
                result.prompt_top_logprobs[top_begin:top_end],
            ),
        )
