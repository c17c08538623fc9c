"""scripts/chaos: every answer is exact while random processes are killed or stopped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

ROOT = Path(__file__).parent.parent.parent


def run_chaos(tmp_path: Path, *arguments: str) -> str:
    """What a run prints that finds nothing but exact answers."""
    log = tmp_path / "log"
    run = subprocess.run(
        [sys.executable, "-P", "-m", "scripts.reliability.chaos", "--log", str(log), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr + log.read_text()[-20_000:]
    return run.stdout


def test_every_answer_is_exact_while_processes_are_killed_and_stopped(tmp_path: Path) -> None:
    """Each second a random process gets a signal. More clients than a neighbour submits at once. Longer runs belong to
    `scripts/chaos`."""
    slow = ("--step-us", "100000")  # the seconds and their signals are the same, with half of the tokens
    run_chaos(tmp_path, "--clients", "300", "--requests", "80", "--tokens", "30", "--seconds", "10", *slow)


def test_two_replicas_and_an_adapter_that_is_loaded_and_unloaded(tmp_path: Path) -> None:
    few = ("--clients", "40", "--requests", "80", "--tokens", "15")
    kills = ("--seconds", "8", "--interval", "1.9", "--signals", "KILL", "--roles", "tokenizer,scheduler,worker")
    printed = run_chaos(tmp_path, *few, *kills, "--adapter-updates", "--", "--replicas", "2")
    assert "SIGKILL" in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("adapters"))
    assert int(line.split()[1]) > 2
