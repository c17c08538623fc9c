"""TCP links in tests: a scheduler's end that runs like a process's loop, and a network that can be cut."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from tgi.microkernel.links import curve
from tgi.microkernel.links.link import Link, PeerId
from tgi.microkernel.messages.protocol import PROTOCOL, Hello

TIMEOUT_SECONDS = 60.0


def hello(role: str, replica: int = 0, model: str = "", site: str = "") -> Hello:
    return Hello(PROTOCOL, role, replica, os.urandom(8), model, site=site)


class LoopedLink:
    """A link with the loop of a process around it: waits for its sources, finds disconnects, receives."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.received: list[tuple[PeerId, Any]] = []
        self._poller = zmq.Poller()
        for source in (link.socket, *link.event_sources):
            self._poller.register(source, zmq.POLLIN)

    def turn(self, milliseconds: int = 0) -> None:
        ready = dict(self._poller.poll(milliseconds))
        if any(source in ready for source in self.link.event_sources):
            self.link.detect_disconnects()
        self.received += self.link.receive()
        self.link.flush()

    def kinds(self) -> list[str]:
        return [type(message).__name__ for _, message in self.received]


def until(done: Callable[[], object], *links: LoopedLink, seconds: float = TIMEOUT_SECONDS) -> bool:
    """Runs the loops until `done`. Returns False if it was not within this time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        for link in links:
            link.turn()
        time.sleep(0.002)
    return True


class Deployment:
    """The keys of one deployment, and links with them."""

    def __init__(self, directory: Path, port: int) -> None:
        scheduler, host, *_ = curve.create_keys(directory)
        self.scheduler_keys = curve.load_scheduler_keys(scheduler)
        self.host_keys = curve.load_host_keys(host)
        self.address = f"tcp://127.0.0.1:{port}"
        self.port = port
        self.made: list[Link] = []

    def bind(self, address: str | None = None) -> LoopedLink:
        link = Link.bind(address or self.address, hello("scheduler"), self.scheduler_keys)
        self.made.append(link)
        return LoopedLink(link)

    def connect(
        self, own_hello: Hello, port: int | None = None, keys: curve.ConnectingKeys | None = None
    ) -> LoopedLink:
        address = self.address if port is None else f"tcp://127.0.0.1:{port}"
        link = Link.connect(address, own_hello, keys or self.host_keys)
        self.made.append(link)
        return LoopedLink(link)

    def close(self) -> None:
        for link in self.made:
            if not link.socket.closed:
                link.socket.linger = 0
                link.close()


class Cable:
    """Relays a TCP port to another one. When it is `cut`, both ends keep their connections and receive nothing. Records
    what the connecting side has sent."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.is_cut = False
        self.bytes_left: int | None = None  # for the connecting side, before the cable is cut by itself
        self.damages_next = False  # of what goes to the connecting side
        self.sent = b""
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self.target))
                except ConnectionRefusedError:
                    here.close()
                    continue
                self._sockets += [here, there]
                threading.Thread(target=self._relay, args=(here, there, True), daemon=True).start()
                threading.Thread(target=self._relay, args=(there, here, False), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, outward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.is_cut:
                    continue
                if outward:
                    self.sent += data
                elif self.bytes_left is not None and (left := self.bytes_left - len(data)) < 0:
                    self.is_cut, self.bytes_left = True, None
                    continue
                elif self.damages_next:
                    self.damages_next, data = False, data[:-1] + bytes([data[-1] ^ 1])
                elif self.bytes_left is not None:
                    self.bytes_left = left
                sink.sendall(data)
            if not self.is_cut:
                sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


@contextlib.contextmanager
def cable(target: int) -> Iterator[Cable]:
    made = Cable(target)
    try:
        yield made
    finally:
        made.close()
