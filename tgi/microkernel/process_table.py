"""The processes of a host and their load, as `tgi ps` and `tgi top` show them and as other hosts are told."""

import logging
import socket
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import psutil

from tgi.microkernel import host_reports, metric_store, rundir
from tgi.microkernel.metric_store import Parts
from tgi.microkernel.process import read_progress
from tgi.microkernel.protocol import HostLoad, HostReport, ProcessRow

log = logging.getLogger(__name__)

# Rates and CPU time are those of the latest seconds.
WINDOW_SECONDS = 5.0


class _Sample(NamedTuple):
    """Counters at one time."""

    time: float
    cpu_seconds: dict[int, float]  # by pid
    tokens: float
    first_tokens: float
    first_token_seconds: float


class HostSampler:
    """Makes the reports of one run directory. Rates and CPU time need two samples."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._site = rundir.site_id(run)
        self._samples: deque[_Sample] = deque()

    def sample(self) -> HostReport:
        """The present report. It has no processes if no supervisor runs."""
        cpu_seconds: dict[int, float] = {}
        rows = [row for row in self._rows(cpu_seconds) if row is not None]
        series = metric_store.sum_over_processes(self._run / "metrics")

        def parts(name: str) -> Parts:
            return series.get(name, {}).get((), {})

        def gauge(name: str) -> int:
            return int(parts(name).get(None, 0))

        first_tokens, first_token_seconds = _count_and_sum(parts("tgi_time_to_first_token_duration"))
        later_tokens, _ = _count_and_sum(parts("tgi_inter_token_duration"))
        sample = _Sample(time.monotonic(), cpu_seconds, first_tokens + later_tokens, first_tokens, first_token_seconds)
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.time - self._samples[0].time > WINDOW_SECONDS:
            self._samples.popleft()
        before = self._samples[0]
        seconds, answered = sample.time - before.time, sample.first_tokens - before.first_tokens
        load = HostLoad(
            running=gauge("tgi_batch_current_size"),
            queued=gauge("tgi_queue_size"),
            kv_pages_used=gauge("tgi_kv_cache_pages_used"),
            kv_pages_free=gauge("tgi_kv_cache_pages_free"),
            prompt_tokens=int(_count_and_sum(parts("tgi_request_input_length"))[1]),
            cached_tokens=gauge("tgi_prefix_cache_hit_tokens"),
            tokens_per_second=max(0.0, sample.tokens - before.tokens) / seconds if seconds else 0.0,
            first_token_ms=1000 * (sample.first_token_seconds - before.first_token_seconds) / answered
            if answered > 0
            else -1.0,
        )
        shares = [
            row._replace(cpu_percent=100 * max(0.0, cpu_seconds[row.pid] - before.cpu_seconds[row.pid]) / seconds)
            if seconds and row.pid in before.cpu_seconds
            else row
            for row in rows
        ]
        report = HostReport(self._site, socket.gethostname(), 0, shares, load, made_ms=int(1000 * sample.time))
        return host_reports.cleaned(report) or report

    def _rows(self, cpu_seconds: dict[int, float]) -> list[ProcessRow | None]:
        """One row per running process, supervisors first. Adds their CPU seconds."""
        roles: dict[int, dict[str, None]] = {}  # of each supervisor, an ordered set
        for claim, pid in rundir.lock_holders(self._run).items():
            roles.setdefault(pid, {})[rundir.role_of(claim)] = None
        rows = [
            self._row("supervisor", pid, "running", "+".join(names), "", 100, cpu_seconds)
            for pid, names in roles.items()
        ]
        if roles:
            rows += [
                self._row(one.name, one.pid, one.state, one.stage, one.boot, one.percent, cpu_seconds)
                for one in rundir.read_states(self._run)
            ]
        return rows

    def _row(
        self, name: str, pid: int, state: str, stage: str, boot: str, percent: int, cpu_seconds: dict[int, float]
    ) -> ProcessRow | None:
        """None if the process has ended."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                memory = process.memory_info().rss
                cpu_seconds[pid] = sum(process.cpu_times()[:2])
        except (psutil.Error, OverflowError, ValueError):
            return None
        progress = read_progress(self._run, name)
        beat_age, progress_age, work = -1, -1, ""
        if progress is not None:
            beat_age, work = int(1000 * progress.silent_seconds), progress.work
            progress_age = -1 if progress.progress_age is None else int(1000 * progress.progress_age)
        return ProcessRow(name, pid, state, stage, percent, boot, memory, beat_age, progress_age, work, -1.0)


def _count_and_sum(parts: Parts) -> tuple[float, float]:
    """Of a histogram."""
    return sum(value for part, value in parts.items() if part != "sum"), parts.get("sum", 0.0)


class ReportPublisher:
    """Writes the report of this host for the processes with links to other hosts, which send it. For a supervisor."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._sampler = HostSampler(run)
        self._due_at = 0.0

    def publish_if_due(self) -> None:
        """To be called at least every second."""
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + host_reports.PUBLISH_SECONDS
        try:
            report = self._sampler.sample()
        except OSError as error:  # the run directory was removed, or no file can be opened
            log.debug("no report for other hosts: %s", error)
            return
        host_reports.write_report(self._run, host_reports.KnownReport(report, time.monotonic()))
        host_reports.remove_expired_files(self._run)
