"""The delay before a process is started again, the token bucket that it uses, and processes that cannot be started."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tgi.microkernel.admission.token_bucket import TokenBucket
from tgi.microkernel.errors import UserError
from tgi.microkernel.host import rundir
from tgi.microkernel.host.terminal import ControllingTerminal
from tgi.microkernel.observability import metrics
from tgi.microkernel.processes.child import ProcessSpec
from tgi.microkernel.processes.fork_server import ForkServer
from tgi.microkernel.processes.rollout import scale
from tgi.microkernel.processes.supervisor import (
    MAX_BACKOFF_SECONDS,
    RESTART_PERIOD_SECONDS,
    RESTARTS_IN_A_ROW,
    Backoff,
    Supervisor,
)
from tgi.microkernel.recovery.exit_causes import oom_kills
from tgi.microkernel.settings.table import Settings


def test_token_bucket_allows_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=4.0, burst=3)
    assert [bucket.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.seconds_until_next(100.0) == 0.25
    assert bucket.seconds_until_next(100.125) == 0.125
    assert bucket.take(100.25)
    assert not bucket.take(100.25)
    assert [bucket.take(200.0) for _ in range(4)] == [True, True, True, False]


def test_a_process_that_had_been_ready_is_restarted_at_once() -> None:
    backoff = Backoff()
    assert [backoff.delay(True, 1.0, 50.0 + 0.1 * n) for n in range(RESTARTS_IN_A_ROW)] == [0.0] * RESTARTS_IN_A_ROW


def test_a_process_that_is_killed_again_and_again_is_restarted_at_once_for_ever() -> None:
    backoff = Backoff()
    assert {backoff.delay(True, 1.0, RESTART_PERIOD_SECONDS * n) for n in range(1000)} == {0.0}


def test_a_process_that_is_never_ready_is_restarted_with_growing_delays() -> None:
    backoff = Backoff()
    delays = [backoff.delay(False, 0.5, 50.0) for _ in range(12)]
    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == MAX_BACKOFF_SECONDS
    assert backoff.delay(True, 0.5, 60.0) == 0.0
    assert backoff.delay(False, 0.5, 60.0) == 0.0  # the sequence begins again
    assert backoff.delay(False, 0.5, 60.0) == 0.1


def test_a_crash_loop_of_a_process_that_becomes_ready_is_slowed_down() -> None:
    backoff = Backoff()
    now = 0.0
    for _ in range(40):
        now += 0.3 + backoff.delay(True, 0.3, now)
    assert now > (40 - RESTARTS_IN_A_ROW) * RESTART_PERIOD_SECONDS * 0.9


def test_a_process_that_cannot_be_added_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir.create_run_dir(tmp_path)
    supervisor = Supervisor(Settings(run_dir=tmp_path), [], ControllingTerminal())
    monkeypatch.setattr("tgi.microkernel.host.interpreter.python_command", lambda *_: [str(tmp_path / "missing")])
    files = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with pytest.raises(UserError, match="Cannot start tokenizer-0: No such file"):
            supervisor.add("tokenizer")
    assert supervisor.processes("tokenizer") == []
    assert rundir.lock_holders(tmp_path) == {}
    assert len(os.listdir("/dev/fd")) == files


def test_processes_that_do_not_get_ready_in_time_are_retired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rundir.create_run_dir(tmp_path)
    settings = Settings(run_dir=tmp_path, start_timeout=0.0)
    supervisor = Supervisor(settings, [], ControllingTerminal())
    idle = [sys.executable, "-c", "import time; time.sleep(3600)"]
    monkeypatch.setattr("tgi.microkernel.host.interpreter.python_command", lambda *_: idle)
    stages = scale(supervisor, "tokenizer", 1)
    next(stages)
    (child,) = supervisor._children.values()
    try:
        assert any(stage == "draining: tokenizer-0" for stage in stages)  # it ends before the error is raised
        assert supervisor.processes("tokenizer") == []
        assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) < 0  # by a signal
    finally:
        child.signal(signal.SIGKILL)


def test_further_processes_of_a_role_start_once_the_first_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir.create_run_dir(tmp_path)
    supervisor = Supervisor(Settings(run_dir=tmp_path), [], ControllingTerminal())
    idle = [sys.executable, "-c", "import time; time.sleep(3600)"]
    monkeypatch.setattr("tgi.microkernel.host.interpreter.python_command", lambda *_: idle)
    first, second, other = supervisor.add("tokenizer"), supervisor.add("tokenizer"), supervisor.add("worker")
    children = supervisor._children
    try:
        assert set(children) == {first.name, other.name}
        pid = children[first.name].pid
        for stage in ("starting", "ready"):
            rundir.write_state(tmp_path, rundir.ProcessState("tokenizer", 0, pid, "", stage))
            supervisor._start_due()
            assert (second.name in children) == (stage == "ready")
    finally:
        for child in children.values():
            child.signal(signal.SIGKILL)
            os.waitpid(child.pid, 0)


def test_pipelines_use_the_lowest_free_number(tmp_path: Path) -> None:
    """So reloads without end leave a bounded number of files."""
    rundir.create_run_dir(tmp_path)
    settings = Settings(run_dir=tmp_path)
    supervisor = Supervisor(settings, [], ControllingTerminal())
    for old, new in [(0, 1), (1, 0)] * 2:
        assert supervisor.create_pipeline(settings) == new
        supervisor.switch_to_pipeline(new)
        supervisor.remove_pipeline(old)
        assert supervisor.settings.pipeline == rundir.read_pipeline(tmp_path) == new


@pytest.mark.parametrize(("state", "advice"), [("ready", "Lower --max-batch-total-tokens"), ("starting", "--quantize")])
def test_a_kill_for_lack_of_memory_names_what_to_lower(
    state: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rundir.create_run_dir(tmp_path)
    metrics.use_directory(tmp_path / "metrics")
    monkeypatch.setattr("tgi.microkernel.host.interpreter.python_command", lambda *_: ["sleep", "600"])
    supervisor = Supervisor(Settings(run_dir=tmp_path), [], ControllingTerminal())
    spec = supervisor.add("worker")
    supervisor.confirm(spec)
    child = supervisor._children[spec.name]
    rundir.write_state(tmp_path, rundir.ProcessState("worker", 0, child.pid, "", state))
    before = oom_kills()
    monkeypatch.setattr("tgi.microkernel.recovery.exit_causes.oom_kills", lambda: before + 1)
    child.signal(signal.SIGKILL)
    child._process.wait()
    supervisor._reap(("worker",))
    killed, advised = caplog.messages
    assert killed == f"worker-0 (pid {child.pid}) was killed for lack of memory; restarting it"
    assert advice in advised


def test_processes_are_supervised_while_a_fork_server_of_others_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that ends is replaced before the worker can be forked. Then a lost fork server delays nothing."""
    rundir.create_run_dir(tmp_path)
    metrics.use_directory(tmp_path / "metrics")
    monkeypatch.setattr("tgi.microkernel.host.interpreter.python_command", lambda *_: ["sleep", "600"])
    connection, requests = socket.socketpair()
    importing = ForkServer(None, connection)
    specs = [ProcessSpec("worker", 0), ProcessSpec("scheduler", 0)]
    settings = Settings(run_dir=tmp_path, graceful_termination_timeout=0.0)
    seen: list[str] = []  # steps of the test, in order
    pids: dict[str, int] = {}

    def on_tick() -> None:
        running = {name: child.pid for name, child in supervisor._children.items()}
        if not seen:
            assert running.keys() == {"scheduler-0"}
            pids.update(running)
            os.kill(running["scheduler-0"], signal.SIGKILL)
            seen.append("killed")
        elif seen == ["killed"] and running.get("scheduler-0", pids["scheduler-0"]) != pids["scheduler-0"]:
            seen.append("replaced")
            assert "worker-0" not in running
            requests.close()  # the fork server ends: a new interpreter is the worker
        elif "worker-0" in running:
            seen.append("worker")
            os.kill(os.getpid(), signal.SIGTERM)

    supervisor = Supervisor(
        settings, specs, ControllingTerminal(), on_tick, lambda role, _: importing if role == "worker" else None
    )
    changed = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD
    handlers = {number: signal.getsignal(number) for number in changed}
    try:
        supervisor.run(lambda *_: iter(()))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert seen == ["killed", "replaced", "worker"]
