"""One ordered link between two neighbouring floors, over a ROUTER (many peers) or a DEALER (one peer)."""

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

from tgi.kernel.codec import MAX_FRAME_BYTES
from tgi.kernel.errors import ProtocolError, UserError
from tgi.kernel.messages import decode, encode
from tgi.kernel.presence import PROTOCOL, Hello, Ping, Refused
from tgi.kernel.rundir import MAX_SOCKET_PATH

log = logging.getLogger(__name__)

# Messages taken from the socket in one receive(); the rest waits for the next turn of the loop.
RECEIVE_AT_ONCE = 256
# pyzmq's flags as plain numbers: putting its enums together costs more than sending does.
_LAST, _MORE, _READABLE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)
# libzmq tells of a broken connection a moment before it gives up what belongs to it.
LOOKS = 20
LOOK_SECONDS = 0.001


_PING = encode(Ping())


class Peer(NamedTuple):
    """One life of one process: a restarted process is another peer."""

    role: str
    place: int
    boot: bytes

    def __str__(self) -> str:
        return f"{self.role}-{self.place} ({self.boot.hex()[:8]})"


class Gone(NamedTuple):
    """Event of this side, never sent: the peer's life is over as far as this link knows."""


class Link:
    """Exchanges messages with neighbours and tells when a neighbour's life begins (its Hello) and ends (Gone).

    How a life is noticed: a DEALER's connection makes libzmq send an empty probe; the ROUTER answers it with its
    Hello; the DEALER answers that with its own. So each new connection, and nothing else, brings a Hello to both
    sides, in whatever order the processes start, and what was in flight on an old connection is known to be lost:
    the upstream side submits it again.

    A life ends when its connection breaks: `monitor` becomes readable then, and `look` finds out whose it was.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", address: str, me: Hello) -> None:
        self.socket = socket
        self.address = address
        self.me = me
        self.peers: dict[Peer, Hello] = {}
        self._routes: dict[Peer, bytes] = {}  # zmq identity of each peer; b"" towards a ROUTER
        self._who: dict[bytes, Peer] = {}  # the other way round
        self._outbox: dict[Peer, list[bytes]] = {}
        self._events: deque[tuple[Peer, Any]] = deque()
        self._more = False  # the latest receive() has left something in the socket, perhaps
        self._binds = socket.type == zmq.ROUTER
        # pyzmq's own name for it is that of a descriptor, which may have been a closed socket's a moment ago.
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, f"inproc://{uuid4()}")
        self._release = weakref.finalize(self, _release, socket, self.monitor)
        self._release.atexit = False

    @classmethod
    def bind(cls, address: str, me: Hello) -> "Link":
        """The stable side. Raises UserError if the address cannot be used."""
        socket = _socket(zmq.ROUTER, address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise UserError(f"Cannot listen on {address}: {error.strerror}. Is another tgi using it?") from error
        return cls(socket, address, me)  # nothing can have connected and broken yet

    @classmethod
    def connect(cls, address: str, me: Hello) -> "Link":
        """The side that comes and goes. The other end need not exist yet."""
        socket = _socket(zmq.DEALER, address)
        socket.setsockopt(zmq.ROUTING_ID, f"{me.role}-{me.place}-{me.boot.hex()}".encode())
        socket.setsockopt(zmq.PROBE_ROUTER, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        link = cls(socket, address, me)
        socket.connect(address)
        return link

    @property
    def pending(self) -> bool:
        """Whether there is something to do although the socket is silent: to be told by receive(), or to be sent."""
        return bool(self._events or self._outbox) or self._more

    def receive(self) -> Iterator[tuple[Peer, Any]]:
        """Yields (peer, message) without blocking; (peer, Hello) for a new life, (peer, Gone()) for an ended one."""
        self._more = False
        for _ in range(RECEIVE_AT_ONCE):
            while self._events:
                yield self._events.popleft()
            # Asking first costs a quarter of the exception with which pyzmq says that there is nothing.
            if not self.socket.getsockopt(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
                return
            parts = self.socket.recv_multipart(_LAST)
            route = parts.pop(0) if self._binds else b""
            for frame in parts:
                yield from self._take(route, frame)
        self._more = True

    def send(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """Queues a message until flush(). Dropped if the peer is gone: whoever needs it hears Gone or a new Hello."""
        if peer in self.peers:
            self._outbox.setdefault(peer, []).append(encode(message))

    def broadcast(self, message: tuple[Any, ...]) -> None:
        """Queues a message for every peer."""
        for peer in self.peers:
            self.send(peer, message)

    def flush(self) -> None:
        """Sends what is queued: one zmq message per peer, however many messages of ours are in it."""
        outbox, self._outbox = self._outbox, {}
        for peer, frames in outbox.items():
            if peer in self.peers and not self._send(self._routes[peer], frames):
                self._forget(peer)

    def look(self) -> None:
        """A connection has broken: whoever cannot be reached any more is Gone, as receive() will say."""
        if not self._hear_of_breaks():
            return
        for _ in range(LOOKS):
            lost = [peer for peer, route in self._routes.items() if not self._binds or not self._send(route, [_PING])]
            for peer in lost:
                self._forget(peer)
            if lost or not self.peers:
                return
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Sends what is queued and closes; what the peer has not read within the linger time is lost."""
        self.flush()
        self._release()

    def _hear_of_breaks(self) -> bool:
        """Empties the monitor. Whether there was anything in it."""
        heard = False
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            heard = True
        return heard

    def _take(self, route: bytes, frame: bytes) -> Iterator[tuple[Peer, Any]]:
        if not frame:  # the probe of a new connection
            if not self._send(route, [encode(self.me)]):
                log.debug("a peer on %s left before it was greeted", self.address)
            return
        try:
            message = decode(frame)
        except ProtocolError as error:
            log.warning("dropped a malformed message on %s: %s", self.address, error)
            return
        if isinstance(message, Hello):
            yield from self._greet(route, message)
        elif isinstance(message, Ping):
            pass
        elif isinstance(message, Refused):
            log.error("%s refused this process: %s", self.address, message.message)
        elif (peer := self._who.get(route)) is not None:
            yield peer, message
        else:
            log.debug("dropped %s from a stranger on %s", type(message).__name__, self.address)

    def _greet(self, route: bytes, hello: Hello) -> Iterator[tuple[Peer, Any]]:
        if problem := self._misfit(hello):
            log.error("refused %s-%d on %s: %s", hello.role, hello.place, self.address, problem)
            self._send(route, [encode(Refused(problem))])
            return
        if not self._binds:
            self._hear_of_breaks()  # those of the connection before this one
        peer = Peer(hello.role, hello.place, hello.boot)
        for old in [other for other in self.peers if other[:2] == peer[:2]]:
            self._forget(old)
        self.peers[peer] = hello
        self._routes[peer] = route
        self._who[route] = peer
        if not self._binds and not self._send(route, [encode(self.me)]):
            self._forget(peer)
        while self._events:
            yield self._events.popleft()
        if peer in self.peers:
            yield peer, hello

    def _misfit(self, hello: Hello) -> str:
        """Why this neighbour cannot be talked to, or "" if it can."""
        if hello.protocol != PROTOCOL:
            return f"protocol {hello.protocol} against {PROTOCOL}; run the same version of tgi on both sides"
        if hello.model and self.me.model and hello.model != self.me.model:
            return (
                f"it serves another model ({hello.model} against {self.me.model}); start both with the same model, the "
                "same --quantize and the same --kv-cache-dtype"
            )
        return ""

    def _send(self, route: bytes, frames: list[bytes]) -> bool:
        """Whether libzmq took the frames. False: no such connection any more."""
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

    def _forget(self, peer: Peer) -> None:
        del self.peers[peer]
        del self._who[self._routes.pop(peer)]
        self._outbox.pop(peer, None)
        self._events.append((peer, Gone()))


def _release(socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
    """In this order, also for a link that is only forgotten: libzmq's own thread, which serves all sockets of the
    process, waits for ever to tell a monitor of a break that is gone before its socket."""
    socket.disable_monitor()
    monitor.close(0)
    socket.close()


def _socket(kind: int, address: str) -> "zmq.Socket[bytes]":
    """A socket with the options that every link has, after a look at the address."""
    url = urlsplit(address)
    if url.scheme == "ipc" and len(path := address.removeprefix("ipc://").encode()) > MAX_SOCKET_PATH:
        raise UserError(
            f"The socket path {path.decode()} has {len(path)} bytes; the system allows {MAX_SOCKET_PATH}. "
            "Set TGI_RUN to a shorter directory."
        )
    if url.scheme == "tcp" and not _loopback(url.hostname or ""):
        raise UserError(f"{address} is not a loopback address: links between hosts need CURVE keys, which are not set.")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # queue for living connections only: a dead one must not swallow messages
    socket.setsockopt(zmq.SNDHWM, 0)  # a full queue would drop silently; the floors bound what is in flight
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
