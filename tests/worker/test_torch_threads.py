"""How many threads torch computes with, and how they wait."""

import logging
import math
import os

import pytest
import torch

from tgi.worker import host_cpu
from tgi.worker.engine import torch_threads


def test_omp_num_threads_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_cpu.THREADS_VARIABLE, "3")
    assert torch_threads.choose_threads() == torch.get_num_threads() == 3


@pytest.mark.parametrize("named", ["zero", "0", "-2", "2,1"])
def test_an_invalid_omp_num_threads_is_logged_and_ignored(
    named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(host_cpu.THREADS_VARIABLE, named)
    assert host_cpu.threads_from_environment() is None
    assert f"OMP_NUM_THREADS is '{named}', which is no number above 0: it is ignored" in caplog.text


@pytest.mark.parametrize(("times", "chosen"), [({1: 1.0, 2: 0.6, 4: 0.3}, 4), ({1: 1.0, 2: 9.0, 4: 0.9}, 1)])
def test_more_threads_are_chosen_where_they_are_clearly_faster(
    times: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(host_cpu.THREADS_VARIABLE, raising=False)
    monkeypatch.setattr(torch_threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch_threads, "_decode_trial", lambda: lambda: times[torch.get_num_threads()])
    assert torch_threads.choose_threads() == torch.get_num_threads() == chosen


def test_a_real_trial_chooses_at_most_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(host_cpu.THREADS_VARIABLE, raising=False)
    with caplog.at_level(logging.DEBUG):
        assert 1 <= torch_threads.choose_threads() <= host_cpu.usable_cores()
    assert "computing with" in caplog.text


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, 8), (2.0, 2), (2.9, 2), (0.5, 1)])
def test_a_quota_limits_the_cores(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cpu, "usable_cpus", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert host_cpu.usable_cores() == cores


def test_a_wait_policy_in_the_environment_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (host_cpu.WAIT_POLICY, host_cpu.SPIN_COUNT):
        monkeypatch.setenv(name, "")  # registers the variable to be restored
        monkeypatch.delenv(name)
    monkeypatch.setenv(host_cpu.WAIT_POLICY, "active")
    host_cpu.configure_thread_waiting()
    assert (os.environ[host_cpu.WAIT_POLICY], os.environ.get(host_cpu.SPIN_COUNT)) == ("active", None)
    monkeypatch.delenv(host_cpu.WAIT_POLICY)
    host_cpu.configure_thread_waiting()
    assert (os.environ[host_cpu.WAIT_POLICY], os.environ[host_cpu.SPIN_COUNT]) == ("passive", host_cpu.SPIN_COUNT_VALUE)
