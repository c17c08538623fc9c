"""Links: ordered message channels between the processes of two neighbouring roles, over ZeroMQ.

The stable side binds a ROUTER (many peers), the side that connects a DEALER (one peer).
"""

import ipaddress
import logging
import socket as sockets
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import zmq

from tgi.microkernel.codec import MAX_FRAME_BYTES
from tgi.microkernel.errors import ProtocolError, UserError
from tgi.microkernel.protocol import PROTOCOL, Hello, LinkRejected, Ping, decode, encode
from tgi.microkernel.rundir import MAX_SOCKET_PATH

log = logging.getLogger(__name__)

# Messages per receive() call. More stay in the socket for the next turn of the loop.
MAX_MESSAGES_PER_RECEIVE = 256
# pyzmq's flags as plain integers: combining its enums costs more than a send.
_LAST, _MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)
# libzmq reports a broken connection shortly before sends to it fail, so the probes are repeated.
PROBE_ATTEMPTS = 20
PROBE_SECONDS = 0.001


_PING = encode(Ping())


class PeerId(NamedTuple):
    """Identifies one process for its lifetime: a restarted process has another boot id."""

    role: str
    replica: int
    boot: bytes

    def __str__(self) -> str:
        return f"{self.role}-{self.replica} ({self.boot.hex()[:8]})"


class PeerDisconnected(NamedTuple):
    """Local event, never sent: the connection to the peer is lost, or a new process has taken its replica."""


class Link:
    """Exchanges messages with peers and reports when a peer connects (its Hello) and disconnects (PeerDisconnected).

    Handshake: when a DEALER connects, libzmq sends an empty probe; the ROUTER answers with its Hello, and the DEALER
    answers that with its own. So every new connection, and nothing else, delivers a Hello to both sides, in whatever
    order the processes start. A Hello means that messages in flight on the previous connection are lost: the upstream
    side sends them again.

    When a connection breaks, `monitor` becomes readable, and `detect_disconnects` finds the peers that were lost.

    Not thread-safe: all methods are called by the thread of the process's loop.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", address: str, own_hello: Hello) -> None:
        self.socket = socket
        self.address = address
        self.own_hello = own_hello
        self.peers: dict[PeerId, Hello] = {}
        self._routes: dict[PeerId, bytes] = {}  # zmq identity of each peer; b"" towards a ROUTER
        self._peer_of_route: dict[bytes, PeerId] = {}
        self._outbox: dict[PeerId, list[bytes]] = {}
        self._events: deque[tuple[PeerId, Any]] = deque()
        self._may_have_more = False  # the latest receive() reached its limit
        self._binds = socket.type == zmq.ROUTER
        # pyzmq's default address contains the file descriptor, which may have belonged to a socket closed just before.
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, f"inproc://{uuid4()}")
        self._release = weakref.finalize(self, _release, socket, self.monitor)
        self._release.atexit = False

    @classmethod
    def bind(cls, address: str, own_hello: Hello) -> "Link":
        """A link of the stable side. Raises UserError if the address cannot be used."""
        socket = _socket(zmq.ROUTER, address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise UserError(f"Cannot listen on {address}: {error.strerror}. Is another tgi using it?") from error
        return cls(socket, address, own_hello)  # the monitor misses no disconnect: no peer can have connected yet

    @classmethod
    def connect(cls, address: str, own_hello: Hello) -> "Link":
        """A link of the connecting side. The other end need not exist yet."""
        socket = _socket(zmq.DEALER, address)
        socket.setsockopt(zmq.ROUTING_ID, f"{own_hello.role}-{own_hello.replica}-{own_hello.boot.hex()}".encode())
        socket.setsockopt(zmq.PROBE_ROUTER, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        link = cls(socket, address, own_hello)
        socket.connect(address)
        return link

    @property
    def has_pending_work(self) -> bool:
        """Whether receive() or flush() has work although the socket is not readable."""
        return bool(self._events or self._outbox) or self._may_have_more

    def receive(self) -> Iterator[tuple[PeerId, Any]]:
        """Yields (peer, message) without blocking: Hello for a new connection, PeerDisconnected for a lost one."""
        self._may_have_more = False
        for _ in range(MAX_MESSAGES_PER_RECEIVE):
            while self._events:
                yield self._events.popleft()
            # Costs a quarter of the exception that pyzmq raises if there is no message.
            if not self.socket.getsockopt(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
                return
            parts = self.socket.recv_multipart(_LAST)
            route = parts.pop(0) if self._binds else b""
            for frame in parts:
                yield from self._handle_frame(route, frame)
        self._may_have_more = True

    def send(self, peer: PeerId, message: tuple[Any, ...]) -> None:
        """Queues a message until flush(). Dropped if the peer has disconnected, which receive() reports."""
        if peer in self.peers:
            self._outbox.setdefault(peer, []).append(encode(message))

    def broadcast(self, message: tuple[Any, ...]) -> None:
        """Queues a message for every peer."""
        for peer in self.peers:
            self.send(peer, message)

    def flush(self) -> None:
        """Sends the queued messages: one ZeroMQ multipart message per peer."""
        outbox, self._outbox = self._outbox, {}
        for peer, frames in outbox.items():
            if peer in self.peers and not self._send(self._routes[peer], frames):
                self._disconnect(peer)

    def detect_disconnects(self) -> None:
        """To be called when `monitor` is readable: probes all peers and disconnects those that cannot be reached."""
        if not self._drain_monitor():
            return
        for _ in range(PROBE_ATTEMPTS):
            lost = [peer for peer, route in self._routes.items() if not self._binds or not self._send(route, [_PING])]
            for peer in lost:
                self._disconnect(peer)
            if lost or not self.peers:
                return
            time.sleep(PROBE_SECONDS)

    def close(self) -> None:
        """Sends the queued messages and closes. What the peer does not read within the linger time is lost."""
        self.flush()
        self._release()

    def _drain_monitor(self) -> bool:
        """Reads all events of the monitor. Returns whether there was one."""
        found = False
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            found = True
        return found

    def _handle_frame(self, route: bytes, frame: bytes) -> Iterator[tuple[PeerId, Any]]:
        if not frame:  # libzmq's probe of a new connection
            if not self._send(route, [encode(self.own_hello)]):
                log.debug("a peer on %s disconnected before it was sent a Hello", self.address)
            return
        try:
            message = decode(frame)
        except ProtocolError as error:
            log.warning("dropped a malformed message on %s: %s", self.address, error)
            return
        if isinstance(message, Hello):
            yield from self._handle_hello(route, message)
        elif isinstance(message, Ping):
            pass
        elif isinstance(message, LinkRejected):
            log.error("%s rejected this process: %s", self.address, message.message)
        elif (peer := self._peer_of_route.get(route)) is not None:
            yield peer, message
        else:
            log.debug("dropped %s from an unknown peer on %s", type(message).__name__, self.address)

    def _handle_hello(self, route: bytes, hello: Hello) -> Iterator[tuple[PeerId, Any]]:
        if problem := self._incompatibility(hello):
            log.error("rejected %s-%d on %s: %s", hello.role, hello.replica, self.address, problem)
            self._send(route, [encode(LinkRejected(problem))])
            return
        if not self._binds:
            self._drain_monitor()  # events of the previous connection
        peer = PeerId(hello.role, hello.replica, hello.boot)
        for old in [other for other in self.peers if (other.role, other.replica) == (peer.role, peer.replica)]:
            self._disconnect(old)
        self.peers[peer] = hello
        self._routes[peer] = route
        self._peer_of_route[route] = peer
        if not self._binds and not self._send(route, [encode(self.own_hello)]):
            self._disconnect(peer)
        while self._events:
            yield self._events.popleft()
        if peer in self.peers:
            yield peer, hello

    def _incompatibility(self, hello: Hello) -> str:
        """Why this peer is rejected, or "" if it is compatible."""
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

    def _disconnect(self, peer: PeerId) -> None:
        del self.peers[peer]
        del self._peer_of_route[self._routes.pop(peer)]
        self._outbox.pop(peer, None)
        self._events.append((peer, PeerDisconnected()))


def _release(socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
    """Closes the monitor before its socket, also when a link is garbage-collected. In the other order libzmq's I/O
    thread, which serves all sockets of the process, may block forever on an event for a closed monitor."""
    socket.disable_monitor()
    monitor.close(0)
    socket.close()


def _socket(kind: int, address: str) -> "zmq.Socket[bytes]":
    """A socket with the options of all links. Raises UserError for an address that cannot be used."""
    url = urlsplit(address)
    if url.scheme == "ipc" and len(path := address.removeprefix("ipc://").encode()) > MAX_SOCKET_PATH:
        raise UserError(
            f"The socket path {path.decode()} has {len(path)} bytes; the system allows {MAX_SOCKET_PATH}. "
            "Set TGI_RUN to a shorter directory."
        )
    if url.scheme == "tcp" and not _loopback(url.hostname or ""):
        raise UserError(f"{address} is not a loopback address: links between hosts need CURVE keys, which are not set.")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # queue for live connections only: a dead one must not accept messages
    socket.setsockopt(zmq.SNDHWM, 0)  # unlimited, since a full queue drops silently; the roles bound what is in flight
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000 if url.scheme == "tcp" else 0)
    return socket


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(sockets.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False
