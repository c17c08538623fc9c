"""Tokens per minute: levels fall with time, and are shared by processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tgi.microkernel.admission.token_rates import MAX_CLIENTS, TokenRates

CHARGER = """
import sys
from pathlib import Path
from tgi.microkernel.admission.token_rates import TokenRates
rates = TokenRates(Path(sys.argv[1]), clock=lambda: 0.0)
for _ in range(500):
    rates.charge(7, 60, 1)
"""


def test_a_level_falls_by_the_rate(tmp_path: Path) -> None:
    now = 0.0
    rates = TokenRates(tmp_path / "rates", clock=lambda: now)
    assert rates.wait_seconds(1, 60) == 0
    rates.charge(1, 60, 60)
    assert rates.wait_seconds(1, 60) == 0
    rates.charge(1, 60, 30)
    assert rates.wait_seconds(1, 60) == pytest.approx(30)
    assert rates.wait_seconds(2, 60) == 0
    now = 20.0
    assert rates.wait_seconds(1, 60) == pytest.approx(10)
    now = 500.0
    rates.charge(1, 60, 61)
    assert rates.wait_seconds(1, 60) == pytest.approx(1)


def test_processes_share_the_levels(tmp_path: Path) -> None:
    chargers = [subprocess.Popen([sys.executable, "-c", CHARGER, str(tmp_path / "rates")]) for _ in range(3)]
    assert [one.wait() for one in chargers] == [0, 0, 0]
    rates = TokenRates(tmp_path / "rates", clock=lambda: 0.0)
    assert rates.wait_seconds(7, 60) == pytest.approx(1440)


def test_a_level_of_before_a_restart_of_the_host_is_void(tmp_path: Path) -> None:
    TokenRates(tmp_path / "rates", clock=lambda: 1e6).charge(1, 60, 1000)
    assert TokenRates(tmp_path / "rates", clock=lambda: 5.0).wait_seconds(1, 60) == 0


def test_clients_beyond_the_table_are_not_limited(tmp_path: Path) -> None:
    rates = TokenRates(tmp_path / "rates", clock=lambda: 0.0)
    for client in range(1, MAX_CLIENTS + 2):
        rates.charge(client, 60, 1000)
    assert rates.wait_seconds(MAX_CLIENTS, 60) > 0
    assert rates.wait_seconds(MAX_CLIENTS + 1, 60) == 0
