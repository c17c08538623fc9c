"""Figures that locust lacks: time to first token, inter-token latency, tokens/s, in its summary and on its web page."""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from flask import Response, request
from locust.env import Environment
from locust.runners import STATE_INIT, WorkerRunner
from locust.stats import bucket_response_time, calculate_response_time_percentile

TAB = "tokens"
# Key, title, width in the terminal. The keys are also what the web page finds in each row.
COLUMNS = (
    ("name", "Name", 32),
    ("tokens", "Tokens", 9),
    ("rate", "Tokens/s", 9),
    ("ttft_avg", "TTFT avg", 8),
    ("ttft_median", "TTFT p50", 8),
    ("ttft_high", "TTFT p95", 8),
    ("ttft_highest", "TTFT p99", 8),
    ("itl_avg", "ITL avg", 8),
    ("itl_median", "ITL p50", 8),
    ("itl_high", "ITL p95", 8),
    ("itl_highest", "ITL p99", 8),
)
PERCENTILES = {"median": 0.5, "high": 0.95, "highest": 0.99}

log = logging.getLogger("locust.stats_logger")  # where locust's own tables go


@dataclass
class Figures:
    """One row. Durations are histograms: microseconds, rounded to two digits as locust rounds -> how often."""

    tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    itl: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: int, ttft: dict[int, int], itl: dict[int, int]) -> None:
        """Adds another row's counts."""
        self.tokens += tokens
        self.ttft.update(ttft)
        self.itl.update(itl)


class Table:
    """The rows of one run, by name of the request."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Resets the table."""
        self.rows: dict[str, Figures] = {}
        self._began = self._last = time.time()

    def count(self, name: str, tokens: int) -> None:
        """Counts tokens."""
        self._row(name).tokens += tokens
        self._last = time.time()

    def first(self, name: str, seconds: float) -> None:
        """Records a time to first token."""
        self._row(name).ttft[bucket_response_time(seconds * 1e6)] += 1

    def gap(self, name: str, seconds: float) -> None:
        """Records an inter-token latency."""
        self._row(name).itl[bucket_response_time(seconds * 1e6)] += 1

    def taken(self) -> dict[str, Any]:
        """The counts since the last call, for locust's master."""
        rows, self.rows = self.rows, {}
        return {"last": self._last, "rows": {name: [row.tokens, row.ttft, row.itl] for name, row in rows.items()}}

    def add(self, taken: dict[str, Any]) -> None:
        """Adds the counts of a locust worker."""
        self._last = max(self._last, taken["last"])
        for name, figures in taken["rows"].items():
            self._row(name).add(*figures)

    def shown(self) -> list[dict[str, Any]]:
        """The cells of each row by the keys of COLUMNS, then all rows together. Durations in ms."""
        together = Figures()
        for row in self.rows.values():
            together.add(row.tokens, row.ttft, row.itl)
        rows = [*sorted(self.rows.items()), ("Aggregated", together)]
        return [self._cells(name, row) for name, row in rows]

    def lines(self) -> list[str]:
        """The table for a terminal."""
        rows = [{key: title for key, title, _ in COLUMNS}, *self.shown()]
        lines = [
            " ".join(f"{row[key]:<{width}}" if key == "name" else f"{row[key]:>{width}}" for key, _, width in COLUMNS)
            for row in rows
        ]
        rule = "-" * len(lines[0])
        return ["Tokens (durations in ms)", lines[0], rule, *lines[1:-1], rule, lines[-1], ""]

    def _row(self, name: str) -> Figures:
        return self.rows.setdefault(name, Figures())

    def _cells(self, name: str, row: Figures) -> dict[str, Any]:
        seconds = self._last - self._began
        cells = {"name": name, "tokens": row.tokens, "rate": round(row.tokens / seconds, 1) if seconds > 0 else 0.0}
        return cells | _durations("ttft", row.ttft) | _durations("itl", row.itl)


def _durations(prefix: str, histogram: Counter[int]) -> dict[str, Any]:
    """Mean and percentiles in ms; empty cells without measurements."""
    samples = histogram.total()
    if not samples:
        return {f"{prefix}_{key}": "" for key in ("avg", *PERCENTILES)}
    mean = sum(duration * times for duration, times in histogram.items()) / samples
    return {f"{prefix}_avg": round(mean / 1e3, 2)} | {
        f"{prefix}_{key}": calculate_response_time_percentile(histogram, samples, share) / 1e3
        for key, share in PERCENTILES.items()
    }


def show(environment: Environment, table: Table) -> None:
    """Adds the table to locust's summary and a tab of its web page; a run without a token fails."""

    @environment.events.test_start.add_listener
    def clear(**_: Any) -> None:
        table.clear()

    @environment.events.spawning_complete.add_listener
    def clear_if_asked(**_: Any) -> None:
        if environment.reset_stats:
            table.clear()

    environment.events.reset_stats.add_listener(clear)
    if isinstance(environment.runner, WorkerRunner):
        environment.events.report_to_master.add_listener(lambda client_id, data: data.update(tokens=table.taken()))
        return  # the master prints
    environment.events.worker_report.add_listener(lambda client_id, data: table.add(data["tokens"]))

    @environment.events.quitting.add_listener
    def fail_without_tokens(**_: Any) -> None:
        if not table.rows and environment.runner.state != STATE_INIT:
            log.error("No token has come from %s: nothing was measured.\n", environment.host)
            environment.process_exit_code = 1

    @environment.events.quit.add_listener
    def summary(**_: Any) -> None:
        for line in table.lines():
            log.info(line)

    if environment.web_ui is not None:
        _show_in_web_page(environment.web_ui, table)


def _show_in_web_page(web_ui: Any, table: Table) -> None:
    structure = [{"key": key, "title": title} for key, title, _ in COLUMNS]
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Tokens", "key": TAB}],
        "extended_tables": [{"key": TAB, "structure": structure}],
    }

    @web_ui.app.after_request
    def add_rows(response: Response) -> Response:
        """The page requests locust's figures every two seconds; ours are added to them."""
        if request.endpoint == "locust.request_stats" and response.is_json:
            more = {"extended_stats": [{"key": TAB, "data": table.shown()}]}
            response.set_data(web_ui.app.json.dumps(response.get_json() | more))
        return response
