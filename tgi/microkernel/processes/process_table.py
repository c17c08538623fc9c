"""The processes of a run directory and their load, as `tgi ps` and `tgi top` show them."""

import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tgi.microkernel.host import rundir
from tgi.microkernel.observability import metric_store
from tgi.microkernel.observability.metric_store import AllSeries, Parts
from tgi.microkernel.processes.process import read_progress

# Rates and CPU time are those of the latest seconds.
WINDOW_SECONDS = 5.0
# Of these roles the first one that runs here knows which model a deployment serves: a scheduler may not.
INFORMED_ROLES = ("api", "tokenizer", "worker")


class ProcessRow(NamedTuple):
    """A process. Ages are in seconds; None where there is nothing whose age it would be."""

    name: str
    pid: int
    state: str
    stage: str
    percent: int
    boot: str
    memory_bytes: int
    beat_age: float | None
    progress_age: float | None  # since it has finished a part of its work
    work: str
    cpu_percent: float | None = None  # of one core; None: not measured yet
    model: str = ""  # that it serves; "": not known


class Load(NamedTuple):
    """What the processes have measured together; 0 what none of them measures. Rates are those of the latest seconds,
    tokens are counted since the start."""

    running: int = 0
    queued: int = 0
    kv_pages_used: int = 0
    kv_pages_free: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    tokens_per_second: float = 0.0
    first_token_ms: float | None = None  # mean time to the first token; None: there was none
    watts: float | None = None  # of the devices that the workers measure; None: of none
    joules_per_token: float | None = None  # None: not measured, or no tokens


class _Sample(NamedTuple):
    """Counters at one time."""

    time: float
    cpu_seconds: dict[int, float]  # by pid
    tokens: float
    first_tokens: float
    first_token_seconds: float
    joules: float


class Deployment:
    """The processes of a run directory."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.processes: list[ProcessRow] = []
        self.served: dict[str, str] = {"model": "", "url": "", "version": ""}
        self.series: AllSeries = {}  # what all processes have measured
        self._load = Load()
        self._sampler = Sampler(run)

    def refresh(self) -> bool:
        """Looks at the processes again. Returns False if none runs."""
        self.processes, self._load, self.series = self._sampler.sample()
        self.served = _served(rundir.read_states(self.run))
        return bool(self.processes)

    def rows(self) -> list[dict[str, Any]]:
        """One row per process, as in `tgi ps --json`."""
        return [
            {
                "run": str(self.run), "name": row.name, "pid": row.pid, "state": row.state, "stage": row.stage,
                "percent": row.percent, "boot": row.boot, "memory_mb": round(row.memory_bytes / 2**20, 1),
                "cpu": _rounded(row.cpu_percent), "beat_age": _rounded(row.beat_age),
                "progress_age": _rounded(row.progress_age), "work": row.work, **self.served,
                "model": row.model or self.served["model"],
            }
            for row in self.processes
        ]  # fmt: skip

    def load(self) -> dict[str, Any]:
        """The load of all processes together; None for what cannot be told."""
        load = self._load
        pages = load.kv_pages_used + load.kv_pages_free
        hit_rate = min(1.0, load.cached_tokens / load.prompt_tokens) if load.prompt_tokens else None
        return {
            "running": load.running,
            "queued": load.queued,
            "tokens_per_second": round(load.tokens_per_second, 1),
            "first_token_ms": _rounded(load.first_token_ms),
            "kv_cache_used": _rounded(load.kv_pages_used / pages if pages else None, 3),
            "prefix_hit_rate": _rounded(hit_rate, 3),
            "watts": _rounded(load.watts),
            "joules_per_token": _rounded(load.joules_per_token, 3),
        }


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def _served(states: list[rundir.ProcessState]) -> dict[str, str]:
    """Model, addresses and version of a deployment; "" for what is not known. During a reload those of the model that
    serves still."""
    for role in INFORMED_ROLES:
        found = [
            state for state in states if state.role == role and state.state != "draining" and "model" in state.facts
        ]
        found = [state for state in found if state.state == "ready"] or found
        if found:
            urls = dict.fromkeys(str(state.facts["url"]) for state in found if "url" in state.facts)
            facts = found[0].facts
            return {"model": str(facts["model"]), "url": ", ".join(urls), "version": str(facts.get("version", ""))}
    return {"model": "", "url": "", "version": ""}


class Sampler:
    """Samples one run directory. Rates and CPU time need two samples."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._samples: deque[_Sample] = deque()

    def sample(self) -> tuple[list[ProcessRow], Load, AllSeries]:
        """The processes now, their load, and all that they have measured. There are none if no supervisor runs."""
        cpu_seconds: dict[int, float] = {}
        rows = [row for row in self._rows(cpu_seconds) if row is not None]
        series = metric_store.sum_over_processes(self._run / "metrics")

        def parts(name: str) -> Parts:
            return series.get(name, {}).get((), {})

        def gauge(name: str) -> int:
            return int(parts(name).get(None, 0))

        first_tokens, first_token_seconds = _count_and_sum(parts("tgi_time_to_first_token_duration"))
        later_tokens, _ = _count_and_sum(parts("tgi_inter_token_duration"))
        energy = series.get("tgi_energy_joules", {})
        joules = sum(one.get(None, 0.0) for one in energy.values())
        tokens = first_tokens + later_tokens
        sample = _Sample(time.monotonic(), cpu_seconds, tokens, first_tokens, first_token_seconds, joules)
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.time - self._samples[0].time > WINDOW_SECONDS:
            self._samples.popleft()
        before = self._samples[0]
        seconds, answered = sample.time - before.time, sample.first_tokens - before.first_tokens
        taken, made = max(0.0, joules - before.joules), tokens - before.tokens
        load = Load(
            running=gauge("tgi_batch_current_size"),
            queued=gauge("tgi_queue_size"),
            kv_pages_used=gauge("tgi_kv_cache_pages_used"),
            kv_pages_free=gauge("tgi_kv_cache_pages_free"),
            prompt_tokens=int(_count_and_sum(parts("tgi_request_input_length"))[1]),
            cached_tokens=gauge("tgi_prefix_cache_hit_tokens"),
            tokens_per_second=max(0.0, sample.tokens - before.tokens) / seconds if seconds else 0.0,
            first_token_ms=1000 * (sample.first_token_seconds - before.first_token_seconds) / answered
            if answered > 0
            else None,
            watts=taken / seconds if energy and seconds else None,
            joules_per_token=taken / made if energy and made > 0 else None,
        )
        shares = [
            row._replace(cpu_percent=100 * max(0.0, cpu_seconds[row.pid] - before.cpu_seconds[row.pid]) / seconds)
            if seconds and row.pid in before.cpu_seconds
            else row
            for row in rows
        ]
        return shares, load, series

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
                row._replace(model=str(one.facts.get("model") or ""))
                for one in rundir.read_states(self._run)
                if (row := self._row(one.name, one.pid, one.state, one.stage, one.boot, one.percent, cpu_seconds))
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
        beat_age, progress_age, work = None, None, ""
        if progress is not None:
            beat_age, progress_age, work = progress.silent_seconds, progress.progress_age, progress.work
        return ProcessRow(name, pid, state, stage, percent, boot, memory, beat_age, progress_age, work)


def _count_and_sum(parts: Parts) -> tuple[float, float]:
    """Of a histogram."""
    return sum(value for part, value in parts.items() if part != "sum"), parts.get("sum", 0.0)
