"""What the hosts of a deployment tell each other about their processes, so that `tgi ps` shows all of them on each.

The supervisor of a host with links to others writes a HostReport of its run directory every two seconds. Each process
with such a link sends that on, and what it has received on its other links. Received reports are written to the run
directory, too, where the other processes of the host find them. A report expires by its age, since clocks of different
hosts are not compared. Of two reports of a host the newer one is known by the clock of that host, so that none is
passed on twice where links form a circle.
"""

import contextlib
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import ProtocolError
from tgi.microkernel.link import Link
from tgi.microkernel.protocol import HostReport, HostReports, ProcessRow, decode, encode

log = logging.getLogger(__name__)

PUBLISH_SECONDS = 2.0
# A host without news for this long is not shown and not passed on.
EXPIRY_SECONDS = 10.0
# Bounds of what a peer can have this process keep, write and send: hosts, and processes of each.
MAX_HOSTS, MAX_PROCESSES = 64, 256
MAX_TEXT = 120
_LARGEST_NUMBER = 1 << 53
_SITE = re.compile(r"[0-9a-f]{16}")
_CREATED = struct.Struct("<d")  # of a file: when its report was made, by time.monotonic; the report follows


class KnownReport(NamedTuple):
    """A report, and when it was made by this host's time.monotonic."""

    report: HostReport
    created: float

    def at(self, now: float) -> HostReport:
        """The report with its present age."""
        return self.report._replace(age_ms=int(1000 * max(0.0, now - self.created)))

    def has_expired(self, now: float) -> bool:
        """Whether it is too old, or was made before this host was started."""
        return not 0 <= now - self.created <= EXPIRY_SECONDS


# --- files ------------------------------------------------------------------------------------------------------------


def write_report(run: Path, known: KnownReport) -> None:
    """Replaces the file of a host in a run directory atomically. A full disk must not end the process."""
    path = _path(run, known.report.site)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_bytes(_CREATED.pack(known.created) + encode(HostReports([known.report])))
        draft.replace(path)
    except OSError as error:
        log.debug("cannot write %s, so `tgi ps` lacks a host: %s", path, error.strerror)


def read_report(run: Path, site: str) -> KnownReport | None:
    """The report of a host; None if there is none, or it has expired."""
    try:
        data = _path(run, site).read_bytes()
        (created,), content = _CREATED.unpack_from(data), decode(data[_CREATED.size :])
    except (OSError, struct.error, ProtocolError):
        return None
    if not isinstance(content, HostReports) or not content.reports:
        return None
    known = KnownReport(content.reports[0], created)
    return None if known.has_expired(time.monotonic()) else known


def read_other_hosts(run: Path, own_site: str) -> list[HostReport]:
    """The reports of all other hosts, with their present age, by host name."""
    with contextlib.suppress(OSError):
        sites = [path.name for path in (run / "hosts").iterdir() if _SITE.fullmatch(path.name)]
        found = [read_report(run, site) for site in sites if site != own_site]
        now = time.monotonic()
        reports = [known.at(now) for known in found if known is not None]
        return sorted(reports, key=lambda report: (report.host, report.site))
    return []


def remove_expired_files(run: Path) -> None:
    """Removes the files of hosts that are gone, and what killed processes have left."""
    with contextlib.suppress(OSError):
        for path in (run / "hosts").iterdir():
            if time.time() - path.stat().st_mtime > 2 * EXPIRY_SECONDS:
                path.unlink(missing_ok=True)


def _path(run: Path, site: str) -> Path:
    return run / "hosts" / site


# --- between hosts ----------------------------------------------------------------------------------------------------


class ReportExchange:
    """The reports that a process knows. To be called with each beat, for its links to other hosts, by one thread."""

    def __init__(self, run: Path, site: str) -> None:
        self._run = run
        self._site = site
        self._known: dict[str, tuple[KnownReport, Link | None]] = {}  # by site, with the link that has brought it
        self._changed_at: dict[str, int] = {}  # of the file of each site

    def exchange(self, links: Iterable[Link]) -> None:
        """Takes what the links have received, and queues on each what has changed since the last call."""
        between_hosts = [link for link in links if link.is_between_hosts]
        if not between_hosts:
            return
        now = time.monotonic()
        changed = self._read_files()
        for link in between_hosts:
            for message in link.take_host_reports():
                for report in message.reports[:MAX_HOSTS]:
                    changed |= self._accept(report, link, now)
        for site in [site for site, (known, _) in self._known.items() if known.has_expired(now)]:
            del self._known[site]
            if read_report(self._run, site) is None:  # no other process has written a newer one
                with contextlib.suppress(OSError):
                    _path(self._run, site).unlink()
        for link in between_hosts:
            # Other peers of the link that has brought a report may not have it.
            news = [
                known.at(now)
                for site, (known, source) in self._known.items()
                if site in changed and (source is not link or len(link.peers) > 1)
            ]
            if news:
                link.send_host_reports(HostReports(news))

    def _read_files(self) -> set[str]:
        """Takes what the supervisor has written, and other processes of this host that have received news. Returns the
        sites of reports that are newer than those known."""
        changed, times = set(), {}
        with contextlib.suppress(OSError), os.scandir(_path(self._run, "")) as entries:
            for entry in entries:
                if _SITE.fullmatch(entry.name):
                    with contextlib.suppress(OSError):  # it has been removed
                        times[entry.name] = entry.stat().st_mtime_ns
        for site, changed_at in times.items():
            if changed_at == self._changed_at.get(site) or (known := read_report(self._run, site)) is None:
                continue
            if site == self._site or self._is_news(known.report):
                self._known[site] = known, None
                changed.add(site)
        self._changed_at = times
        return changed

    def _is_news(self, report: HostReport) -> bool:
        """Whether the report of another host is to be kept."""
        if (before := self._known.get(report.site)) is not None:
            return report.made_ms > before[0].report.made_ms
        return len(self._known) < MAX_HOSTS

    def _accept(self, received: HostReport, link: Link, now: float) -> set[str]:
        """Keeps a report if it is newer than the one that is known. Returns its site if so."""
        site = received.site
        if site == self._site or not self._is_news(received) or (report := cleaned(received)) is None:
            return set()
        known = KnownReport(report, now - report.age_ms / 1000)
        self._known[site] = known, link
        write_report(self._run, known)
        return {site}


def cleaned(report: HostReport) -> HostReport | None:
    """The report within the bounds of what is kept and shown: no long texts, nothing that controls a terminal, no
    numbers that JSON lacks. None if it cannot be one of a host, or has expired."""
    if not _SITE.fullmatch(report.site) or not 0 <= report.age_ms <= 1000 * EXPIRY_SECONDS:
        return None
    if not 0 <= report.made_ms <= _LARGEST_NUMBER:
        return None
    rows = [ProcessRow(*map(_cleaned, row)) for row in report.processes[:MAX_PROCESSES]]
    load = type(report.load)(*map(_cleaned, report.load))
    return report._replace(host=_cleaned(report.host), processes=rows, load=load)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) <= MAX_TEXT and value.isprintable():
            return value
        return "".join(one if one.isprintable() else "?" for one in value[:MAX_TEXT])
    if -1 <= value <= _LARGEST_NUMBER:
        return value
    return type(value)(0)
