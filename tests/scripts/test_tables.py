"""Tables of a comparison, from given figures."""

from pathlib import Path

import pytest

from scripts.benchmarks.comparison import Measured, Record, tables
from scripts.benchmarks.workloads import Model, Workload

pytestmark = pytest.mark.slow

MODEL = Model("tiny", Path("nowhere"), {"W1": Workload(1, 128, 64), "W4": Workload(8, 32, 32, shared=1024)})


def record(rates: list[float], wait: float, first: float, **more: str) -> Record:
    found = [Measured(rate, wait, 1.0, 40.0) for rate in rates]
    return Record([first], [512.4], {"W1": found} if found else {}, dict(more))


def test_medians_and_ratios_to_the_best_peer() -> None:
    records = {
        "ours": record([120.0, 90.0, 100.0], 20.0, 2.5),
        "quick": record([80.0, 70.0], 40.0, 3.25),
        "prompt": record([50.0], 10.0, 137.0),
        "broken": record([], 0.0, 1.0, W1="it fell over"),
    }
    assert (
        tables(MODEL, records)
        == """\
## tiny

|                        | ours tokens/s | quick tokens/s | prompt tokens/s | broken tokens/s | ours/best | \
ours TTFT ms | quick TTFT ms | prompt TTFT ms | broken TTFT ms | ours/best |
| ---------------------- | ------------- | -------------- | --------------- | --------------- | --------- | \
------------ | ------------- | -------------- | -------------- | --------- |
| W1: 1 x 128 in, 64 out |           100 |             75 |              50 |               – |      1.33 | \
          20 |            40 |             10 |              – |      2.00 |

|                         | ours | quick | prompt | broken |
| ----------------------- | ---- | ----- | ------ | ------ |
| W1: CPU µs/token        |   40 |    40 |     40 |      – |
| start to first token, s |  2.5 |  3.25 |    137 |      1 |
| memory, MB              |  512 |   512 |    512 |    512 |

- broken, W1: it fell over"""
    )


def test_without_figures_only_the_reasons_are_listed() -> None:
    assert tables(MODEL, {"ours": Record(failed={"": "no model"})}) == "## tiny\n\n- ours: no model"


def test_without_a_peer_there_is_no_ratio() -> None:
    text = tables(MODEL, {"ours": record([1234.5], 0.12345, 2.0)})
    assert "| W1: 1 x 128 in, 64 out |         1,234 |         – |        0.123 |         – |" in text


def test_costs_by_context_show_their_growth() -> None:
    lengths = {"1k": Workload(1, 1024, 32), "2k": Workload(1, 2048, 32), "4k": Workload(1, 4096, 32)}
    found = {
        "1k": [Measured(9, 512.0, 3.0, 1)],
        "2k": [Measured(9, 1228.8, 4.0, 1)],
        "4k": [Measured(9, 3276.8, 6.5, 1)],
    }
    text = tables(Model("long", Path("nowhere"), lengths), {"ours": Record([2.0], [500.0], found)})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[-5:]]
    assert rows == [
        ["1k", "500", "3"],
        ["2k", "600", "4"],
        ["4k", "800", "6.5"],
        ["1k to 2k, per 1k", "100", "1"],
        ["2k to 4k, per 1k", "100", "1.25"],
    ]
