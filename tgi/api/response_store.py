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

Items = Sequence[dict[str, Any]]

MAX_STORED_BYTES = 256 << 20
ROW_BYTES = 1 << 10  # that a response, or an item of a conversation, counts besides its text
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
CREATE TABLE IF NOT EXISTS threads(id TEXT PRIMARY KEY, owner TEXT NOT NULL, body TEXT NOT NULL,
    size INTEGER NOT NULL, used REAL NOT NULL);
CREATE TABLE IF NOT EXISTS items(thread TEXT NOT NULL, number INTEGER NOT NULL, id TEXT NOT NULL, item TEXT NOT NULL,
    PRIMARY KEY(thread, number));
CREATE INDEX IF NOT EXISTS items_by_id ON items(thread, id);
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
    def items(self) -> "Items":
        """What it adds to a conversation."""
        return [*json.loads(self.input), *json.loads(self.output)]

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
        _purge(db, self.ttl)

    async def put(self, response: StoredResponse, conversation: str | None = None) -> None:
        """Keeps a response, and appends its items to a conversation of its owner if one is named."""

        def write(db: sqlite3.Connection) -> None:
            size = ROW_BYTES + sum(map(len, (response.body, response.input, response.output)))
            db.execute(
                "INSERT OR REPLACE INTO responses VALUES(?,?,?,?,?,?,?,?,?,?,?,?)",
                (*response[:9], size, time.time(), time.time()),
            )
            if conversation is not None:
                _append_items(db, response.owner, conversation, response.items)

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
                _append_items(db, response.owner, conversation, response.items)
            return found.rowcount > 0

        return await self._run(write)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
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

    async def put_conversation(self, owner: str, conversation_id: str, body: str, items: Items = ()) -> None:
        """Keeps a conversation, or its new body, and appends items to it."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO threads VALUES(?1,?2,?3,?4,?5) ON CONFLICT(id) DO UPDATE SET body=?3 WHERE owner=?2",
                (conversation_id, owner, body, len(body), time.time()),
            )
            _append_items(db, owner, conversation_id, items)

        await self._run(write)

    async def conversation(self, owner: str, conversation_id: str) -> str | None:
        def read(db: sqlite3.Connection) -> str | None:
            found = db.execute("SELECT body FROM threads WHERE id=? AND owner=?", (conversation_id, owner)).fetchone()
            return None if found is None else found[0]

        return await self._run(read)

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        """Forgets a conversation with its items, not its responses. Returns whether there was one."""

        def write(db: sqlite3.Connection) -> bool:
            found = db.execute("DELETE FROM threads WHERE id=? AND owner=?", (conversation_id, owner))
            if found.rowcount:
                db.execute("DELETE FROM items WHERE thread=?", (conversation_id,))
            return found.rowcount > 0

        return await self._run(write)

    async def append_items(self, owner: str, conversation_id: str, items: Items) -> bool:
        """Appends items to a conversation. Returns whether there is one."""
        return await self._run(lambda db: _append_items(db, owner, conversation_id, items))

    async def items(self, owner: str, conversation_id: str, max_bytes: int) -> Items | None:
        """The items of a conversation, oldest first; None if it is not kept. It is kept from now on as if it were new.

        Raises HistoryTooLong beyond `max_bytes`.
        """

        def read(db: sqlite3.Connection) -> Items | None:
            if not _append_items(db, owner, conversation_id, ()):
                return None
            size = db.execute("SELECT SUM(LENGTH(item)) FROM items WHERE thread=?", (conversation_id,)).fetchone()[0]
            if (size or 0) > max_bytes:
                raise HistoryTooLong
            rows = db.execute("SELECT item FROM items WHERE thread=? ORDER BY number", (conversation_id,))
            return [json.loads(text) for (text,) in rows]

        return await self._run(read)

    async def item(self, owner: str, conversation_id: str, item_id: str) -> str | None:
        def read(db: sqlite3.Connection) -> str | None:
            found = db.execute(
                "SELECT item FROM items JOIN threads ON thread = threads.id WHERE thread=? AND items.id=? AND owner=?",
                (conversation_id, item_id, owner),
            ).fetchone()
            return None if found is None else found[0]

        return await self._run(read)

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> bool:
        """Takes an item out of a conversation. Returns whether there was one."""

        def write(db: sqlite3.Connection) -> bool:
            found = db.execute(
                "DELETE FROM items WHERE thread=?1 AND id=?2 AND thread IN (SELECT id FROM threads WHERE owner=?3) "
                "RETURNING LENGTH(item)",
                (conversation_id, item_id, owner),
            ).fetchall()
            size = sum(length + ROW_BYTES for (length,) in found)
            db.execute("UPDATE threads SET size = size - ? WHERE id=?", (size, conversation_id))
            return bool(found)

        return await self._run(write)


def _get(db: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse | None:
    row: Sequence[Any] | None = db.execute(
        "SELECT id, owner, previous, status, body, input, output, streamed, background, beat FROM responses "
        "WHERE id=? AND owner=?",
        (response_id, owner),
    ).fetchone()
    return None if row is None else StoredResponse._make(row)


def _append_items(db: sqlite3.Connection, owner: str, thread: str, items: Items) -> bool:
    """Returns whether there is such a conversation, which is kept from now on as if it were new."""
    texts = [json.dumps(item, ensure_ascii=False) for item in items]
    found = db.execute(
        "UPDATE threads SET size=size+?, used=? WHERE id=? AND owner=?",
        (sum(map(len, texts)) + ROW_BYTES * len(texts), time.time(), thread, owner),
    )
    if found.rowcount and items:
        first = db.execute("SELECT COALESCE(MAX(number), 0) + 1 FROM items WHERE thread=?", (thread,)).fetchone()[0]
        numbered = enumerate(zip(items, texts, strict=True), first)
        rows = [(thread, number, item["id"], text) for number, (item, text) in numbered]
        db.executemany("INSERT INTO items VALUES(?,?,?,?)", rows)
    return found.rowcount > 0


def _purge(db: sqlite3.Connection, ttl: float) -> None:
    """Drops what has expired, then the oldest of the client that stores most until the rest fits."""
    for table in _KEPT:
        db.execute(f"DELETE FROM {table} WHERE used < ?", (time.time() - ttl,))
    kept = " UNION ALL ".join(f"SELECT '{table}' AS kind, id, owner, size, used FROM {table}" for table in _KEPT)
    total = db.execute(f"SELECT COALESCE(SUM(size), 0) FROM ({kept})").fetchone()[0]
    while total > MAX_STORED_BYTES:
        oldest = db.execute(
            f"WITH kept AS ({kept}) SELECT kind, id, size FROM (SELECT *, SUM(size) OVER (ORDER BY used, id) - size "
            "AS older FROM kept WHERE owner = (SELECT owner FROM kept GROUP BY owner ORDER BY SUM(size) DESC LIMIT 1)) "
            "WHERE older < ?",
            (total - MAX_STORED_BYTES,),
        ).fetchall()
        for kind, name, size in oldest:
            db.execute(f"DELETE FROM {kind} WHERE id=?", (name,))
            total -= size
    too_many = db.execute("SELECT COUNT(*) FROM threads").fetchone()[0] - MAX_CONVERSATIONS
    if too_many > 0:
        db.execute(
            "DELETE FROM threads WHERE id IN (SELECT id FROM threads WHERE owner = (SELECT owner FROM threads "
            "GROUP BY owner ORDER BY COUNT(*) DESC LIMIT 1) ORDER BY used LIMIT ?)",
            (too_many,),
        )
    db.execute("DELETE FROM events WHERE id NOT IN (SELECT id FROM responses)")
    db.execute("DELETE FROM items WHERE thread NOT IN (SELECT id FROM threads)")


_KEPT = ("responses", "threads")  # a thread is a conversation with its items
