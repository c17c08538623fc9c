"""POST /tokenize and /chat_tokenize: long responses."""

import asyncio

from tgi.api.routes.tokenize import token_items
from tgi.api.token_columns import MAX_ITEMS_PER_TURN, join_in_turns
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import Tokenized


def test_other_tasks_have_turns_while_a_long_response_is_written() -> None:
    count = 5 * MAX_ITEMS_PER_TURN + 1
    starts = range(count)
    tokenized = Tokenized(
        1, *(pack_column(INT32, column) for column in (starts, starts, range(1, count + 1))), bytes(count)
    )
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> str:
        task = asyncio.create_task(other())
        try:
            return await join_in_turns(token_items("é" * count, tokenized))
        finally:
            task.cancel()

    assert asyncio.run(both()) == ",".join(token_items("é" * count, tokenized))
    assert turns > 5
