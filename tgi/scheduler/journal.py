"""The journal of a scheduler's life: every call with its arguments, and a digest of every result.

A journal begins with the scheduler's configuration and holds the calls in order, so `replay.py` can make them again. A
record is written with one write(2), so that the journal of a scheduler that was killed is complete up to its last call.
When a file is large enough and the scheduler is idle, the scheduler begins again, as a new one with the same
neighbours, and so does its journal, in a new file: each file can be replayed on its own.

Layout, little-endian: MAGIC, the length of the configuration (uint32) and the configuration as JSON; then records: a
byte that names the call, its time (float64), and for
    h  handle: the number of the sender (uint16), the length of the message (uint32), the encoded message, or the code
       of an event of its link
    p  plan: the digest (uint64) of the step, 0 for None
    r  report_status: nothing
    o  outgoing: the digest of the messages
    c  commit: nothing (its time is 0)
    n  a new sender: the length of its id (uint32), the id as JSON. Not a call: it precedes the first `h` of a sender
"""

import contextlib
import json
import logging
import struct
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from tgi.microkernel.errors import ProtocolError, UserError
from tgi.microkernel.links.link import PeerDisconnected, PeerId, PeerResponds, PeerSilent
from tgi.microkernel.messages.protocol import Step, decode, encode
from tgi.microkernel.observability.flight_recorder import FlightRecorder
from tgi.microkernel.recovery.work_register import WorkRegister
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)

MAGIC = b"tgi journal 4\n"
SUFFIX = ".journal"
# A journal goes on in a new file at the first idle moment after it has reached this share of the size of all of them.
FILE_SHARE = 1 / 4
# Files that are kept at most: a scheduler that is restarted again and again writes small ones.
MAX_FILES = 64

_CALL, _LENGTH, _DIGEST, _SENDER = struct.Struct("<cd"), struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<HI")
# Codes of the events of a link. An encoded message never equals one of them: it begins with the mark of an array.
EVENT_OF_CODE: dict[bytes, Any] = {
    b"": PeerDisconnected(), b"p": PeerDisconnected(planned=True), b"s": PeerSilent(), b"r": PeerResponds(),
}  # fmt: skip
# Digest of a plan that has returned None.
NO_STEP = 0


class Call(NamedTuple):
    """One recorded call of a Scheduler method."""

    method: str  # handle, plan, report_status, outgoing or commit
    now: float
    message: Any = None  # of handle
    source: PeerId | None = None  # of handle
    digest: int = 0  # of what plan or outgoing have returned


class JournalWriter:
    """Appends records to files in a directory. Their sizes stay within a limit together: the oldest are removed."""

    def __init__(self, directory: Path, boot: bytes, config: SchedulerConfig, limit_bytes: int) -> None:
        """`limit_bytes`: of all journals in the directory. Raises UserError if the directory cannot be written."""
        self._directory, self._boot, self._limit = directory, boot.hex(), limit_bytes
        self._config = json.dumps(config._asdict()).encode()
        self._number = 0  # of files that this process has begun
        self._file: IO[bytes] | None = None
        self._old: deque[tuple[Path, int]] = deque()  # other files and their sizes, the oldest first
        self._old_bytes = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            found = []
            for path in directory.glob(f"*{SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):  # another scheduler has just removed it
                    found.append((path.stat().st_mtime_ns, path, path.stat().st_size))
            for _, path, size in sorted(found):
                self._add_old(path, size)
            self._begin_file()
        except OSError as error:
            raise UserError(f"Cannot write a journal to {directory}: {error.strerror}. Change --journal.") from error

    @property
    def is_full(self) -> bool:
        """Whether the journal should go on in a new file."""
        return self._file is not None and (self._cut or self._bytes >= FILE_SHARE * self._limit)

    def continue_with(self, config: SchedulerConfig) -> None:
        """Goes on in a new file, with a scheduler that begins again with this configuration."""
        assert self._file is not None
        self._file.close()
        self._add_old(self._path, self._bytes)
        self._config = json.dumps(config._asdict()).encode()
        try:
            self._begin_file()
        except OSError as error:
            self._end(f"{self._directory} cannot be written ({error.strerror})")

    def write(self, kind: bytes, now: float, details: bytes = b"") -> None:
        self._append(_CALL.pack(kind, now) + details)

    def write_message(self, message: Any, source: PeerId, now: float) -> None:
        records = b""
        if (sender := self._senders.get(source)) is None:
            sender = self._senders[source] = len(self._senders)
            described = json.dumps([source.role, source.replica, source.boot.hex()]).encode()
            records = _CALL.pack(b"n", now) + _LENGTH.pack(len(described)) + described
        frame = _frame(message)
        self._append(records + _CALL.pack(b"h", now) + _SENDER.pack(sender, len(frame)) + frame)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin_file(self) -> None:
        self._path = self._directory / f"scheduler-{self._boot}-{self._number:04}{SUFFIX}"
        self._number += 1
        self._file = self._path.open("wb", buffering=0)
        self._bytes, self._cut = 0, False  # cut: a record is missing, so no other may follow
        self._senders: dict[PeerId, int] = {}
        self._append(MAGIC + _LENGTH.pack(len(self._config)) + self._config)

    def _append(self, record: bytes) -> None:
        if self._file is None or self._cut:
            return
        needed = self._bytes + len(record)
        if needed > self._limit:
            self._cut = True
            log.warning("The journal has reached --journal-size. It goes on when the scheduler has no requests.")
            return
        while self._old and (self._old_bytes + needed > self._limit or len(self._old) >= MAX_FILES):
            path, size = self._old.popleft()
            self._old_bytes -= size
            with contextlib.suppress(OSError):
                path.unlink()
        try:
            written = self._file.write(record)
        except OSError as error:
            self._end(f"{self._path} cannot be written ({error.strerror})")
            return
        self._bytes += written
        if written < len(record):
            self._end(f"{self._path} cannot be written (the disk is full)")

    def _add_old(self, path: Path, size: int) -> None:
        self._old.append((path, size))
        self._old_bytes += size

    def _end(self, reason: str) -> None:
        """The scheduler works on without a journal."""
        log.error("The journal ends: %s", reason)
        self.close()
        self._file = None


class RecordedScheduler(Scheduler):
    """A scheduler whose calls are written to a journal."""

    def __init__(
        self,
        config: SchedulerConfig,
        journal: JournalWriter,
        recorder: FlightRecorder,
        work_register: WorkRegister,
    ) -> None:
        super().__init__(config, recorder, work_register)
        self._journal = journal

    def handle(self, message: Any, source: PeerId, now: float) -> None:
        """As Scheduler.handle. Recorded before it is called: the message may be what ends this process."""
        self._journal.write_message(message, source, now)
        super().handle(message, source, now)

    def plan(self, now: float) -> Step | None:
        step = super().plan(now)
        self._journal.write(b"p", now, _DIGEST.pack(step_digest(step)))
        return step

    def report_status(self, now: float) -> None:
        self._journal.write(b"r", now)
        super().report_status(now)

    def outgoing(self) -> Iterator[tuple[PeerId, tuple[Any, ...]]]:
        messages = list(super().outgoing())
        self._journal.write(b"o", 0.0, _DIGEST.pack(messages_digest(messages)))
        return iter(messages)

    def commit(self) -> None:
        self._journal.write(b"c", 0.0)
        super().commit()

    def begin_file_when_idle(self, now: float) -> None:
        """To be called when everything is sent. If the journal's file is full and there are no requests, begins again
        with a new file; the prefix cache is empty then, and what was learned from steps is forgotten."""
        if self._journal.is_full and self.idle:
            messages = self.begin_again()
            self._journal.continue_with(self.config)
            for message, source in messages:
                self.handle(message, source, now)


def step_digest(step: Step | None) -> int:
    """A digest of a planned step."""
    return NO_STEP if step is None else _digest(encode(step))


def messages_digest(messages: list[tuple[PeerId, tuple[Any, ...]]]) -> int:
    """A digest of outgoing messages with their receivers."""
    return _digest(b"".join(repr(peer).encode() + encode(message) for peer, message in messages))


def _frame(message: Any) -> bytes:
    """How a message or an event of a link is recorded."""
    for code, event in EVENT_OF_CODE.items():
        if type(message) is type(event) and message == event:
            return code
    return encode(message)


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


# --- reading ----------------------------------------------------------------------------------------------------------


class Journal(NamedTuple):
    """A journal that was read."""

    config: SchedulerConfig
    calls: list[Call]
    cut_off: bool  # the file ends within a record


def read_journal(path: Path) -> Journal:
    """Reads a journal. Raises UserError if the file is not one, or was written by another version."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, IndexError, ProtocolError, EOFError) as error:
        raise UserError(f"{path} is not a journal of this version of tgi: {error}.") from error


def _read(file: IO[bytes]) -> Journal:
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError(f"it does not begin with {MAGIC.decode().strip()!r}")
    config = SchedulerConfig(**json.loads(_sized(file)))
    methods = {b"p": "plan", b"r": "report_status", b"o": "outgoing", b"c": "commit"}
    senders: list[PeerId] = []
    calls: list[Call] = []
    try:
        while head := file.read(_CALL.size):
            kind, now = _CALL.unpack(_whole(head, _CALL.size))
            if kind == b"n":
                role, replica, boot = json.loads(_sized(file))
                senders.append(PeerId(role, replica, bytes.fromhex(boot)))
            elif kind == b"h":
                sender, length = _SENDER.unpack(_whole(file.read(_SENDER.size), _SENDER.size))
                frame = _whole(file.read(length), length)
                message = EVENT_OF_CODE[frame] if frame in EVENT_OF_CODE else decode(frame)
                calls.append(Call("handle", now, message, senders[sender]))
            else:
                digest = 0
                if kind in b"po":
                    (digest,) = _DIGEST.unpack(_whole(file.read(_DIGEST.size), _DIGEST.size))
                calls.append(Call(methods[kind], now, digest=digest))
    except EOFError:
        return Journal(config, calls, cut_off=True)
    return Journal(config, calls, cut_off=False)


def _sized(file: IO[bytes]) -> bytes:
    (length,) = _LENGTH.unpack(_whole(file.read(_LENGTH.size), _LENGTH.size))
    return _whole(file.read(length), length)


def _whole(data: bytes, size: int) -> bytes:
    """The data. Raises EOFError if the file has ended before `size` bytes."""
    if len(data) < size:
        raise EOFError
    return data
