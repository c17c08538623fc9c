"""Samples of metrics: each process writes its own to memory-mapped files, and readers add up those of all processes.

A process has two files (prometheus_client's MmapedDict: keys and doubles), one for sums and one for gauges. A key is
JSON: [series, label values, part]. The part of a counter or a gauge is null. A distribution has the part "sum", and one
part per bucket that was hit (its upper bound) or, in a summary, per distinct value.

When a process has ended, its gauges are deleted and its sums are added to one file for all ended processes, so the
number of files does not grow with restarts. The directory is locked (flock) meanwhile, since a reader must find each
count in exactly one file. No sum may decrease, not even by a rounding error, which Prometheus would take for a restart
of the server: readers round the sum of all files correctly, and sums of ended processes are rounded up.

Only one thread of a process may write. Files are created with the first sample.
"""

import fcntl
import json
import logging
import os
import struct
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from math import fsum, inf, nextafter
from pathlib import Path
from typing import Any

from prometheus_client.mmap_dict import MmapedDict

from tgi.microkernel.host.mapped_file import map_file

log = logging.getLogger(__name__)

GAUGES, SUMS = "gauges", "sums"
ENDED = f"{SUMS}_ended.db"  # sums of all ended processes

# part -> sum over all processes, for one series with one set of label values.
Parts = dict[Any, float]
# series -> label values -> parts
AllSeries = dict[str, dict[tuple[str, ...], Parts]]


# Initial size of a file; it doubles when it is full.
FILE_BYTES = 1 << 16
# What an entry of a file needs besides its key, at most.
ENTRY_BYTES = 32


class MetricStore:
    """The metric files of this process. Numbers for which the disk has no space are missing from the metrics."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, SampleFile] = {}
        self._complained = False

    def number(self, kind: str, name: str, labels: tuple[str, ...], part: Any = None) -> "Number":
        """One number: a counter (SUMS), a gauge (GAUGES), or a part of a distribution (SUMS)."""
        return Number(self, kind, json.dumps([name, labels, part]))

    def open_number(self, kind: str, key: str) -> tuple[Any, float]:
        """The file of a number, a MmapedDict, and its value, 0 if it is new. None in place of the file: it is not
        stored."""
        try:
            if kind not in self._files:
                self._files[kind] = SampleFile(self.directory / f"{kind}_{os.getpid()}.db")
            self._files[kind].reserve(key)
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.error("metrics are missing: cannot write to %s: %s", self.directory, error.strerror)
            return None, 0.0
        file = self._files[kind].numbers
        return file, file.read_value(key)[0]


class SampleFile:
    """A metric file that is open for writing, with disk space for its entries."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the disk is full."""
        map_file(path, FILE_BYTES).close()
        numbers: Any = MmapedDict(str(path))  # type: ignore[no-untyped-call]
        self.numbers = numbers
        self._path = path
        self._size = path.stat().st_size
        self._used = ENTRY_BYTES  # the head
        for key, *_ in self.numbers.read_all_values():
            self._used += ENTRY_BYTES + len(key)

    def reserve(self, key: str) -> None:
        """Allocates the space for another entry. Raises OSError if the disk is full."""
        used = self._used + ENTRY_BYTES + len(key)
        if used > self._size:
            map_file(self._path, 2 * self._size).close()
            self._size *= 2
        self._used = used


class Number:
    """A double in a file, in which it appears with its first value. The numbers of several processes are added up.
    Keeps a copy, since reading the file is slow."""

    __slots__ = ("_file", "_key", "_kind", "_store", "_value")

    def __init__(self, store: MetricStore, kind: str, key: str) -> None:
        self._store, self._kind, self._key = store, kind, key
        self._file: Any = None
        self._value: float | None = None  # None: not in the file yet

    def set(self, value: float) -> None:
        if self._value is None:
            self._file, _ = self._store.open_number(self._kind, self._key)
        self._value = value
        if self._file is not None:
            self._file.write_value(self._key, value, 0.0)

    def inc(self, amount: float = 1) -> None:
        if self._value is None:
            self._file, self._value = self._store.open_number(self._kind, self._key)
        self.set(self._value + amount)


class Distribution:
    """A histogram with these upper bounds, or a summary of all distinct values if there are none.

    `write_bounds`: writes all buckets with the first sample, for readers that do not know the bounds.
    """

    def __init__(
        self,
        store: MetricStore,
        name: str,
        labels: tuple[str, ...],
        bounds: tuple[float, ...],
        write_bounds: bool = False,
    ) -> None:
        self._key = (store, name, labels)
        self._bounds = (*bounds, inf) if bounds else ()
        self._write_bounds = write_bounds
        self._numbers: dict[Any, Number] = {}

    def observe(self, value: float) -> None:
        self._add("sum", value)
        self._add(self._bounds[bisect_left(self._bounds, value)] if self._bounds else value, 1)

    def observe_all(self, values: Sequence[float]) -> None:
        """`observe` for several values: values in the same bucket are written once."""
        if not values:
            return
        self._add("sum", sum(values))
        bounds = self._bounds
        for part, count in Tally([bounds[bisect_left(bounds, v)] for v in values] if bounds else values).items():
            self._add(part, count)

    def _add(self, part: Any, amount: float) -> None:
        if self._write_bounds:
            self._write_bounds = False
            for bound in self._bounds:
                self._add(bound, 0)
        number = self._numbers.get(part)
        if number is None:
            store, name, labels = self._key
            number = self._numbers[part] = store.number(SUMS, name, labels, part)
        number.inc(amount)


def sum_over_processes(directory: Path) -> AllSeries:
    """All series, added up over all processes that have written to this directory."""
    if not directory.is_dir():
        return {}
    with _locked(directory, fcntl.LOCK_SH):
        found = _collected(directory.glob("*.db"))
    series: AllSeries = {}
    for key, values in found.items():
        name, labels, part = _parse(key)
        series.setdefault(name, {}).setdefault(labels, {})[part] = fsum(values)
    return series


def fold_ended_processes(directory: Path, pids: Collection[int], wait: bool = False) -> bool:
    """Removes the files of these ended processes; their counts are kept in the file ENDED.

    Returns False, without `wait`, if a reader holds the lock, and if no file can be opened or the disk is full: then
    the sums are still in their own files. Call again.
    """
    if not os.path.isdir(directory):
        return True
    try:
        for path in _files(directory, GAUGES, pids):
            path.unlink(missing_ok=True)
        with _locked(directory, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)):
            if ended := _files(directory, SUMS, pids):
                _fold(ended, directory / ENDED)
    except OSError as error:  # BlockingIOError: a reader
        log.debug("the samples of ended processes are not added up yet: %s", error)
        return False
    return True


def fold_dead_processes(directory: Path) -> None:
    """`fold_ended_processes` for all processes that ended while no supervisor ran, since it was killed."""
    pids = {int(number) for path in directory.glob("*.db") if (number := path.stem.partition("_")[2]).isdecimal()}
    fold_ended_processes(directory, [pid for pid in pids if not _alive(pid)], wait=True)


def remove_all_samples(directory: Path) -> None:
    """Deletes all files: a new deployment starts in an old run directory."""
    for path in directory.glob("*.db"):
        path.unlink(missing_ok=True)


def _fold(files: list[Path], into: Path) -> None:
    """Adds the numbers of `files` to those in `into`, and removes the files. If the supervisor is killed between the
    last two steps, they are counted twice; in the other order they would be lost."""
    draft = into.with_suffix(".draft")
    draft.unlink(missing_ok=True)  # left by a supervisor that was killed
    written = SampleFile(draft)
    for key, values in _collected([into, *files]).items():
        written.reserve(key)
        written.numbers.write_value(key, _at_least(values), 0.0)
    written.numbers.close()
    draft.replace(into)
    for path in files:
        path.unlink()


def _at_least(values: list[float]) -> float:
    """The sum, rounded up."""
    found, exact = fsum(values), sum(map(Fraction, values))
    return nextafter(found, inf) if found < exact else found


@contextmanager
def _locked(directory: Path, kind: int) -> Iterator[None]:
    """Holds the directory's lock. With LOCK_NB raises BlockingIOError if another process holds it."""
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, kind)
        yield
    finally:
        os.close(held)


def _files(directory: Path, kind: str, pids: Iterable[int]) -> list[Path]:
    return [path for pid in pids if (path := directory / f"{kind}_{pid}.db").exists()]


def _collected(files: Iterable[Path]) -> dict[str, list[float]]:
    """key -> its values in the files that have it."""
    found: dict[str, list[float]] = {}
    for path in files:
        for key, value in _numbers(path):
            found.setdefault(key, []).append(value)
    return found


def _numbers(path: Path) -> Iterator[tuple[str, float]]:
    """The entries of one file, whose process may be writing, or have died during a write."""
    try:
        if path.stat().st_size == 0:
            return  # just created
        for key, value, _, _ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]
            _parse(key)
            yield key, value
    except FileNotFoundError:
        return  # the process has just ended
    except (OSError, RuntimeError, ValueError, TypeError, struct.error) as error:
        log.warning("The rest of %s cannot be read and is missing from the metrics: %s", path, error)


@lru_cache(maxsize=1 << 14)
def _parse(key: str) -> tuple[str, tuple[str, ...], Any]:
    name, labels, part = json.loads(key)
    return name, tuple(labels), part


def _alive(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
