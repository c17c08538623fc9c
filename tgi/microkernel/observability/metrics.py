"""Metrics: the table of all series, their recording, and the text of GET /metrics.

To add a metric: a row in OWN_SERIES, a call like those below in the role that measures it, and docs/metrics.md from
scripts/metrics_page.py. `metrics.NAME` is a series:

    metrics.tgi_queue_size.set(3)
    metrics.tgi_request_failure.labels(err="validation").inc()
    metrics.tgi_request_duration.observe(0.5)

Each process writes its samples to files in the run directory (metric_store.py), and `render` adds up those of all
processes of the host. The text is not prometheus_client's, since TGI's counters have no suffix `_total` and TGI's
series appear with their first sample. Our own counters and histograms are 0 from the start: Prometheus' `increase` does
not see the first sample of a series.
"""

import socket
import threading
from collections.abc import Iterator
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError
from tgi.microkernel.messages.protocol import ROLES
from tgi.microkernel.observability import metric_store
from tgi.microkernel.observability.metric_store import (
    MetricStore,
    Parts,
    fold_dead_processes,
    fold_ended_processes,
    remove_all_samples,
)

__all__ = [
    "fold_dead_processes",
    "fold_ended_processes",
    "remove_all_samples",
    "render",
    "set_length_limits",
    "use_directory",
]


# --- the table of series ---

DURATION = tuple(0.00015 * 1.5**k for k in range(35))  # seconds

BATCH = tuple(float(n) for n in range(1, 1025))

# Interval at which an ObservationBuffer is due.
FLUSH_SECONDS = 1.0
QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)  # of summaries


class Series(NamedTuple):
    """One row of the table. `buckets` are the upper bounds of a histogram, or "input" / "total": 100 equal buckets up
    to the maximum of prompt / total tokens, known when the worker has measured its limits. `values` are those of each
    label of an own counter or histogram; without them it appears with its first sample."""

    kind: str  # counter, gauge, histogram, summary
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | str = ()
    values: tuple[tuple[str, ...], ...] = ()


TGI_SERIES: dict[str, Series] = {
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
    "tgi_request_skipped_tokens": Series("summary", "Tokens beyond the first that one step gave to one request"),
    "tgi_queue_size": Series("gauge", "Current queue size"),
    "tgi_batch_current_size": Series("gauge", "Current batch size"),
    "tgi_batch_current_max_tokens": Series("gauge", "Tokens of KV cache held by the running batch"),
    "tgi_batch_next_size": Series("histogram", "Requests taken from the queue at once", (), BATCH),
    "tgi_batch_concat": Series("counter", "Steps in which new requests joined running ones", ("reason",)),
    "tgi_batch_inference_count": Series("counter", "Steps started", ("method",)),
    "tgi_batch_inference_success": Series("counter", "Steps finished", ("method",)),
    "tgi_batch_inference_failure": Series("counter", "Steps failed", ("method",)),
    "tgi_batch_inference_duration": Series("histogram", "Whole step, in seconds", ("method",), DURATION),
    "tgi_batch_forward_duration": Series("histogram", "Forward and sampling, in seconds", ("method",), DURATION),
    "tgi_batch_decode_duration": Series("histogram", "Ids to text, in seconds", ("method",), DURATION),
    "tgi_batch_filter_duration": Series("histogram", "Handling a step's result, in seconds", ("method",), DURATION),
    "tgi_batch_concat_duration": Series(
        "histogram", "Planning a step in which new requests join running ones, in seconds", ("method",), DURATION
    ),
    "tgi_batch_max_total_tokens": Series("gauge", "Size of the KV cache in tokens"),
}

OWN_SERIES: dict[str, Series] = {
    "tgi_generation_count": Series("counter", "Generations started: one per prompt and choice of a request"),
    "tgi_generation_success": Series("counter", "Generations that delivered all tokens"),
    "tgi_time_to_first_token_duration": Series("histogram", "Arrival to first token, in seconds", (), DURATION),
    "tgi_inter_token_duration": Series(
        "histogram", "Time between two tokens of a generation, in seconds", (), DURATION
    ),
    "tgi_recomputed_tokens": Series(
        "counter", "Generated tokens recomputed as prefill after a lost process or a preemption"
    ),
    "tgi_preemptions": Series("counter", "Requests whose KV pages were freed for other requests"),
    "tgi_draft_tokens": Series("counter", "Draft tokens verified"),
    "tgi_accepted_draft_tokens": Series(
        "counter", "Draft tokens accepted; divided by the verified ones: the acceptance rate"
    ),
    "tgi_prefix_cache_hit_tokens": Series("counter", "Prompt tokens found in the prefix cache"),
    "tgi_kv_cache_pages_used": Series("gauge", "KV pages held by running requests"),
    "tgi_kv_cache_pages_free": Series("gauge", "KV pages that are free or hold cached prefixes"),
    "tgi_encoding_jobs_dropped": Series(
        "counter",
        "Texts and grammars that were dropped before a tokenizer began with them",
        ("cause",),
        values=(("cancelled", "overloaded"),),
    ),
    "tgi_pooled_inputs": Series("counter", "Inputs whose vector was delivered: of embeddings, scores and classes"),
    "tgi_parked_requests": Series("counter", "Times that a stream was parked, since its client did not read"),
    "tgi_adapters_loaded": Series("gauge", "LoRA adapters that requests may name"),
    "tgi_last_progress_timestamp_seconds": Series(
        "gauge", "When a process last had no work, or finished a part of it (Unix time)", ("process",)
    ),
    "tgi_energy_joules": Series(
        "counter",
        "Energy that the devices of the workers have taken since these were ready: GPUs, processor packages",
        ("source",),
    ),
    "tgi_worker_losses": Series("counter", "Times that the worker process was lost"),
    "tgi_quarantined_requests": Series("counter", "Requests put into quarantine because they crash processes"),
    "tgi_model_replicas": Series("gauge", "Schedulers with a worker that is ready", ("model",)),
    "tgi_process_restarts": Series("counter", "Processes restarted by the supervisor", ("role",), values=(ROLES,)),
}

SERIES = TGI_SERIES | OWN_SERIES


# --- recording samples ---


class _ProcessMetrics:
    """The store of this process and the metrics it has used so far."""

    def __init__(self) -> None:
        self.store: MetricStore | None = None
        self.metrics: dict[tuple[str, tuple[str, ...]], Any] = {}
        self.length_limits: dict[str, int] = {}


_process = _ProcessMetrics()


def use_directory(directory: Path) -> None:
    """Sets the directory for the samples of this process."""
    _process.store = MetricStore(directory)
    _process.metrics.clear()
    for name in SERIES:
        globals().pop(name, None)  # see __getattr__


def set_length_limits(max_input_tokens: int, max_total_tokens: int) -> None:
    """Sets the maxima of the buckets "input" and "total"."""
    _process.length_limits = {"input": max_input_tokens, "total": max_total_tokens}


class _LabelledSeries:
    """A series with labels, whose values are still to be given."""

    def __init__(self, name: str, keys: tuple[str, ...]) -> None:
        self._name = name
        self._keys = keys

    def labels(self, **labels: str) -> Any:
        """The counter, gauge or distribution with these label values. Raises ValueError for other label names."""
        if labels.keys() != set(self._keys):
            raise ValueError(f"{self._name} has the labels {self._keys}, not {tuple(labels)}")
        return _metric(self._name, tuple(labels[key] for key in self._keys))


def __getattr__(name: str) -> Any:
    if name not in SERIES:
        raise AttributeError(name)
    keys = SERIES[name].labels
    globals()[name] = series = _LabelledSeries(name, keys) if keys else _metric(name, ())
    return series  # the next access finds it without a call


def _metric(name: str, labels: tuple[str, ...]) -> Any:
    if (name, labels) not in _process.metrics:
        if _process.store is None:
            raise RuntimeError(f"a sample of {name} before metrics.use_directory()")
        series = SERIES[name]
        if series.kind == "counter":
            metric: Any = _process.store.number(metric_store.SUMS, name, labels)
        elif series.kind == "gauge":
            metric = _process.store.number(metric_store.GAUGES, name, labels)
        else:
            metric = metric_store.Distribution(
                _process.store, name, labels, _bounds(series), write_bounds=isinstance(series.buckets, str)
            )
        _process.metrics[name, labels] = metric
    return _process.metrics[name, labels]


def _bounds(series: Series) -> tuple[float, ...]:
    if isinstance(series.buckets, str):
        return tuple(_process.length_limits[series.buckets] / 100 * k for k in range(1, 101))
    return series.buckets


class ObservationBuffer:
    """Collects measurements for hot loops, where a list append is affordable and a write to the metric files is not.

    buffer = metrics.ObservationBuffer()
    seconds = buffer.values("tgi_batch_decode_duration", method="decode")
    ...
    seconds.append(0.001)
    if now > buffer.due_at:
        buffer.flush(now)
    """

    def __init__(self) -> None:
        self.due_at = 0.0  # by the caller's clock
        self._values: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def values(self, name: str, **labels: str) -> list[float]:
        """The buffered measurements of a histogram or summary. The same list for the life of the buffer."""
        return self._values.setdefault((name, tuple(labels[key] for key in SERIES[name].labels)), [])

    def flush(self, now: float | None = None) -> None:
        """Writes all measurements, and is due again FLUSH_SECONDS after `now`, if given."""
        if now is not None:
            self.due_at = now + FLUSH_SECONDS
        for (name, labels), values in self._values.items():
            if values:
                _metric(name, labels).observe_all(values)
                values.clear()


# --- the Prometheus text format ---


def render(directory: Path | None = None) -> str:
    """The samples of all processes of this host, in Prometheus text format 0.0.4."""
    if directory is None:
        assert _process.store is not None
        directory = _process.store.directory
    found = metric_store.sum_over_processes(directory)
    for name, series in OWN_SERIES.items():
        if series.kind != "gauge" and len(series.values) == len(series.labels):
            found[name] = {labels: {} for labels in product(*series.values)} | found.get(name, {})
    return "".join(line for name in SERIES if name in found for line in _family(name, found[name]))


def _family(name: str, found: dict[tuple[str, ...], Parts]) -> Iterator[str]:
    series = SERIES[name]
    yield f"# HELP {name} {series.help}\n# TYPE {name} {series.kind}\n"
    for values in sorted(found):
        labels = [f'{key}="{_escape(value)}"' for key, value in zip(series.labels, values, strict=True)]
        for ending, more, value in _lines(series, found[values]):
            both = ",".join(labels + more)
            yield f"{name}{ending}{{{both}}} {_number(value)}\n" if both else f"{name}{ending} {_number(value)}\n"
    yield "\n"


def _lines(series: Series, parts: Parts) -> Iterator[tuple[str, list[str], float]]:
    """(suffix of the name, further labels, value) of each line."""
    if series.kind in ("counter", "gauge"):
        yield "", [], parts.get(None, 0.0)
        return
    total = parts.pop("sum", 0.0)
    count = sum(parts.values())
    if series.kind == "histogram":
        below = 0.0
        known = () if isinstance(series.buckets, str) else series.buckets
        for bound in sorted({*known, inf, *parts}):
            below += parts.get(bound, 0.0)
            yield "_bucket", [f'le="{"+Inf" if bound == inf else _number(bound)}"'], below
    else:
        for quantile in QUANTILES:
            yield "", [f'quantile="{_number(quantile)}"'], _quantile(parts, quantile * count)
    yield "_sum", [], total
    yield "_count", [], count


def _quantile(counts: Parts, rank: float) -> float:
    """The smallest value such that at least `rank` values are less than or equal to it."""
    for value in sorted(counts):
        rank -= counts[value]
        if rank <= 0:
            return float(value)
    return float(max(counts, default=0))


def _escape(value: str) -> str:
    value = value.encode("utf-8", "replace").decode()
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


# --- --prometheus-port ---


class MetricsServer:
    """Serves GET /metrics on a port of its own (--prometheus-port), from a thread of the supervisor, until closed.

    Raises UserError if it cannot listen on the port.
    """

    def __init__(self, hostname: str, port: int, directory: Path) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # only servers with this port need it

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds that a silent client may hold a thread

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    return self.send_error(404)
                body = render(directory).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *values: object) -> None:
                """Does not log scrapes."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
            daemon_threads = True

        try:
            self._server = Server((hostname, port), Handler)
        except OSError as error:
            raise UserError(
                f"Cannot listen on {hostname}:{port} for --prometheus-port: {error.strerror}. Choose another port; "
                "/metrics is on the server's own port too."
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
