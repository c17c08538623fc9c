"""How the supervisor reports the end of a process to its successor, and what that had in progress."""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tgi.microkernel.messages.protocol import LastExit, RequestContext
from tgi.microkernel.processes.child import ChildProcess, ProcessSpec
from tgi.microkernel.processes.process import work_register_path
from tgi.microkernel.recovery.exit_causes import OOM_SECONDS, OomKills, is_lack_of_memory, oom_kills
from tgi.microkernel.recovery.work_register import WorkRegister, register_number, split_in_progress
from tgi.microkernel.settings.table import Settings

pytestmark = pytest.mark.slow

# A child that takes its work register, as Process does, and states that it works on one request.
CHILD = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from tgi.microkernel.recovery.work_register import WorkRegister
register = WorkRegister.open(Path(sys.argv[1]))
register.begin_life(b"12345678")
register.units[3] = int.from_bytes(b"poison!!", "little")
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChildProcess:
    """A supervised process that has one request in progress."""
    path = work_register_path(tmp_path, "tokenizer-0")
    command = [sys.executable, "-c", CHILD, str(path)]
    monkeypatch.setattr("tgi.microkernel.host.interpreter.python_command", lambda *_: command)
    child = ChildProcess(ProcessSpec("tokenizer", 0), Settings(run_dir=tmp_path))
    while WorkRegister.open(path).in_progress() != b"poison!!":
        time.sleep(0.01)
    return child


def report_after(child: ChildProcess) -> LastExit:
    while (code := child.poll()) is None:
        time.sleep(0.01)
    report = child.exit_report(code)
    child.close()
    assert report is not None
    assert report.boot == b"12345678"
    assert report.in_progress == b"poison!!"
    assert 0 < report.lived_ms < 1000 * (time.monotonic() - child.started)
    return report


@pytest.mark.parametrize(
    ("number", "cause", "outside"),
    [
        (signal.SIGKILL, "was killed by SIGKILL", True),
        (signal.SIGTERM, "was killed by SIGTERM", True),
        (signal.SIGSEGV, "was killed by SIGSEGV", False),
        (signal.SIGABRT, "was killed by SIGABRT", False),
        (signal.SIGRTMIN + 1, f"was killed by signal {signal.SIGRTMIN + 1}", True),  # has no name
    ],
)
def test_signals_from_outside_are_told_from_faults(child: ChildProcess, number: int, cause: str, outside: bool) -> None:
    os.kill(child.pid, number)
    report = report_after(child)
    assert (report.cause, report.outside) == (cause, outside)


def test_a_kill_for_lack_of_memory_comes_from_outside(child: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    before = oom_kills()
    monkeypatch.setattr("tgi.microkernel.recovery.exit_causes.oom_kills", lambda: before + 1)
    os.kill(child.pid, signal.SIGKILL)
    report = report_after(child)
    assert (report.cause, report.outside) == ("was killed for lack of memory", True)


def allocate_with_torch() -> object:
    import torch

    return torch.empty(1 << 50)


@pytest.mark.parametrize(
    "allocate", [lambda: mmap.mmap(-1, 1 << 50), lambda: bytearray(1 << 62), allocate_with_torch], ids=range(3)
)
def test_exceptions_for_lack_of_memory_are_known(allocate: Callable[[], object]) -> None:
    with pytest.raises((MemoryError, OSError, RuntimeError)) as raised:
        allocate()
    assert is_lack_of_memory(raised.value)
    assert not is_lack_of_memory(OSError(2, "No such file"))
    assert not is_lack_of_memory(RuntimeError("shapes differ"))


def test_an_earlier_kill_for_lack_of_memory_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    now, count = 100.0, 3
    monkeypatch.setattr("tgi.microkernel.recovery.exit_causes.oom_kills", lambda: count)
    kills = OomKills(lambda: now)
    assert not kills.has_risen()
    count = 4
    assert kills.has_risen()
    for _ in range(int(OOM_SECONDS)):  # the kernel needs time until the process has ended
        now += 0.9
        kills.tick()
        assert kills.has_risen()
    for _ in range(3):
        now += 1.0
        kills.tick()
    assert not kills.has_risen()
    count = 5
    assert kills.has_risen()


def test_a_hang_is_a_fault_but_not_that_of_a_stopped_process(child: ChildProcess) -> None:
    child.kill_hung()
    report = report_after(child)
    assert (report.cause, report.outside) == ("made no progress and was killed", False)


def test_a_process_that_a_signal_has_stopped_is_not_at_fault(child: ChildProcess) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    while Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    child.kill_hung()
    while child.poll() is None:
        child.kill_hung()  # as the supervisor does until it has ended
    report = report_after(child)
    assert (report.cause, report.outside) == ("was stopped by a signal and was killed", True)


@pytest.mark.parametrize("whose", ["its own", "a rank's"])
def test_a_process_that_is_stopped_while_it_loads_is_overdue_long_before_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    program = "import subprocess; subprocess.run(['sleep', '600'])"
    monkeypatch.setattr("tgi.microkernel.host.interpreter.python_command", lambda *_: [sys.executable, "-c", program])
    child = ChildProcess(ProcessSpec("worker", 0), Settings(run_dir=tmp_path, start_timeout=600, hang_timeout=0.5))
    process = psutil.Process(child.pid)
    while not (ranks := process.children()):
        time.sleep(0.01)
    stopped = process if whose == "its own" else ranks[0]

    def tick_until(overdue: bool) -> None:
        while child.overdue() is not overdue:
            child.tick()
            time.sleep(0.01)

    try:
        stopped.suspend()
        tick_until(overdue=True)
        stopped.resume()  # one that continues is left alone
        tick_until(overdue=False)
        stopped.suspend()
        tick_until(overdue=True)
        child.kill_hung()
        while (code := child.poll()) is None:
            time.sleep(0.01)
        assert child.cause_of_exit(code) == ("was stopped by a signal and was killed", True)
    finally:
        for one in (process, *ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        child.close()


def test_a_process_that_never_took_the_register_passes_on_the_earlier_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = WorkRegister.open(work_register_path(tmp_path, "tokenizer-0"))
    register.begin_life(b"earlier!")
    register.units[0] = register_number(RequestContext(fingerprint=b"in progress!"))
    earlier = LastExit(b"earlier!", "was killed by SIGSEGV", False, b"in progress!")
    monkeypatch.setattr(
        "tgi.microkernel.host.interpreter.python_command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"]
    )
    child = ChildProcess(ProcessSpec("tokenizer", 0), Settings(run_dir=tmp_path), earlier)
    while (code := child.poll()) is None:
        time.sleep(0.01)
    assert child.exit_report(code) is earlier
    child.close()


@pytest.mark.parametrize(
    ("role", "ready", "passes_on"), [("worker", False, True), ("worker", True, False), ("scheduler", False, False)]
)
def test_a_process_that_dies_while_loading_passes_on_the_earlier_report(
    role: str, ready: bool, passes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = LastExit(b"earlier!", "was killed by SIGSEGV", False, b"in progress!")
    program = CHILD.replace('register.units[3] = int.from_bytes(b"poison!!", "little")', "sys.exit(7)")
    command = [sys.executable, "-c", program, str(work_register_path(tmp_path, f"{role}-0"))]
    monkeypatch.setattr("tgi.microkernel.host.interpreter.python_command", lambda *_: command)
    child = ChildProcess(ProcessSpec(role, 0), Settings(run_dir=tmp_path), earlier)
    while (code := child.poll()) is None:
        time.sleep(0.01)
    child.had_been_ready = ready
    report = child.exit_report(code)
    assert report is not None
    assert (report is earlier, report.boot == b"12345678") == (passes_on, not passes_on)
    assert child.cause_of_exit(code) == ("ended with code 7", False)
    child.close()


def test_the_register_is_read_by_others_and_outlives_its_process(tmp_path: Path) -> None:
    program = CHILD.replace("time.sleep(600)", "")
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "x.work")], check=True, stdout=subprocess.DEVNULL)
    register = WorkRegister.open(tmp_path / "x.work")
    assert register.boot == b"12345678"
    assert register.in_progress() == b"poison!!"
    register.begin_life(b"87654321")
    assert register.in_progress() == b""


def test_a_batch_is_in_progress_while_the_process_works_on_it() -> None:
    register = WorkRegister()
    for slot, name in enumerate((b"a" * 8, b"b" * 8, b"a" * 8)):
        register.slots[slot] = register_number(RequestContext(fingerprint=name))
    assert register.in_progress() == b""
    register.working_on_batch()
    assert split_in_progress(register.in_progress()) == [b"a" * 8, b"b" * 8]
    assert register_number(RequestContext(fingerprint=b"too long!")) == 0
