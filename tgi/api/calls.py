"""The live requests of this process: what was asked, what has been received, and who waits for more."""

import asyncio
import time
from array import array
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tgi.api.columns import NOTHING, Arrivals, Columns, PromptColumns
from tgi.kernel.messages import Adapt, Adapted, End, Generate, Reason, Tokenize, Tokenized

if TYPE_CHECKING:
    from tgi.kernel.trace import Span

# True in the context of the readiness probe (readiness.py): what it asks for holds no permit and is not counted.
probing: ContextVar[bool] = ContextVar("probing", default=False)

SUCCESSES = frozenset((Reason.LENGTH, Reason.EOS, Reason.STOP))


class Bell:
    """Wakes the one task that waits for what comes."""

    def __init__(self) -> None:
        self._rings = False  # nobody has heard it yet
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Lets the owner look again."""
        self._rings = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def rung(self) -> None:
        """Waits for a ring(), unless there was one since the last time."""
        if not self._rings:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rings = False


class Call:
    """One request to the tokenizers. It is ended exactly once, by the router, and rings its owner's bell."""

    def __init__(self, bell: Bell) -> None:
        self.bell = bell
        self.wanted = True  # the client still waits, and there has been no end
        self.losses = 0  # tokenizers that died while they had it, since its latest token
        self.span: Span | None = None  # of the HTTP request that it belongs to, if there is tracing

    def order(self, rid: int) -> tuple[Any, ...]:
        """The message that asks a tokenizer for what is still missing."""
        raise NotImplementedError

    def fail(self, message: str) -> None:
        """Ends the request without help from a tokenizer."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        raise NotImplementedError

    @property
    def failed(self) -> bool:
        """Whether it has ended without what was asked for."""
        raise NotImplementedError


class Generation(Call):
    """A request for tokens. `resume` keeps all ids ever received, so that another tokenizer can go on behind them.

    With `stream` the owner is woken for tokens, without it for the end alone.
    """

    def __init__(self, request: Generate, stream: bool, bell: Bell) -> None:
        super().__init__(bell)
        self.request = request
        self.stream = stream
        self.probe = probing.get()
        self._hides = request.hide_stop
        self._lists = request.sampling.top_n > 0
        self.resume = array("i")
        self.fresh = NOTHING  # what has not been taken by the owner
        self.prompt = PromptColumns.empty()  # complete before the first token
        self.end: End | None = None
        self.text = request.inputs  # of the prompt; of one that came as ids it is known before the first token
        self.characters = len(self.text)  # of the prompt; of a chat, too, they are known then
        self.divided = False  # the answer comes in parts; known before the first token
        self.arrival = time.perf_counter()
        self.first: float | None = None  # time.perf_counter of the first and the latest tokens
        self.latest = self.arrival

    def order(self, rid: int) -> Generate:
        trace = "" if self.span is None else self.span.traceparent
        known = None if self.request.prompt_from is None else len(self.prompt.ids)
        return self.request._replace(rid=rid, resume=self.resume.tobytes(), trace=trace, prompt_from=known)

    def fail(self, message: str) -> None:
        self.finish(End(0, Reason.FAILED, message))

    @property
    def ended(self) -> bool:
        return self.end is not None

    @property
    def failed(self) -> bool:
        return self.end is not None and self.end.reason not in SUCCESSES

    @property
    def generated(self) -> int:
        """Tokens received so far."""
        return len(self.resume)

    def receive(self, came: Arrivals, start: int, stop: int) -> None:
        """Takes the tokens `start` to `stop` of those that came."""
        words = slice(4 * start, 4 * stop)
        mine = Columns(
            array("i", came.ids[words]), array("f", came.logprobs[words]), bytearray(came.special[start:stop]),
            came.texts[start:stop],
        )  # fmt: skip
        if self._hides or self._lists or self.divided:
            mine = self._with_extras(mine, came, start, stop)
        self.losses = 0
        self.resume += mine.ids
        if not self.fresh.texts:  # a stream takes each token before the next one comes
            self.fresh = mine
        else:
            for column, more in zip(self.fresh, mine, strict=True):
                column.extend(more)  # type: ignore[attr-defined]
        if self.stream:
            self.bell.ring()

    def _with_extras(self, mine: Columns, came: Arrivals, start: int, stop: int) -> Columns:
        """The same tokens with what this request wants beside them. Where no request has it, there is no column."""
        places = range(start, stop)
        return mine._replace(
            held=array("I", came.held[4 * start : 4 * stop] or bytes(4 * len(places))) if self._hides else array("I"),
            tops=(came.tops[start:stop] or [[] for _ in places]) if self._lists else [],
            parts=(came.parts[start:stop] or [[] for _ in places]) if self.divided else [],
        )

    def finish(self, end: End) -> None:
        """Takes the End."""
        self.end = end
        self.bell.ring()

    def take(self, most: int | None = None) -> Columns:
        """The tokens that have come since the last call, or the first `most` of them."""
        fresh, self.fresh = self.fresh, NOTHING
        if most is None or len(fresh.texts) <= most:
            return fresh
        self.fresh = fresh.part(slice(most, None))
        return fresh.part(slice(most))


Result = TypeVar("Result", Tokenized, Adapted)


class Question(Call, Generic[Result]):
    """A request that one message answers."""

    def __init__(self, bell: Bell) -> None:
        super().__init__(bell)
        self.result: Result | None = None

    @property
    def ended(self) -> bool:
        return self.result is not None

    @property
    def failed(self) -> bool:
        return self.result is not None and bool(self.result.error)

    def finish(self, result: Result) -> None:
        """Takes the answer."""
        self.result = result
        self.bell.ring()


class Encoding(Question[Tokenized]):
    """A request for the ids of a text, or of a chat."""

    def __init__(self, bell: Bell, inputs: str, add_special_tokens: bool, chat: bytes = b"") -> None:
        super().__init__(bell)
        self.inputs = inputs
        self.add_special_tokens = add_special_tokens
        self.chat = chat

    def order(self, rid: int) -> Tokenize:
        return Tokenize(rid, self.inputs, self.add_special_tokens, self.chat)

    def fail(self, message: str) -> None:
        self.finish(Tokenized(0, b"", b"", b"", b"", error=message))


class Adaptation(Question[Adapted]):
    """A request to load the adapter in directory `path` under a name, or to unload it if `path` is empty."""

    def __init__(self, bell: Bell, name: str, path: str) -> None:
        super().__init__(bell)
        self.name = name
        self.path = path
        self.lost = False  # nobody has answered: the error in `result` is the server's, not the client's

    def order(self, rid: int) -> Adapt:
        return Adapt(rid, self.name, self.path)

    def fail(self, message: str) -> None:
        self.lost = True
        self.finish(Adapted(0, message))
