"""The processes of one role below a front end: links that the event loop reads, and the requests that each has.

The router (tokenizers) and the loading of images (media processes) say which process gets a request, how it is sent and
what an answer means; this class keeps links and assignments, sends the requests of lost and silent processes again at
the limited rate, and finds those that crash processes.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId, PeerResponds, PeerSilent, ReplicaId
from tgi.microkernel.messages.protocol import Beat, Cancel, Hello
from tgi.microkernel.recovery.assignments import Assignments, Neighbour, RequestT
from tgi.microkernel.recovery.crash_isolation import CrashIsolation
from tgi.microkernel.recovery.work_register import among, split_in_progress

log = logging.getLogger(__name__)

# Of the requests that are submitted in one turn of the loop, this many are sent at a time: in a burst, the processes
# below work on the first ones while this process reads the others. With much smaller parts the first streams would
# take the cores that the others need to begin.
REQUESTS_PER_FLUSH = 24


class Connection(Neighbour[RequestT]):
    """One process below: its link, and the requests that it has."""

    def __init__(self, link: Link) -> None:
        super().__init__(ReplicaId("", 0))  # until it has connected
        self.link = link


ConnectionT = TypeVar("ConnectionT", bound=Connection)  # type: ignore[type-arg]


class Downstream(Generic[ConnectionT, RequestT]):
    """Connections to the processes of one role. `attach` reads their links from the running loop. libzmq's descriptor
    signals changes only, so a link is read until it is empty, and again after each send."""

    def __init__(
        self,
        choose: Callable[[RequestT], ConnectionT | None],
        send: Callable[[RequestT, ConnectionT], int],
        handle: Callable[[ConnectionT, object], None],
        quarantine: Callable[[bytes, list[RequestT], str], None],
        work_in_progress: Callable[[PeerId], bytes | None],
        on_moved: Callable[[RequestT, PeerId], bool] = lambda request, peer: True,
    ) -> None:
        """`choose`: among those that respond; None: the request waits. `send`: queues a request at a connection and
        returns its rid. `handle`: for each message received, and for PeerDisconnected. `quarantine`: refuses requests
        of this name (`Named`), which are these here, with how they have ended a process. `work_in_progress`: as in
        Assignments. `on_moved`: a request was taken from a process; returns whether it is still wanted."""
        self.connections: list[ConnectionT] = []
        self.assignments: Assignments[ConnectionT, RequestT] = Assignments(
            lambda request, now: choose(request), work_in_progress
        )
        self.isolation = CrashIsolation()  # of requests that crash processes of this role
        self._send, self._handle, self._quarantine = send, handle, quarantine
        self._on_moved = on_moved
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None  # when the rate allows to send again
        self._exchange_is_due = False  # in the next turn of the loop, with all
        self._unsent_requests = 0  # submitted since the latest flush of all links

    @property
    def responds(self) -> bool:
        """Whether any process can be sent requests."""
        return any(connection.responds for connection in self.connections)

    # --- requests ---

    def submit(self, request: RequestT) -> None:
        """Sends a request in the next turn of the loop at the latest, or keeps it until a process can have it."""
        if (connection := self.assignments.choose(request, time.monotonic())) is None:
            self.assignments.wait(request)
        else:
            self._submit_to(connection, request)
            self._unsent_requests += 1
            if self._unsent_requests >= REQUESTS_PER_FLUSH:
                self._flush()
        self.exchange_soon()

    def submit_waiting(self) -> None:
        """Sends waiting requests at the limited rate, while a process responds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.assignments.waiting or not self.responds:
            return
        now = time.monotonic()
        for request, connection in self.assignments.next_due(now):
            self._submit_to(connection, request)
        if (due_at := self.assignments.due_at) is not None and self._loop is not None:
            self._timer = self._loop.call_later(due_at - now, self.submit_waiting)
        self.exchange_soon()

    def withdraw(self, request: RequestT) -> None:
        """Takes a request from its process: what that still sends for it is dropped."""
        if (assigned := self.assignments.remove(request)) is not None:
            connection, rid = assigned
            self.cancel(connection, Cancel(rid))

    def cancel(self, connection: ConnectionT, message: Cancel) -> None:
        """Queues a Cancel."""
        if connection.peer is not None:
            connection.link.send(connection.peer, message)

    def ended_well(self, request: RequestT) -> None:
        """A request was answered, which clears its strikes. A disconnect does not: the same request may come back."""
        self.assignments.ended_well(request)
        if self.isolation.suspects:
            self.isolation.discard(request, well=True)

    def _submit_to(self, connection: ConnectionT, request: RequestT) -> None:
        self.assignments.assign(request, connection, self._send(request, connection))

    # --- links ---

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        for connection in self.connections:
            self._register(connection)
        self.exchange_soon()

    def add(self, connection: ConnectionT) -> None:
        self.connections.append(connection)
        self._register(connection)

    def remove(self, connection: ConnectionT) -> None:
        """Closes the link to a process that is not connected, so that no request is assigned to it."""
        self.exchange(connection)  # that it is lost may not have been handled yet
        self.connections.remove(connection)
        self._close_link(connection)
        self.assignments.release(connection)
        self.submit_waiting()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for connection in self.connections:
            self._close_link(connection)

    def tick(self, beat: Beat) -> None:
        """Every BEAT_SECONDS: finds silent processes, and sends what has waited for a report in vain."""
        for connection in self.connections:
            self.exchange(connection)
            connection.link.exchange_beats(beat)
            self.exchange(connection)
        self.submit_waiting()

    def exchange_soon(self) -> None:
        """In the next turn of the loop: once for all requests that are submitted in this one."""
        if self._loop is not None and not self._exchange_is_due:
            self._exchange_is_due = True
            self._loop.call_soon(self._exchange_with_all)

    def exchange(self, connection: ConnectionT) -> None:
        """Sends what is queued and handles what has been received; continues in the next loop turn if there is more."""
        link = connection.link
        if link.socket.closed:
            return
        link.flush()
        for peer, message in link.receive():
            self._receive(connection, peer, message)
        if link.has_pending_work and self._loop is not None:
            self._loop.call_soon(self.exchange, connection)

    def _flush(self) -> None:
        self._unsent_requests = 0
        for connection in self.connections:
            if not connection.link.socket.closed:
                connection.link.flush()

    def _exchange_with_all(self) -> None:
        self._exchange_is_due, self._unsent_requests = False, 0
        for connection in [*self.connections]:
            self.exchange(connection)

    def _register(self, connection: ConnectionT) -> None:
        if self._loop is not None:
            self._loop.add_reader(connection.link.socket.fileno(), self.exchange, connection)
            self._loop.add_reader(connection.link.monitor.fileno(), self._on_monitor_event, connection)
            self._loop.call_soon(self._on_monitor_event, connection)  # both are read once, see above

    def _close_link(self, connection: ConnectionT) -> None:
        if self._loop is not None:
            self._loop.remove_reader(connection.link.socket.fileno())
            self._loop.remove_reader(connection.link.monitor.fileno())
        connection.link.close()

    def _on_monitor_event(self, connection: ConnectionT) -> None:
        connection.link.detect_disconnects()
        self.exchange(connection)

    # --- crashes ---

    def _receive(self, connection: ConnectionT, peer: PeerId, message: object) -> None:
        match message:
            case Hello():
                log.debug("%s is connected", peer)
                connection.replica_id = ReplicaId(message.site, peer.replica)
                self._handle(connection, message)
                self._read_exit_report(connection, peer, message)
                self._move_requests()
            case PeerDisconnected():
                if connection.peer == peer:
                    self._handle(connection, message)
                    self._on_lost(connection, peer, message.planned)
            case PeerSilent():
                log.warning("%s does not respond", peer)
                connection.silent = True
                self._move_requests()
            case PeerResponds():
                log.warning("%s responds again", peer)
                connection.silent = False
                self._move_requests()
            case Beat():
                connection.beat = message
            case _:
                self._handle(connection, message)

    def _on_lost(self, connection: ConnectionT, peer: PeerId, planned: bool) -> None:
        """Submits the requests of a process that has ended again, to another one or to its replacement."""
        lost = self.assignments.lost(connection, time.monotonic(), planned=planned)
        wanted = [request for request in lost if self._on_moved(request, peer)]
        level = logging.DEBUG if planned else logging.WARNING
        log.log(level, "%s has disconnected; its %d requests are sent to another process", peer, len(wanted))
        for request in wanted:
            self.assignments.wait(request)
        self.submit_waiting()
        self.exchange_soon()

    def _move_requests(self) -> None:
        """Takes the requests from silent processes, if there is another one. What they have in progress stays there,
        since that may be what they hang in."""
        if not self.responds:
            return
        for connection in self.connections:
            if not connection.silent or connection.peer is None or not connection.requests:
                continue
            staying = set(among(connection.requests.values(), self.assignments.suspects(connection)))
            moved = [request for request in connection.requests.values() if request not in staying]
            if moved:
                log.warning("%d requests of %s are sent to another process", len(moved), connection.peer)
            for request in moved:
                self.withdraw(request)
                if self._on_moved(request, connection.peer):
                    self.assignments.wait(request)
        self.submit_waiting()

    def _read_exit_report(self, connection: ConnectionT, peer: PeerId, hello: Hello) -> None:
        """A process has connected. If it tells how its predecessor died, the requests that this had in progress are
        suspects; any process works on them alone from now on."""
        if (report := self.assignments.connected(connection, peer, hello, now := time.monotonic())) is not None:
            in_progress = split_in_progress(report.in_progress)
            for name in self.isolation.record_death(in_progress, now, outside=report.outside):
                self._quarantine(name, among(self.assignments, [name]), report.cause)
        self.assignments.release(connection)
