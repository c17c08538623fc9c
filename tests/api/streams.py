"""Streams of a front end without processes: tokens are delivered, and events are formatted."""

import asyncio
from collections.abc import Callable

import msgspec

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
from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT32, pack_column
from tgi.microkernel.messages.protocol import Generate, Texts
from tgi.microkernel.messages.sampling_params import SamplingParams

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
