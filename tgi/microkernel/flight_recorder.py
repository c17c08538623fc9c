"""The flight recorder: every process stamps the steps of every request into a ring in shared memory.

`tgi why` reads the rings of all processes and tells where the time of a request went.

A ring is a file of the run directory that is mapped into memory, so what a process has stamped survives the process.
Times are time.monotonic, which is the same clock in all processes of a host.
"""

import contextlib
import logging
import mmap
import os
import struct
import time
from collections import defaultdict
from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

# Stamps that a ring holds: a request has about four in each process.
RING_STAMPS = 16_384
# Time, request key, index of the generation in its HTTP request, event, two numbers that the event explains.
_STAMP = struct.Struct("<dQHHiiI")
_COUNT = struct.Struct("<Q")
_HEADER_BYTES = 32


class Event(IntEnum):
    """What happened to a request. The phases between events are in PHASES."""

    RECEIVED = 1  # api: head and body are read and valid
    SUBMITTED = 2  # api: sent to tokenizer `a` for the first time
    RESUBMITTED = 3  # api: sent to tokenizer `a` with `b` tokens, since the previous one was lost
    FIRST_TOKEN = 4  # api: the first token has arrived
    ANSWERED = 5  # api: the End has arrived; `b` tokens
    LEFT = 6  # api: the client has disconnected, or the request was cancelled
    PARKED = 7  # api: cancelled below until the client, which does not read, has read on; `b` tokens
    UNPARKED = 8  # api: sent to tokenizer `a` again with `b` tokens
    TOKENIZED = 10  # tokenizer: encoded and validated, `a` prompt tokens
    QUEUED = 20  # scheduler: in the waiting queue; `a` requests wait before it, `b` run
    ADMITTED = 21  # scheduler: has a slot; `a` tokens came from the prefix cache, `b` requests run
    PREFILLED = 22  # scheduler: its prompt is computed, and the first token after it drawn
    PREEMPTED = 23  # scheduler: lost its slot or pages to other requests; `a` requests wait, `b` run
    WORKER_LOST = 24  # scheduler: the worker was lost or a step failed; it is computed again
    ENDED = 25  # scheduler: ended, `b` tokens


# What a request waits for after each event; an event that is missing here does not end the phase before it.
PHASES = {
    Event.RECEIVED: "front end",
    Event.SUBMITTED: "tokenizer",
    Event.RESUBMITTED: "recovery of a tokenizer",
    Event.PARKED: "client that does not read",
    Event.UNPARKED: "tokenizer",
    Event.TOKENIZED: "way to the scheduler",
    Event.QUEUED: "queue",
    Event.ADMITTED: "prefill",
    Event.PREFILLED: "decode",
    Event.PREEMPTED: "preempted",
    Event.WORKER_LOST: "recovery of the worker",
    Event.ENDED: "delivery",
}

TEXTS = {
    Event.RECEIVED: "received",
    Event.SUBMITTED: "sent to tokenizer-{a}",
    Event.RESUBMITTED: "the tokenizer was lost: sent to tokenizer-{a} with {b} tokens",
    Event.FIRST_TOKEN: "first token",
    Event.ANSWERED: "ended with {b} tokens",
    Event.LEFT: "cancelled: the client has disconnected",
    Event.PARKED: "parked with {b} tokens: its client does not read",
    Event.UNPARKED: "the client reads on: sent to tokenizer-{a} with {b} tokens",
    Event.TOKENIZED: "tokenized: {a} prompt tokens",
    Event.QUEUED: "queued: {a} requests waited before it, {b} ran",
    Event.ADMITTED: "admitted: {a} tokens found in the prefix cache, {b} requests ran",
    Event.PREFILLED: "prompt computed",
    Event.PREEMPTED: "preempted: others needed its slot or its KV pages; {a} requests waited, {b} ran",
    Event.WORKER_LOST: "the worker was lost, or its step failed: queued again",
    Event.ENDED: "ended after {b} tokens",
}


def request_key(request_id: str) -> int:
    """The number that stands for a request id in stamps and messages; never 0."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") or 1


class FlightRecorder:
    """Records nothing: for tests and replays. RingRecorder is the real one."""

    def stamp(self, event: Event, key: int, index: int, a: int = 0, b: int = 0) -> None:
        """Records an event of generation `index` of the request with this key; no event of key 0."""

    def close(self) -> None:
        """Releases the ring."""


NO_RECORDER = FlightRecorder()


class RingRecorder(FlightRecorder):
    """Writes to the ring of one process. A process that is restarted continues the ring of its predecessor."""

    def __init__(self, path: Path) -> None:
        size = _HEADER_BYTES + RING_STAMPS * _STAMP.size
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.touch()
            with path.open("r+b") as file:
                _allocate(file.fileno(), size)
                self._ring = mmap.mmap(file.fileno(), size)
        except OSError as error:
            log.warning("`tgi why` will not know what this process does: cannot use %s: %s", path, error.strerror)
            self._ring = mmap.mmap(-1, size)
        (self._count,) = _COUNT.unpack_from(self._ring)

    def stamp(self, event: Event, key: int, index: int, a: int = 0, b: int = 0) -> None:
        """As FlightRecorder.stamp."""
        if not key:
            return
        place = _HEADER_BYTES + self._count % RING_STAMPS * _STAMP.size
        _STAMP.pack_into(self._ring, place, time.monotonic(), key, min(index, 0xFFFF), event, a, b, 0)
        self._count += 1
        _COUNT.pack_into(self._ring, 0, self._count)

    def close(self) -> None:
        """Releases the ring."""
        self._ring.close()


def _allocate(file: int, size: int) -> None:
    """Makes a file this long. Raises OSError if the disk is full: a write to a hole in a mapped file would then end the
    process with SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


# --- reading ----------------------------------------------------------------------------------------------------------


class Stamp(NamedTuple):
    """One recorded event."""

    time: float
    process: str  # such as "scheduler-0"
    generation: int  # its index in the HTTP request
    event: Event
    a: int
    b: int

    @property
    def text(self) -> str:
        """What happened, in words."""
        return TEXTS[self.event].format(a=self.a, b=self.b)


def ring_path(run: Path, name: str) -> Path:
    """The ring of a process in a run directory."""
    return run / "flight" / f"{name}.ring"


def remove_rings(run: Path) -> None:
    """Removes the rings of an earlier deployment in this run directory."""
    for path in (run / "flight").glob("*.ring"):
        path.unlink(missing_ok=True)


def read_stamps(run: Path, key: int) -> list[Stamp]:
    """All stamps of a request in a run directory, in order of time."""
    found = []
    for path in (run / "flight").glob("*.ring"):
        with contextlib.suppress(FileNotFoundError):
            ring = path.read_bytes()
            for time_, stamped, index, event, a, b, _ in _STAMP.iter_unpack(ring[_HEADER_BYTES:]):
                if stamped == key and event in TEXTS:
                    found.append(Stamp(time_, path.stem, index, Event(event), a, b))
    return sorted(found)


def explain(stamps: Iterable[Stamp]) -> list[str]:
    """Where the time of one generation went, in lines: the phases by duration, then each event."""
    known = sorted(stamps)
    seconds: dict[str, float] = defaultdict(float)
    phase, since = "", known[0].time
    held = 0  # how often the scheduler has it: twice for a moment after the loss of a tokenizer
    for stamp in known:
        if stamp.event in (Event.ANSWERED, Event.LEFT):
            break
        held += (stamp.event is Event.QUEUED) - (stamp.event is Event.ENDED)
        if stamp.event is Event.ENDED and held > 0:
            continue
        if (following := PHASES.get(stamp.event)) is not None:
            if phase:
                seconds[phase] += stamp.time - since
            phase, since = following, stamp.time
    total = known[-1].time - known[0].time
    if phase:
        seconds[phase] += known[-1].time - since
    lines = [
        f"{name:24}{1e3 * spent:10.1f} ms{100 * spent / total if total else 0:5.0f} %"
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    lines.append(f"{'total':24}{1e3 * total:10.1f} ms")
    lines.append("")
    lines += [f"{1e3 * (one.time - known[0].time):10.1f} ms  {one.process:14}{one.text}" for one in known]
    return lines
