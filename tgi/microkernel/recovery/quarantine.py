"""The quarantine: fingerprints of requests that have crashed processes, refused by all front ends for a while.

One file in the run directory, which the front end that learns of a quarantine replaces atomically.
"""

import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tgi.microkernel.host.rundir import quarantine_path

log = logging.getLogger(__name__)

QUARANTINE_SECONDS = 3600.0
MAX_ENTRIES = 1024


@dataclass(frozen=True)
class QuarantinedRequest:
    """A request that is refused."""

    fingerprint: str  # hexadecimal
    until: float  # seconds on the clock of the quarantine
    reason: str


class Quarantine:
    """The list of one run directory, as a front end uses it. `clock` is the same for all processes of a host; a change
    of the time of day neither ends nor extends a quarantine."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._path = quarantine_path(run)
        self._name = str(self._path)
        self._version: tuple[int, int] | None = None  # of the file whose entries are known
        self._entries: dict[str, QuarantinedRequest] = {}

    def entries(self) -> dict[str, QuarantinedRequest]:
        """The requests that are refused now, by fingerprint in hexadecimal."""
        self._refresh()
        now = self._clock()
        return {name: entry for name, entry in self._entries.items() if entry.until > now}

    def find(self, fingerprint: bytes) -> QuarantinedRequest | None:
        """The entry of a request that is refused now."""
        self._refresh()
        if not self._entries:
            return None
        entry = self._entries.get(fingerprint.hex())
        return entry if entry is not None and entry.until > self._clock() else None

    def minutes_left(self, entry: QuarantinedRequest) -> int:
        """For how many minutes a request is refused, rounded up."""
        return math.ceil((entry.until - self._clock()) / 60)

    def add(self, fingerprint: bytes, reason: str) -> bool:
        """Refuses this request from now on, at all front ends; at this one only if the file cannot be written. Returns
        False if it is refused already."""
        entry = QuarantinedRequest(fingerprint.hex(), self._clock() + QUARANTINE_SECONDS, reason)
        try:
            with self._path.with_suffix(".exclusive").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
                kept = self.entries()
                if entry.fingerprint in kept:
                    return False
                kept[entry.fingerprint] = entry
                draft = self._path.with_suffix(f".{os.getpid()}")
                draft.write_text(json.dumps([asdict(entry) for entry in [*kept.values()][-MAX_ENTRIES:]]))
                draft.replace(self._path)
        except OSError as error:
            log.error("cannot write %s, so other front ends accept this request: %s", self._path, error.strerror)
            self._entries[entry.fingerprint] = entry
        return True

    def _refresh(self) -> None:
        """Reads the file if it has been replaced."""
        try:  # the file is missing nearly always, and to ask takes a fraction of an exception
            status = os.stat(self._name) if os.access(self._name, os.F_OK) else None
        except FileNotFoundError:
            status = None
        if status is None:
            if self._version is not None:  # else there may be entries that could not be written
                self._version, self._entries = None, {}
            return
        version = (status.st_ino, status.st_mtime_ns)
        if version == self._version:
            return
        self._version, self._entries = version, {}
        try:
            for values in json.loads(self._path.read_text()):
                entry = QuarantinedRequest(**values)
                self._entries[entry.fingerprint] = replace(entry, until=float(entry.until), reason=str(entry.reason))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning("ignored %s, which is damaged or written by another version of tgi: %s", self._path, error)
