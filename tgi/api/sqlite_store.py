"""An SQLite file in the run directory that the front ends of a host share, or the memory of one front end.

The calls run one after the other in a thread of their own, so that no lock of the file holds up the event loop. All
raise StoreUnavailable."""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

from tgi.api.errors import ApiError

log = logging.getLogger(__name__)

T = TypeVar("T")

PURGE_SECONDS = 1.0


class StoreUnavailable(ApiError):
    """503: the store cannot be read or written, as on a full disk."""

    def __init__(self, what: str, error: Exception) -> None:
        super().__init__(503, "unavailable", f"The {what} cannot be read or written: {error}")


class SqliteStore:
    """The store of one front end. With `path` None it is in memory."""

    what: ClassVar[str]  # what it keeps, in the plural, for error messages
    schema: ClassVar[str]
    synchronous: ClassVar[str] = "OFF"  # a crash of the machine may lose what is temporary anyway

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.what.replace(" ", "-"))
        self._connection: sqlite3.Connection | None = None
        self._next_purge = 0.0

    @property
    def exists(self) -> bool:
        """Whether anything has been kept since the run directory was made."""
        return self._connection is not None or (self._path is not None and self._path.exists())

    def purge(self, db: sqlite3.Connection) -> None:
        """Drops what has expired: called in a transaction, about every PURGE_SECONDS while the store is used."""
        raise NotImplementedError

    def close(self) -> None:
        if self._connection is not None:
            self._thread.submit(self._connection.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._open()
            with self._connection as db:  # commits, or rolls back after an exception
                if time.monotonic() >= self._next_purge:
                    self._next_purge = time.monotonic() + PURGE_SECONDS
                    self.purge(db)
                return work(db)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(self.what, error) from error

    def _open(self) -> sqlite3.Connection:
        if self._path is None:
            return self._connect(":memory:")
        try:
            return self._connect(str(self._path))
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, or the disk is full
                raise
            log.error("The %s in %s are damaged and begin anew: %s", self.what, self._path, error)
            for end in ("", "-wal", "-shm"):
                Path(f"{self._path}{end}").unlink(missing_ok=True)
            return self._connect(str(self._path))

    def _connect(self, path: str) -> sqlite3.Connection:
        if path != ":memory:":
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # prompts are private
        db = sqlite3.connect(path, timeout=10)
        db.execute("PRAGMA auto_vacuum=FULL")  # the file shrinks as its rows are dropped
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={self.synchronous}")
        db.executescript(self.schema)
        return db
