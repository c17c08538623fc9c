"""The limit of concurrent requests of the whole server, as byte-range locks on one file that all front ends share.

Permit k is a lock on byte k of the file. The kernel keeps the table of locks: it is exact, needs no messages between
processes, and releases the locks of a process that dies.
"""

import fcntl
import struct
import sys
from pathlib import Path

# struct flock of fcntl(2), and the indices of its fields l_type, l_start and l_len.
_FLOCK, _KIND, _START, _LENGTH = ("hhqqi4x", 0, 2, 3) if sys.platform == "linux" else ("qqihh", 3, 0, 1)


class Permits:
    """The permits of one process. The process may open the file only once: POSIX locks are released when any of its
    descriptors is closed.

    A process acquires permits upwards from `home` and releases the latest first. So it holds few ranges, the kernel
    merges each into one lock, and a search skips whole ranges. Front ends get homes far apart.
    """

    def __init__(self, path: Path, limit: int, home: int = 0) -> None:
        self.limit = limit
        self._file = path.open("a+b")
        self._home = home % limit
        self._held: list[int] = []  # in the order of acquisition
        self._mine = bytearray(limit)  # 1 for held permits, which fcntl would let this process lock again

    @property
    def held(self) -> int:
        """The number of permits of this process."""
        return len(self._held)

    def acquire(self, count: int = 1) -> bool:
        """Acquires `count` permits, or none if fewer are free. Returns whether it did."""
        for taken in range(count):
            permit = self._search()
            if permit is None:
                self.release(taken)
                return False
            self._held.append(permit)
            self._mine[permit] = 1
        return True

    def release(self, count: int = 1) -> None:
        """Releases `count` permits for all processes. Raises IndexError if this process has fewer."""
        for _ in range(count):
            permit = self._held.pop()
            self._mine[permit] = 0
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, permit)

    def _search(self) -> int | None:
        """Locks the next free permit after the latest one, wrapping around. None if all are held."""
        begin = self._held[-1] if self._held else self._home
        for first, end in ((begin, self.limit), (0, begin)):
            permit = self._mine.find(0, first, end)
            while permit >= 0:
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, permit)
                    return permit
                except (BlockingIOError, PermissionError):  # POSIX allows both errors for a lock of another process
                    permit = self._mine.find(0, self._end_of_lock(permit), end)
        return None

    def _end_of_lock(self, permit: int) -> int:
        """The end of another process's range with this permit; the permit itself if it was just released."""
        asked = [0, 0, 0, 0, 0]
        asked[_KIND], asked[_START], asked[_LENGTH] = fcntl.F_WRLCK, permit, 1
        found = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, struct.pack(_FLOCK, *asked)))
        if found[_KIND] == fcntl.F_UNLCK:
            return permit
        return int(found[_START] + found[_LENGTH])
