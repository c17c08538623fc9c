"""What goes out besides steps: tokens in columns, ends and status to tokenizers, changes of adapters to the worker, in
the order in which it came about."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from tgi.kernel.link import Peer

Outgoing = tuple[Peer, tuple[Any, ...]]  # neighbour, message


class Outbox:
    """Messages to neighbours, until somebody sends them."""

    def __init__(self) -> None:
        self._messages: list[Iterable[Outgoing]] = []

    def put(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """Queues a message behind the others."""
        self._messages.append([(peer, message)])

    def put_all(self, messages: Iterable[Outgoing]) -> None:
        """Queues some more. Of an iterator they are not asked for before they are sent: the worker need not wait until
        they are made."""
        self._messages.append(messages)

    def take(self) -> Iterator[Outgoing]:
        """All that is queued; then it is empty."""
        messages, self._messages = self._messages, []
        return chain.from_iterable(messages)
