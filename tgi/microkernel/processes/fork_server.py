"""Fork servers: processes of one thread that have imported what roles need, and fork the processes of these roles.

Imports are most of the time that a role takes to start. A fork server imports once, and a process that it forks is at
its own work within milliseconds, also when it replaces one that has died. The supervisor forks its fork servers before
it opens files, links or threads, of which they have none.

The supervisor is the parent of the processes, as of those that it starts as new interpreters: the fork server forks a
process that forks the role and ends, and an orphan belongs to the nearest ancestor that adopts orphans
(PR_SET_CHILD_SUBREAPER), which the supervisor is. So the end of a fork server ends no other process.

A process may leave a fork server behind, too: `leave_fork_server` forks one with all that this process has loaded until
then, such as the weights of a model, which the process and its successors share with it page by page. The memory is
that of one copy, as long as none of them writes to it. And a process that has one thread may fork others for roles,
which are its own children: `fork_role`.
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
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NoReturn

from tgi.microkernel.errors import ForkedRole
from tgi.microkernel.processes.process import HAND_OVER, die_with_parent, name_process, run_role

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # from <linux/prctl.h>
# A request: its length, then a JSON list of arguments, environment and the variables that name the descriptors, which
# come with the length. An answer: a pid, or minus an errno.
LENGTH, ANSWER = struct.Struct("=I"), struct.Struct("=i")
READY = b"+"  # what a fork server sends first, when it has imported or loaded what it is for
MAX_DESCRIPTORS = 8
ENDED_THREAD_SECONDS = 0.1  # for which the system may still count a thread that was joined
# Of the environment of fork servers: libraries that would start threads when they are loaded (of numpy).
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}


class ForkServerLost(Exception):
    """A fork server has ended, or does not answer."""


class ForkedProcess:
    """A child process of this one that it or a fork server has forked: what is used of `subprocess.Popen`. Thread-safe,
    as that is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: the signal that ended it), else None."""
        with self._reaping:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self) -> int:
        """Waits until it has ended. Returns the exit code."""
        with contextlib.suppress(ChildProcessError):  # another thread has called `poll` meanwhile
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """A fork server, as the process sees it that has started it."""

    def __init__(self, pid: int | None, connection: socket.socket) -> None:
        """`pid`: of a child of this process; None for the one that another process leaves behind."""
        self._pid = pid
        self._connection = connection
        self.lost = False
        self._has_forked = False

    def fileno(self) -> int:
        """A descriptor that is readable once `is_ready` is not None any more."""
        return self._connection.fileno()

    def is_ready(self) -> bool | None:
        """Whether it forks processes now; None while it still imports, or is not left behind yet. Does not wait."""
        if self.lost:
            return False
        self._connection.setblocking(False)
        try:
            return self._connection.recv(len(READY), socket.MSG_PEEK) == READY
        except BlockingIOError:
            return True if self._has_forked else None
        except OSError:
            return False

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[str, int], timeout: float
    ) -> ForkedProcess:
        """Starts `run_role` with these arguments in a child of this process, with nothing else in its environment than
        this one and `descriptors`: variables with the number that a file descriptor has there.

        Waits for at most `timeout` seconds, for its imports too. Raises ForkServerLost, and OSError if the system has
        no process left.
        """
        request = json.dumps([*arguments, dict(environment), list(descriptors)]).encode()
        self._connection.settimeout(timeout)
        try:
            if not self._has_forked:
                _receive(self._connection, len(READY))
                self._has_forked = True
            with adopting_orphans():
                socket.send_fds(self._connection, [LENGTH.pack(len(request))], list(descriptors.values()))
                self._connection.sendall(request)
                answer = _receive(self._connection, ANSWER.size)
        except OSError as error:
            self.close()
            raise ForkServerLost(f"The fork server has ended or does not answer: {error}") from error
        (pid,) = ANSWER.unpack(answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return ForkedProcess(pid)

    def close(self) -> None:
        """Ends the fork server. Called again it does nothing."""
        if self.lost:
            return
        self.lost = True
        self._connection.close()  # which ends it, unless it still imports
        if self._pid is not None:
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
    gc.disable()  # imports make little garbage, and collections take a tenth of their time
    try:
        preload()
    except Exception:
        log.debug("a process that needs this will report it", exc_info=True)
    until = time.monotonic() + ENDED_THREAD_SECONDS
    while (threads := count_threads()) > 1 and time.monotonic() < until:
        time.sleep(0.001)
    if threads > 1:
        log.error("the imports of a fork server have started %d threads, so it forks no processes", threads - 1)
        os._exit(1)
    requests.sendall(READY)
    raise ForkedRole(fork_roles(requests))


def leave_fork_server(requests: socket.socket) -> None:
    """Forks a fork server from this process, which goes on. The supervisor has the other end of `requests`.

    Processes that it forks find all objects as they are now, but no threads: whatever has some starts them again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, whose locks the fork server does not need
        pid = os.fork()
    if pid:
        requests.close()
        return

    def serve() -> list[str]:
        name_process("tgi fork server")
        requests.sendall(READY)
        return fork_roles(requests)

    _run_forked(serve, (requests.fileno(),))


def fork_role(
    arguments: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[str, int]
) -> ForkedProcess:
    """Starts `run_role` as `ForkServer.start` does, in a process that has what this one has imported. It is in the
    process group of this one. To be called by a process of one thread on Linux. Raises OSError."""
    if pid := os.fork():
        return ForkedProcess(pid)

    def role() -> Sequence[str]:
        _take_environment(environment, descriptors)
        return arguments

    _run_forked(role, descriptors.values())


def count_threads() -> int:
    """The number of threads of this process, on Linux. A process that is forked from one with several would wait for
    the locks of the others for ever."""
    return len(os.listdir("/proc/self/task"))


def _run_forked(role: Callable[[], Sequence[str]], kept: Collection[int]) -> NoReturn:
    """Runs the role with these arguments in a process that a supervised one has forked, of whose descriptors only the
    standard ones and `kept` stay open."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, HAND_OVER):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in kept:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(descriptor)
        arguments = role()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # the functions that have called this one belong to the other process
    run_role(arguments)


def _take_environment(environment: Mapping[str, str], descriptors: Mapping[str, int]) -> None:
    """Makes these variables and those with the numbers of descriptors the environment of this process."""
    os.environ.clear()
    os.environ.update({**environment, **{name: str(number) for name, number in descriptors.items()}})


def fork_roles(requests: socket.socket) -> list[str]:
    """What a fork server does once it has imported and sent READY: forks a process for each request. Returns there,
    with the arguments of its role; ends with the connection."""
    gc.freeze()  # collections would copy what the processes share, and take a tenth of the time of its imports
    gc.enable()
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
            _take_environment(environment, dict(zip(names, descriptors, strict=True)))
            return [str(one) for one in arguments]
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
def adopting_orphans() -> Iterator[None]:
    """In this block an orphan among the descendants of this process becomes its child. Linux only."""
    prctl, before = ctypes.CDLL(None, use_errno=True).prctl, ctypes.c_int()
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system does not let a process adopt orphans")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before, 0, 0, 0)
