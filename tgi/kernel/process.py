"""What every child process has: its name and boot id, the poll loop, its state file, and the watchdog's beat."""

import contextlib
import mmap
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from tgi.kernel import rundir
from tgi.kernel.link import Link
from tgi.kernel.presence import PROTOCOL, Hello
from tgi.kernel.settings import MADE_AT_LOAD, Settings

# An idle loop wakes this often to beat: the cost of 200 idle streams is this wake-up.
BEAT_SECONDS = 2.0


class Beat:
    """A promise in shared memory: "I will be back before this moment" (time.monotonic, which a host shares)."""

    def __init__(self, path: Path) -> None:
        path.touch()
        if path.stat().st_size != 8:
            path.write_bytes(struct.pack("d", 0.0))
        with path.open("r+b") as file:
            # One store writes the number, one load reads it: struct.pack_into would put zeros there first.
            self._deadline = memoryview(mmap.mmap(file.fileno(), 8)).cast("d")

    def promise(self, deadline: float) -> None:
        """Called by the child."""
        self._deadline[0] = deadline

    def deadline(self) -> float:
        """Read by the supervisor."""
        return self._deadline[0]


class Process:
    """One supervised process. Roles get one in `main(process)` and drive their loop with `wait`."""

    def __init__(
        self, settings: Settings, role: str, place: int, *, listen_fd: int | None = None, parent_fd: int | None = None
    ) -> None:
        self.settings = settings
        self.role = role
        self.place = place
        self.listen_fd = listen_fd
        self.boot = os.urandom(8)
        self.stopping = False
        self.run_dir = settings.run_dir
        self.facts: dict[str, Any] = {}  # what `state` publishes besides; to be set before "ready"
        self._state = ("", "", -1)
        self._beat = Beat(self.run_dir / f"{self.name}.beat")
        self._parent_fd = parent_fd
        self._links: list[Link] = []
        self._monitored: dict[Any, Link] = {}
        self._poller = zmq.Poller()
        self._wake, write = socket.socketpair()
        self._wake.setblocking(False)
        write.setblocking(False)
        self._wake_write = write
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the supervisor decides
        for fd in self.fds:
            self._poller.register(fd, zmq.POLLIN)
        self.promise(settings.start_timeout)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.place}"

    @property
    def fds(self) -> list[int]:
        """What an event loop must watch besides the links: signals, and the parent's death. Then call `woken`."""
        return [self._wake.fileno()] + ([self._parent_fd] if self._parent_fd is not None else [])

    def hello(self, model: str = "") -> Hello:
        """This process's first message on a link. `model` is the fingerprint of the directory that it serves."""
        what = served(model, self.settings.quantize, self.settings.kv_cache_dtype)
        return Hello(PROTOCOL, self.role, self.place, self.boot, what)

    def address(self, name: str) -> str:
        """Where a link of this deployment meets, e.g. "tok-0.front"."""
        return f"ipc://{self.run_dir / name}"

    def watch(self, link: Link) -> None:
        """Adds a link to what `wait` waits for."""
        self._links.append(link)
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)
        self._monitored[link.monitor] = link

    def wait(self, timeout: float) -> None:
        """Sleeps until a watched link has something, a signal comes, or `timeout` seconds have passed."""
        if any(link.pending for link in self._links):
            timeout = 0.0
        timeout = max(0.0, min(timeout, BEAT_SECONDS))
        self.promise(timeout + self.settings.hang_timeout)
        ready = self._poller.poll(int(timeout * 1000 + 0.999))
        if ready:
            self.promise(self.settings.hang_timeout)
        for source, _ in ready:
            if isinstance(source, int):
                self.woken()
            elif source in self._monitored:
                self._monitored[source].look()

    def woken(self) -> None:
        """Handles what came in on `fds`: a signal (it has set `stopping`), or the parent's end of its pipe closing."""
        try:
            while self._wake.recv(64):
                pass
        except BlockingIOError:
            pass
        if self._parent_fd is not None and _at_eof(self._parent_fd):
            sys.exit(f"tgi {self.role} {self.place}: the supervisor is gone")

    def wake(self) -> None:
        """Ends a `wait` early; for threads that have something for the loop."""
        with contextlib.suppress(BlockingIOError):  # as many wake-ups are on their way as the pipe holds
            self._wake_write.send(b"\0")

    def stop(self) -> None:
        """Asks the loop to drain and return."""
        self.stopping = True

    def beat(self, seconds: float = BEAT_SECONDS) -> None:
        """For loops that do not use `wait`: the next beat comes within `seconds`."""
        self.promise(seconds + self.settings.hang_timeout)

    def promise(self, seconds: float) -> None:
        """Tells the watchdog to be patient for this long (before loading, or a step of unusual size)."""
        self._beat.promise(time.monotonic() + seconds)

    def state(self, state: str, stage: str = "", percent: int = 0) -> None:
        """Publishes where this process is: "starting", "ready" or "draining", with stage and percentage of start-up."""
        if (state, stage, percent) != self._state:
            self._state = (state, stage, percent)
            rundir.write_state(
                self.run_dir,
                rundir.ProcessState(
                    self.role, self.place, os.getpid(), self.boot.hex(), state, stage, percent, facts=self.facts
                ),
            )


def _at_eof(fd: int) -> bool:
    """Whether the other end of this pipe is closed (nothing is ever written to it)."""
    poll = zmq.Poller()
    poll.register(fd, zmq.POLLIN)
    return bool(poll.poll(0)) and os.read(fd, 1) == b""


def served(model: str, quantize: str | None, cache: str | None = None) -> str:
    """What HELLO says of a model with this fingerprint: what its weights are made at load makes it another one, and
    what its keys and values are kept as."""
    made = (MADE_AT_LOAD.get(quantize or ""), cache)
    return " in ".join([model, *(name for name in made if name is not None)]) if model else model
