"""A result as one HTML file with plots, which needs nothing from a network."""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from tgi.bench.report import COLUMNS, level_name, remarks

WIDTH, HEIGHT = 560, 300  # of a plot, in pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 30, 44
TICKS = 5
COLOURS = ("#2f7ed8", "#e08a1e", "#3aa655", "#b455a0", "#c0392b", "#16a2a2", "#7a7f87", "#8e6f3e")

STYLE = """:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid #8884}
th:first-child,td:first-child{text-align:left}
.plots{display:flex;flex-wrap:wrap;gap:1rem}svg{max-width:100%;height:auto}
text{fill:currentColor;font:12px system-ui,sans-serif}.title{font-size:14px;font-weight:600}
.grid{stroke:#8884}.line{fill:none;stroke-width:2}"""


class Line(NamedTuple):
    """A line of a plot."""

    name: str
    points: list[tuple[float, float]]


def page(result: dict[str, Any]) -> str:
    """The file's text."""
    levels = result["levels"]
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("load", "requests", *(head for head, *_ in COLUMNS)))
    rows = "".join(_row(level) for level in levels)
    notes = "".join(f"<li>{escape(line)}</li>" for line in remarks(result))
    title = f"{', '.join(result.get('models', ())) or 'benchmark'} on {result['url']}"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style>
<h1>{escape(title)}</h1>
<p>{escape(result.get("api", ""))}, {escape(_workload(result.get("workload")))}, {escape(result.get("began", ""))}.
Times in milliseconds. TTFT: from sending a request to its first token; ITL: between two tokens.</p>
<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>
<ul>{notes}</ul>
<div class="plots">{"".join(plots(levels))}</div>
</html>
"""


def plots(levels: Sequence[dict[str, Any]]) -> list[str]:
    """Throughput by load, latency by throughput, and the distributions of each level, as SVG."""
    found = []
    if len(levels) > 1:
        loads = [float(level["concurrency"] or level["rate"]) for level in levels]
        by_load = [(load, float(level["tokens_per_s"])) for load, level in zip(loads, levels, strict=True)]
        unit = "requests at once" if levels[0]["concurrency"] else "requests per second"
        found.append(plot("Throughput", unit, "tokens/s", [Line("", by_load)]))
        for name, text in (("ttft_ms", "Time to first token"), ("itl_ms", "Time between tokens")):
            lines = [
                Line(percentile, [(level["tokens_per_s"], level[name][percentile]) for level in levels if level[name]])
                for percentile in ("p50", "p99")
            ]
            found.append(plot(f"{text} by throughput", "tokens/s", "ms", lines))
    for name, text in (("ttft_ms", "Time to first token"), ("itl_ms", "Time between tokens"), ("total_ms", "Whole")):
        lines = [
            Line(level_name(level), [(value, float(at)) for at, value in enumerate(level[name]["quantiles"])])
            for level in levels
            if level[name]
        ]
        found.append(plot(f"{text}: share of requests within", "ms", "%", lines, legend_below=True))
    return found


def plot(title: str, x_name: str, y_name: str, lines: Sequence[Line], legend_below: bool = False) -> str:
    """A line plot from 0 on, as SVG text. `legend_below`: the lines leave room at the lower right."""
    points = [point for line in lines for point in line.points]
    right, top = (_round_up(max((point[axis] for point in points), default=1.0)) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + x / right * across, HEIGHT - BOTTOM - y / top * down

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(title)}"><text class="title" x="0" y="16">{escape(title)}</text>'
    ]
    for tick in range(TICKS + 1):
        x, base = place(right * tick / TICKS, 0)
        start, y = place(0, top * tick / TICKS)
        parts.append(f'<line class="grid" x1="{start:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 16:.1f}" text-anchor="middle">{right * tick / TICKS:,.6g}</text>')
        parts.append(f'<text x="{start - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{top * tick / TICKS:,.6g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(x_name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{escape(y_name)} upwards</text>')
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<polyline class="line" stroke="{colour}" points="{drawn}"/>')
        if line.name:
            y = HEIGHT - BOTTOM - 10 - 16 * (len(lines) - 1 - number) if legend_below else TOP + 14 + 16 * number
            parts.append(f'<rect x="{WIDTH - 118}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{WIDTH - 100}" y="{y}">{escape(line.name)}</text>')
    return "".join([*parts, "</svg>"])


def _row(level: dict[str, Any]) -> str:
    values = (read(level) for _, read, *_ in COLUMNS)
    shown = ("-" if value is None else f"{value:,.2f}" for value in values)
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in (level_name(level), f"{level['requests']:,}", *shown))
    return f"<tr>{cells}</tr>"


def _workload(workload: Any) -> str:
    if not isinstance(workload, dict):
        return str(workload or "")
    text = f"{workload['input_tokens']} tokens in, {workload['output_tokens']} out"
    shared = f", {workload['shared_tokens']} shared" if workload["shared_tokens"] else ""
    return text + shared + (f", {workload['turns']} turns" if workload["turns"] > 1 else "")


def _round_up(value: float) -> float:
    """The next of 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power > value:
        power /= 10
    while power * 10 <= value:
        power *= 10
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.999999)
