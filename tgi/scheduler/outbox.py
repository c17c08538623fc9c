"""What goes up: tokens in columns, ends and status, each for its tokenizer, in the order in which it came about."""

from collections.abc import Iterator
from typing import Any

from tgi.kernel.link import Peer


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
