"""Draws docs/figures/*.svg from the JSON files there, which are outputs of `scripts/bench --against ... --json`.

python -m scripts.benchmarks.plots
"""

import json
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from scripts.benchmarks.streams import median

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
# Sizes in pixels. Text is 12 px high; its colour and the bars' are legible on white and on dark pages.
WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 760, 150, 80, 64, 14, 12
TEXT = "#7a7f87"
COLOURS = ("#2f7ed8", "#e08a1e", "#3aa655", "#b455a0")
NAMES = {"ours": "tgi", "openvino": "OpenVINO", "vllm": "vLLM", "transformers": "transformers"}


class Series(NamedTuple):
    """One colour of a bar chart. `values` has one number per group; None leaves the bar out."""

    name: str
    values: list[float | None]


def bar_chart(title: str, groups: list[str], series: list[Series]) -> str:
    """A chart of horizontal bars as SVG text: one group of bars per entry of `groups`, one bar per series in it."""
    most = max((value for one in series for value in one.values if value is not None), default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / most
    height = TOP + len(groups) * (len(series) * BAR + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{TEXT}" role="img" aria-label="{escape(title)}">',
        f'<text x="0" y="16" font-size="14">{escape(title)}</text>',
    ]
    for position, one in enumerate(series):
        x = LEFT + position * 130
        parts.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{COLOURS[position]}"/>')
        parts.append(f'<text x="{x + 18}" y="40">{escape(one.name)}</text>')
    for row, group in enumerate(groups):
        top = TOP + row * (len(series) * BAR + GAP)
        middle = top + len(series) * BAR / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{middle:g}" text-anchor="end">{escape(group)}</text>')
        for position, one in enumerate(series):
            value = one.values[row]
            if value is None:
                continue
            y, length = top + position * BAR, value * scale
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{COLOURS[position]}"/>'
            )
            parts.append(f'<text x="{LEFT + length + 5:.1f}" y="{y + 10}" font-size="10">{_number(value)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def comparison_chart(document: dict[str, Any], model: str, where: str = "") -> str:
    """Tokens/s of each server on each workload of one model. `where` is added to the title."""
    servers: dict[str, Any] = document["models"][model]
    workloads = list(dict.fromkeys(name for record in servers.values() for name in record["workloads"]))
    series = [
        Series(NAMES.get(name, name), [_tokens_s(record["workloads"].get(w)) for w in workloads])
        for name, record in servers.items()
    ]
    return bar_chart(f"Output tokens/s, {model} model{where}, by workload (more is better)", workloads, series)


# Words for the title, by JSON file.
COMPARISONS = {"comparison": "", "comparison-avx2": ", AVX2"}


def charts(folder: Path) -> dict[str, str]:
    """File name -> SVG text of every chart."""
    found: dict[str, str] = {}
    for name, where in COMPARISONS.items():
        document = json.loads((folder / f"{name}.json").read_text())
        found |= {f"{name}-{model}.svg": comparison_chart(document, model, where) for model in document["models"]}
    return found


def _tokens_s(repetitions: list[dict[str, float]] | None) -> float | None:
    return median([one["tokens_s"] for one in repetitions]) if repetitions else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Writes the charts."""
    for name, text in charts(FIGURES).items():
        (FIGURES / name).write_text(text)


if __name__ == "__main__":
    main()
