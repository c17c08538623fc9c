"""The cost of a streamed token in a front end for a request without options, in calls and instructions.

The ceilings are the cost of today. What falcon and uvicorn do with a chunk comes on top: 98 instructions and a system
call.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from tests.counting import Cost, per_item
from tgi.api.asgi import DisconnectWatcher
from tgi.api.openai_output import ResponseIdentity
from tgi.api.requests import Generation, WakeEvent
from tgi.api.resumption import ResponseKey
from tgi.api.routes.chat import ChatFormatter
from tgi.api.routes.completions import CompletionFormatter
from tgi.api.routes.native import NativeEvents
from tgi.api.shapes.completions import CompletionRequest
from tgi.api.sse import EventFormatter, EventStream
from tgi.api.token_delivery import TokenDelivery
from tgi.microkernel.codec import FLOAT32, INT32, UINT32, pack_column
from tgi.microkernel.protocol import Generate, Texts
from tgi.microkernel.sampling_params import SamplingParams

IDENTITY = ResponseIdentity('"id"', 1, '"m"', '"f"', ResponseKey.new())
COMPLETION = msgspec.json.decode(b'{"prompt": "a", "stream": true}', type=CompletionRequest)
ROUTES: dict[str, Callable[[Generation], EventFormatter]] = {
    "native": lambda generation: NativeEvents(generation, False, ""),
    "chat": lambda generation: ChatFormatter([generation], IDENTITY, False, False),
    "completions": lambda generation: CompletionFormatter([generation], COMPLETION, IDENTITY),
}


async def _silence() -> dict[str, str]:
    await asyncio.Event().wait()
    raise AssertionError


class Streams:
    """Streams of one front end, each of which has sent its first event."""

    def __init__(self, route: str, count: int) -> None:
        self.generations = {
            rid: Generation(Generate(rid, "", SamplingParams(0)), True, WakeEvent()) for rid in range(count)
        }
        self.delivery = TokenDelivery()
        self.message = Texts(
            pack_column(UINT32, self.generations), pack_column(UINT32, [1] * count), pack_column(INT32, [1234] * count),
            pack_column(FLOAT32, [-1.2345678] * count), bytes(count), [" word"] * count,
        )  # fmt: skip
        self.streams = [
            EventStream(
                [generation], ROUTES[route](generation), DisconnectWatcher(_silence, lambda: None), lambda _: None
            )
            for generation in self.generations.values()
        ]
        self.step()

    def step(self) -> None:
        """Delivers a token to each stream and formats its event."""
        self.delivery.deliver(self.generations, self.message)
        for stream in self.streams:
            for _ in anext(stream).__await__():
                raise AssertionError("the stream waits for a token")

    def steps(self, count: int) -> None:
        """Delivers this many tokens one after the other."""
        for _ in range(count):
            self.step()


def counted(prepare: Callable[[int], Callable[[], object]]) -> Cost:
    async def inside() -> Cost:  # a stream sets a timer of the running loop
        return per_item(prepare)

    return asyncio.run(inside())


@pytest.mark.parametrize(
    ("route", "calls", "instructions"), [("native", 32, 514), ("chat", 31, 522), ("completions", 29, 500)]
)
def test_cost_of_another_stream_in_a_step(route: str, calls: int, instructions: int) -> None:
    cost = counted(lambda count: Streams(route, count).step)
    assert cost.within(calls, instructions), cost


@pytest.mark.parametrize(
    ("route", "calls", "instructions"), [("native", 44, 653), ("chat", 43, 661), ("completions", 41, 639)]
)
def test_cost_of_a_single_token(route: str, calls: int, instructions: int) -> None:
    cost = counted(lambda count: partial(Streams(route, 1).steps, count))
    assert cost.within(calls, instructions), cost


def test_the_measured_streams_write_their_tokens() -> None:
    async def inside() -> None:
        for route in ROUTES:
            streams = Streams(route, 3)
            streams.steps(2)
            assert all(
                generation.generated_count == 3 and not generation.unread_tokens.texts
                for generation in streams.generations.values()
            )

    asyncio.run(inside())
