"""JSON of what generations are made of, written by hand: some of it goes out thousands of times a second."""

import asyncio
from collections.abc import Iterable
from json.encoder import encode_basestring as quote

from tgi.api.calls import Generation
from tgi.api.columns import Columns, PromptColumns, Top
from tgi.api.float32 import render

# So many tokens of a prompt are written before other requests have their turn.
TURN = 4096

_BOOL = ("false", "true")


def tokens(columns: Columns) -> list[str]:
    """Each token as TGI writes it."""
    return [
        f'{{"id":{token},"text":{quote(text)},"logprob":{render(logprob)},"special":{_BOOL[special]}}}'
        for token, text, logprob, special in zip(
            columns.ids, columns.texts, columns.logprobs, columns.special, strict=True
        )
    ]


async def prefill(prompt: PromptColumns) -> str:
    """The tokens of a prompt as TGI writes them."""
    parts = []
    for begin in range(0, len(prompt.ids), TURN):
        turn = slice(begin, begin + TURN)
        items = (
            f'{{"id":{token},"text":{quote(text)},"logprob":{render(logprob)}}}'
            for token, text, logprob in zip(prompt.ids[turn], prompt.texts[turn], prompt.logprobs[turn], strict=True)
        )
        parts.append(",".join(items))
        await asyncio.sleep(0)
    return f"[{','.join(parts)}]"


def top_tokens(tops: Iterable[Top]) -> str:
    """The likeliest tokens of one place, as TGI writes them."""
    items = (
        f'{{"id":{top.id},"text":{quote(top.text)},"logprob":{render(top.logprob)},"special":{_BOOL[top.special]}}}'
        for top in tops
    )
    return f"[{','.join(items)}]"


def seed(call: Generation) -> str:
    """The seed of a generation that has drawn at random; null for a greedy one."""
    sampling = call.request.sampling
    return str(sampling.seed) if sampling.samples else "null"
