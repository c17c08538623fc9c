"""One streamed HTTP request whose bytes are recorded with their times: a client with minimal cost while it measures.

Parsing happens after the measurement, because load generator and server may share the machine's cores.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from tgi.server_address import ServerAddress


class BadStream(Exception):
    """The response is not the expected stream. The message says what it is, `kind` is one word or two for a table."""

    def __init__(self, message: str, kind: str = "bad event") -> None:
        super().__init__(message)
        self.kind = kind


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
        return self.reads[-1][0] if self.reads else self.sent

    def events(self) -> list[Event]:
        """The events, without `[DONE]`. Raises BadStream for another status than 200, an invalid event, and a chunked
        body without its end."""
        head, _, body = b"".join(data for _, data in self.reads).partition(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0].decode(errors="replace")
        chunked = b"transfer-encoding: chunked" in head.lower()
        if " 200 " not in f"{status} ":
            text = f"{status or 'no answer'} {body[:500].decode(errors='replace')}".strip()
            words = status.split()
            raise BadStream(text, f"status {words[1]}" if len(words) > 1 else "no answer")
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
            return b"".join(parts), starts
        starts.append((length, line + 2))
        parts.append(body[line + 2 : line + 2 + size])
        length += size
        place = line + 4 + size
    raise BadStream("a stream without an end: the connection closed in the middle of a chunk", "cut off")


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise BadStream(f"an event that is not JSON: {data[:500]!r}") from None
    if not isinstance(value, dict) or "error" in value:
        raise BadStream(f"an event that is no token: {data[:500].decode(errors='replace').strip()}", "error event")
    return value


class Meter:
    """What all streams have received so far, for the live view."""

    def __init__(self) -> None:
        self.events = 0


class Origin:
    """Where requests go: host, port and TLS of a URL, and the headers of every request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Raises UserError for what is not the URL of a server."""
        self.address = ServerAddress.parse(url)
        self.tls = ssl.create_default_context() if self.address.tls else None
        given = {"host": self.address.host_header, "content-type": "application/json", "connection": "close"}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (given | dict(headers)).items())

    def request(self, method: str, path: str, body: bytes) -> bytes:
        length = f"content-length: {len(body)}\r\n" if body else ""
        return f"{method} {self.address.prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode() + body


class _Recorder(asyncio.Protocol):
    """Records the reads of one connection."""

    def __init__(self, meter: Meter) -> None:
        self.reads: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._meter = meter

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))
        self._meter.events += data.count(b"data:")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def send(origin: Origin, path: str, body: dict[str, Any] | None, meter: Meter, seconds: float) -> Stream:
    """One request over a connection of its own, read to the end: a POST of `body`, or a GET. `sent` is when the
    connection stood.

    Raises OSError if there is no connection, TimeoutError after `seconds`.
    """
    loop = asyncio.get_running_loop()
    data = b"" if body is None else json.dumps(body).encode()
    async with asyncio.timeout(seconds):
        transport, recorder = await loop.create_connection(
            lambda: _Recorder(meter), origin.address.host, origin.address.port, ssl=origin.tls
        )
        try:
            sent = time.perf_counter()
            transport.write(origin.request("GET" if body is None else "POST", path, data))
            await recorder.ended
        finally:
            transport.abort()
    return Stream(sent, recorder.reads)


def body_of(stream: Stream) -> tuple[int, bytes]:
    """Status and body of a response that is no stream of events. Raises BadStream if there was none."""
    head, _, body = b"".join(data for _, data in stream.reads).partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[1].isdigit():
        raise BadStream("no HTTP response", "no answer")
    if b"transfer-encoding: chunked" in head.lower():
        body = _joined(body)[0]
    return int(words[1]), body
