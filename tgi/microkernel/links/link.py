"""Links: ordered message channels between the processes of two neighbouring roles, over ZeroMQ.

The stable side binds a ROUTER (many peers), the side that connects a DEALER (one peer). Links on a host are sockets in
the run directory, those between hosts are encrypted TCP connections (see curve).
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4
from zlib import crc32

import zmq

from tgi.microkernel.errors import ProtocolError, UserError
from tgi.microkernel.host.rundir import MAX_SOCKET_PATH
from tgi.microkernel.links.curve import (
    HANDSHAKE_MILLISECONDS,
    HEARTBEAT_MILLISECONDS,
    HEARTBEAT_TIMEOUT_MILLISECONDS,
    MEASURES_SILENCE,
    ConnectingKeys,
    ConnectionGuard,
    Connector,
    ListeningKeys,
)
from tgi.microkernel.links.liveness import SilenceDetector
from tgi.microkernel.messages.codec import MAX_FRAME_BYTES
from tgi.microkernel.messages.protocol import (
    PEER_ROLES,
    PROTOCOL,
    ROLES,
    ROLES_WITHOUT_BEATS,
    Beat,
    Goodbye,
    Hello,
    LinkRejected,
    Ping,
    decode,
    encode,
)
from tgi.microkernel.observability.log import ComplaintLimit

log = logging.getLogger(__name__)

# Messages per receive() call. More stay in the socket for the next turn of the loop.
MAX_MESSAGES_PER_RECEIVE = 256
# Over TCP also bytes, so that a flood of large messages does not keep the loop from other links.
MAX_BYTES_PER_RECEIVE = 4 << 20
# pyzmq's flags as plain integers: combining its enums costs more than a send.
_LAST, _MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)
# How long a closed link still sends what it has queued.
LINGER_SECONDS = 0.5
# libzmq reports a broken connection shortly before sends to it fail, so the probes are repeated.
PROBE_ATTEMPTS = 20
PROBE_SECONDS = 0.001
# Multipart messages of one TCP peer that wait to be received; then its connection is not read further.
MAX_WAITING_MESSAGES = 1000

_PING, _GOODBYE = encode(Ping()), encode(Goodbye())
# How long a process that was told to end waits for the answers to its Goodbyes. Over a slow network none may come in
# this time, but there the end of the connection is as late as the Goodbye: the peer has the same time to read that.
GOODBYE_SECONDS = 1.0
# Messages that a link handles itself, once a peer has a session; all others are for the role.
_OF_LINKS = frozenset((Beat, Ping))


class PeerId(NamedTuple):
    """Identifies one process for its lifetime: a restarted process has another boot id."""

    role: str
    replica: int
    boot: bytes

    def __str__(self) -> str:
        return f"{self.role}-{self.replica} ({self.boot.hex()[:8]})"


class ReplicaId(NamedTuple):
    """What a process of a role and its successors have in common: the run directory and the number there."""

    site: str
    replica: int

    @property
    def number(self) -> int:
        """A number that is the same in all processes, and the same for two replicas by chance only."""
        return crc32(f"{self.site}/{self.replica}".encode()) if self.site else self.replica


class PeerDisconnected(NamedTuple):
    """Local event, never sent: the connection to the peer is lost, a new process has taken its replica, or it is an
    upstream peer that has stopped sending."""

    planned: bool = False  # it has said Goodbye: it was told to end, and no request is the cause


class PeerSilent(NamedTuple):
    """Local event, never sent: the downstream peer is connected but has stopped sending. It is stopped, or its loop is
    stuck."""


class PeerResponds(NamedTuple):
    """Local event, never sent: the downstream peer that was silent has sent something."""


class Link:
    """Exchanges messages with peers and reports when a peer connects (its Hello) and disconnects (PeerDisconnected).

    Handshake: when a DEALER connects, libzmq sends an empty probe; the ROUTER answers with its Hello, and the DEALER
    answers that with its own. So every new connection, and nothing else, delivers a Hello to both sides, in whatever
    order the processes start. A Hello means that messages in flight on the previous connection are lost: the upstream
    side sends them again.

    A loop waits for the descriptors of `socket` and of `event_sources` unless the link `has_pending_work`, and then
    calls `receive`. When a connection breaks, one of `event_sources` becomes readable, and `detect_disconnects` finds
    the lost peers.

    `exchange_beats`, called every BEAT_SECONDS, sends a Beat to every peer but a worker, which has no use for it, and
    finds peers that have stopped sending. A downstream peer is reported (PeerSilent, later PeerResponds). With an
    upstream peer the session ends (PeerDisconnected), so what it asked for is cancelled; when it sends again, it gets
    a new Hello and submits its requests again, as after the loss of a connection.

    Not thread-safe: all methods are called by the thread of the process's loop.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        address: str,
        own_hello: Hello,
        guard: ConnectionGuard | None = None,
        connector: Connector | None = None,
    ) -> None:
        self.socket = socket
        role = own_hello.role
        self._upstream_roles = ROLES[: ROLES.index(role)] if role in ROLES else ()
        # Watches upstream peers from their Hello on, downstream peers from their first beat on.
        self._silence: SilenceDetector[PeerId] = SilenceDetector()
        self._heard: set[bytes] = set()  # routes that have sent something since the last exchange_beats
        self.address = address
        self.own_hello = own_hello
        self.peers: dict[PeerId, Hello] = {}  # those with a session
        # zmq identity of each peer, also of a silent one without a session; b"" towards a ROUTER
        self._routes: dict[PeerId, bytes] = {}
        self._peer_of_route: dict[bytes, PeerId] = {}
        self._outbox: dict[PeerId, list[bytes]] = {}
        self._events: deque[tuple[PeerId, Any]] = deque()
        self._may_have_more = False  # the latest receive() reached its limit
        self._has_sent = True  # since receive() has found no more
        self.found_quiet = False  # a loop has just waited, and nothing has arrived: the next receive() need not ask
        self._binds = socket.type == zmq.ROUTER
        self._guard = guard  # of a ROUTER that listens on TCP
        self._peer_of_connection: dict[int, PeerId] = {}  # by file descriptor; only with a guard
        self._connector = connector  # of a DEALER that connects over TCP
        self._malformed, self._rejected = ComplaintLimit(), ComplaintLimit()
        # Of a connecting side: whether a process is connected over another link, and the process for which that holds.
        self.has_other_link: Callable[[PeerId, Link], bool] = lambda peer, link: False
        self.redundant_peer: PeerId | None = None
        events = zmq.EVENT_DISCONNECTED | (zmq.EVENT_ACCEPTED if guard is not None else 0)
        events |= Connector.EVENTS if connector is not None else 0
        # pyzmq's default address contains the file descriptor, which may have belonged to a socket closed just before.
        self.monitor = socket.get_monitor_socket(events, f"inproc://{uuid4()}")
        self.event_sources = [self.monitor] if guard is None else [self.monitor, guard.zap]
        self._release = weakref.finalize(self, _release, socket, self.event_sources)
        self._release.atexit = False

    @classmethod
    def bind(cls, address: str, own_hello: Hello, keys: ListeningKeys | None = None) -> "Link":
        """A link of the stable side; a TCP address needs keys. Raises UserError if the address cannot be used."""
        socket = _socket(zmq.ROUTER, address, keys)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        guard = ConnectionGuard(socket, address, keys) if keys is not None else None
        link = cls(socket, address, own_hello, guard)  # before a peer can connect: the monitor must miss no event
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            link.close()
            used = error.errno == zmq.EADDRINUSE
            advice = "Is another tgi using it?" if used else "Give an address of this host, or 0.0.0.0 for all."
            raise UserError(f"Cannot listen on {address}: {zmq.strerror(error.errno or 0)}. {advice}") from error
        return link

    @classmethod
    def connect(cls, address: str, own_hello: Hello, keys: ConnectingKeys | None = None) -> "Link":
        """A link of the connecting side; a TCP address needs keys. The other end need not exist yet."""
        socket = _socket(zmq.DEALER, address, keys)
        connector = Connector(socket, address, keys) if keys is not None else None
        socket.setsockopt(zmq.PROBE_ROUTER, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 20 if connector is None else 200)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        link = cls(socket, address, own_hello, connector=connector)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            link.close()
            raise UserError(f"Cannot connect to {address}: {error.strerror}. Give tcp://HOST:PORT.") from error
        return link

    @property
    def has_pending_work(self) -> bool:
        """Whether receive() or flush() has work although the socket's descriptor is not readable. libzmq signals there
        that something has arrived since it was last asked, and a send asks, too."""
        if self._has_sent:
            self._has_sent = False
            if self.socket.getsockopt(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
                self._may_have_more = True
        return self._may_have_more or bool(self._events or self._outbox)

    def receive(self) -> Iterator[tuple[PeerId, Any]]:
        """Yields (peer, message) without blocking: Hello for a new connection, PeerDisconnected for a lost one. To be
        called every BEAT_SECONDS, too: it connects again when that is due, and finds the peers that have vanished."""
        if self._connector is not None:
            self._connector.retry_if_due()
        if self._guard is not None:
            self._guard.close_silent_if_due(self._peer_of_connection)
        quiet, self.found_quiet = self.found_quiet, False
        if quiet and not self._events:
            return
        self._may_have_more = False
        size = 0  # of messages over TCP
        for _ in range(MAX_MESSAGES_PER_RECEIVE):
            while self._events:
                yield self._events.popleft()
            # Costs a quarter of the exception that pyzmq raises if there is no message.
            if not self.socket.getsockopt(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
                self._has_sent = False
                return
            connection = None
            if self._guard is None:
                parts = self.socket.recv_multipart(_LAST)
            else:
                if size > MAX_BYTES_PER_RECEIVE:
                    break
                frames = self.socket.recv_multipart(_LAST, copy=False)
                connection = int(frames[-1].get(zmq.SRCFD))
                parts = [frame.bytes for frame in frames]
                size += sum(map(len, parts))
            route = parts.pop(0) if self._binds else b""
            self._heard.add(route)
            for frame in parts:
                yield from self._handle_frame(route, frame, connection)
        self._may_have_more = True

    def send(self, peer: PeerId, message: tuple[Any, ...]) -> None:
        """Queues a message until flush(). Dropped if the peer has disconnected, which receive() reports."""
        if peer in self.peers:
            frame = encode(message)  # may raise: then nothing is queued
            self._outbox.setdefault(peer, []).append(frame)

    def broadcast(self, message: tuple[Any, ...]) -> None:
        """Queues a message for every peer."""
        for peer in self.peers:
            self.send(peer, message)

    def flush(self) -> None:
        """Sends the queued messages: one ZeroMQ multipart message per peer."""
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, {}
        for peer, frames in outbox.items():
            if peer in self.peers and not self._send(self._routes[peer], frames):
                self._disconnect(peer)

    def detect_disconnects(self) -> None:
        """To be called when one of `event_sources` is readable: finds and disconnects the peers that cannot be reached.
        A TCP listener also decides here who may connect."""
        if self._guard is not None:
            self._guard.authenticate()
            for connection in self._guard.closed_connections(self.monitor):
                if (peer := self._peer_of_connection.get(connection)) is not None:
                    self._disconnect(peer)
            self._guard.shed_strangers(self._peer_of_connection)
            return
        if not self._drain_monitor():
            return
        for _ in range(PROBE_ATTEMPTS):
            lost = [peer for peer, route in self._routes.items() if not self._binds or not self._send(route, [_PING])]
            for peer in lost:
                self._disconnect(peer)
            if lost or not self._routes:
                return
            time.sleep(PROBE_SECONDS)

    def exchange_beats(self, beat: Beat) -> None:
        """Sends the beat, and looks for silent peers. To be called every BEAT_SECONDS, after receive()."""
        for peer in self.peers:
            if peer.role not in ROLES_WITHOUT_BEATS:
                self.send(peer, beat)
        self.flush()
        heard = {self._peer_of_route[route] for route in self._heard if route in self._peer_of_route}
        self._heard.clear()
        silent, responding = self._silence.tick(heard)
        for peer in silent:
            if peer.role in self._upstream_roles:
                log.warning("%s does not respond: what it asked for is cancelled", peer)
                self._end_session(peer)
            else:
                self._events.append((peer, PeerSilent()))
        self._events.extend((peer, PeerResponds()) for peer in responding)

    def local_address(self, peers: Iterable[PeerId]) -> str:
        """Of a TCP listener: the address of this host to which one of these peers has connected, one that other hosts
        reach if there is one. "" if all are gone. Thread-safe."""
        assert self._guard is not None
        connections = [connection for connection, peer in [*self._peer_of_connection.items()] if peer in peers]
        found = [address for one in connections if (address := self._guard.local_address(one))]
        return min(found, key=lambda address: ip_address(address).is_loopback, default="")

    def say_goodbye(self) -> None:
        """Sends a Goodbye to every peer. For a process that was told to end, see `end_sessions`."""
        self.broadcast(Goodbye())
        self.flush()

    def wait_for_goodbyes(self, deadline: float) -> None:
        """Of a side that listens: waits until all peers have answered the Goodbye, at most until `deadline`, by
        time.monotonic. What they send before that is dropped."""
        poller = zmq.Poller()
        for source in (self.socket, *self.event_sources):
            poller.register(source, zmq.POLLIN)
        while self._binds and self.peers and (seconds := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(int(1000 * seconds)))
            if any(source in ready for source in self.event_sources):
                self.detect_disconnects()
            deque(self.receive(), maxlen=0)

    def close(self) -> None:
        """Sends the queued messages and closes. What the peer does not read within the linger time is lost."""
        self.flush()
        self._release()

    def _drain_monitor(self) -> bool:
        """Reads all events of the monitor. Returns whether a connection was lost."""
        if self._connector is not None:
            return self._connector.read_events(self.monitor)
        found = False
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            found = True
        return found

    def _handle_frame(self, route: bytes, frame: bytes, connection: int | None = None) -> Iterator[tuple[PeerId, Any]]:
        if not frame:  # libzmq's probe of a new connection
            if not self._send(route, [encode(self.own_hello)]):
                log.debug("a peer on %s disconnected before it was sent a Hello", self.address)
            return
        try:
            message = decode(frame)
        except ProtocolError as error:
            if self._malformed.allows_one():
                log.warning("dropped a malformed message on %s: %s", self.address, error)
            return
        if isinstance(message, Hello):
            yield from self._handle_hello(route, message, connection)
        elif isinstance(message, LinkRejected):
            if self._rejected.allows_one():
                log.error("%s rejected this process: %s", self.address, message.message)
        elif (peer := self._peer_of_route.get(route)) is not None:
            kind = type(message)
            if kind is Goodbye:
                if not self._binds:
                    self._send(route, [_GOODBYE])
                self._disconnect(peer, planned=True)
            elif peer not in self.peers:
                self._begin_new_session(peer)
            elif kind not in _OF_LINKS:
                yield peer, message
            elif kind is Beat:
                self._silence.watch(peer)
                if peer.role not in self._upstream_roles:  # else it tells only that the peer runs
                    yield peer, message
        elif not isinstance(message, Ping | Goodbye):
            log.debug("dropped %s from an unknown peer on %s", type(message).__name__, self.address)

    def _handle_hello(self, route: bytes, hello: Hello, connection: int | None) -> Iterator[tuple[PeerId, Any]]:
        if connection is not None and self._guard is not None and connection not in self._guard.connections:
            return  # it was closed meanwhile
        if problem := self._incompatibility(hello):
            if self._rejected.allows_one():
                log.error("rejected %s-%d on %s: %s", hello.role, hello.replica, self.address, problem)
            self._send(route, [encode(LinkRejected(problem))])
            return
        peer = PeerId(hello.role, hello.replica, hello.boot)
        if not self._binds:
            self._drain_monitor()  # events of the previous connection
            if self.has_other_link(peer, self):
                self.redundant_peer = peer  # without an answer, its session over the other link goes on
                for previous in list(self._routes):
                    self._disconnect(previous)
                return
        place = (hello.role, hello.replica, hello.site)
        for old, its in list(self.peers.items()):
            if (its.role, its.replica, its.site) == place:
                if its.last_exit is not None and its.last_exit.boot == hello.boot:
                    return  # a delayed Hello: that process has ended, and the one with a session has replaced it
                self._disconnect(old)
        if peer in self._routes:  # it was silent, and has a new connection
            self._disconnect(peer)
        if (other := self._peer_of_route.get(route)) is not None:
            self._disconnect(other)
        self.peers[peer] = hello
        if peer.role in self._upstream_roles and self.own_hello.role not in ROLES_WITHOUT_BEATS:
            self._silence.watch(peer)
        self._routes[peer] = route
        self._peer_of_route[route] = peer
        if connection is not None:
            self._peer_of_connection[connection] = peer
        if self._connector is not None:
            self._connector.has_session = True
        if not self._binds and not self._send(route, [encode(self.own_hello)]):
            self._disconnect(peer)
        while self._events:
            yield self._events.popleft()
        if peer in self.peers:
            yield peer, hello

    def _incompatibility(self, hello: Hello) -> str:
        """Why this peer is rejected, or "" if it is compatible."""
        wanted = PEER_ROLES.get((self.own_hello.role, self._binds))
        if wanted is not None and hello.role not in wanted:
            return f"a {self.own_hello.role} has no link of this kind to a {hello.role}"
        if hello.protocol != PROTOCOL:
            return f"protocol {hello.protocol} against {PROTOCOL}; run the same version of tgi on both sides"
        if hello.model and self.own_hello.model and hello.model != self.own_hello.model:
            return (
                f"it serves another model ({hello.model} against {self.own_hello.model}); start both with the same "
                "model, the same --quantize and the same --kv-cache-dtype"
            )
        return ""

    def _send(self, route: bytes, frames: list[bytes]) -> bool:
        """Sends one multipart message. Returns False if the connection is gone."""
        if self._binds:
            frames = [route, *frames]
        self._has_sent = True
        send = self.socket.send
        try:
            for frame in frames[:-1]:
                send(frame, _MORE)
            send(frames[-1], _LAST)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _disconnect(self, peer: PeerId, planned: bool = False) -> None:
        """Ends the session, and forgets the connection."""
        self._end_session(peer, planned)
        del self._peer_of_route[self._routes.pop(peer)]
        self._peer_of_connection = {fd: other for fd, other in self._peer_of_connection.items() if other != peer}

    def _end_session(self, peer: PeerId, planned: bool = False) -> None:
        if self.peers.pop(peer, None) is not None:
            self._outbox.pop(peer, None)
            self._silence.forget(peer)
            self._events.append((peer, PeerDisconnected(planned)))

    def _begin_new_session(self, peer: PeerId) -> None:
        """A silent peer has sent something: begins the handshake again, as on a new connection. What it sends before it
        has answered belongs to the session that has ended, and is dropped."""
        log.warning("%s responds again", peer)
        route = self._routes[peer]
        self._disconnect(peer)
        self._send(route, [encode(self.own_hello)])


def end_sessions(links: Iterable[Link]) -> None:
    """Says Goodbye to all peers, for a process that was told to end. When a connection ends, libzmq drops what the
    connecting side has not read: so that side answers the Goodbye, which it reads last, and the other waits for it."""
    links, deadline = list(links), time.monotonic() + GOODBYE_SECONDS
    for link in links:
        link.say_goodbye()
    for link in links:
        link.wait_for_goodbyes(deadline)


def _release(socket: "zmq.Socket[bytes]", event_sources: "list[zmq.Socket[bytes]]") -> None:
    """Closes the monitor before its socket, also when a link is garbage-collected. In the other order libzmq's I/O
    thread, which serves all sockets of the process, may block forever on an event for a closed monitor."""
    socket.disable_monitor()
    for source in event_sources:
        source.close(0)
    socket.close()
    if socket.context is not zmq.Context.instance():
        socket.context.term()


def send_remaining() -> None:
    """Waits until what closed links have queued is sent, at most their linger time: for a process that is about to end
    without the interpreter's clean-up."""
    term = zmq.Context.instance().term
    sending = threading.Thread(target=term, daemon=True)  # which waits for ever if a socket is open
    sending.start()
    sending.join(LINGER_SECONDS)


def _socket(kind: int, address: str, keys: ListeningKeys | ConnectingKeys | None) -> "zmq.Socket[bytes]":
    """A socket with the options of all links. Raises UserError for an address that cannot be used."""
    url = urlsplit(address)
    if url.scheme == "ipc" and len(path := address.removeprefix("ipc://").encode()) > MAX_SOCKET_PATH:
        raise UserError(
            f"The socket path {path.decode()} has {len(path)} bytes; the system allows {MAX_SOCKET_PATH}. "
            "Set TGI_RUN to a shorter directory."
        )
    if url.scheme == "tcp" and keys is None:
        raise UserError(f"{address} cannot be used without keys: links over TCP are encrypted. Give --keys FILE.")
    listens = isinstance(keys, ListeningKeys)
    context = zmq.Context() if listens else zmq.Context.instance()
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # queue for live connections only: a dead one must not accept messages
    socket.setsockopt(zmq.SNDHWM, 0)  # unlimited, since a full queue drops silently; the roles bound what is in flight
    socket.setsockopt(zmq.RCVHWM, MAX_WAITING_MESSAGES if listens else 0)
    socket.setsockopt(zmq.LINGER, int(1000 * LINGER_SECONDS))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    if url.scheme == "tcp":
        socket.setsockopt(zmq.IPV6, 1)
        # The side that listens sends none: libzmq aborts the process at the next one after a peer with
        # MAX_WAITING_MESSAGES has closed its connection (libzmq#4841).
        if not (listens and MEASURES_SILENCE):
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MILLISECONDS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, HEARTBEAT_TIMEOUT_MILLISECONDS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
    return socket
