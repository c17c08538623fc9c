"""The run directory: one supervisor per claim, and states that come and go with their processes."""

import fcntl
import os
import re
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


def plant(kind: str, path: Path, victim: Path) -> None:
    """Makes `path` what another user could have left in a directory that all users may write to."""
    if kind == "link":
        path.symlink_to(victim, target_is_directory=True)
        return
    path.mkdir()
    if kind == "owner":
        if os.getuid():
            pytest.skip("only root can give a directory to another user")
        os.chown(path, 4711, -1)
    else:
        path.chmod({"group": 0o770, "world": 0o707}[kind])


REASONS = {
    "link": "is a symbolic link",
    "owner": f"belongs to user 4711, and this is user {os.getuid()}",
    "group": "can be written by others (its mode is 0770)",
    "world": "can be written by others (its mode is 0707)",
}


@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.parametrize("where", ["base", "run", "state", "metrics"])
def test_a_directory_that_others_could_have_filled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    """In the fallback place, which is below a directory that all users may write to."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("TGI_RUN", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (victim := tmp_path / "victim").mkdir()
    base = tmp_path / f"tgi-{os.getuid()}"
    run = rundir.default(3000)
    assert run == base / "3000"
    planted = {"base": base, "run": run, "state": run / "state", "metrics": run / "metrics"}[where]
    for parent in (base, run):
        if parent in planted.parents:
            parent.mkdir(mode=0o700)
    plant(kind, planted, victim)
    told = re.escape(f"The run directory {planted} {REASONS[kind]}, so another user could redirect")
    if kind == "link" and where != "base":
        told = re.escape(
            f"The run directory {planted.parent} contains the symbolic link {planted.name}, which tgi does"
        )
    with pytest.raises(UserError, match=told):
        rundir.create(run)
    with pytest.raises(UserError, match=told):  # `tgi down` would signal pids that are named there
        rundir.check(run)
    if where == "base":
        with pytest.raises(UserError, match=told):
            rundir.all_of_user()
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("name", ["worker.lock", "permits", "worker-0.beat", "state/api-0.json", "metrics/sums_1.db"])
def test_a_link_in_a_run_directory_is_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    (victim := tmp_path / "victim").write_text("precious")
    (run / name).symlink_to(victim)
    with pytest.raises(UserError, match=f"contains the symbolic link {Path(name).name}, which tgi does not make"):
        rundir.create(run)
    assert victim.read_text() == "precious"


def test_the_fallback_directory_and_the_one_that_holds_it_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("TGI_RUN", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    before = os.umask(0)
    try:
        rundir.create(run := rundir.default(3000))
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (run.parent, run, run / "state", run / "metrics")] == [0o700] * 4


def test_a_runtime_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid():
        pytest.skip("only root can write to a directory of another user")
    (runtime := tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert rundir.base() == runtime / "tgi"
    os.chown(runtime, 4711, -1)
    assert rundir.base() == tmp_path / "tgi-0"


@pytest.mark.parametrize("command", ["up", "ps", "down"])
def test_commands_refuse_an_exposed_directory_in_one_message(tmp_path: Path, command: str) -> None:
    (tmp_path / f"tgi-{os.getuid()}").symlink_to(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("TGI_RUN", "XDG_RUNTIME_DIR")}
    done = subprocess.run(
        [sys.executable, "-m", "tgi", command, *(["--port", "3000"] if command == "down" else [])],
        env=environment | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert "is a symbolic link" in message
    assert "Traceback" not in done.stderr


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
