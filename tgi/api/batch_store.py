"""Files (/v1/files) and batches (/v1/batches) as they are kept. Each client sees its own only.

A file is kept as its lines. The result of a request is a line, too, with the number of its request: it is written once,
in the transaction that counts it, so a request that two front ends have answered is in the output once. A batch is
answered by the front end that holds its lease, which another one takes over LOST_SECONDS after the last beat.
"""

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tgi.api.errors import ApiError, Rejection, unknown_after
from tgi.api.shapes.batches import (
    BatchInputDetails,
    BatchObject,
    BatchOutputDetails,
    BatchStatus,
    BatchUsage,
    FileObject,
    RequestCounts,
)
from tgi.api.sqlite_store import SqliteStore

LIVE: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")
OUTPUT, ERROR = 0, 1  # the kind of a result; the lines of an uploaded file are of the kind 0
# What rows count besides their content.
FILE_BYTES, LINE_BYTES, BATCH_BYTES = 1 << 10, 64, 16 << 10
BEAT_SECONDS, LOST_SECONDS = 1.0, 10.0
# Front ends that a batch has lost in a row, all before its first unanswered request had a result: from the first number
# on its requests are sent one at a time by a front end without other batches; the second one blames that request, since
# two front ends have ended with it alone.
TRIAL_LOSSES, BLAMING_LOSSES = 2, 4
# An upload that has made no progress for so long has ended with its front end.
LOST_UPLOAD_SECONDS = 300.0

_IS_LIVE = f"status IN {LIVE}"
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files(
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, name TEXT NOT NULL, source TEXT NOT NULL,
    kind INTEGER NOT NULL, size INTEGER NOT NULL, lines INTEGER NOT NULL, created INTEGER NOT NULL,
    expires REAL NOT NULL, complete INTEGER NOT NULL, touched REAL NOT NULL);
CREATE TABLE IF NOT EXISTS lines(
    source TEXT NOT NULL, number INTEGER NOT NULL, kind INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY(source, number));
CREATE TABLE IF NOT EXISTS batches(
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, input TEXT NOT NULL, status TEXT NOT NULL, body TEXT NOT NULL,
    expires INTEGER NOT NULL, output_ttl REAL NOT NULL, total INTEGER NOT NULL, completed INTEGER NOT NULL,
    failed INTEGER NOT NULL, size INTEGER NOT NULL, runner TEXT NOT NULL, beat REAL NOT NULL, kept_until REAL NOT NULL,
    losses INTEGER NOT NULL, unanswered INTEGER NOT NULL,
    model TEXT, input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, reasoning_tokens INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS live_batches ON batches(owner) WHERE {_IS_LIVE};
"""


class StoredFile(NamedTuple):
    """A file as it is kept: the lines of this kind of a source, which is an upload or a batch."""

    id: str
    owner: str
    purpose: Literal["batch", "batch_output"]
    name: str
    source: str
    kind: int
    size: int  # bytes
    lines: int
    created: int  # seconds since the epoch, as `expires`
    expires: float

    @property
    def shown(self) -> FileObject:
        """The file as its client sees it."""
        return FileObject(self.id, self.size, self.created, int(self.expires), self.name, self.purpose)


_FILE = ", ".join(StoredFile._fields)


class Result(NamedTuple):
    """The result of a request: its line, and what it counts in the batch."""

    number: int  # of the request
    kind: int
    line: bytes
    model: str | None = None
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output


class Lease(NamedTuple):
    """What the front end that answers a batch learns with each beat."""

    status: BatchStatus
    overdue: bool  # its completion window has passed
    full: bool  # its results take too much


class Claim(NamedTuple):
    """A batch for the front end that has taken its lease."""

    owner: str
    batch: BatchObject
    losses: int  # see TRIAL_LOSSES


class StoreFull(Rejection):
    """413: the client may store no more."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            413,
            f"All files and batches may take {limit} bytes (--batch-store-bytes), those of one client half of what "
            "others leave. Delete files, or wait until some expire",
        )


def new_id(prefix: str) -> str:
    """An id that is not in use."""
    return prefix + secrets.token_hex(16)


class BatchStore(SqliteStore):
    """The files and batches, as one front end sees them."""

    what = "files and batches"
    schema = _SCHEMA
    synchronous = "NORMAL"  # a crash of the machine may lose the last results, which are computed again, and no more

    def __init__(self, path: Path | None, ttl: float, max_bytes: int) -> None:
        """`ttl`: seconds that a file, and a batch that has ended, are kept; 0: none are. `max_bytes`: of all."""
        super().__init__(path)
        self.changed = asyncio.Event()  # there may be something to do for this front end
        self.ttl = ttl
        self._max_bytes = max_bytes

    # --- files ---

    async def begin_upload(self, file: StoredFile) -> None:
        """Begins a file without lines, which is not shown before `finish_upload`."""
        values = (*file, 0, time.time())
        await self._run(lambda db: db.execute("INSERT INTO files VALUES(?,?,?,?,?,?,?,?,?,?,?,?)", values))

    async def append_lines(self, file: StoredFile, first: int, lines: Sequence[bytes]) -> None:
        """Adds lines to an upload, of which the first has this number. Raises StoreFull."""

        def write(db: sqlite3.Connection) -> None:
            size = sum(map(len, lines))
            self._require_room(db, file.owner, size + LINE_BYTES * len(lines))
            found = db.execute(
                "UPDATE files SET size=size+?, lines=lines+?, touched=? WHERE id=? AND NOT complete",
                (size, len(lines), time.time(), file.id),
            )
            if not found.rowcount:
                raise Rejection(408, "The upload has made no progress for too long")
            rows = [(file.id, number, OUTPUT, line) for number, line in enumerate(lines, first)]
            db.executemany("INSERT INTO lines VALUES(?,?,?,?)", rows)

        await self._run(write)

    async def finish_upload(self, file: StoredFile) -> StoredFile:
        """Completes an upload with the name and the expiry of `file`. Raises Rejection, a 408, if it was dropped."""

        def write(db: sqlite3.Connection) -> StoredFile:
            db.execute("UPDATE files SET complete=1, name=?, expires=? WHERE id=?", (file.name, file.expires, file.id))
            if (found := _file(db, file.owner, file.id)) is None:
                raise Rejection(408, "The upload has made no progress for too long")
            return found

        return await self._run(write)

    async def drop_upload(self, file: StoredFile) -> None:
        """Drops an upload that is not complete."""

        def write(db: sqlite3.Connection) -> None:
            if db.execute("DELETE FROM files WHERE id=? AND NOT complete", (file.id,)).rowcount:
                _drop_lines(db, file.source, file.kind)

        await self._run(write)

    async def file(self, owner: str, file_id: str) -> StoredFile | None:
        return await self._run(lambda db: _file(db, owner, file_id))

    async def files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile]:
        """At most `limit` files behind the one named `after`. Raises ApiError, a 422, if there is no such file."""
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        where = "owner=:owner AND complete AND (:purpose IS NULL OR purpose=:purpose)"
        query = (
            f"SELECT {_FILE} FROM files WHERE {where} AND (:after IS NULL OR rowid {sign} "
            f"(SELECT rowid FROM files WHERE id=:after AND owner=:owner)) ORDER BY rowid {order} LIMIT :limit"
        )
        values = {"owner": owner, "purpose": purpose, "after": after, "limit": limit}

        def read(db: sqlite3.Connection) -> list[StoredFile]:
            _require_known(db, "files", owner, after)
            return [StoredFile._make(row) for row in db.execute(query, values)]

        return await self._run(read)

    async def delete_file(self, owner: str, file_id: str) -> bool:
        """Forgets a file. Returns whether there was one. Raises ApiError, a 409, for the input of a batch that runs."""

        def write(db: sqlite3.Connection) -> bool:
            if (file := _file(db, owner, file_id)) is None:
                return False
            if db.execute(f"SELECT 1 FROM batches WHERE input=? AND {_IS_LIVE}", (file_id,)).fetchone():
                raise ApiError(409, "conflict", f"The file {file_id} is the input of a batch that has not ended")
            db.execute("DELETE FROM files WHERE id=?", (file_id,))
            _drop_lines(db, file.source, file.kind)
            return True

        return await self._run(write)

    async def content(self, file: StoredFile, after: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """The next lines of a file behind the number `after`: at least one, then up to `max_bytes`."""
        query = "SELECT number, data FROM lines WHERE source=? AND kind=? AND number>? ORDER BY number"
        return await self._run(lambda db: _page(db.execute(query, (file.source, file.kind, after)), max_bytes))

    # --- batches ---

    async def create_batch(self, owner: str, batch: BatchObject, output_ttl: float) -> bool:
        """Keeps a new batch. Returns False if its owner has no such input file. Raises StoreFull."""

        def write(db: sqlite3.Connection) -> bool:
            self._require_room(db, owner, BATCH_BYTES)
            body = msgspec.json.encode(batch).decode()
            found = db.execute(
                "INSERT INTO batches SELECT ?,?,id,?,?,?,?,0,0,0,0,'',0,0,0,-1,NULL,0,0,0,0 FROM files WHERE id=? AND "
                "owner=? AND complete AND purpose='batch'",
                (batch.id, owner, batch.status, body, batch.expires_at, output_ttl, batch.input_file_id, owner),
            )
            return found.rowcount > 0

        return await self._run(write)

    async def batch(self, owner: str, batch_id: str) -> BatchObject | None:
        query = f"SELECT {_BATCH} FROM batches WHERE id=? AND owner=?"
        found = await self._run(lambda db: db.execute(query, (batch_id, owner)).fetchone())
        return None if found is None else _shown(*found)

    async def batches(self, owner: str, after: str | None, limit: int) -> list[BatchObject]:
        """At most `limit` batches, the last one first, behind the one named `after`. Raises ApiError, a 422, if there
        is no such batch."""
        query = (
            f"SELECT {_BATCH} FROM batches WHERE owner=:owner AND (:after IS NULL OR rowid < (SELECT rowid FROM "
            "batches WHERE id=:after AND owner=:owner)) ORDER BY rowid DESC LIMIT :limit"
        )
        values = {"owner": owner, "after": after, "limit": limit}

        def read(db: sqlite3.Connection) -> list[BatchObject]:
            _require_known(db, "batches", owner, after)
            return [_shown(*row) for row in db.execute(query, values)]

        return await self._run(read)

    async def move(self, batch_id: str, before: Sequence[BatchStatus], status: BatchStatus, **members: Any) -> bool:
        """Changes the status of a batch that has one of those `before`, with the time of it and other members. Returns
        False if it has another one."""
        return await self._run(lambda db: self._move(db, batch_id, before, status, members))

    # --- for the front end that answers a batch ---

    async def claim(self, runner: str, alone: bool) -> Claim | None:
        """Takes the lease of the oldest batch that has none, or whose front end has ended; of a client that has one
        running only if there is nothing to answer. `alone`: the front end has no other batch; a batch on trial waits
        for that."""

        def write(db: sqlite3.Connection) -> Claim | None:
            now = time.time()
            found = db.execute(
                "SELECT id, owner, beat, input, status, runner, losses, unanswered FROM batches "
                f"WHERE {_IS_LIVE} AND beat < :lost AND (status='cancelling' OR "
                f"expires < :now OR owner NOT IN (SELECT owner FROM batches WHERE {_IS_LIVE} AND beat >= :lost)) "
                "ORDER BY rowid LIMIT 1",
                {"now": now, "lost": now - LOST_SECONDS},
            ).fetchone()
            if found is None:
                return None
            batch_id, owner, beat, source, status, lost, losses, before = found
            unanswered = before
            if lost and status == "in_progress":
                lines = db.execute(_UNANSWERED, (source, -1, batch_id))
                unanswered = next((number for number, line in lines if line.strip()), -1)
                losses = losses + 1 if unanswered == before else 1
            if losses >= TRIAL_LOSSES and not alone:
                return None
            query = "UPDATE batches SET runner=?, beat=?, losses=?, unanswered=? WHERE id=? AND beat=?"
            if not db.execute(query, (runner, now, losses, unanswered, batch_id, beat)).rowcount:
                return None  # another front end has it
            row = db.execute(f"SELECT {_BATCH} FROM batches WHERE id=?", (batch_id,)).fetchone()
            return Claim(owner, _shown(*row), losses)

        return await self._run(write)

    async def beat(self, batch_id: str, runner: str) -> Lease | None:
        """Prolongs a lease. Returns None if another front end has it, or if the batch has ended."""

        def write(db: sqlite3.Connection) -> Lease | None:
            now = time.time()
            found = db.execute(
                f"UPDATE batches SET beat=? WHERE id=? AND runner=? AND {_IS_LIVE} RETURNING status, expires, owner",
                (now, batch_id, runner),
            ).fetchone()
            return None if found is None else Lease(found[0], found[1] < now, self._is_full(db, found[2]))

        return await self._run(write)

    async def release(self, batch_id: str, runner: str) -> None:
        """Gives a lease back, so that another front end goes on at once."""
        query = "UPDATE batches SET beat=0, runner='' WHERE id=? AND runner=?"
        await self._run(lambda db: db.execute(query, (batch_id, runner)))

    async def requests(self, batch: BatchObject, after: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """The next lines of the input behind the number `after` that have no result."""
        values = (batch.input_file_id, after, batch.id)
        return await self._run(lambda db: _page(db.execute(_UNANSWERED, values), max_bytes))

    async def record(self, batch_id: str, results: Sequence[Result]) -> None:
        """Keeps results. The first one of a request counts."""

        def write(db: sqlite3.Connection) -> None:
            for number, kind, line, *counted in results:
                column = "completed" if kind == OUTPUT else "failed"
                found = db.execute(
                    f"UPDATE batches SET {column}={column}+1, size=size+?, model=COALESCE(model, ?), {_ADDED} "
                    f"WHERE id=? AND {_IS_LIVE} AND NOT EXISTS (SELECT 1 FROM lines WHERE source=? AND number=?)",
                    (len(line) + LINE_BYTES, *counted, batch_id, batch_id, number),
                )
                if found.rowcount:
                    db.execute("INSERT INTO lines VALUES(?,?,?,?)", (batch_id, number, kind, line))

        await self._run(write)

    async def end(self, batch_id: str, before: BatchStatus, status: BatchStatus) -> None:
        """Ends a batch with this status, and makes its files."""

        def write(db: sqlite3.Connection) -> None:
            now = time.time()
            row = db.execute("SELECT owner, output_ttl FROM batches WHERE id=?", (batch_id,)).fetchone()
            if row is None or not self._move(db, batch_id, (before,), status, {}):
                return
            owner, ttl = row
            query = "SELECT kind, COUNT(*), SUM(LENGTH(data)) FROM lines WHERE source=? GROUP BY kind"
            for kind, count, size in db.execute(query, (batch_id,)).fetchall():
                what = "error" if kind == ERROR else "output"
                file_id = new_id("file-")
                file = StoredFile(
                    file_id, owner, "batch_output", f"{batch_id}_{what}.jsonl", batch_id, kind, size, count, int(now),
                    now + ttl,
                )  # fmt: skip
                db.execute("INSERT INTO files VALUES(?,?,?,?,?,?,?,?,?,?,?,?)", (*file, 1, now))
                member = f"$.{what}_file_id"
                db.execute("UPDATE batches SET body=json_set(body, ?, ?) WHERE id=?", (member, file_id, batch_id))

        await self._run(write)

    async def set_total(self, batch_id: str, total: int) -> None:
        """The number of requests of a batch."""
        await self._run(lambda db: db.execute("UPDATE batches SET total=? WHERE id=?", (total, batch_id)))

    # ---

    def _require_room(self, db: sqlite3.Connection, owner: str, size: int) -> None:
        """Raises StoreFull. A client may fill half of what the others leave."""
        total, own = self._stored(db, owner)
        if own + size > (self._max_bytes - (total - own)) // 2:
            raise StoreFull(self._max_bytes)

    def _is_full(self, db: sqlite3.Connection, owner: str) -> bool:
        """Whether a client's batch has to end: for its own results, or for those of all running batches, which may take
        as much again as the files."""
        total, own = self._stored(db, owner)
        return own > self._max_bytes // 2 or total > 2 * self._max_bytes

    def _stored(self, db: sqlite3.Connection, owner: str) -> tuple[int, int]:
        """The bytes of all clients and of this one."""
        query = (
            f"SELECT SUM(cost), SUM(CASE WHEN owner=? THEN cost ELSE 0 END) FROM (SELECT owner, {FILE_BYTES} + size + "
            f"{LINE_BYTES} * lines AS cost FROM files UNION ALL SELECT owner, {BATCH_BYTES} + CASE WHEN {_IS_LIVE} "
            "THEN size ELSE 0 END FROM batches)"
        )
        total, own = db.execute(query, (owner,)).fetchone()
        return total or 0, own or 0

    def _move(
        self,
        db: sqlite3.Connection,
        batch_id: str,
        before: Sequence[BatchStatus],
        status: BatchStatus,
        members: dict[str, Any],
    ) -> bool:
        now = time.time()
        changes = {"status": status, f"{status}_at": int(now)} | members
        marks = ", ".join("?, json(?)" for _ in changes)
        pairs = ((f"$.{name}", msgspec.json.encode(member).decode()) for name, member in changes.items())
        values = [value for pair in pairs for value in pair]
        allowed = ", ".join("?" * len(before))
        found = db.execute(
            f"UPDATE batches SET status=?, kept_until=?, body=json_set(body, {marks}) WHERE id=? "
            f"AND status IN ({allowed})",
            (status, now + self.ttl, *values, batch_id, *before),
        )
        return found.rowcount > 0

    def purge(self, db: sqlite3.Connection) -> None:
        now = time.time()
        found = db.execute(
            "SELECT id, source, kind FROM files WHERE (complete AND expires < ? AND id NOT IN "
            f"(SELECT input FROM batches WHERE {_IS_LIVE})) OR (NOT complete AND touched < ?)",
            (now, now - LOST_UPLOAD_SECONDS),
        ).fetchall()
        for file_id, source, kind in found:
            db.execute("DELETE FROM files WHERE id=?", (file_id,))
            _drop_lines(db, source, kind)
        db.execute(f"DELETE FROM batches WHERE NOT {_IS_LIVE} AND kept_until < ?", (now,))


_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")  # columns, and as of Result
_ADDED = ", ".join(f"{name}={name}+?" for name in _TOKENS)
# The lines of an input behind a number that have no result.
_UNANSWERED = (
    "SELECT number, data FROM lines AS given WHERE source=? AND number>? AND NOT EXISTS "
    "(SELECT 1 FROM lines WHERE source=? AND number=given.number) ORDER BY number"
)
_BATCH = ", ".join(("body", "model", *_TOKENS, "total", "completed", "failed"))


def _shown(
    body: str, model: str | None, prompts: int, cached: int, answers: int, reasoning: int, *counts: int
) -> BatchObject:
    batch = msgspec.json.decode(body, type=BatchObject)
    batch.request_counts = RequestCounts(*counts)
    batch.model = model
    batch.usage = BatchUsage(
        prompts, BatchInputDetails(cached), answers, BatchOutputDetails(reasoning), prompts + answers
    )
    return batch


def _require_known(db: sqlite3.Connection, table: str, owner: str, after: str | None) -> None:
    query = f"SELECT 1 FROM {table} WHERE id=? AND owner=?"
    if after is not None and db.execute(query, (after, owner)).fetchone() is None:
        raise unknown_after(after)


def _file(db: sqlite3.Connection, owner: str, file_id: str) -> StoredFile | None:
    query = f"SELECT {_FILE} FROM files WHERE id=? AND owner=? AND complete"
    row = db.execute(query, (file_id, owner)).fetchone()
    return None if row is None else StoredFile._make(row)


def _drop_lines(db: sqlite3.Connection, source: str, kind: int) -> None:
    db.execute("DELETE FROM lines WHERE source=? AND kind=?", (source, kind))


def _page(rows: sqlite3.Cursor, max_bytes: int) -> list[tuple[int, bytes]]:
    """Rows with their data as the second column: at least one, then up to this many bytes."""
    page: list[tuple[int, bytes]] = []
    size = 0
    for row in rows:
        page.append(row)
        size += len(row[1]) + LINE_BYTES
        if size >= max_bytes:
            break
    rows.close()
    return page
