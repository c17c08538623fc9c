"""A pool without sockets, and what stands around it in the tests."""

from typing import Any

from tests.tokenizer.vocabularies import byte_level
from tgi.kernel.answer import Texts
from tgi.kernel.link import Gone, Peer
from tgi.kernel.messages import Add, End, Generate, Reason, Sampling, Tokens
from tgi.kernel.pack import FLOAT32, INT32, UINT32, floats, ints, pack, uints
from tgi.kernel.presence import PROTOCOL, Hello, Limits, Status
from tgi.tokenizer.chat import Chats
from tgi.tokenizer.pool import Pool
from tgi.tokenizer.template import ChatTemplates
from tgi.tokenizer.vocabulary import Vocabulary

LIMITS = Limits(2048, 2000, 32768, 4096, 64, 2048, 16, 512, "float32", "cpu")
READY = Status(True, True, "", 100, LIMITS, 3, 4)
API, OTHER = Peer("api", 0, b"a"), Peer("api", 1, b"b")
EOS = 2


def hello(peer: Peer) -> Hello:
    return Hello(PROTOCOL, *peer)


def ids_of(text: str, vocabulary: Vocabulary | None = None) -> list[int]:
    return list((vocabulary or byte_level()).tokenizer.encode(text, add_special_tokens=False).ids)


class House:
    """A pool between two apis and a scheduler, all played by the test. The clock ticks once per look at it."""

    def __init__(self, vocabulary: Vocabulary | None = None, scheduler: bool = True, template: str = "") -> None:
        self.now = 0.0
        templates = ChatTemplates({"default": template} if template else {}, {"bos_token": "<|bos|>"})
        self.pool = Pool(vocabulary or byte_level(), Chats(templates), self.tick)
        self.lives = 0
        self.told: dict[Peer, list[Any]] = {}
        for api in (API, OTHER):
            self.pool.handle(api, hello(api))
        if scheduler:
            self.scheduler_up()
            self.pool.handle(self.scheduler, READY)
        self.pool.outgoing()

    def tick(self) -> float:
        self.now += 0.001
        return self.now

    def scheduler_up(self) -> None:
        self.lives += 1
        self.scheduler = Peer("scheduler", 0, bytes([self.lives]))
        self.pool.handle(self.scheduler, hello(self.scheduler))

    def scheduler_gone(self) -> None:
        self.pool.handle(self.scheduler, Gone())

    def take(self) -> None:
        for peer, message in self.pool.outgoing():
            self.told.setdefault(peer, []).append(message)

    def said(self, peer: Peer) -> list[Any]:
        """What this peer has been sent since the last time."""
        self.take()
        return self.told.pop(peer, [])

    def ask(self, rid: int, inputs: str = "Hello", api: Peer = API, least: int = 0, **fields: Any) -> Add:
        """A Generate, and the one Add that comes of it."""
        self.pool.handle(api, Generate(rid, inputs, Sampling(5, temperature=0.5, min_new_tokens=least), **fields))
        (add,) = self.said(self.scheduler)
        assert isinstance(add, Add)
        return add

    def tokens(self, *rows: tuple[int, list[int]]) -> None:
        """A step: (rid, ids) per request."""
        ids = [number for _, row in rows for number in row]
        self.pool.handle(
            self.scheduler,
            Tokens(
                pack(UINT32, [rid for rid, _ in rows]),
                pack(UINT32, [len(row) for _, row in rows]),
                pack(INT32, ids),
                pack(FLOAT32, [-number / 4 for number in ids]),
            ),
        )

    def end(self, rid: int, reason: Reason = Reason.LENGTH, message: str = "") -> None:
        self.pool.handle(self.scheduler, End(rid, reason, message, "", 0, 0, 16, 0, 30, 70))


def shown(messages: list[Any], rid: int) -> tuple[list[int], str]:
    """The ids and the text that the Texts among these messages give to a request."""
    ids, text = [], ""
    for message in messages:
        if isinstance(message, Texts):
            at = 0
            for one, count in zip(uints(message.rids), uints(message.counts), strict=True):
                if one == rid:
                    ids += ints(message.ids)[at : at + count]
                    text += "".join(message.texts[at : at + count])
                at += count
            assert at == len(message.texts) == len(message.special) == len(ints(message.ids))
            assert floats(message.logprobs) == [-number / 4 for number in ints(message.ids)]
    return ids, text


def ends(messages: list[Any]) -> list[End]:
    return [message for message in messages if isinstance(message, End)]
