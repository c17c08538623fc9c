"""docs/figures: the charts are those of the JSON next to them, and are well-formed SVG."""

import json
from xml.etree import ElementTree

import pytest

from scripts.benchmarks.plots import COMPARISONS, FIGURES, Series, bar_chart, charts

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"


def test_charts_are_up_to_date() -> None:
    made = charts(FIGURES)
    assert made == {path.name: path.read_text() for path in FIGURES.glob("comparison*.svg")}, (
        "run -m scripts.benchmarks.plots"
    )


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_measured_value_has_a_bar(name: str) -> None:
    document = json.loads((FIGURES / f"{name}.json").read_text())
    for model, servers in document["models"].items():
        chart = ElementTree.fromstring(charts(FIGURES)[f"{name}-{model}.svg"])
        values = sum(len(record["workloads"]) for record in servers.values())
        assert len(chart.findall(f"{SVG}rect")) == values + len(servers)  # and a legend


def test_bars_are_in_proportion_and_missing_values_have_none() -> None:
    chart = ElementTree.fromstring(
        bar_chart("<title>", ["a", "b"], [Series("x & y", [1.0, 4.0]), Series("z", [2.0, None])])
    )
    legend, bars = chart.findall(f"{SVG}rect")[:2], chart.findall(f"{SVG}rect")[2:]
    assert len(legend) == 2
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert [round(width / widths[0]) for width in widths] == [1, 2, 4]
