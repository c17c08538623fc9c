"""`scripts/bench` lists its measurements, and each of them names a module that has a main function."""

import re
import sys
from importlib import import_module

import pytest

from scripts.benchmarks.__main__ import MEASUREMENTS, main

pytestmark = pytest.mark.slow


def test_help_lists_every_measurement(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    main()
    listed = re.findall(r"^  ([\w-]+) +\S", capsys.readouterr().out, re.M)
    assert listed == list(MEASUREMENTS)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_measurement_runs_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    described = import_module(f"scripts.benchmarks.{MEASUREMENTS[name][0]}").__doc__ or ""
    assert described.split(":")[0].split("\n")[0] in capsys.readouterr().out


def test_an_unknown_measurement_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "nonsense"])
    with pytest.raises(SystemExit, match=r"There is no measurement .nonsense.\. Choose one of serving, "):
        main()
