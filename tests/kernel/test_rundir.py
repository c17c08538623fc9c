"""The run directory: one supervisor per claim, and states that come and go with their processes."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tgi.kernel import rundir
from tgi.kernel.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rundir.create(tmp_path / "run")
    return tmp_path / "run"


def test_it_is_private(run: Path) -> None:
    assert run.stat().st_mode & 0o777 == 0o700


def test_a_claim_is_exclusive_and_names_its_holder(run: Path) -> None:
    lock = rundir.Lock(run, "api")
    assert list(rundir.holders(run)) == ["api"]
    with pytest.raises(UserError, match=r"Another tgi \(pid \d+\) runs `api`"):
        rundir.Lock(run, "api")
    lock.release()
    assert rundir.holders(run) == {}
    rundir.Lock(run, "api").release()


def test_states_are_read_back(run: Path) -> None:
    state = rundir.ProcessState("worker", 0, 42, "ab", "starting", "loading weights", 40)
    rundir.write_state(run, state)
    (found,) = rundir.read_states(run)
    assert (found.name, found.stage, found.percent) == ("worker-0", "loading weights", 40)
    rundir.remove_state(run, "worker-0")
    assert rundir.read_states(run) == []


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="TGI_RUN"):
        rundir.create(tmp_path / "file" / "run")


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    rundir.create(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


def test_a_name_too_long_for_sockets_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TGI_RUN to a shorter one"):
        rundir.create(tmp_path / ("x" * 120))
    assert list(tmp_path.iterdir()) == []


def test_who_looks_for_holders_is_not_taken_for_one(run: Path) -> None:
    path = run / "api.lock"
    path.touch()
    with path.open() as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        threading.Timer(0.1, lambda: fcntl.flock(glance, fcntl.LOCK_UN)).start()
        rundir.Lock(run, "api").release()


def test_down_waits_for_a_holder_without_a_pid_and_signals_nobody(run: Path) -> None:
    lock = rundir.Lock(run, "api")
    lock.path.write_text("")  # as between taking the lock and writing the pid
    down = subprocess.run(
        [sys.executable, "-m", "tgi", "down", "--timeout", "0.2"],
        env=os.environ | {"TGI_RUN": str(run)}, start_new_session=True, capture_output=True, text=True,
    )  # fmt: skip
    assert down.returncode == 1
    assert "did not end within 0.2 s" in down.stderr
    lock.release()


def test_a_run_directory_is_listed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TGI_RUN", str(tmp_path / "tgi" / "3000"))
    rundir.create(tmp_path / "tgi" / "3000")
    assert rundir.all_of_user() == [tmp_path / "tgi" / "3000"]
