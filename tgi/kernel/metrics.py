"""Every metric series, in one table, shared by all processes of a host, and the text that /metrics answers.

prometheus_client's multiprocess mode is the store: each process writes memory-mapped files into the run directory.
Its exposition is not used: TGI's dashboards know counters without `_total`, and see a series only from its first
sample on. So a series is made on first use (`metrics.tgi_queue_size.set(3)`) and rendered here.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DURATION = tuple(0.00015 * 1.5**k for k in range(35))  # seconds
BATCH = tuple(float(n) for n in range(1, 1025))


class Series(NamedTuple):
    """One row of the table. `buckets` is a tuple of upper bounds, or "input" / "total": a hundredth of the longest
    prompt / request times 1 to 100, known once the worker has measured."""

    kind: str  # counter, gauge, histogram
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | str = ()


SERIES: dict[str, Series] = {
    # TGI's own
    "tgi_request_count": Series("counter", "Total number of requests"),
    "tgi_request_success": Series("counter", "Number of successful requests"),
    "tgi_request_failure": Series("counter", "Number of failed requests", ("err",)),
    "tgi_request_duration": Series("histogram", "Whole request, in seconds", (), DURATION),
    "tgi_request_validation_duration": Series("histogram", "Arrival to queued, in seconds", (), DURATION),
    "tgi_request_queue_duration": Series("histogram", "Queued to batched, in seconds", (), DURATION),
    "tgi_request_inference_duration": Series("histogram", "Batched to done, in seconds", (), DURATION),
    "tgi_request_mean_time_per_token_duration": Series("histogram", "Inference per token, in seconds", (), DURATION),
    "tgi_request_generated_tokens": Series("histogram", "Tokens generated per request", (), "total"),
    "tgi_request_input_length": Series("histogram", "Prompt tokens per request", (), "input"),
    "tgi_request_max_new_tokens": Series("histogram", "Tokens asked for per request", (), "total"),
    "tgi_queue_size": Series("gauge", "Current queue size"),
    "tgi_batch_current_size": Series("gauge", "Current batch size"),
    "tgi_batch_current_max_tokens": Series("gauge", "Tokens of KV cache held by the running batch"),
    "tgi_batch_next_size": Series("histogram", "Requests taken from the queue at once", (), BATCH),
    "tgi_batch_concat": Series("counter", "New requests that joined a running batch", ("reason",)),
    "tgi_batch_inference_count": Series("counter", "Steps started", ("method",)),
    "tgi_batch_inference_success": Series("counter", "Steps finished", ("method",)),
    "tgi_batch_inference_failure": Series("counter", "Steps failed", ("method",)),
    "tgi_batch_inference_duration": Series("histogram", "Whole step, in seconds", ("method",), DURATION),
    "tgi_batch_forward_duration": Series("histogram", "Forward and sampling, in seconds", ("method",), DURATION),
    "tgi_batch_decode_duration": Series("histogram", "Ids to text, in seconds", ("method",), DURATION),
    "tgi_batch_filter_duration": Series("histogram", "Handling a step's result, in seconds", ("method",), DURATION),
    "tgi_batch_max_total_tokens": Series("gauge", "Size of the KV cache in tokens"),
    # This server's additions
    "tgi_time_to_first_token_duration": Series("histogram", "Arrival to first token, in seconds", (), DURATION),
    "tgi_inter_token_duration": Series("histogram", "Between two tokens of a stream, in seconds", (), DURATION),
    "tgi_resumed_tokens": Series("counter", "Generated ids that came back as prefill after a loss or a preemption"),
    "tgi_preemptions": Series("counter", "Requests that gave up their pages to others"),
    "tgi_prefix_cache_hit_tokens": Series("counter", "Prompt tokens found in the prefix cache"),
    "tgi_pages_used": Series("gauge", "KV pages held by running requests"),
    "tgi_pages_free": Series("gauge", "KV pages free or holding reusable prefixes"),
    "tgi_worker_losses": Series("counter", "Times that the worker was lost"),
    "tgi_process_restarts": Series("counter", "Processes replaced by the supervisor", ("role",)),
}


class _Store:
    """The series made so far in this process."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.spans: dict[str, int] = {}


_store = _Store()


def use(directory: Path) -> None:
    """Where this process writes its samples. To be called before the first one."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)


def limits(max_input_tokens: int, max_total_tokens: int) -> None:
    """What the buckets "input" and "total" are hundredths of."""
    _store.spans = {"input": max_input_tokens, "total": max_total_tokens}


def __getattr__(name: str) -> Any:
    if name not in SERIES:
        raise AttributeError(name)
    if name not in _store.made:
        _store.made[name] = _make(name, SERIES[name])
    return _store.made[name]


def _make(name: str, series: Series) -> Any:
    # Imported here: the library decides at import, from the environment that use() has set, where samples go.
    import prometheus_client

    if series.kind == "counter":
        return prometheus_client.Counter(name, series.help, series.labels)
    if series.kind == "gauge":
        return prometheus_client.Gauge(name, series.help, series.labels, multiprocess_mode="livesum")
    bounds = series.buckets
    if isinstance(bounds, str):
        bounds = tuple(_store.spans[bounds] / 100 * k for k in range(1, 101))
    return prometheus_client.Histogram(name, series.help, series.labels, buckets=bounds)


def forget(directory: Path, pid: int) -> None:
    """Drops the gauges of a process that has ended; its counters stay in the totals."""
    for path in directory.glob(f"gauge_live*_{pid}.db"):
        path.unlink(missing_ok=True)


def forget_dead(directory: Path) -> None:
    """The same for all processes that have ended while nobody looked: their supervisor was killed."""
    for path in directory.glob("gauge_live*_*.db"):
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


def render(directory: Path | None = None) -> str:
    """All samples of all processes of this host, in Prometheus text format 0.0.4."""
    from prometheus_client.multiprocess import MultiProcessCollector

    where = str(directory or os.environ["PROMETHEUS_MULTIPROC_DIR"])
    files = [str(path) for path in Path(where).glob("*.db")]
    merged = MultiProcessCollector.merge(files, accumulate=True)  # type: ignore[no-untyped-call]
    families = {family.name: family for family in merged}
    return "".join(line for name in SERIES if name in families for line in _family(name, families[name].samples))


def _family(name: str, samples: list[Any]) -> Iterator[str]:
    series = SERIES[name]
    yield f"# HELP {name} {series.help}\n# TYPE {name} {series.kind}\n"
    for sample in samples:
        title = sample.name.removesuffix("_total") if series.kind == "counter" else sample.name
        labels = ",".join(f'{key}="{_escape(value)}"' for key, value in sample.labels.items())
        yield f"{title}{{{labels}}} {_number(sample.value)}\n" if labels else f"{title} {_number(sample.value)}\n"
    yield "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
