"""Fork servers: processes of one thread that have imported what roles need, and fork the processes of these roles.

Imports are most of the time that a role takes to start. A fork server imports once, and a process that it forks is at
its own work within milliseconds, also when it replaces one that has died. The supervisor forks its fork servers before
it opens files, links or threads, of which they have none.

The supervisor is the parent of the processes, as of those that it starts as new interpreters: the fork server forks a
process that forks the role and ends, and an orphan belongs to the nearest ancestor that adopts orphans
(PR_SET_CHILD_SUBREAPER), which the supervisor is meanwhile. So the end of a fork server ends no other process.
"""

import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from tgi.microkernel.errors import ForkedRole
from tgi.microkernel.processes.process import die_with_parent, name_process

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
# A request: its length, then a JSON list of arguments, environment and the variables that name the descriptors, which
# come with the length. An answer: a pid, or minus an errno.
LENGTH, ANSWER = struct.Struct("=I"), struct.Struct("=i")
MAX_DESCRIPTORS = 8
# Of the environment of fork servers: libraries that would start threads when they are loaded (of numpy).
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}


class ForkServerLost(Exception):
    """A fork server has ended, or does not answer."""


class ForkedProcess:
    """A child process of this one that a fork server has forked: what the supervisor uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: the signal that ended it), else None."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """A fork server, as the process sees it that has started it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid = pid
        self._connection = connection
        self.lost = False

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[str, int], timeout: float
    ) -> ForkedProcess:
        """Starts `run_role` with these arguments in a child of this process, with nothing else in its environment than
        this one and `descriptors`: variables with the number that a file descriptor has there.

        Waits for at most `timeout` seconds for imports. Raises ForkServerLost, and OSError if the system has no process
        left.
        """
        request = json.dumps([*arguments, dict(environment), list(descriptors)]).encode()
        self._connection.settimeout(timeout)
        try:
            with _adopting_orphans():
                socket.send_fds(self._connection, [LENGTH.pack(len(request))], list(descriptors.values()))
                self._connection.sendall(request)
                answer = _receive(self._connection, ANSWER.size)
        except OSError as error:
            self.close()
            raise ForkServerLost(f"The fork server (pid {self._pid}) has ended or does not answer: {error}") from error
        (pid,) = ANSWER.unpack(answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return ForkedProcess(pid)

    def close(self) -> None:
        """Ends the fork server. Called again it does nothing."""
        if self.lost:
            return
        self.lost = True
        self._connection.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def release(self) -> None:
        """Closes what another fork server has inherited of this one."""
        self.lost = True
        self._connection.close()


def start_fork_servers(preloads: Mapping[str, Callable[[], None]]) -> dict[str, ForkServer]:
    """A fork server for each function, which imports modules there. Empty where the system has none (not Linux).

    To be called by the main thread of a process that has no other, and before signals get handlers. In a forked process
    ForkedRole is raised, which is to leave all functions of the caller: `tgi.__main__` runs the role.
    """
    servers: dict[str, ForkServer] = {}
    if sys.platform != "linux":
        return servers
    parent = os.getpid()
    for name, preload in preloads.items():
        connection, requests = socket.socketpair()
        if (pid := os.fork()) == 0:
            connection.close()
            for other in servers.values():
                other.release()
            _serve(requests, preload, parent)
        requests.close()
        servers[name] = ForkServer(pid, connection)
    return servers


def _serve(requests: socket.socket, preload: Callable[[], None], parent: int) -> NoReturn:
    """The loop of a fork server. Ends with its parent."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    die_with_parent(parent)
    name_process("tgi fork server")
    os.environ.update(SINGLE_THREADED)
    try:
        preload()
    except Exception:
        log.debug("a process that needs this will report it", exc_info=True)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # whose locks would never be free in forked processes
        log.error("the imports of a fork server have started %d threads, so it forks no processes", threads - 1)
        os._exit(1)
    gc.collect()
    gc.freeze()  # collections would copy what the processes share
    while True:
        try:
            length, descriptors, _, _ = socket.recv_fds(requests, LENGTH.size, MAX_DESCRIPTORS)
            *arguments, environment, names = json.loads(_receive(requests, *LENGTH.unpack(length)))
        except (OSError, struct.error):
            os._exit(0)  # the supervisor has closed the connection
        try:
            answer = _fork_orphan()
        except OSError as error:
            answer = -(error.errno or 1)
        if answer == 0:
            requests.close()
            os.setpgid(0, 0)
            os.environ.clear()
            os.environ.update(environment | dict(zip(names, map(str, descriptors), strict=True)))
            raise ForkedRole(arguments)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.sendall(ANSWER.pack(answer))


def _fork_orphan() -> int:
    """Forks a process whose parent has ended when it returns there, with 0. Returns its pid here. Raises OSError."""
    wait, done = os.pipe()
    read, write = os.pipe()
    try:
        if (middle := os.fork()) == 0:
            try:
                pid = os.fork()
            except OSError as error:
                pid = -(error.errno or 1)
            if pid == 0:
                os.close(done)
                os.read(wait, 1)
                return 0
            os.write(write, ANSWER.pack(pid))
            os._exit(0)
        os.waitpid(middle, 0)
        (pid,) = ANSWER.unpack(os.read(read, ANSWER.size))
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return int(pid)
    finally:
        for descriptor in (wait, done, read, write):
            with contextlib.suppress(OSError):  # `done` is closed already in the forked process
                os.close(descriptor)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Exactly this many bytes. Raises ConnectionError if the peer closes the connection before."""
    received = bytearray()
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("it has closed the connection")
        received += part
    return bytes(received)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """In this block an orphan among the descendants of this process becomes its child."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system does not let a process adopt orphans")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
