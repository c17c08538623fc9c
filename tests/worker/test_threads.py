import logging
import os
from pathlib import Path

import pytest
import torch

from tgi.worker import threads


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(threads.THREADS, "3")
    assert threads.choose_threads() == torch.get_num_threads() == 3


@pytest.mark.parametrize("named", ["zero", "0", "-2", "2,1"])
def test_what_is_no_number_of_threads_is_warned_of(
    named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(threads.THREADS, named)
    assert threads.named_threads() is None
    assert f"OMP_NUM_THREADS is '{named}', which is no number above 0" in caplog.text


@pytest.mark.parametrize(("times", "chosen"), [({1: 1.0, 2: 0.6, 4: 0.3}, 4), ({1: 1.0, 2: 9.0, 4: 0.9}, 1)])
def test_the_quickest_wins_if_it_is_worth_it(
    times: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(threads.THREADS, raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "_trial", lambda: lambda: times[torch.get_num_threads()])
    assert threads.choose_threads() == torch.get_num_threads() == chosen


def test_a_real_trial_stays_within_the_cores(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(threads.THREADS, raising=False)
    with caplog.at_level(logging.DEBUG):
        assert 1 <= threads.choose_threads() <= threads.usable_cores()
    assert "computing with" in caplog.text


@pytest.mark.parametrize(("text", "cores"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("", 8)])
def test_a_quota_counts(text: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(threads, "CGROUP_CPU", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert threads.usable_cores() == cores


def test_what_the_user_says_about_waiting_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (threads.WAIT_POLICY, threads.SPINS):
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv(threads.WAIT_POLICY, "active")
    threads.wait_shortly()
    assert (os.environ[threads.WAIT_POLICY], os.environ.get(threads.SPINS)) == ("active", None)
    monkeypatch.delenv(threads.WAIT_POLICY)
    threads.wait_shortly()
    assert (os.environ[threads.WAIT_POLICY], os.environ[threads.SPINS]) == ("passive", threads.FEW_SPINS)
