"""POST /tokenize and /chat_tokenize: answers that take long to write."""

import asyncio

from tgi.api.routes import tokenize
from tgi.api.routes.tokenize import TURN, render_items
from tgi.kernel.messages import Tokenized
from tgi.kernel.pack import INT32, pack


def test_others_have_their_turn_while_a_long_answer_is_written() -> None:
    count = 5 * TURN + 1
    starts = range(count)
    encoded = Tokenized(1, *(pack(INT32, column) for column in (starts, starts, range(1, count + 1))), bytes(count))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> str:
        task = asyncio.create_task(other())
        try:
            return await tokenize._rendered("é" * count, encoded)
        finally:
            task.cancel()

    assert asyncio.run(both()) == ",".join(render_items("é" * count, encoded))
    assert turns > 5
