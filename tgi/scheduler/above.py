"""The floor above: the tokenizers, which requests each of them has here, and what all of them were last told."""

import logging
from collections.abc import Callable

from tgi.kernel.errors import ProtocolError
from tgi.kernel.link import Peer
from tgi.kernel.messages import Add, End, Reason, Tokens
from tgi.kernel.presence import Status
from tgi.scheduler.outbox import Outbox
from tgi.scheduler.request import Client, Request
from tgi.scheduler.status import Load, Report
from tgi.scheduler.tokens import Columns, Row, Top

log = logging.getLogger(__name__)


class Above:
    """What it tells, it puts into the outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self.clients: dict[Peer, Client] = {}
        self.report = Report()
        self._outbox = outbox
        self._arrivals = 0

    @property
    def requests(self) -> list[Request]:
        """All that have not ended."""
        return [request for client in self.clients.values() for request in client.requests.values()]

    def take(self, add: Add, client: Client, now: float) -> Request | None:
        """A request comes. None: its columns are none, which its tokenizer is told, or its number is taken."""
        if add.rid in client.requests:
            # Its first Add lives on and gets the one End that this number can have.
            log.error("%s has used number %d twice; the second request is ignored", client.peer, add.rid)
            return None
        try:
            request = Request(client, add, self._arrivals, now)
        except (ValueError, ProtocolError) as error:  # columns of odd length
            self._outbox.put(client.peer, End(add.rid, Reason.INVALID, f"malformed request: {error}"))
            return None
        self._arrivals += 1
        client.requests[add.rid] = request
        return request

    def tell_rows(self, message: Callable[[Columns, list[Row], list[Top]], Tokens]) -> None:
        """Each hears what its requests have drawn. `message` is made of it when it is sent."""
        told = [(one.peer, one.take_rows()) for one in self.clients.values() if one.rows or one.columns.rids]
        self._outbox.put_all((peer, message(*rows)) for peer, rows in told)

    def tell(self, status: Status, load: Load, now: float) -> None:
        """Each hears how things are, if that has changed."""
        if self.report.is_news(status, load, now):
            for peer in self.clients:
                self._outbox.put(peer, status)
