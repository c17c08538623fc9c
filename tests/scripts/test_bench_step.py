"""The measurement of steps: its table on this machine's kernels, and the operations that it counts."""

import sys

import pytest

from scripts.benchmarks import step
from scripts.benchmarks.shapes import CONFIG, SHAPES

pytestmark = pytest.mark.slow


def test_the_table_has_parts_and_both_floors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shape", "two-layer", "--rows", "1,2", "--context", "20", "--prefill", "32", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["step", *arguments])
    step.main()
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:-1]
        for line in capsys.readouterr().out.splitlines()
        if "|" in line
    }
    assert [cell.strip() for cell in rows["ms"]] == ["1 rows", "2 rows", "prompt of 32"]
    for name in ("linear: qkv", "attention", "head", "step", "floor of memory"):
        assert min(map(float, rows[name])) >= 0
    assert all(cell.strip().endswith("%") for name in ("memory / step", "arithmetic / step") for cell in rows[name])


def test_operations_are_counted_from_the_shapes() -> None:
    config = CONFIG | SHAPES["two-layer"] | {"vocab_size": 100}
    assert step.matmul_weights(config) == 2 * (4 * 64 * 64 + 3 * 64 * 256)
    assert step.head_weights(config) == 6400
    assert step.attention_operations(config, 10) == 2 * 2 * (
        2 * 64 * 10
    )  # layers, products, multiply-adds of a product
