"""Event streams: events that are ready are written together."""

import asyncio

import pytest

from tests.api.streams import ROUTES, Streams
from tgi.api.sse import MAX_EVENTS_PER_WRITE


@pytest.mark.parametrize("route", ROUTES)
def test_events_that_are_ready_are_one_write_up_to_a_maximum(route: str) -> None:
    """As for a slow client."""

    async def written(tokens: int) -> list[bytes]:
        streams = Streams(route, 1)
        for _ in range(tokens):
            streams.delivery.deliver(streams.generations, streams.message)
        writes = []
        while streams.generations[0].unread_tokens.texts:
            writes.append(await anext(streams.streams[0]))
        return writes

    (write,) = asyncio.run(written(5))
    assert write.count(b"data: {") == 5
    assert [write.count(b"data: {") for write in asyncio.run(written(MAX_EVENTS_PER_WRITE + 3))] == [
        MAX_EVENTS_PER_WRITE,
        3,
    ]
