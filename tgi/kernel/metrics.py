"""Metrics: `metrics.NAME` is a series of the table in series.py, and `render` the text that /metrics answers.

    metrics.tgi_queue_size.set(3)
    metrics.tgi_request_failure.labels(err="validation").inc()
    metrics.tgi_request_duration.observe(0.5)

Each process of a host writes files into the run directory. prometheus_client's store is used for them and its
exposition is not: TGI's dashboards know counters without `_total`, and a series appears with its first sample.
"""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

from tgi.kernel import samples
from tgi.kernel.samples import Parts, Store, clear, forget, forget_dead
from tgi.kernel.series import QUANTILES, SERIES, Series

__all__ = ["clear", "forget", "forget_dead", "limits", "render", "use"]


class _Here:
    """Where this process writes, and what it has written to so far."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self.made: dict[tuple[str, tuple[str, ...]], Any] = {}
        self.spans: dict[str, int] = {}


_here = _Here()


def use(directory: Path) -> None:
    """Where this process writes its samples from now on."""
    _here.store = Store(directory)
    _here.made.clear()


def limits(max_input_tokens: int, max_total_tokens: int) -> None:
    """What the buckets "input" and "total" are hundredths of."""
    _here.spans = {"input": max_input_tokens, "total": max_total_tokens}


class _Labelled:
    """A series before its labels are given."""

    def __init__(self, name: str, keys: tuple[str, ...]) -> None:
        self._name = name
        self._keys = keys

    def labels(self, **labels: str) -> Any:
        """The counter, gauge or distribution with these labels. Raises ValueError if the table has others."""
        if labels.keys() != set(self._keys):
            raise ValueError(f"{self._name} has the labels {self._keys}, not {tuple(labels)}")
        return _make(self._name, tuple(labels[key] for key in self._keys))


def __getattr__(name: str) -> Any:
    if name not in SERIES:
        raise AttributeError(name)
    keys = SERIES[name].labels
    return _Labelled(name, keys) if keys else _make(name, ())


def _make(name: str, labels: tuple[str, ...]) -> Any:
    if (name, labels) not in _here.made:
        if _here.store is None:
            raise RuntimeError(f"{name} has a sample before metrics.use() has said where samples go")
        series = SERIES[name]
        if series.kind in ("histogram", "summary"):
            measured = isinstance(series.buckets, str)
            made: Any = samples.Distribution(_here.store, name, labels, _bounds(series), known=not measured)
        else:
            made = (samples.Counter if series.kind == "counter" else samples.Gauge)(_here.store, name, labels)
        _here.made[name, labels] = made
    return _here.made[name, labels]


def _bounds(series: Series) -> tuple[float, ...]:
    if isinstance(series.buckets, str):
        return tuple(_here.spans[series.buckets] / 100 * k for k in range(1, 101))
    return series.buckets


# --- the text ---------------------------------------------------------------------------------------------------------


def render(directory: Path | None = None) -> str:
    """All samples of all processes of this host, in Prometheus text format 0.0.4."""
    if directory is None:
        assert _here.store is not None
        directory = _here.store.directory
    found = samples.total(directory)
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
    """(end of the name, further label, value) of each line."""
    if series.kind in ("counter", "gauge"):
        yield "", [], parts[None]
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
    """The smallest value that has this many values up to it."""
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
