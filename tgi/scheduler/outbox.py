"""What goes out besides steps: tokens in columns, ends and status to tokenizers, changes of adapters to the worker, in
the order in which it came about."""

from collections.abc import Callable, Iterator
from typing import Any

from tgi.kernel.link import Peer

Message = tuple[Any, ...]


class Outbox:
    """Messages to neighbours, until somebody sends them."""

    def __init__(self) -> None:
        self._messages: list[tuple[Peer, Message | Callable[[], Message]]] = []

    def put(self, peer: Peer, message: Message | Callable[[], Message]) -> None:
        """Queues a message behind the others, or what will make it: the worker need not wait until it is made."""
        self._messages.append((peer, message))

    def take(self) -> Iterator[tuple[Peer, Message]]:
        """All that is queued; then it is empty."""
        messages, self._messages = self._messages, []
        for peer, message in messages:
            yield peer, message() if callable(message) else message
