"""scripts/chaos for a minute: 500 clients, every feature, and each second a random process is killed or stopped."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_answer_is_exact_while_processes_are_killed_and_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = subprocess.run(
        [sys.executable, "-P", "-m", "scripts.reliability.chaos", "--seconds", "60", "--log", str(log)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr + log.read_text()[-20_000:]
