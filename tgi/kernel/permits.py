"""How many requests the whole server may have at once: byte-range locks on one file that all front ends share.

Permit k is byte k of the file; who holds a lock on it has the permit. The system keeps the table, so it is exact, is
read and changed without asking anybody, and forgets a process the moment it dies.
"""

import fcntl
import struct
import sys
from pathlib import Path

# struct flock, and where in it are the kind of lock, its first byte and its length.
_FLOCK, _KIND, _START, _LENGTH = ("hhqqi4x", 0, 2, 3) if sys.platform == "linux" else ("qqihh", 3, 0, 1)


class Permits:
    """The permits of one process. It may have the file open once: closing any other opening would give all back.

    A process takes permits upwards from `home` and gives the latest back first. So it holds few ranges, the system
    merges each into one lock, and a search jumps from range to range. Front ends are given homes far apart.
    """

    def __init__(self, path: Path, limit: int, home: int = 0) -> None:
        self.limit = limit
        self._file = path.open("a+b")
        self._home = home % limit
        self._held: list[int] = []  # in the order in which they were taken
        self._mine = bytearray(limit)  # 1 for those: the system lets a process lock again what it has

    @property
    def held(self) -> int:
        """How many this process has."""
        return len(self._held)

    def take(self, count: int = 1) -> bool:
        """Takes so many, or none: then fewer are free."""
        for taken in range(count):
            permit = self._search()
            if permit is None:
                self.give(taken)
                return False
            self._held.append(permit)
            self._mine[permit] = 1
        return True

    def give(self, count: int = 1) -> None:
        """Gives so many back, which are free for every process at once. Raises IndexError if it has fewer."""
        for _ in range(count):
            permit = self._held.pop()
            self._mine[permit] = 0
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, permit)

    def _search(self) -> int | None:
        """Locks the next free one behind the latest, and around the end; None if every one is held."""
        begin = self._held[-1] if self._held else self._home
        for first, end in ((begin, self.limit), (0, begin)):
            permit = self._mine.find(0, first, end)
            while permit >= 0:
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, permit)
                    return permit
                except (BlockingIOError, PermissionError):  # the two ways of saying that it is another's
                    permit = self._mine.find(0, self._end_of_lock(permit), end)
        return None

    def _end_of_lock(self, permit: int) -> int:
        """Where the range ends in which another process holds this one; the same one if it has just been given back."""
        asked = [0, 0, 0, 0, 0]
        asked[_KIND], asked[_START], asked[_LENGTH] = fcntl.F_WRLCK, permit, 1
        found = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, struct.pack(_FLOCK, *asked)))
        if found[_KIND] == fcntl.F_UNLCK:
            return permit
        return int(found[_START] + found[_LENGTH])
