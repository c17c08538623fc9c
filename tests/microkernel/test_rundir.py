"""The run directory: exclusive locks of supervisors, state files, and protection against other users."""

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tgi.microkernel.errors import UserError
from tgi.microkernel.host import rundir


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a short name, since the paths of sockets are limited."""
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rundir.create_run_dir(tmp_path / "run")
    return tmp_path / "run"


def test_run_dir_is_private(run: Path) -> None:
    assert run.stat().st_mode & 0o777 == 0o700


def test_lock_is_exclusive_and_names_its_holder(run: Path) -> None:
    lock = rundir.RunDirLock(run, "api")
    assert list(rundir.lock_holders(run)) == ["api"]
    with pytest.raises(UserError, match=r"Another tgi \(pid \d+\) runs `api`"):
        rundir.RunDirLock(run, "api")
    lock.release()
    assert rundir.lock_holders(run) == {}
    rundir.RunDirLock(run, "api").release()


def test_states_round_trip(run: Path) -> None:
    state = rundir.ProcessState("worker", 0, 42, "ab", "starting", "loading weights", 40)
    rundir.write_state(run, state)
    (found,) = rundir.read_states(run)
    assert (found.name, found.stage, found.percent) == ("worker-0", "loading weights", 40)
    rundir.remove_state(run, "worker-0")
    assert rundir.read_states(run) == []


def test_directory_that_cannot_be_created_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="TGI_RUN"):
        rundir.create_run_dir(tmp_path / "file" / "run")


def test_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    rundir.create_run_dir(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755


def plant(kind: str, path: Path, target: Path) -> None:
    """Creates `path` as another user could have left it in a directory that all users can write to."""
    if kind == "link":
        path.symlink_to(target, target_is_directory=True)
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
def test_directory_writable_by_others_is_rejected(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    """In the fallback location, below a directory that all users can write to."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("TGI_RUN", raising=False)
    monkeypatch.setenv("TMPDIR", str(short_path))
    (target := short_path / "target").mkdir()
    base = short_path / f"tgi-{os.getuid()}"
    run = rundir.default_run_dir(3000)
    assert run == base / "3000"
    planted = {"base": base, "run": run, "state": run / "state", "metrics": run / "metrics"}[where]
    for parent in (base, run):
        if parent in planted.parents:
            parent.mkdir(mode=0o700)
    plant(kind, planted, target)
    message = re.escape(f"The run directory {planted} {REASONS[kind]}, so another user could redirect")
    if kind == "link" and where != "base":
        message = re.escape(
            f"The run directory {planted.parent} contains the symbolic link {planted.name}, which tgi does"
        )
    with pytest.raises(UserError, match=message):
        rundir.create_run_dir(run)
    with pytest.raises(UserError, match=message):  # `tgi down` would signal pids that are named there
        rundir.check_run_dir(run)
    if where == "base":
        with pytest.raises(UserError, match=message):
            rundir.user_run_dirs()
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("name", ["worker.lock", "permits", "worker-0.beat", "state/api-0.json", "metrics/sums_1.db"])
def test_symbolic_link_in_run_directory_is_rejected(run: Path, tmp_path: Path, name: str) -> None:
    (target := tmp_path / "target").write_text("precious")
    (run / name).symlink_to(target)
    with pytest.raises(UserError, match=f"contains the symbolic link {Path(name).name}, which tgi does not make"):
        rundir.create_run_dir(run)
    assert target.read_text() == "precious"


@pytest.mark.parametrize("name", ["worker.lock", "state/api-0.json"])
def test_named_pipe_in_run_directory_is_rejected(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Opening it would block forever."""
    monkeypatch.setenv("TGI_RUN", str(run))
    os.mkfifo(run / name)
    for looks in (lambda: rundir.create_run_dir(run), lambda: rundir.check_run_dir(run), rundir.user_run_dirs):
        with pytest.raises(UserError, match=f"contains the named pipe {Path(name).name}, which tgi does not make"):
            looks()


def test_fallback_directory_and_its_parent_are_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("TGI_RUN", raising=False)
    with tempfile.TemporaryDirectory(prefix="tgi") as folder:  # a short path: sockets have at most 100 bytes
        monkeypatch.setenv("TMPDIR", folder)
        before = os.umask(0)
        try:
            rundir.create_run_dir(run := rundir.default_run_dir(3000))
        finally:
            os.umask(before)
        modes = [path.stat().st_mode & 0o777 for path in (run.parent, run, run / "state", run / "metrics")]
    assert modes == [0o700] * 4


def test_xdg_runtime_dir_of_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid():
        pytest.skip("only root can write to a directory of another user")
    (runtime := tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert rundir.user_base_dir() == runtime / "tgi"
    os.chown(runtime, 4711, -1)
    assert rundir.user_base_dir() == tmp_path / "tgi-0"


@pytest.mark.parametrize("command", ["up", "ps", "down"])
def test_commands_reject_an_exposed_directory(short_path: Path, command: str) -> None:
    (short_path / f"tgi-{os.getuid()}").symlink_to(short_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("TGI_RUN", "XDG_RUNTIME_DIR")}
    done = subprocess.run(
        [sys.executable, "-m", "tgi", command, *(["--port", "3000"] if command == "down" else [])],
        env=environment | {"TMPDIR": str(short_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert "is a symbolic link" in message
    assert "Traceback" not in done.stderr


def test_too_long_path_is_rejected_before_anything_is_created(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TGI_RUN to a shorter one"):
        rundir.create_run_dir(tmp_path / ("x" * 120))
    assert list(tmp_path.iterdir()) == []


def test_lock_holders_does_not_block_a_lock(run: Path) -> None:
    path = run / "api.lock"
    path.touch()
    with path.open() as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        threading.Timer(0.1, lambda: fcntl.flock(glance, fcntl.LOCK_UN)).start()
        rundir.RunDirLock(run, "api").release()


def test_down_waits_for_a_holder_without_a_pid(run: Path) -> None:
    lock = rundir.RunDirLock(run, "api")
    lock.path.write_text("")  # as between taking the lock and writing the pid
    down = subprocess.run(
        [sys.executable, "-m", "tgi", "down", "--timeout", "0.2"],
        env=os.environ | {"TGI_RUN": str(run)}, start_new_session=True, capture_output=True, text=True,
    )  # fmt: skip
    assert down.returncode == 1
    assert "did not end within 0.2 s" in down.stderr
    lock.release()


def test_run_directory_is_listed_once(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    monkeypatch.setenv("TGI_RUN", str(short_path / "tgi" / "3000"))
    rundir.create_run_dir(short_path / "tgi" / "3000")
    assert rundir.user_run_dirs() == [short_path / "tgi" / "3000"]


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"role": "api", "place": 0}', "", "\0", "[" * 100_000, "5",
        '{"role": "api", "replica": 0, "pid": "7", "boot": "", "state": "ready"}',
        '{"role": "api", "replica": 0, "pid": 7, "boot": null, "state": "ready"}',
        '{"role": "api", "replica": 0, "pid": 7, "boot": "", "state": "ready", "facts": []}',
    ],
)  # fmt: skip
def test_unreadable_state_files_are_skipped_with_a_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rundir.create_run_dir(tmp_path / "run")
    state = rundir.ProcessState("worker", 0, 1, "ab", "ready")
    rundir.write_state(tmp_path / "run", state)
    (tmp_path / "run" / "state" / "api-0.json").write_text(content)
    assert [one.name for one in rundir.read_states(tmp_path / "run")] == ["worker-0"]
    assert "api-0.json, which another version of tgi has written, or which is damaged" in caplog.text


def test_replica_numbers_belong_to_one_supervisor(run: Path) -> None:
    first, second = rundir.claim_process(run, "api"), rundir.claim_process(run, "api")
    assert [(claim.role, claim.replica) for claim in (first, second)] == [("api", 0), ("api", 1)]
    first.lock.release()
    assert rundir.claim_process(run, "api").replica == 0
    held = rundir.claim_process(run, "worker")
    with pytest.raises(rundir.LockHeld, match=r"Another tgi \(pid \d+\) runs `worker`"):
        rundir.claim_process(run, "worker")
    held.lock.release()


def test_leftovers_of_killed_supervisors_are_removed(run: Path) -> None:
    """Also under names that this supervisor has claimed, but not under those of another one."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "tokenizer-0\n"
        own = rundir.claim_process(run, "tokenizer")
        assert own.replica == 1
        for role, replica in (("tokenizer", 0), ("tokenizer", 1), ("api", 0)):
            rundir.write_state(run, rundir.ProcessState(role, replica, 42, "ab", "ready"))
        for name in ("tok-0.front", "tok-1.front", f"control-{holder.pid}", "control-1"):
            (run / name).touch()
        rundir.write_pipeline(run, 2)
        rundir.remove_leftovers(run)
        assert [state.name for state in rundir.read_states(run)] == ["tokenizer-0"]
        assert rundir.tokenizer_sockets(run) == {"tok-0.front"}
        assert [path.name for path in run.glob("control-*")] == [f"control-{holder.pid}"]
        assert rundir.read_pipeline(run) == 2
        holder.communicate("\n")
    rundir.remove_leftovers(run)
    assert rundir.read_states(run) == []
    assert rundir.tokenizer_sockets(run) == set()
    assert rundir.read_pipeline(run) == 0


HOLDER = """
import sys
from pathlib import Path
from tgi.microkernel.host import rundir
claim = rundir.claim_process(Path(sys.argv[1]), "tokenizer")
print(f"{claim.role}-{claim.replica}", flush=True)
sys.stdin.readline()
"""


def test_a_state_file_that_cannot_be_written_does_not_end_the_process(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "state" / "worker-0.json").mkdir()
    rundir.write_state(run, rundir.ProcessState("worker", 0, os.getpid(), "", "ready", "", 100))
    assert "outdated state" in caplog.text


def test_a_state_file_that_cannot_be_removed_does_not_end_the_supervisor(run: Path) -> None:
    (stuck := run / "state" / "worker-0.json").mkdir()
    rundir.remove_state(run, "worker-0")
    assert stuck.exists()
    assert rundir.read_states(run) == []


def test_a_damaged_lock_file_names_no_process(run: Path) -> None:
    lock = rundir.RunDirLock(run, "worker")
    lock.path.write_bytes(b"\xff garbage")
    assert rundir.lock_holders(run) == {"worker": rundir.UNKNOWN_PID}
    lock.release()


def test_files_that_are_damaged_are_replaced_at_start(run: Path) -> None:
    site = rundir.site_id(run)
    (run / "site").write_bytes(bytes(range(128, 144)))
    (run / "pipeline").write_bytes(b"\xff")
    (run / "state" / "api-0.json").write_bytes(b"\xff")
    assert rundir.site_id(run) == ""
    assert rundir.read_pipeline(run) == 0
    rundir.create_run_dir(run)
    rundir.remove_leftovers(run)
    assert rundir.site_id(run) not in ("", site)
    assert not list((run / "state").iterdir())


@pytest.mark.parametrize(
    ("name", "remove"),
    [
        ("scheduler-0.successor", rundir.forget_server),
        ("quarantine.json", rundir.forget_server),
        ("state/api-0.json", rundir.remove_leftovers),
    ],
)
def test_a_directory_in_place_of_a_file_is_a_user_error(run: Path, name: str, remove: Callable[[Path], None]) -> None:
    (run / name).mkdir()
    assert rundir.read_states(run) == []
    with pytest.raises(UserError, match=f"{name}: .*Remove it"):
        remove(run)


def test_media_directories_go_with_their_last_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(rundir, "SHARED_MEMORY", memory)
    first, second = (rundir.create_media_directory(tmp_path / "run") for _ in range(2))
    path = rundir.media_directory(tmp_path / "run")
    assert path.stat().st_mode & 0o777 == 0o700
    (path / "file").touch()
    left = memory / (path.name[:-3] + "xyz")  # of a server that was killed
    left.mkdir(mode=0o700)
    other = rundir.create_media_directory(tmp_path / "other")
    assert not left.exists()
    first.release()
    assert (path / "file").exists()
    second.release()
    assert [one.name for one in memory.iterdir()] == [other.path.name]
    other.release()


def test_a_media_directory_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "SHARED_MEMORY", tmp_path)
    path = rundir.media_directory(tmp_path / "run")
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(UserError, match="can be written by others"):
        rundir.create_media_directory(tmp_path / "run")
