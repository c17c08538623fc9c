"""One HTTP request over its own connection, as an unlucky but patient client sends it: it retries what was refused
before it began, and resumes a stream that its front end lost."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from enum import StrEnum

# A refused request is sent again after this time.
RETRY_SECONDS = 0.2


class Outcome(StrEnum):
    """How a request ended for its client."""

    COMPLETE = "complete"
    LOST = "lost"  # refused, failed, or cut off without a way to resume
    HUNG = "hung"  # nothing came for `patience` seconds, keep-alive comments aside


@dataclass
class Answer:
    """What a client has received. Times are seconds by time.perf_counter."""

    outcome: Outcome = Outcome.LOST
    status: int = 0
    body: bytes = b""  # without chunk headers; of a resumed stream: all events
    silence: float = 0.0  # the longest time in which the client waited for the next part of the answer
    connections: int = 0
    problem: str = ""
    last_event_id: str = ""
    heard: float = field(default_factory=time.perf_counter)

    def hear(self) -> None:
        """A part of the answer has arrived."""
        now = time.perf_counter()
        self.silence = max(self.silence, now - self.heard)
        self.heard = now


class Client:
    """Sends requests to one port. With `resume` a broken stream continues with Last-Event-ID, and an answer that was
    cut off is asked for again: for servers whose front ends are killed."""

    def __init__(self, port: int, patience: float, resume: bool) -> None:
        self._port = port
        self._patience = patience
        self._resume = resume

    async def ask(self, path: str, body: bytes) -> Answer:
        """Sends a POST until it has an answer, is lost, or hangs."""
        answer = Answer()
        while True:
            answer.connections += 1
            try:
                complete = await self._exchange(path, body, answer)
            except TimeoutError:
                answer.outcome = Outcome.HUNG
                return answer
            except OSError as error:
                complete, answer.problem = False, f"{type(error).__name__}: {error}"
            refused = answer.status == 503 or not answer.status
            if complete and not refused:
                answer.outcome = Outcome.COMPLETE
                return answer
            if not refused and (not self._resume or answer.status != 200):
                return answer
            if time.perf_counter() - answer.heard > self._patience:
                answer.outcome = Outcome.HUNG
                return answer
            if not answer.last_event_id:
                answer.status, answer.body = 0, b""
            await asyncio.sleep(RETRY_SECONDS)

    async def _exchange(self, path: str, body: bytes, answer: Answer) -> bool:
        """One connection. Adds what it brings to the answer; returns whether the response is complete."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        try:
            resumed = f"last-event-id: {answer.last_event_id}\r\n" if answer.last_event_id else ""
            head = (
                f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
                f"{resumed}content-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            head_bytes = await self._until(reader, b"\r\n\r\n")
            if not head_bytes:
                answer.status, answer.problem = 0, "closed without an answer"
                return False
            answer.hear()
            lines = head_bytes.lower().split(b"\r\n")
            answer.status = int(lines[0].split()[1])
            if b"transfer-encoding: chunked" in lines:
                return await self._read_chunks(reader, answer)
            length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
            whole = b""
            while len(whole) < length:
                async with asyncio.timeout(self._patience):
                    data = await reader.read(1 << 16)
                if not data:
                    answer.problem = "cut off"
                    return False
                answer.hear()
                whole += data
            if answer.last_event_id:  # a stream that could not be resumed: its events are kept
                answer.problem = f"resumption was answered with {answer.status} {whole[:200]!r}"
                return False
            answer.body = whole
            return True
        finally:
            writer.close()

    async def _until(self, reader: asyncio.StreamReader, separator: bytes) -> bytes:
        """Reads up to the separator; b"" if the connection ends before."""
        async with asyncio.timeout(self._patience):
            try:
                return await reader.readuntil(separator)
            except asyncio.IncompleteReadError:
                return b""

    async def _read_chunks(self, reader: asyncio.StreamReader, answer: Answer) -> bool:
        """Reads a chunked body. Of a stream that breaks only whole events are kept."""
        body, begin = bytearray(answer.body), len(answer.body)
        while size := await self._until(reader, b"\r\n"):
            length = int(size, 16)
            try:
                async with asyncio.timeout(self._patience):
                    data = await reader.readexactly(length + 2)
            except asyncio.IncompleteReadError:
                break
            if not length:
                answer.body = bytes(body)
                return True
            body += data[:-2]
            if not data.startswith(b":"):  # the comment that keeps a silent stream open
                answer.hear()
            elif time.perf_counter() - answer.heard > self._patience:
                raise TimeoutError
        answer.body = bytes(body[: max(body.rfind(b"\n\n") + 2, begin)])
        ids = [line[3:].strip() for line in answer.body.split(b"\n") if line.startswith(b"id:")]
        answer.last_event_id = ids[-1].decode() if ids else ""
        answer.problem = "the stream was cut off"
        return False


def events(body: bytes) -> list[dict[str, object]]:
    """The JSON objects of the events of a stream, without `[DONE]`."""
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]
