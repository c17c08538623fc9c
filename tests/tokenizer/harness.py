"""A TokenizerPool without sockets, with two apis and a scheduler that the test plays."""

from typing import Any

from tests.tokenizer.vocabularies import byte_level
from tgi.microkernel.links.link import PeerDisconnected, PeerId
from tgi.microkernel.messages.codec import (
    FLOAT32,
    INT32,
    UINT32,
    pack_column,
    unpack_float32,
    unpack_int32,
    unpack_uint32,
)
from tgi.microkernel.messages.protocol import (
    PROTOCOL,
    Add,
    DeploymentLimits,
    End,
    FinishReason,
    Generate,
    Hello,
    Status,
    Texts,
    Tokens,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.tokenizer.chat import ChatRenderer
from tgi.tokenizer.chat_template import ChatTemplates
from tgi.tokenizer.encoding_jobs import ExecutorName
from tgi.tokenizer.pool import TokenizerPool
from tgi.tokenizer.vocabulary import Vocabulary

LIMITS = DeploymentLimits(2048, 2000, 32768, 4096, 64, 2048, 16, 512, "float32", "cpu")
READY = Status(True, True, "", 100, LIMITS, 3, 4)
API, OTHER = PeerId("api", 0, b"a"), PeerId("api", 1, b"b")
EOS = 2


def hello(peer: PeerId) -> Hello:
    return Hello(PROTOCOL, *peer)


def ids_of(text: str, vocabulary: Vocabulary | None = None) -> list[int]:
    return list((vocabulary or byte_level()).tokenizer.encode(text, add_special_tokens=False).ids)


class PoolHarness:
    """A pool between two apis and a scheduler. Its clock advances by 1 ms per reading."""

    def __init__(
        self, vocabulary: Vocabulary | None = None, scheduler: bool = True, template: str = "", **options: Any
    ) -> None:
        """`options`: of the pool."""
        self.now = 0.0
        templates = ChatTemplates({"default": template} if template else {}, {"bos_token": "<|bos|>"})
        self.pool = TokenizerPool(
            vocabulary or byte_level(),
            ChatRenderer(templates, image_token=options.get("image_token", "")),
            self._tick,
            **options,
        )
        self.lives = 0
        self.sent: dict[PeerId, list[Any]] = {}
        for api in (API, OTHER):
            self.pool.handle(api, hello(api))
        if scheduler:
            self.connect_scheduler()
            self.pool.handle(self.scheduler, READY)
        self.pool.drain_outgoing()

    def _tick(self) -> float:
        self.now += 0.001
        return self.now

    def connect_scheduler(self) -> None:
        self.lives += 1
        self.scheduler = PeerId("scheduler", 0, bytes([self.lives]))
        self.pool.handle(self.scheduler, hello(self.scheduler))

    def disconnect_scheduler(self) -> None:
        self.pool.handle(self.scheduler, PeerDisconnected())

    def collect_outgoing(self) -> None:
        for peer, message in self.pool.drain_outgoing():
            self.sent.setdefault(peer, []).append(message)

    def received_by(self, peer: PeerId) -> list[Any]:
        """The messages sent to this peer since the last call."""
        self.collect_outgoing()
        return self.sent.pop(peer, [])

    def submit(self, rid: int, inputs: str = "Hello", api: PeerId = API, least: int = 0, **fields: Any) -> Add:
        """Sends a Generate. Returns the Add that the scheduler receives."""
        self.pool.handle(api, Generate(rid, inputs, SamplingParams(5, temperature=0.5, min_new_tokens=least), **fields))
        (add,) = self.received_by(self.scheduler)
        assert isinstance(add, Add)
        return add

    def run_jobs(self) -> list[ExecutorName]:
        """Runs all queued jobs, and those that they lead to. Returns their executors."""
        executors = []
        while len(self.pool.jobs):
            while self.pool.jobs.trials:
                trial = self.pool.jobs.take_trial(in_loop=True) or self.pool.jobs.take_trial(in_loop=False)
                assert trial is not None
                executors.append(trial.executor)
                self.pool.complete_job(trial.key, trial.run())
            for name in ExecutorName:
                if (job := self.pool.jobs.take(name)) is not None:
                    executors.append(name)
                    self.pool.complete_job(job.key, job.run())
        return executors

    def send_tokens(self, *rows: tuple[int, list[int]]) -> None:
        """Sends the Tokens of one step: (rid, ids) per request."""
        ids = [number for _, row in rows for number in row]
        self.pool.handle(
            self.scheduler,
            Tokens(
                pack_column(UINT32, [rid for rid, _ in rows]),
                pack_column(UINT32, [len(row) for _, row in rows]),
                pack_column(INT32, ids),
                pack_column(FLOAT32, [-number / 4 for number in ids]),
            ),
        )

    def send_end(self, rid: int, reason: FinishReason = FinishReason.LENGTH, message: str = "") -> None:
        self.pool.handle(self.scheduler, End(rid, reason, message, "", 0, 0, 16, 0, 30, 70))


def streamed_output(messages: list[Any], rid: int) -> tuple[list[int], str]:
    """The ids and the text of a request in the Texts among these messages."""
    ids, text = [], ""
    for message in messages:
        if isinstance(message, Texts):
            at = 0
            for one, count in zip(unpack_uint32(message.rids), unpack_uint32(message.counts), strict=True):
                if one == rid:
                    ids += unpack_int32(message.token_ids)[at : at + count]
                    text += "".join(message.texts[at : at + count])
                at += count
            assert at == len(message.texts) == len(message.special) == len(unpack_int32(message.token_ids))
            assert unpack_float32(message.logprobs) == [-number / 4 for number in unpack_int32(message.token_ids)]
    return ids, text


def end_messages(messages: list[Any]) -> list[End]:
    return [message for message in messages if isinstance(message, End)]
