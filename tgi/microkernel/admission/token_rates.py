"""Tokens per minute of clients, summed over all front ends: leaky buckets in one file that all of them map.

A client's level is the number of tokens that it has used beyond what its rate has allowed since. It falls by the rate,
and rises by the tokens of each request that ends. While it is above one minute's tokens the client has to wait.
"""

import fcntl
import logging
import mmap
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tgi.microkernel.host.mapped_file import map_file

log = logging.getLogger(__name__)

# A row: client (0: free), level, and the time of the level on the clock that all processes of a host share.
ROW = struct.Struct("=ddd")
# Clients with a limit that are remembered; keys name them, so they are few.
MAX_CLIENTS = 4096


class TokenRates:
    """The levels of all clients. `clock` is the same for all processes. The process may open the file only once: its
    lock is released when any of its descriptors is closed."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        size = ROW.size * MAX_CLIENTS
        try:
            self._table = map_file(path, size)
        except OSError as error:
            log.error("clients have a rate at each front end, not at all: cannot use %s: %s", path, error.strerror)
            self._table = mmap.mmap(-1, size)
        self._file = path.open("a+b")
        self._rows: dict[float, int] = {}  # offset of each client's row; rows never move
        self._read = 0  # offset of the first row that this process has not seen in use

    def wait_seconds(self, client: int, per_minute: int) -> float:
        """How long the client has to wait until its next request; 0 if it need not."""
        with self._locked():
            level, _ = self._level(client, per_minute)
        return max(0.0, (level - per_minute) * 60 / per_minute)

    def charge(self, client: int, per_minute: int, tokens: int) -> None:
        with self._locked():
            level, offset = self._level(client, per_minute)
            if offset is not None:
                ROW.pack_into(self._table, offset, client, level + tokens, self._clock())

    def _level(self, client: int, per_minute: int) -> tuple[float, int | None]:
        """The level now, and the offset of the row; None if the table is full."""
        if (offset := self._find(client)) is None:
            return 0.0, None
        _, level, then = ROW.unpack_from(self._table, offset)
        seconds = self._clock() - then
        if seconds < 0:  # the host was restarted, and the file is older
            return 0.0, offset
        return max(0.0, level - seconds * per_minute / 60), offset

    def _find(self, client: int) -> int | None:
        if (known := self._rows.get(client)) is not None:
            return known
        for offset in range(self._read, ROW.size * MAX_CLIENTS, ROW.size):
            found = ROW.unpack_from(self._table, offset)[0]
            if not found:
                ROW.pack_into(self._table, offset, client, 0.0, self._clock())
            self._rows[found or client] = offset
            self._read = offset + ROW.size
            if found in (0.0, client):
                return offset
        return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
