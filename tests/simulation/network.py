"""A simulated network: sockets with the behaviour of ZeroMQ's ROUTER and DEALER on which `Link` relies.

Within a connection frames keep their order; connections are independent of each other, so frames on one may overtake
those on another. When a connection breaks, each side learns of it at a time of its own, and what was under way is lost.
"""

import struct
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

import zmq

from tests.simulation.clock import VirtualClock
from tgi.microkernel.links.link import Link
from tgi.microkernel.messages.protocol import Hello

# As plain integers: combining pyzmq's enums costs more than the rest of a send.
_MORE, _READABLE = int(zmq.SNDMORE), int(zmq.POLLIN)
# As Link.connect sets them.
RECONNECT_SECONDS, MAX_RECONNECT_SECONDS = 0.02, 0.5

# A side may notice a broken connection this much later than it breaks.
HALF_OPEN_SECONDS, HALF_OPEN_SHARE = 2.0, 0.5


class Killed(BaseException):
    """The process is killed while it runs: raised through its code, which must not catch it."""


class Crashed(Killed):
    """A request has crashed the process."""


class SocketOwner(Protocol):
    """What the network needs to know of a process."""

    name: str
    alive: bool
    stopped: bool

    def socket_readable(self, source: Any) -> None:
        """A socket, or the monitor of one, has become readable."""

    def message_sent(self) -> None:
        """The process has sent a message. May raise Killed."""


class Monitor:
    """The monitor of a socket: readable once per lost connection."""

    def __init__(self, descriptor: int) -> None:
        self.pending = 0
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def poll(self, timeout: int) -> int:
        return self.pending

    def recv_multipart(self) -> list[bytes]:
        self.pending -= 1
        return [struct.pack("=HI", zmq.EVENT_DISCONNECTED, 0)]

    def close(self, linger: int = 0) -> None:
        self.pending = 0


class Connection:
    """One connection of a DEALER to a ROUTER. `open` and `latest` (the time of the latest delivery) are per side."""

    def __init__(self, dealer: "SimulatedSocket", router: "SimulatedSocket", route: bytes) -> None:
        self.sides = (dealer, router)
        self.route = route
        self.open = [True, True]
        self.latest = [0.0, 0.0]
        self.broken = False


DEALER_SIDE, ROUTER_SIDE = 0, 1


class SimulatedSocket:
    """The part of a pyzmq socket that `Link` uses."""

    def __init__(self, network: "Network", owner: SocketOwner, kind: int, address: str) -> None:
        self.type = kind
        self.mechanism = zmq.NULL
        self.context = zmq.Context.instance()
        self.owner = owner
        self.address = address
        self.closed = False
        self.inbox: deque[list[bytes]] = deque()
        self.routes: dict[bytes, Connection] = {}  # of a ROUTER
        self.connection: Connection | None = None  # of a DEALER
        self.monitor = Monitor(network.next_descriptor())
        self.descriptor = network.next_descriptor()
        self.peers_answer = False  # its peers answer its Goodbye, so they have read all before it closes
        self._network = network
        self._unsent: list[bytes] = []

    def fileno(self) -> int:
        return self.descriptor

    def get_monitor_socket(self, events: int, address: str) -> Monitor:
        return self.monitor

    def disable_monitor(self) -> None:
        pass

    def setsockopt(self, option: int, value: Any) -> None:
        pass

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return _READABLE if self.inbox else 0

    @property
    def readable(self) -> bool:
        return bool(self.inbox or self.monitor.pending)

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def send(self, frame: bytes, flags: int = 0) -> None:
        if self.type == zmq.ROUTER and not self._unsent and frame not in self.routes:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)  # as with ROUTER_MANDATORY
        if self.type == zmq.DEALER and self.connection is None:
            raise zmq.ZMQError(zmq.EAGAIN)  # as with IMMEDIATE
        self._unsent.append(frame)
        if flags & _MORE:
            return
        frames, self._unsent = self._unsent, []
        if self.type == zmq.ROUTER:
            self._network.transmit(self.routes[frames[0]], DEALER_SIDE, frames[1:])
        else:
            assert self.connection is not None
            self._network.transmit(self.connection, ROUTER_SIDE, frames)
        self.owner.message_sent()

    def close(self, linger: int = 0) -> None:
        """The connections break: the owner closes the socket, or has died."""
        if not self.closed:
            self.closed = True
            self._network.socket_closed(self)


class Network:
    """All sockets and connections. `delay` returns the seconds that the next frame takes."""

    def __init__(self, clock: VirtualClock, random: Random, delay: Callable[[], float]) -> None:
        self._clock = clock
        self._random = random
        self._delay = delay
        self._bound: dict[str, SimulatedSocket] = {}
        self._descriptors = 100
        self._routes = 0
        self.connections: list[Connection] = []
        self.frames = 0

    def next_descriptor(self) -> int:
        self._descriptors += 1
        return self._descriptors

    # --- sockets ------------------------------------------------------------------------------------------------------

    def bind(self, owner: SocketOwner, address: str, hello: Hello) -> Link:
        """A link of the stable side."""
        socket = SimulatedSocket(self, owner, zmq.ROUTER, address)
        self._bound[address] = socket
        return Link(socket, address, hello)  # type: ignore[arg-type]

    def connect(self, owner: SocketOwner, address: str, hello: Hello) -> Link:
        """A link of the side that connects."""
        socket = SimulatedSocket(self, owner, zmq.DEALER, address)
        self._clock.after(self._delay(), self._try_to_connect, socket)
        return Link(socket, address, hello)  # type: ignore[arg-type]

    def _try_to_connect(self, socket: SimulatedSocket) -> None:
        if socket.closed:
            return
        router = self._bound.get(socket.address)
        if router is None or router.closed or router.owner.stopped or socket.owner.stopped:
            self._connect_later(socket)
            return
        self._routes += 1
        connection = Connection(socket, router, self._routes.to_bytes(5, "big"))
        self.connections.append(connection)
        router.routes[connection.route] = connection
        socket.connection = connection
        self.transmit(connection, ROUTER_SIDE, [b""])  # as with PROBE_ROUTER

    def _connect_later(self, socket: SimulatedSocket) -> None:
        self._clock.after(self._random.uniform(RECONNECT_SECONDS, MAX_RECONNECT_SECONDS), self._try_to_connect, socket)

    # --- frames -------------------------------------------------------------------------------------------------------

    def transmit(self, connection: Connection, side: int, frames: list[bytes]) -> None:
        """Sends a message to one side of a connection."""
        self.frames += len(frames)
        if connection.broken:
            return
        due = connection.latest[side] = max(connection.latest[side], self._clock.now + self._delay())
        self._clock.at(due, self._deliver, connection, side, frames)

    def _deliver(self, connection: Connection, side: int, frames: list[bytes]) -> None:
        socket = connection.sides[side]
        if not connection.open[side] or socket.closed:
            return
        socket.inbox.append(frames if side == DEALER_SIDE else [connection.route, *frames])
        socket.owner.socket_readable(socket)

    # --- loss ---------------------------------------------------------------------------------------------------------

    def drop(self, connection: Connection) -> None:
        """Breaks a connection. Each side notices it some time later."""
        if not connection.broken:
            connection.broken = True
            for side in (DEALER_SIDE, ROUTER_SIDE):
                unnoticed = HALF_OPEN_SECONDS if self._random.random() < HALF_OPEN_SHARE else 0.0
                self._clock.after(self._delay() + self._random.random() * unnoticed, self._close_side, connection, side)

    def socket_closed(self, socket: SimulatedSocket) -> None:
        """The other sides are delivered what was sent to them, then the end of the connection."""
        for connection in [one for one in self.connections if socket in one.sides]:
            side = connection.sides.index(socket)
            connection.open[side] = False
            if not connection.broken:
                connection.broken = True
                due = max(connection.latest[1 - side], self._clock.now + self._delay())
                self._clock.at(due, self._close_side, connection, 1 - side, socket.peers_answer)

    def _close_side(self, connection: Connection, side: int, has_read: bool = False) -> None:
        """As libzmq does it: a DEALER loses what it has not read, if its loop was stopped or busy."""
        socket = connection.sides[side]
        connection.open[side] = False
        if connection in self.connections and not any(connection.open):
            self.connections.remove(connection)
        if socket.closed:
            return
        if side == ROUTER_SIDE:
            if socket.routes.get(connection.route) is connection:
                del socket.routes[connection.route]
        elif socket.connection is connection:
            socket.connection = None
            if not has_read:
                socket.inbox.clear()
            self._connect_later(socket)
        socket.monitor.pending += 1
        socket.owner.socket_readable(socket.monitor)
