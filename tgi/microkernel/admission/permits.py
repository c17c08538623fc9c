"""The limit of concurrent requests of the whole server, as byte-range locks on one file that all front ends share, and
the shares of its clients in it.

Permit k is a lock on byte k of the file. The kernel keeps the table of locks: it is exact, needs no messages between
processes, and releases the locks of a process that dies. A second file, mapped by all front ends, names the client
that holds each permit; only the holder of permit k writes row k.
"""

import fcntl
import logging
import mmap
import os
import struct
import sys
from array import array
from pathlib import Path
from typing import Any

from tgi.microkernel.host.mapped_file import map_file

log = logging.getLogger(__name__)

# struct flock of fcntl(2), and the indices of its fields l_type, l_start and l_len.
_FLOCK, _KIND, _START, _LENGTH = ("hhqqi4x", 0, 2, 3) if sys.platform == "linux" else ("qqihh", 3, 0, 1)

# From this share of the limit on, a client gets a permit only within its own share if others hold permits, too.
CONTENDED_SHARE = 0.75
# Permits beyond the limit, as a share of it: for clients within their share while another one holds too much.
RESERVE_SHARE = 0.25

# A row of the table of holders, all float64: client (0: free), its weight, process id of the front end.
_ROW = 3
_FREE_ROW = array("d", [0.0] * _ROW)
# The client of requests that are not told apart.
ANY_CLIENT = 1


class Permits:
    """The permits of one process. The process may open the file only once: POSIX locks are released when any of its
    descriptors is closed.

    A process acquires permits upwards from `home` and releases the latest first. So it holds few ranges, the kernel
    merges each into one lock, and a search skips whole ranges. Front ends get homes far apart.

    A client is a number from 1 to 2**48. Alone it gets all permits. Clients share them by weight: when few are free, a
    client that holds its share or more is refused, and one below it may use the reserve.
    """

    def __init__(self, path: Path, limit: int, home: int = 0) -> None:
        self.limit = limit
        self._total = limit + max(1, int(limit * RESERVE_SHARE))
        self._contended = int(limit * CONTENDED_SHARE)
        self._file = path.open("a+b")
        self._home = home % limit
        self._held: list[int] = []  # in the order of acquisition
        self._mine = bytearray(self._total)  # 1 for held permits, which fcntl would let this process lock again
        self._pid = float(os.getpid())
        self._holders = _map_table(path.with_name(f"{path.name}-holders"), self._total * _ROW)

    @property
    def held(self) -> int:
        return len(self._held)

    def held_by(self, client: int) -> int:
        """The number of permits of a client, in all processes."""
        return self._clients().count(client)

    def acquire(self, count: int = 1, client: int = ANY_CLIENT, weight: float = 1.0) -> bool:
        """Acquires `count` permits, or none if fewer are free for this client. Returns whether it did."""
        end = self._allowed_end(count, client, weight)
        row = array("d", [client, weight, self._pid])
        for taken in range(count):
            permit = self._search(end)
            if permit is None:
                self.release(taken, client)
                return False
            self._held.append(permit)
            self._mine[permit] = 1
            self._holders[_ROW * permit : _ROW * (permit + 1)] = row
        return True

    def release(self, count: int = 1, client: int = ANY_CLIENT) -> None:
        """Releases `count` permits of a client for all processes. Raises IndexError if this process has fewer."""
        for _ in range(count):
            permit = self._held.pop()
            row = slice(_ROW * permit, _ROW * (permit + 1))
            if self._holders[row.start] != client:
                self._hand_over(permit, client)
            self._holders[row] = _FREE_ROW
            self._mine[permit] = 0
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, permit)

    def _hand_over(self, permit: int, client: int) -> None:
        """Moves the holder of `permit` to another permit, which `client` holds in this process."""
        clients = self._clients()
        other = next((one for one in reversed(self._held) if clients[one] == client), None)
        if other is None:
            return  # the row is free: another process has taken it for that of a dead process
        self._holders[_ROW * other : _ROW * (other + 1)] = self._holders[_ROW * permit : _ROW * (permit + 1)]

    # --- shares ---

    def _allowed_end(self, count: int, client: int, weight: float) -> int:
        """The end of the range of permits that the client may take from; 0: none."""
        clients = self._clients()
        if len(clients) - clients.count(0.0) + count <= self._contended:
            return self.limit
        self._free_rows_of_dead_processes()
        clients = self._clients()
        held = len(clients) - clients.count(0.0)
        weights = dict(zip(clients, self._holders[1::_ROW].tolist(), strict=True))
        weights.pop(0.0, None)
        weights[client] = weight
        if held + count <= self._contended or len(weights) == 1:
            return self.limit
        own, share = clients.count(client), self.limit * weight / sum(weights.values())
        return self._total if not own or own + count <= share else 0

    def _clients(self) -> list[float]:
        """The client of each permit; 0 if it is free."""
        clients: list[float] = self._holders[::_ROW].tolist()
        return clients

    def _free_rows_of_dead_processes(self) -> None:
        pids = self._holders[2::_ROW].tolist()
        dead = {pid for pid in {*pids} - {0.0, self._pid} if not _is_alive(int(pid))}
        for permit, pid in enumerate(pids):
            if pid in dead:
                self._holders[_ROW * permit : _ROW * (permit + 1)] = _FREE_ROW

    # --- locks ---

    def _search(self, end: int) -> int | None:
        """Locks the next free permit after the latest one, wrapping around at the limit, then one of the reserve if
        `end` allows it. None if all are held."""
        if not end:
            return None
        begin = self._held[-1] if self._held else self._home
        if begin >= self.limit:
            begin = self._home
        for first, stop in ((begin, self.limit), (0, begin), (self.limit, end)):
            permit = self._mine.find(0, first, stop)
            while permit >= 0:
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, permit)
                    return permit
                except (BlockingIOError, PermissionError):  # POSIX allows both errors for a lock of another process
                    permit = self._mine.find(0, self._end_of_lock(permit), stop)
        return None

    def _end_of_lock(self, permit: int) -> int:
        """The end of another process's range with this permit; the permit itself if it was just released."""
        asked = [0, 0, 0, 0, 0]
        asked[_KIND], asked[_START], asked[_LENGTH] = fcntl.F_WRLCK, permit, 1
        found = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, struct.pack(_FLOCK, *asked)))
        if found[_KIND] == fcntl.F_UNLCK:
            return permit
        return int(found[_START] + found[_LENGTH])


def _map_table(path: Path, numbers: int) -> Any:
    """A file of float64 numbers that all processes map; new ones are 0. Where the disk is full, memory of this
    process."""
    size = numbers * struct.calcsize("d")
    try:
        table = map_file(path, size)
    except OSError as error:
        log.error("clients have a share of each front end, not of all: cannot use %s: %s", path, error.strerror)
        table = mmap.mmap(-1, size)
    return memoryview(table).cast("d")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
