"""A link in a thread of its own, for a process that must end with its peers, whatever its main thread waits for."""

import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import zmq

from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId, end_sessions
from tgi.microkernel.links.liveness import BEAT_SECONDS
from tgi.microkernel.processes.process import Process

log = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0


class WatchedLink:
    """Sends and receives on a link, and ends this process when one of its `members` is gone. The methods are called by
    the main thread.

    The process ends with code 0, as one that was told to end: no request is the cause here. What has ended the other
    process is reported by its own supervisor.
    """

    def __init__(self, process: Process, link: Link) -> None:
        self._process = process
        self._link = link
        self._received: deque[tuple[PeerId, Any]] = deque()
        self._outgoing: deque[tuple[PeerId | None, tuple[Any, ...]]] = deque()
        self._members: frozenset[PeerId] = frozenset()
        self._closing = False
        self._wake, self._wake_write = socket.socketpair()
        for end in (self._wake, self._wake_write):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run_or_end, daemon=True, name="watched link")
        self._thread.start()

    def send(self, message: tuple[Any, ...], peer: PeerId | None = None) -> None:
        """Sends a message to one peer, or to all members."""
        self._outgoing.append((peer, message))
        self._wake_thread()

    def receive(self) -> Iterator[tuple[PeerId, Any]]:
        """Yields what was received, as Link.receive. New messages end the `wait` of the process."""
        while self._received:
            yield self._received.popleft()

    def local_address(self, peers: Iterable[PeerId]) -> str:
        return self._link.local_address(peers)

    def set_members(self, members: frozenset[PeerId]) -> bool:
        """From now on this process ends when one of these peers is gone. Returns False, and does nothing, if one is
        gone already."""
        self._members = members
        if members <= self._link.peers.keys():  # the thread removes a peer before it looks at the members
            return True
        self._members = frozenset()
        return False

    def close(self) -> None:
        """Says goodbye and closes the link."""
        self._closing = True
        self._wake_thread()
        self._thread.join(CLOSE_SECONDS)

    def _wake_thread(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the socket is full of wake-ups already
            self._wake_write.send(b"\0")

    def _run_or_end(self) -> None:
        """Without this thread the process would neither hear the others nor notice their end."""
        try:
            self._run()
        except zmq.ContextTerminated:
            pass  # the process is about to end
        except Exception:
            log.critical("the link of the ranks has failed; the supervisor starts this process again", exc_info=True)
            os._exit(1)

    def _run(self) -> None:
        link, poller = self._link, zmq.Poller()
        for source in (link.socket, *link.event_sources):
            poller.register(source, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(0 if link.has_pending_work else int(1000 * BEAT_SECONDS)))
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
            if any(source in ready for source in link.event_sources):
                link.detect_disconnects()
            for peer, message in link.receive():
                if isinstance(message, PeerDisconnected) and peer in self._members:
                    _end(peer, message)
                self._received.append((peer, message))
                self._process.wake_loop()
            while self._outgoing:
                receiver, message = self._outgoing.popleft()
                for one in self._members if receiver is None else (receiver,):
                    link.send(one, message)
            link.flush()
        end_sessions([link])
        link.close()


def _end(peer: PeerId, event: PeerDisconnected) -> None:
    log.error("%s %s; so does this process", peer, "was told to end" if event.planned else "is gone")
    os._exit(0)
