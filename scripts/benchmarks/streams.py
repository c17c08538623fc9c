"""A streamed HTTP request whose bytes are recorded with their times: a client with minimal cost while it measures.

Parsing happens after the measurement, because load generator and servers share the machine's cores.
"""

import asyncio
import json
import statistics
import time
from typing import Any, NamedTuple

LONGEST_BURST = 900.0  # seconds until a silent server counts as failed


class BadStream(Exception):
    """The response is not the expected stream; the message says what it is."""


class Event(NamedTuple):
    """One server-sent event: when its first byte was read, in seconds, and its JSON object."""

    time: float
    data: dict[str, Any]


class Stream(NamedTuple):
    """One request: when it was sent, and the data of each read with its time in seconds."""

    sent: float
    reads: list[tuple[float, bytes]]

    @property
    def ended(self) -> float:
        """The time of the last read."""
        return self.reads[-1][0] if self.reads else self.sent

    def events(self) -> list[Event]:
        """The events, without `[DONE]`. Raises BadStream for another status than 200 or an invalid event."""
        head, _, body = b"".join(data for _, data in self.reads).partition(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0].decode(errors="replace")
        chunked = b"transfer-encoding: chunked" in head.lower()
        if " 200 " not in f"{status} ":
            raise BadStream(f"{status or 'no answer'} {body[:500].decode(errors='replace')}".strip())
        whole, starts = _joined(body) if chunked else (body, [(0, 0)])
        times = _Times(self.reads, len(head) + 4, starts)
        found = []
        place = 0
        for line in whole.splitlines(keepends=True):
            if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                found.append(Event(times.at(place), _parsed(line[5:])))
            place += len(line)
        return found


class _Times:
    """Arrival times of bytes of the body, queried in ascending order."""

    def __init__(self, reads: list[tuple[float, bytes]], head: int, starts: list[tuple[int, int]]) -> None:
        self._reads, self._starts, self._head = reads, starts, head
        self._read, self._end = 0, len(reads[0][1])
        self._chunk = 0

    def at(self, place: int) -> float:
        """The time of the read with the byte at offset `place` of the joined body."""
        while self._chunk + 1 < len(self._starts) and self._starts[self._chunk + 1][0] <= place:
            self._chunk += 1
        joined, sent = self._starts[self._chunk]
        wanted = self._head + sent + place - joined
        while self._end <= wanted:
            self._read += 1
            self._end += len(self._reads[self._read][1])
        return self._reads[self._read][0]


def _joined(body: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """The body without chunk headers, and the start of each chunk in the result and in `body`."""
    parts: list[bytes] = []
    starts: list[tuple[int, int]] = []
    place = length = 0
    while (line := body.find(b"\r\n", place)) >= 0:
        size = int(body[place:line].partition(b";")[0], 16)
        if not size:
            break
        starts.append((length, line + 2))
        parts.append(body[line + 2 : line + 2 + size])
        length += size
        place = line + 4 + size
    return b"".join(parts), starts


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise BadStream(f"an event that is not JSON: {data[:500]!r}") from None
    if not isinstance(value, dict) or "error" in value:
        raise BadStream(f"an event that is no token: {data[:500].decode(errors='replace').strip()}")
    return value


async def stream(port: int, path: str, body: dict[str, Any]) -> Stream:
    """One POST over its own connection, read to the end. Raises OSError if the port is closed."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    sent = time.perf_counter()
    reads: list[tuple[float, bytes]] = []
    try:
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        while got := await reader.read(1 << 16):
            reads.append((time.perf_counter(), got))
    finally:
        writer.close()
    return Stream(sent, reads)


def burst(port: int, path: str, bodies: list[dict[str, Any]], patience: float = LONGEST_BURST) -> list[Stream]:
    """Sends all requests concurrently. Raises BadStream if they have not ended after `patience` seconds."""

    async def ask() -> list[Stream]:
        async with asyncio.timeout(patience):
            return await asyncio.gather(*(stream(port, path, body) for body in bodies))

    try:
        return asyncio.run(ask())
    except TimeoutError:
        raise BadStream(f"no end after {patience:g} s") from None


def median(values: list[float]) -> float:
    """The median; nan for an empty list."""
    return statistics.median(values) if values else float("nan")
