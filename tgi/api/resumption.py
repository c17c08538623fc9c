"""Streams that a client may resume (--resume-window): the ids of their events, and what a client has received.

A front end keeps nothing about a stream whose client has disconnected, so any other one can resume it. The id of an
event holds the key of the response, from which all that is random in it derives, and for each generation the number and
the checksum of the events so far. The front end that gets the id in `Last-Event-ID` formats the whole response again,
from the tokens that the tokenizer process has kept, else from those that are generated again, and leaves out what the
client has. The checksums prove that it is the same.
"""

import os
import re
import time
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

from falcon.asgi import Request

from tgi.api import errors

KEY_BYTES = 16
_EVENT_ID = re.compile(r"([0-9a-f]{32})([0-9a-f]{8})((?:\.\d{1,9}-[0-9a-f]{1,8})+)")


class ResponseKey:
    """The source of all that is random in a response (seeds, ids), and its time."""

    def __init__(self, secret: bytes, created: int) -> None:
        self.secret = secret
        self.created = created  # seconds since the epoch
        self._seeds = 0

    @classmethod
    def new(cls) -> "ResponseKey":
        return cls(os.urandom(KEY_BYTES), int(time.time()))

    def draw_seed(self) -> int:
        """The next of the response's seeds, a uint64."""
        self._seeds += 1
        return int.from_bytes(self.digest(f"seed {self._seeds}", 8), "little")

    @property
    def response_id(self) -> str:
        """The id of the response: the same for a client that resumes it."""
        return self.hex_id("response")

    def hex_id(self, name: str) -> str:
        """The id of the part of the response that has this name within it."""
        return self.digest(name, 16).hex()

    def digest(self, name: str, size: int) -> bytes:
        """Bytes that tell nothing about the key."""
        return blake2b(name.encode(), key=self.secret, digest_size=size).digest()


class Received(NamedTuple):
    """The events of one generation that a client has."""

    events: int
    checksum: int  # crc32 of their bytes, without the ids


NOTHING = Received(0, 0)


class LastEvent(NamedTuple):
    """The content of a `Last-Event-ID`."""

    key: ResponseKey
    received: list[Received]  # of each generation, then of the closing events

    @classmethod
    def parse(cls, text: str) -> "LastEvent":
        """Raises Rejection: 400 for an id that no stream of this server has."""
        if (found := _EVENT_ID.fullmatch(text.strip())) is None:
            raise errors.invalid_event_id()
        secret, created, positions = found.groups()
        received = [
            Received(int(count), int(checksum, 16))
            for count, _, checksum in (position.partition("-") for position in positions[1:].split("."))
        ]
        return cls(ResponseKey(bytes.fromhex(secret), int(created, 16)), received)


class EventNumbering:
    """Adds ids to the events of one stream, and leaves out those that the client has."""

    def __init__(self, key: ResponseKey, generations: int, last_event: LastEvent | None) -> None:
        """Raises ApiError: 410 if `last_event` belongs to a request with another number of generations."""
        self._prefix = f"id: {key.secret.hex()}{key.created:08x}"
        self._sent = [NOTHING] * (generations + 1)  # and formatted again, of those that the client has
        self._received = self._sent[:] if last_event is None else last_event.received
        if len(self._received) != len(self._sent):
            raise errors.cannot_resume()

    def number(self, events: Iterable[tuple[int, str]]) -> str:
        """The text of the next events, each given with the index of its generation; -1: a closing event.

        Raises ApiError: 410 if they differ from those that the client has.
        """
        text = []
        for index, event in events:
            if index < 0:
                self._check_that_all_is_repeated()
            count, checksum = self._sent[index]
            sent = self._sent[index] = Received(count + 1, crc32(event.encode(), checksum))
            if sent.events > self._received[index].events:
                # The client has its events of another generation also before those are formatted again.
                positions = map(max, self._sent, self._received)
                event_id = self._prefix + "".join(f".{each.events}-{each.checksum:x}" for each in positions)
                text.append(f"{event_id}\n{event}")
            elif sent.events == self._received[index].events and sent != self._received[index]:
                raise errors.cannot_resume()
        return "".join(text)

    def _check_that_all_is_repeated(self) -> None:
        """The client must not have more events of a generation than there are."""
        if any(sent.events < had.events for sent, had in zip(self._sent[:-1], self._received[:-1], strict=True)):
            raise errors.cannot_resume()


def response_key(req: Request, *, resumable: bool = False) -> ResponseKey:
    """The key of the response to this request: if it is `resumable` that in `Last-Event-ID`, else a new one.

    Raises Rejection: 400 for an invalid id.
    """
    context = req.context
    if "response_key" not in context:
        given = req.get_header("last-event-id") if resumable else None
        context.last_event = LastEvent.parse(given) if given else None
        context.response_key = context.last_event.key if context.last_event is not None else ResponseKey.new()
    key: ResponseKey = context.response_key
    return key


def event_numbering(req: Request, generations: int) -> EventNumbering:
    """The numbering of the events of a resumable stream. Raises ApiError: 410 as EventNumbering."""
    return EventNumbering(response_key(req, resumable=True), generations, req.context.last_event)
