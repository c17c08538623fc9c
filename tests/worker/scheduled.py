"""A scheduler and an engine in one thread: requests are batched, chunked, cached and preempted as in a server."""

from collections.abc import Sequence
from typing import Any

from tests.scheduler.invariants import check_scheduler
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_float32, unpack_int32
from tgi.microkernel.messages.protocol import (
    PROTOCOL,
    Add,
    End,
    Hello,
    ImageSegment,
    PageExtra,
    PromptLogprobs,
    Status,
    Tokens,
    decode,
    encode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig
from tgi.worker.engine.engine import TorchEngine

TOKENIZER, WORKER = PeerId("tokenizer", 0, b"t"), PeerId("worker", 0, b"w")


class Served:
    """What a request got."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.end: End | None = None


class ScheduledEngine:
    """`add` requests, then `run` until all have ended."""

    def __init__(self, engine: TorchEngine, config: SchedulerConfig | None = None) -> None:
        self.engine = engine
        self.scheduler = Scheduler(config or SchedulerConfig())
        self.served: dict[int, Served] = {}
        self.steps = 0
        self._now = 0.0
        self._connect(TOKENIZER, WORKER)

    def _connect(self, *peers: PeerId) -> None:
        for peer in peers:
            self._handle(Hello(PROTOCOL, *peer), peer)
        for held in self.engine.held_pages():
            self._handle(held, WORKER)
        limits = self.engine.limits
        self._handle(Status(ready=True, healthy=True, stage="ready", percent=100, limits=limits), WORKER)

    def _handle(self, message: Any, peer: PeerId) -> None:
        self.scheduler.handle(decode(encode(message)), peer, self._now)
        check_scheduler(self.scheduler)

    def add(
        self,
        ids: Sequence[int],
        count: int,
        images: Sequence[ImageSegment] = (),
        resumed: Sequence[int] = (),
        logprobs_from: int = 0,
    ) -> Served:
        """A greedy request for `count` tokens, of which `resumed` are known."""
        rid = len(self.served)
        served = self.served[rid] = Served()
        extras = [PageExtra(one.position, one.digest) for one in images]
        columns = pack_column(INT32, [*ids]), count, encode(SamplingParams(0)), b"", pack_column(INT32, [*resumed])
        add = Add(rid, *columns, prompt_logprobs_from=logprobs_from, extras=extras, images=[*images])
        self._handle(add, TOKENIZER)
        return served

    def run(self, steps: int = 1000) -> None:
        """Computes at most this many steps, in their order, each after its predecessor is answered."""
        for _ in range(steps):
            self._now += 1.0
            self._deliver()
            if (step := self.scheduler.plan(self._now)) is None:
                break
            self.steps += 1
            step = decode(encode(step))
            self._handle(self.engine.collect(self.engine.launch(step)), WORKER)
            self.scheduler.commit()
        self._deliver()

    def restart_scheduler(self) -> None:
        """The scheduler is replaced; requests that have not ended are to be added again."""
        self.scheduler = Scheduler(SchedulerConfig(first_epoch=100))
        self.served = {}
        held = self.engine.held_pages()
        self.engine.reset()
        for peer in (TOKENIZER, WORKER):
            self._handle(Hello(PROTOCOL, *peer), peer)
        for one in held:
            self._handle(one, WORKER)
        limits = self.engine.limits
        self._handle(Status(ready=True, healthy=True, stage="ready", percent=100, limits=limits), WORKER)

    def _deliver(self) -> None:
        for peer, message in self.scheduler.outgoing():
            assert peer == TOKENIZER
            if isinstance(message, End):
                self.served[message.rid].end = message
            elif isinstance(message, PromptLogprobs):
                self.served[message.rid].prompt_logprobs += unpack_float32(message.logprobs)
            elif isinstance(message, Tokens):
                at = 0
                ids, logprobs = unpack_int32(message.token_ids), unpack_float32(message.logprobs)
                for rid, got in zip(unpack_int32(message.rids), unpack_int32(message.counts), strict=True):
                    self.served[rid].ids += ids[at : at + got]
                    self.served[rid].logprobs += logprobs[at : at + got]
                    at += got
