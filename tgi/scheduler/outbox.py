"""What goes up: tokens in columns, ends and status, each for its tokenizer, in the order in which it came about."""

from collections.abc import Iterator
from typing import Any

from tgi.kernel.link import Peer
from tgi.kernel.messages import Tokens
from tgi.kernel.pack import FLOAT32, INT32, UINT32, pack
from tgi.scheduler.request import Request


class Client:
    """One life of a tokenizer: its requests by its own numbers, and its rows of the result being handled."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.requests: dict[int, Request] = {}
        self.rows: list[tuple[int, int, float]] = []  # rid, id, logprob

    def take_tokens(self) -> Tokens:
        """The rows as columns; then there are none."""
        rids, ids, logprobs = zip(*self.rows, strict=True)
        self.rows = []
        return Tokens(pack(UINT32, rids), b"\1\0\0\0" * len(rids), pack(INT32, ids), pack(FLOAT32, logprobs))


class Outbox:
    """Messages to tokenizers, until somebody sends them."""

    def __init__(self) -> None:
        self._messages: list[tuple[Peer, tuple[Any, ...]]] = []

    def put(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """Queues a message behind the others."""
        self._messages.append((peer, message))

    def take(self) -> Iterator[tuple[Peer, tuple[Any, ...]]]:
        """All that is queued; then it is empty."""
        messages, self._messages = self._messages, []
        yield from messages
