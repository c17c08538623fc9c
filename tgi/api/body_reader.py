"""Reading request bodies: each has to make progress, and the memory of all that are incomplete is bounded."""

import asyncio
import zlib
from collections.abc import AsyncIterable, AsyncIterator

from tgi.api.errors import Rejection

# An incomplete body has to grow by this much within the time limit, about 1 KB/s at the default of 30 s. A limit of the
# whole time would end large bodies on slow lines.
PROGRESS_BYTES = 32 << 10
# Memory of the incomplete bodies of a process, or four of the longest allowed.
MAX_BYTES_IN_TRANSIT = 64 << 20
GZIP_WINDOW_BITS = 31  # zlib's number for gzip's header and any window
TOO_LONG = "Failed to buffer the request body: length limit exceeded"


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """A body in the encoding that its Content-Encoding names.

    Raises Rejection: 415 for another encoding than gzip, 413 for more than `limit` bytes, 400 for a damaged body.
    """
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "x-gzip"):
        text = f"Content-Encoding `{encoding[:64]}` is not supported: send the body uncompressed or with gzip"
        raise Rejection(415, text, headers={"accept-encoding": "gzip"})
    decoder = zlib.decompressobj(wbits=GZIP_WINDOW_BITS)
    try:
        content = decoder.decompress(body, limit + 1)
    except zlib.error:
        raise Rejection(400, "The body is not what its Content-Encoding says: gzip") from None
    if len(content) > limit:
        raise Rejection(413, TOO_LONG)
    if not decoder.eof or decoder.unused_data:
        raise Rejection(400, "The body is not one whole gzip stream, which its Content-Encoding says that it is")
    return content


class BodyReader:
    """Reads the bodies of one front end, each of at most `limit` bytes.

    When the incomplete ones exceed the memory for all, the one that has made no progress for longest is ended, so
    clients that stop sending do not keep others out.
    """

    def __init__(self, limit: int, timeout_seconds: float) -> None:
        self._limit = limit
        self._timeout = timeout_seconds
        self._max_in_transit = max(MAX_BYTES_IN_TRANSIT, 4 * limit)
        self.bytes_in_transit = 0  # received of bodies that are incomplete
        self._sizes: dict[asyncio.Timeout, int] = {}  # of the incomplete ones; that with the oldest progress first

    async def read(self, stream: AsyncIterable[bytes], *, limited: bool = True, received: bool = False) -> bytes:
        """Reads one body. `limited`: whether the limit of its size applies. `received`: as a whole already, which the
        server's own buffer bounds: it is not awaited.

        Raises Rejection: 413 if it is too long, 408 if it makes no progress or if others need the memory.
        """
        if received:
            whole = b"".join([chunk async for chunk in stream])
            if limited and len(whole) > self._limit:
                raise Rejection(413, TOO_LONG)
            return whole
        body = bytearray()
        credited = 0
        loop = asyncio.get_running_loop()
        deadline = asyncio.timeout(self._timeout)
        self._sizes[deadline] = 0
        try:
            async with deadline:
                async for chunk in stream:
                    body += chunk
                    if limited and len(body) > self._limit:
                        raise Rejection(413, TOO_LONG)
                    if deadline not in self._sizes:  # ended by _free_memory, and the timer has not fired yet
                        raise TimeoutError
                    self._sizes[deadline] += len(chunk)
                    self.bytes_in_transit += len(chunk)
                    if len(body) >= credited + PROGRESS_BYTES:
                        credited = len(body)
                        deadline.reschedule(loop.time() + self._timeout)
                        self._sizes[deadline] = self._sizes.pop(deadline)
                    self._free_memory(loop.time())
        except TimeoutError:
            if deadline in self._sizes:
                raise self._too_slow() from None
            text = (  # ended by _free_memory
                f"The incomplete bodies of all requests take more than {self._max_in_transit >> 20} MiB, and this "
                "one has made no progress for longest"
            )
            raise Rejection(408, text, headers={"connection": "close"}) from None
        finally:
            self.bytes_in_transit -= self._sizes.pop(deadline, 0)
        return bytes(body)

    async def pieces(self, stream: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """The pieces of a body that is not held in memory. Raises Rejection: 408 if it makes no progress."""
        loop, received, credited = asyncio.get_running_loop(), 0, 0
        deadline = loop.time() + self._timeout
        iterator = aiter(stream)
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await anext(iterator, None)
            except TimeoutError:
                raise self._too_slow() from None
            if piece is None:
                return
            received += len(piece)
            if received >= credited + PROGRESS_BYTES:
                credited, deadline = received, loop.time() + self._timeout
            yield piece

    def _too_slow(self) -> Rejection:
        text = f"The body of this request did not grow by {PROGRESS_BYTES >> 10} KiB within {self._timeout:g} s"
        return Rejection(408, text, headers={"connection": "close"})

    def _free_memory(self, now: float) -> None:
        """Ends the bodies with the oldest progress until the others fit."""
        while self.bytes_in_transit > self._max_in_transit:
            deadline = next(iter(self._sizes))
            self.bytes_in_transit -= self._sizes.pop(deadline)
            deadline.reschedule(now)
