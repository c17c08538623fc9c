"""What a streamed token costs a front end that asks for nothing special, counted in calls and instructions.

The budgets are what it costs today. Whoever adds to the path of every token sees it here, and whoever takes away lowers
them. What falcon and uvicorn do with a chunk comes on top: 98 instructions and a system call.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from tests.counting import Cost, per_item
from tgi.api.calls import Bell, Generation
from tgi.api.client import Client
from tgi.api.delivery import Delivery
from tgi.api.openai import Stamp
from tgi.api.routes.chat import ChatEvents
from tgi.api.routes.completions import CompletionEvents
from tgi.api.routes.native import NativeEvents
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.sse import Events, EventStream
from tgi.kernel.answer import Texts
from tgi.kernel.messages import Generate, Sampling
from tgi.kernel.pack import FLOAT32, INT32, UINT32, pack

STAMP = Stamp('"id"', 1, '"m"', '"f"')
COMPLETION = msgspec.json.decode(b'{"prompt": "a", "stream": true}', type=CompletionRequest)
ROUTES: dict[str, Callable[[Generation], Events]] = {
    "native": lambda call: NativeEvents(call, False, ""),
    "chat": lambda call: ChatEvents([call], STAMP, False, False),
    "completions": lambda call: CompletionEvents([call], COMPLETION, STAMP),
}


async def _silence() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError


class Streams:
    """So many streams of one front end, each of which has had its first event."""

    def __init__(self, route: str, count: int) -> None:
        self.calls = {rid: Generation(Generate(rid, "", Sampling(0)), True, Bell()) for rid in range(count)}
        self.delivery = Delivery()
        self.message = Texts(
            pack(UINT32, self.calls), pack(UINT32, [1] * count), pack(INT32, [1234] * count),
            pack(FLOAT32, [-1.2345678] * count), bytes(count), [" word"] * count,
        )  # fmt: skip
        self.streams = [
            EventStream([call], ROUTES[route](call), Client(_silence, lambda: None), lambda calls: None)
            for call in self.calls.values()
        ]
        self.step()

    def step(self) -> None:
        """Each gets a token and makes an event of it."""
        self.delivery.texts(self.calls, self.message)
        for stream in self.streams:
            for _ in anext(stream).__await__():
                raise AssertionError("there is no event to be had")

    def steps(self, count: int) -> None:
        """So many tokens, one after the other."""
        for _ in range(count):
            self.step()


def counted(prepare: Callable[[int], Callable[[], object]]) -> Cost:
    async def inside() -> Cost:  # streams have timers, and so a loop
        return per_item(prepare)

    return asyncio.run(inside())


@pytest.mark.parametrize(
    ("route", "calls", "instructions"), [("native", 32, 514), ("chat", 31, 522), ("completions", 29, 500)]
)
def test_a_stream_more_in_a_step(route: str, calls: int, instructions: int) -> None:
    cost = counted(lambda count: Streams(route, count).step)
    assert cost.within(calls, instructions), cost


@pytest.mark.parametrize(
    ("route", "calls", "instructions"), [("native", 44, 653), ("chat", 43, 661), ("completions", 41, 639)]
)
def test_a_token_that_comes_alone(route: str, calls: int, instructions: int) -> None:
    cost = counted(lambda count: partial(Streams(route, 1).steps, count))
    assert cost.within(calls, instructions), cost


def test_the_streams_have_written_their_tokens() -> None:
    async def inside() -> None:
        for route in ROUTES:
            streams = Streams(route, 3)
            streams.steps(2)
            assert all(call.generated == 3 and not call.fresh.texts for call in streams.calls.values())

    asyncio.run(inside())
