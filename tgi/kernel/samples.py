"""The numbers behind the metrics: each process writes its own into memory-mapped files, whoever is asked adds them up.

A process has two files (prometheus_client's MmapedDict: keys and doubles): one for what counts up, which stays when the
process is dead, and one for gauges, which goes with it. A key is JSON: [series, label values, part]. The part of a
counter or a gauge is null. A distribution has the part "sum", and one part for each bucket that was hit (its upper
bound) or, in a summary, for each value that was seen.

One thread of a process writes. Nothing is written before the first sample.
"""

import json
import logging
import os
import struct
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

from prometheus_client.mmap_dict import MmapedDict

log = logging.getLogger(__name__)

GAUGES, SUMS = "gauges", "sums"

# What the parts of one series with one set of label values add up to.
Parts = dict[Any, float]


class Store:
    """The files of this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}

    def number(self, kind: str, name: str, labels: tuple[str, ...], part: Any = None) -> "Number":
        """One number, 0 if it is new."""
        if kind not in self._files:
            self._files[kind] = MmapedDict(str(self.directory / f"{kind}_{os.getpid()}.db"))  # type: ignore[no-untyped-call]
        return Number(self._files[kind], json.dumps([name, labels, part]))


class Number:
    """A double in a file, and a copy of it at hand."""

    __slots__ = ("_file", "_key", "_value")

    def __init__(self, file: Any, key: str) -> None:
        self._file, self._key = file, key
        self._value: float = file.read_value(key)[0]

    def set(self, value: float) -> None:
        self._value = value
        self._file.write_value(self._key, value, 0.0)

    def add(self, amount: float) -> None:
        self.set(self._value + amount)


class Counter:
    """Counts up."""

    def __init__(self, store: Store, name: str, labels: tuple[str, ...]) -> None:
        self._at = (store, name, labels)
        self._number: Number | None = None

    def inc(self, amount: float = 1) -> None:
        if self._number is None:
            store, name, labels = self._at
            self._number = store.number(SUMS, name, labels)
        self._number.add(amount)


class Gauge:
    """How much there is now; several processes add up."""

    def __init__(self, store: Store, name: str, labels: tuple[str, ...]) -> None:
        self._at = (store, name, labels)
        self._number: Number | None = None

    def set(self, value: float) -> None:
        if self._number is None:
            store, name, labels = self._at
            self._number = store.number(GAUGES, name, labels)
        self._number.set(value)


class Distribution:
    """A histogram with these upper bounds, or a summary of every value if there are none.

    `known`: whoever reads knows the bounds; otherwise all of them are written with the first sample.
    """

    def __init__(
        self, store: Store, name: str, labels: tuple[str, ...], bounds: tuple[float, ...], known: bool = True
    ) -> None:
        self._at = (store, name, labels)
        self._bounds = (*bounds, inf) if bounds else ()
        self._known = known
        self._numbers: dict[Any, Number] = {}

    def observe(self, value: float) -> None:
        self._add("sum", value)
        self._add(self._bounds[bisect_left(self._bounds, value)] if self._bounds else value, 1)

    def observe_all(self, values: Sequence[float]) -> None:
        """The same for many at once: what falls into the same bucket is written once."""
        if not values:
            return
        self._add("sum", sum(values))
        bounds = self._bounds
        for part, count in Tally([bounds[bisect_left(bounds, v)] for v in values] if bounds else values).items():
            self._add(part, count)

    def _add(self, part: Any, amount: float) -> None:
        if not self._known:
            self._known = True
            for bound in self._bounds:
                self._add(bound, 0)
        number = self._numbers.get(part)
        if number is None:
            store, name, labels = self._at
            number = self._numbers[part] = store.number(SUMS, name, labels, part)
        number.add(amount)


def total(directory: Path) -> dict[str, dict[tuple[str, ...], Parts]]:
    """series -> label values -> parts, added up over all processes that have written to this directory."""
    series: dict[str, dict[tuple[str, ...], Parts]] = {}
    for path in sorted(directory.glob("*.db")):
        for (name, labels, part), value in _numbers(path):
            parts = series.setdefault(name, {}).setdefault(labels, {})
            parts[part] = parts.get(part, 0.0) + value
    return series


def _numbers(path: Path) -> Iterator[tuple[tuple[str, tuple[str, ...], Any], float]]:
    """What is in one file; its process may be writing, or have died while it wrote."""
    try:
        if path.stat().st_size == 0:
            return  # just made
        for key, value, _, _ in MmapedDict.read_all_values_from_file(str(path)):  # type: ignore[no-untyped-call]
            yield _parse(key), value
    except FileNotFoundError:
        return  # a gauge of a process that has just ended
    except (OSError, RuntimeError, ValueError, TypeError, struct.error) as error:
        log.warning("The rest of %s cannot be read and is left out of the metrics: %s", path, error)


@lru_cache(maxsize=1 << 14)
def _parse(key: str) -> tuple[str, tuple[str, ...], Any]:
    name, labels, part = json.loads(key)
    return name, tuple(labels), part


def forget(directory: Path, pid: int) -> None:
    """Drops the gauges of a process that has ended; what it has counted stays."""
    (directory / f"{GAUGES}_{pid}.db").unlink(missing_ok=True)


def forget_dead(directory: Path) -> None:
    """The same for all processes that have ended while nobody looked: their supervisor was killed."""
    for path in directory.glob(f"{GAUGES}_*.db"):
        pid = path.stem.rpartition("_")[2]
        if pid.isdecimal() and not _alive(int(pid)):
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def clear(directory: Path) -> None:
    """Starts from zero: a new deployment in an old run directory."""
    for path in directory.glob("*.db"):
        path.unlink(missing_ok=True)
