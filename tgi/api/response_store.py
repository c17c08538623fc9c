"""Stored responses (POST /v1/responses) and conversations. Each client sees its own only. All are dropped after
--response-ttl seconds without use, the oldest of the client that stores most before, if all together need more than
MAX_STORED_BYTES."""

import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tgi.api.sqlite_store import SqliteStore

Items = list[dict[str, Any]]

MAX_STORED_BYTES = 256 << 20
ROW_BYTES = 1 << 10  # that a response counts besides its text
MAX_CONVERSATIONS = 1 << 14
# Responses that one may go on from: what is read for a request is bounded in bytes, too.
MAX_TURNS = 1000
# A background response whose front end has not been heard of for so long has ended with it.
BEAT_SECONDS, LOST_SECONDS = 0.5, 15.0
RUNNING = ("queued", "in_progress")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses(
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL, body TEXT NOT NULL,
    input TEXT NOT NULL, output TEXT NOT NULL, streamed INTEGER NOT NULL, background INTEGER NOT NULL,
    size INTEGER NOT NULL, used REAL NOT NULL, beat REAL NOT NULL);
CREATE INDEX IF NOT EXISTS by_use ON responses(used);
CREATE TABLE IF NOT EXISTS events(id TEXT NOT NULL, first INTEGER NOT NULL, text TEXT NOT NULL, PRIMARY KEY(id, first));
CREATE TABLE IF NOT EXISTS conversations(id TEXT PRIMARY KEY, owner TEXT NOT NULL, head TEXT, body TEXT NOT NULL,
    used REAL NOT NULL);
"""


class StoredResponse(NamedTuple):
    """A response as it is kept. `body` is the response's JSON, `input` and `output` are lists of items as JSON."""

    id: str
    owner: str
    previous: str | None
    status: str
    body: str
    input: str
    output: str = "[]"
    streamed: bool = False  # its events are kept, too
    background: bool = False
    beat: float = 0.0  # when its front end was last heard of; seconds since the epoch

    @property
    def lost(self) -> bool:
        """Whether it will not be completed: its front end has ended."""
        return self.status in RUNNING and time.time() - self.beat > LOST_SECONDS


class HistoryTooLong(Exception):
    """A conversation is longer than a request may be."""


class ResponseStore(SqliteStore):
    """The stored responses, as one front end sees them."""

    what = "kept responses"
    schema = _SCHEMA

    def __init__(self, path: Path | None, ttl: float) -> None:
        """`ttl`: seconds; 0: nothing is kept."""
        super().__init__(path)
        self.ttl = ttl

    def purge(self, db: sqlite3.Connection) -> None:
        """As SqliteStore.purge."""
        _purge(db, self.ttl)

    async def put(self, response: StoredResponse, conversation: str | None = None) -> None:
        """Keeps a response; as the head of a conversation of its owner if one is named."""

        def write(db: sqlite3.Connection) -> None:
            size = ROW_BYTES + sum(map(len, (response.body, response.input, response.output)))
            db.execute(
                "INSERT OR REPLACE INTO responses VALUES(?,?,?,?,?,?,?,?,?,?,?,?)",
                (*response[:9], size, time.time(), time.time()),
            )
            if conversation is not None:
                db.execute(
                    "UPDATE conversations SET head=?, used=? WHERE id=? AND owner=?",
                    (response.id, time.time(), conversation, response.owner),
                )

        await self._run(write)

    async def finish(self, response: StoredResponse, conversation: str | None = None) -> bool:
        """As `put`, for a background response that still runs. Returns False if it was cancelled or deleted."""

        def write(db: sqlite3.Connection) -> bool:
            size = ROW_BYTES + sum(map(len, (response.body, response.input, response.output)))
            found = db.execute(
                "UPDATE responses SET status=?, body=?, output=?, size=?, used=? WHERE id=? AND status IN (?,?)",
                (response.status, response.body, response.output, size, time.time(), response.id, *RUNNING),
            )
            if conversation is not None and found.rowcount:
                values = (response.id, conversation, response.owner)
                db.execute("UPDATE conversations SET head=? WHERE id=? AND owner=?", values)
            return found.rowcount > 0

        return await self._run(write)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response of this owner."""
        return await self._run(lambda db: _get(db, owner, response_id))

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forgets a response, which ends if it runs. Returns whether there was one."""

        def write(db: sqlite3.Connection) -> bool:
            found = db.execute("DELETE FROM responses WHERE id=? AND owner=?", (response_id, owner))
            if found.rowcount:
                db.execute("DELETE FROM events WHERE id=?", (response_id,))
            return found.rowcount > 0

        return await self._run(write)

    async def history(self, owner: str, response_id: str, max_bytes: int) -> Items | None:
        """The items of a response and of all that it goes on from, oldest first; None if one of them is not kept. They
        are kept from now on as if they were new.

        Raises HistoryTooLong beyond `max_bytes` or MAX_TURNS.
        """

        def read(db: sqlite3.Connection) -> Items | None:
            turns: list[StoredResponse] = []
            size, previous = 0, response_id
            while previous:
                if (found := _get(db, owner, previous)) is None:
                    return None
                turns.append(found)
                size += len(found.input) + len(found.output)
                if size > max_bytes or len(turns) > MAX_TURNS:
                    raise HistoryTooLong
                previous = found.previous or ""
            now = time.time()
            db.executemany("UPDATE responses SET used=? WHERE id=?", [(now, turn.id) for turn in turns])
            return [item for turn in reversed(turns) for text in (turn.input, turn.output) for item in json.loads(text)]

        return await self._run(read)

    # --- background responses ---

    async def beat(self, response_id: str) -> bool:
        """Tells that a response is still computed. Returns False if it was cancelled or deleted."""

        def write(db: sqlite3.Connection) -> bool:
            found = db.execute(
                "UPDATE responses SET beat=?, status=? WHERE id=? AND status IN (?,?)",
                (time.time(), RUNNING[1], response_id, *RUNNING),
            )
            return found.rowcount > 0

        return await self._run(write)

    async def append_events(self, response_id: str, first: int, text: str) -> None:
        """Keeps events, of which the first has this sequence number. Does nothing for a response that was deleted."""

        def write(db: sqlite3.Connection) -> None:
            grown = db.execute("UPDATE responses SET size=size+? WHERE id=?", (len(text), response_id))
            if grown.rowcount:
                db.execute("INSERT OR REPLACE INTO events VALUES(?,?,?)", (response_id, first, text))

        await self._run(write)

    async def events(self, response_id: str, first: int) -> list[tuple[int, str]]:
        """The kept pieces of a stream that have the event with this number, or later ones."""

        def read(db: sqlite3.Connection) -> list[tuple[int, str]]:
            return db.execute(
                "SELECT first, text FROM events WHERE id=?1 AND first >= "
                "COALESCE((SELECT MAX(first) FROM events WHERE id=?1 AND first <= ?2), 0) ORDER BY first LIMIT 64",
                (response_id, first),
            ).fetchall()

        return await self._run(read)

    # --- conversations ---

    async def put_conversation(self, owner: str, conversation_id: str, body: str, head: str | None) -> None:
        """Keeps a conversation. `head` is its latest response."""
        values = (conversation_id, owner, head, body, time.time())
        await self._run(lambda db: db.execute("INSERT OR REPLACE INTO conversations VALUES(?,?,?,?,?)", values))

    async def conversation(self, owner: str, conversation_id: str) -> tuple[str, str | None] | None:
        """The body and the head of a conversation of this owner."""

        def read(db: sqlite3.Connection) -> tuple[str, str | None] | None:
            found: tuple[str, str | None] | None = db.execute(
                "SELECT body, head FROM conversations WHERE id=? AND owner=?", (conversation_id, owner)
            ).fetchone()
            return found

        return await self._run(read)

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        """Forgets a conversation, not its responses. Returns whether there was one."""
        statement = "DELETE FROM conversations WHERE id=? AND owner=?"
        return await self._run(lambda db: db.execute(statement, (conversation_id, owner)).rowcount > 0)


def _get(db: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse | None:
    row: Sequence[Any] | None = db.execute(
        "SELECT id, owner, previous, status, body, input, output, streamed, background, beat FROM responses "
        "WHERE id=? AND owner=?",
        (response_id, owner),
    ).fetchone()
    return None if row is None else StoredResponse._make(row)


def _purge(db: sqlite3.Connection, ttl: float) -> None:
    """Drops what has expired, then the oldest of the client that stores most until the rest fits."""
    db.execute("DELETE FROM responses WHERE used < ?", (time.time() - ttl,))
    db.execute("DELETE FROM conversations WHERE used < ?", (time.time() - ttl,))
    total = db.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()[0]
    while total > MAX_STORED_BYTES:
        found = db.execute(
            "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id, SUM(size) OVER (ORDER BY used, id) - size "
            "AS older FROM responses WHERE owner = (SELECT owner FROM responses GROUP BY owner ORDER BY SUM(size) DESC "
            "LIMIT 1)) WHERE older < ?) RETURNING size",
            (total - MAX_STORED_BYTES,),
        ).fetchall()
        total -= sum(size for (size,) in found)
    too_many = db.execute("SELECT COUNT(*) FROM conversations").fetchone()[0] - MAX_CONVERSATIONS
    if too_many > 0:
        db.execute(
            "DELETE FROM conversations WHERE id IN (SELECT id FROM conversations WHERE owner = (SELECT owner FROM "
            "conversations GROUP BY owner ORDER BY COUNT(*) DESC LIMIT 1) ORDER BY used LIMIT ?)",
            (too_many,),
        )
    db.execute("DELETE FROM events WHERE id NOT IN (SELECT id FROM responses)")
