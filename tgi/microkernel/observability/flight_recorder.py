"""The flight recorder: every process stamps the steps of every request into a ring in shared memory.

`tgi why` reads the rings of all processes; request_timeline.py tells from the stamps where the time of a request went.

A ring is a file of the run directory that is mapped into memory, so what a process has stamped survives the process.
Times are time.monotonic, which is the same clock in all processes of a host. Stamps contain no text but the client's
name, which is a digest of its API key or its address.
"""

import contextlib
import logging
import mmap
import re
import struct
import time
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

from tgi.microkernel.host.mapped_file import map_file
from tgi.microkernel.messages.protocol import RequestContext

log = logging.getLogger(__name__)

# Stamps that a ring holds: a request has about four in each process.
RING_STAMPS = 16_384
# Time, request key, index of the generation in its HTTP request, event, two numbers that the event explains.
_STAMP = struct.Struct("<dQHHIQ")
_COUNT = struct.Struct("<Q")
_HEADER_BYTES = 32
# The key of stamps that concern no single request.
EVERY_REQUEST = 1
KEY_DIGITS = 16
# A response id of OpenAI's routes, or what the key of a request is printed as.
_RESPONSE_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)?([0-9a-f]{16})(?:[0-9a-f]{16})?")


class Event(IntEnum):
    """What happened to a request. request_timeline.py has the phases between events."""

    RECEIVED = 1  # api: head and body are read and valid; client_number is (`a`, `b`)
    SUBMITTED = 2  # api: sent to tokenizer `a` for the first time
    RESUBMITTED = 3  # api: sent to tokenizer `a` with `b` tokens, since the previous one was lost
    FIRST_TOKEN = 4  # api: the first token has arrived
    ANSWERED = 5  # api: the End has arrived; `b` tokens
    LEFT = 6  # api: the client has disconnected, or the request was cancelled
    PARKED = 7  # api: cancelled below until the client, which does not read, has read on; `b` tokens
    UNPARKED = 8  # api: sent to tokenizer `a` again with `b` tokens
    NAMED = 9  # api: the digest of x-request-id is `b`
    TOKENIZER_LOST = 10  # api: its tokenizer, `a`, has ended or does not respond
    TOKENIZED = 20  # tokenizer: encoded and validated, `a` prompt tokens
    SCHEDULER_LOST = 21  # tokenizer: scheduler `a` has ended or does not respond, or is not there yet
    QUEUED = 30  # scheduler: in the waiting queue; `a` requests wait before it, `b` run
    ADMITTED = 31  # scheduler: has a slot; `a` tokens came from the prefix cache, `b` requests run
    PREFILLED = 32  # scheduler: its prompt is computed, and the first token after it sampled
    PREEMPTED = 33  # scheduler: lost its slot or pages to other requests; `a` requests wait, `b` run
    WORKER_LOST = 34  # scheduler: the worker was lost or a step failed; it is computed again
    ENDED = 35  # scheduler: ended, `b` tokens
    ON_TRIAL = 36  # scheduler, or api for the tokenizers: suspected of a crash, has turns of its own; `a` strikes
    RELEASED = 37  # scheduler: its trial is over
    WORKER_DOWN = 38  # scheduler, of every request: the worker computes nothing
    WORKER_UP = 39  # scheduler, of every request: the worker is ready


def request_key(response_id: str) -> int:
    """The number that stands for a request in stamps and messages, from the hexadecimal id of its response."""
    return int(response_id[:KEY_DIGITS], 16)


def name_digest(request_id: str) -> int:
    """The digest of a header x-request-id, as Event.NAMED has it."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=4096)
def client_number(name: str) -> tuple[int, int]:
    """The name of a client (api/clients.py) as two numbers: its kind, and 64 bits. (0, 0) for another name."""
    if found := re.fullmatch(r"key ([0-9a-f]{16})", name):
        return 1, int(found[1], 16)
    try:
        address = ip_address(name.partition("/")[0])
    except ValueError:
        return 0, 0
    return (4, int(address)) if address.version == 4 else (6, int(address) >> 64)


def client_name(kind: int, number: int) -> str:
    """The name of the client that has these numbers; "" for (0, 0)."""
    if kind == 1:
        return f"key {number:016x}"
    if kind == 4:
        return str(IPv4Address(number))
    return str(ip_network((int(IPv6Address(number << 64)), 64))) if kind == 6 else ""


class FlightRecorder:
    """Records nothing: for tests and replays. RingRecorder is the real one."""

    def stamp(self, event: Event, context: RequestContext, a: int = 0, b: int = 0) -> None:
        """Records an event of a request; none of one whose context has key 0."""

    def close(self) -> None:
        """Releases the ring."""


NO_RECORDER = FlightRecorder()


class RingRecorder(FlightRecorder):
    """Writes to the ring of one process. A process that is restarted continues the ring of its predecessor."""

    def __init__(self, path: Path) -> None:
        size = _HEADER_BYTES + RING_STAMPS * _STAMP.size
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._ring = map_file(path, size)
        except OSError as error:
            log.warning("`tgi why` will not know what this process does: cannot use %s: %s", path, error.strerror)
            self._ring = mmap.mmap(-1, size)
        (self._count,) = _COUNT.unpack_from(self._ring)

    def stamp(self, event: Event, context: RequestContext, a: int = 0, b: int = 0) -> None:
        if not (key := context.request_key):
            return
        place = _HEADER_BYTES + self._count % RING_STAMPS * _STAMP.size
        _STAMP.pack_into(self._ring, place, time.monotonic(), key, min(context.request_index, 0xFFFF), event, a, b)
        self._count += 1
        _COUNT.pack_into(self._ring, 0, self._count)

    def close(self) -> None:
        self._ring.close()


# --- reading ----------------------------------------------------------------------------------------------------------


class Stamp(NamedTuple):
    """One recorded event."""

    time: float
    process: str  # such as "scheduler-0"
    key: int
    generation: int  # its index in the HTTP request
    event: Event
    a: int = 0
    b: int = 0


def ring_path(run: Path, name: str) -> Path:
    """The ring of a process in a run directory."""
    return run / "flight" / f"{name}.ring"


def remove_rings(run: Path) -> None:
    """Removes the rings of an earlier deployment in this run directory."""
    for path in (run / "flight").glob("*.ring"):
        path.unlink(missing_ok=True)


def read_stamps(run: Path) -> list[Stamp]:
    """All stamps of all processes in a run directory, in order of time."""
    found = []
    events = {int(event): event for event in Event}
    for path in (run / "flight").glob("*.ring"):
        with contextlib.suppress(FileNotFoundError):
            ring = path.read_bytes()[_HEADER_BYTES:]
            for time_, key, index, number, a, b in _STAMP.iter_unpack(ring[: len(ring) // _STAMP.size * _STAMP.size]):
                if key and (event := events.get(number)) is not None:
                    found.append(Stamp(time_, path.stem, key, index, event, a, b))
    return sorted(found)


def find_requests(stamps: Iterable[Stamp], name: str) -> list[int]:
    """The keys of the requests with this name, in order of time: a header x-request-id, which several requests may
    have, the `id` of a response of OpenAI's routes, or what `tgi why` has printed for another request."""
    digest = name_digest(name)
    matched = _RESPONSE_ID.fullmatch(name)
    key = request_key(matched[1]) if matched is not None else 0
    keys = [one.key for one in stamps if one.key == key or (one.event is Event.NAMED and one.b == digest)]
    return list(dict.fromkeys(keys))
