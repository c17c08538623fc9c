"""A stream's events go out in as few writes as there can be."""

import asyncio

import pytest

from tests.api.test_cost import ROUTES, Streams
from tgi.api.sse import MOST_EVENTS


@pytest.mark.parametrize("route", ROUTES)
def test_all_events_that_are_ready_go_out_in_one_write(route: str) -> None:
    """A front end that has fallen behind, or a client that reads slowly, is not a write for each token."""

    async def written(tokens: int) -> list[bytes]:
        streams = Streams(route, 1)
        for _ in range(tokens):
            streams.delivery.texts(streams.calls, streams.message)
        writes = []
        while streams.calls[0].fresh.texts:
            writes.append(await anext(streams.streams[0]))
        return writes

    (write,) = asyncio.run(written(5))
    assert write.count(b"data: {") == 5
    assert [write.count(b"data: {") for write in asyncio.run(written(MOST_EVENTS + 3))] == [MOST_EVENTS, 3]
