#!/usr/bin/env python3
"""Prints docs/metrics.md, made from tgi/kernel/series.py (redirect it into that file)."""

import sys

from tgi.kernel.series import BATCH, DURATION, OURS, QUANTILES, TGI, Series

HEAD = """# Metrics

<!-- Made by scripts/metrics_page.py from tgi/kernel/series.py; a test holds them together. Do not edit. -->

`GET /metrics` answers in Prometheus text format 0.0.4, on every front end with the same figures: those of all processes
of this host. Names, types and labels of the first table are TGI's, so its dashboards work.

- A series appears with its first sample. Counters carry no `_total`.
- Counters, histograms and the summary are sums over all processes since the server started. What a process had counted
  stays when it dies. Gauges are of living processes.
- A request is counted once, however many prompts and choices it has; `tgi_generation_count` and
  `tgi_generation_success` count each of them, and so do the histograms of tokens and of parts of a request.
- `tgi_request_input_length` and `tgi_request_max_new_tokens` are recorded for each generation that passed validation,
  at its end; the other histograms of requests for those that succeed.
- `method` is `prefill` for a step that computes any prompt token, else `decode`. `err` is `validation`, `overloaded`,
  `template`, `incomplete`, `generation` or `dropped` (the client left). `reason` is always `chunking`: new requests
  join running ones at any step. `role` is the process: `api`, `tokenizer`, `scheduler` or `worker`.
- The request with which a front end [tries itself](processes.md#health) when it starts is in no series of requests or
  generations. Its step is counted as every step: one `prefill` for each start of a front end.
- Requests that run are `tgi_batch_current_size`, those that wait `tgi_queue_size`.

Buckets: **D** are the {durations} durations 0.00015 s · 1.5^k, up to {longest:.0f} s; **B** are 1 to {batch}; **I**
and **G** are hundredths of the longest prompt and of the longest request, 1 to 100, as measured when the worker is
first ready. Quantiles of the summary ({quantiles}) are over all values since the start.
"""

TAIL = """
## For a dashboard

Time to the first token that 95 % of requests stay below:

```promql
histogram_quantile(0.95, sum by (le) (rate(tgi_time_to_first_token_duration_bucket[5m])))
```

Tokens per second that clients receive:

```promql
sum(rate(tgi_inter_token_duration_count[1m])) + sum(rate(tgi_time_to_first_token_duration_count[1m]))
```

The share of drafted tokens that were drawn ([speculation.md](speculation.md)):

```promql
sum(rate(tgi_accepted_tokens[5m])) / sum(rate(tgi_drafted_tokens[5m]))
```

How full the KV cache is, and the share of requests that are refused because all permits are in use:

```promql
tgi_pages_used / (tgi_pages_used + tgi_pages_free)
sum(rate(tgi_request_failure{err="overloaded"}[5m])) / sum(rate(tgi_request_count[5m]))
```
"""

LETTERS: dict[object, str] = {DURATION: "D", BATCH: "B", "input": "I", "total": "G", (): ""}


def main() -> None:
    """Prints the page."""
    sys.stdout.write(page())


def page() -> str:
    """The whole page as Markdown."""
    head = HEAD.format(
        durations=len(DURATION),
        longest=DURATION[-1],
        batch=len(BATCH),
        quantiles=", ".join(f"{quantile:g}" for quantile in QUANTILES),
    )
    return f"{head}\n## TGI's\n\n{_table(TGI)}\n## This server's own\n\n{_table(OURS)}{TAIL}"


def _table(rows: dict[str, Series]) -> str:
    lines = [
        f"| `{name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels)} | {LETTERS[row.buckets]} "
        f"| {row.help} |\n"
        for name, row in rows.items()
    ]
    return "| name | type | labels | buckets | |\n|---|---|---|---|---|\n" + "".join(lines)


if __name__ == "__main__":
    main()
