"""What `tgi ps` and `tgi top` show: the processes of each run directory of this user, and their load."""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tgi.microkernel.errors import UserError
from tgi.microkernel.host import rundir
from tgi.microkernel.host.terminal import writable
from tgi.microkernel.processes.process_table import Deployment
from tgi.microkernel.recovery.quarantine import Quarantine

# Between the two samples of a single frame.
SAMPLE_SECONDS = 1.0

# The columns of `tgi ps` and `tgi top` in their order. A terminal that is too narrow for all lacks those with the
# highest numbers.
COLUMNS = {
    "name": 0, "model": 2, "pid": 3, "state": 1, "stage": 7, "cpu": 5, "memory_mb": 4, "beat_age": 8,
    "progress_age": 6, "work": 2,
}  # fmt: skip
# The last column may be cut to this width before others are left out.
MIN_LAST_WIDTH = 24
# Escape sequences: another screen without a cursor, and back; the first column of the first line; clear to the end.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def table(rows: list[dict[str, Any]], width: int | None) -> list[str]:
    """The rows as lines with aligned columns, and a heading. `width`: of the terminal. Before there are two samples
    `cpu` is left out, and so is the model where there is one for all."""
    several = len({row["model"] for row in rows}) > 1
    columns = [name for name in COLUMNS if any(row[name] is not None for row in rows) and (several or name != "model")]
    shown = [{name: _cell(row, name) for name in columns} for row in rows]
    widths = {name: max(len(name), *(len(row[name]) for row in shown)) for name in columns}

    def needed() -> int:
        *others, last = (widths[name] for name in columns)
        return sum(others) + 2 * len(others) + min(last, MIN_LAST_WIDTH)

    while width is not None and len(columns) > 1 and needed() > width:
        columns.remove(max(columns, key=lambda name: COLUMNS[name]))
    lines = [{name: name for name in columns}, *shown]
    return [cut("  ".join(line[name].ljust(widths[name]) for name in columns).rstrip(), width) for line in lines]


def _cell(row: dict[str, Any], name: str) -> str:
    """What a table shows; a stage only where it says more than the state. Texts of other hosts, such as the work of a
    remote worker, cannot control the terminal."""
    value = row[name]
    text = "" if value is None or (name == "stage" and value == row["state"]) else str(value)
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def cut(line: str, width: int | None) -> str:
    """The line, cut with a mark where it is longer than the terminal is wide."""
    if width is None or len(line) <= width:
        return line
    mark = writable(sys.stdout, "…", "~")
    return line[: max(0, width - 1)] + mark


def terminal_width() -> int | None:
    """The width of the terminal that standard output is; None if it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def headline(deployment: Deployment, width: int | None) -> str:
    """Which model is served, where and by which version."""
    served = deployment.served
    model = served["model"] or "no model yet"
    address = f" on {served['url']}" if served["url"] else ""
    version = f", tgi {served['version']}" if served["version"] else ""
    return cut(f"{model}{address}{version}, in {deployment.run}", width)


def list_processes(port: int | None, as_json: bool) -> None:
    """Prints what `tgi ps` shows: the processes of each server, and its requests in quarantine."""
    deployments = running_deployments(port)
    if as_json:
        print(json.dumps([row for deployment in deployments for row in deployment.rows()], indent=2))
        return
    if not deployments:
        print("You have no running tgi server.", file=sys.stderr)
    width = terminal_width()
    for number, deployment in enumerate(deployments):
        lines = [headline(deployment, width), *table(deployment.rows(), width)]
        quarantine = Quarantine(deployment.run)
        lines += [
            f"request {name} in quarantine for {quarantine.minutes_left(entry)} minutes: {entry.reason}"
            for name, entry in quarantine.entries().items()
        ]
        print("\n".join([""] * (number > 0) + lines))


def running_deployments(port: int | None) -> list[Deployment]:
    """The deployments of this user that run, or the one on a port."""
    return [one for one in map(Deployment, _run_directories(port)) if one.refresh()]


def _run_directories(port: int | None) -> list[Path]:
    """The run directories of this user, or the one of a port. Raises UserError as rundir.check_run_dir."""
    if port is None:
        return rundir.user_run_dirs()
    run = rundir.default_run_dir(port)
    rundir.check_run_dir(run)
    return [run] if run.is_dir() else []


# --- tgi top ----------------------------------------------------------------------------------------------------------


def print_frame(port: int | None, as_json: bool) -> None:
    """Prints one frame of `tgi top`."""
    deployments = running_deployments(port)
    if deployments:
        time.sleep(SAMPLE_SECONDS)
    deployments = [one for one in deployments if one.refresh()]
    if as_json:
        found = [
            {"run": str(one.run), **one.served, "load": one.load(), "processes": one.rows()} for one in deployments
        ]
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_frame(deployments, terminal_width())))


def show_frames(port: int | None, seconds: float) -> None:
    """Shows frames on the terminal until q or Ctrl-C. Raises UserError without a terminal."""
    if not sys.stdout.isatty() or not sys.stdin.isatty():
        raise UserError("`tgi top` needs a terminal. Print one frame with --once, or --json.", code=2)
    known: dict[Path, Deployment] = {}
    with _screen():
        while True:
            known = {run: known.get(run) or Deployment(run) for run in _run_directories(port)}
            width, height = shutil.get_terminal_size()
            lines = _frame([one for one in known.values() if one.refresh()], width)
            sys.stdout.write(_repainted(lines, width, height))
            sys.stdout.flush()
            if select.select([sys.stdin], [], [], seconds)[0]:
                keys = os.read(sys.stdin.fileno(), 64)
                if not keys or b"q" in keys.lower():
                    return


def _repainted(lines: list[str], width: int, height: int) -> str:
    """What shows these lines on a terminal in place of the previous ones. A line is cleared before it is written: where
    it has reached the last column the cursor stands on its last character."""
    return _HOME + "".join(f"{_CLEAR_LINE}{line[:width]}\r\n" for line in lines[: height - 1]) + _CLEAR_BELOW


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen, where keys are read at once; restored at the end, also that by a signal, and while
    Ctrl-Z has stopped this process."""
    before = termios.tcgetattr(sys.stdin)

    def enter() -> None:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(_ENTER)

    def leave() -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    def pause(number: int, frame: object) -> None:
        leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        enter()

    actions = {signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGTSTP: pause}
    handlers = {number: signal.signal(number, action) for number, action in actions.items()}
    try:
        enter()
        yield
    finally:
        leave()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _frame(deployments: list[Deployment], width: int | None) -> list[str]:
    """The lines of a frame."""
    if not deployments:
        return ["You have no running tgi server."]
    lines = []
    for deployment in deployments:
        lines += [headline(deployment, width), cut(_load_line(deployment), width), *table(deployment.rows(), width), ""]
    return lines[:-1]


def _load_line(deployment: Deployment) -> str:
    load = deployment.load()
    parts = [f"{load['running']} running, {load['queued']} queued", f"{load['tokens_per_second']:.1f} tokens/s"]
    if load["first_token_ms"] is not None:
        parts.append(f"first token {load['first_token_ms']:.0f} ms")
    if load["kv_cache_used"] is not None:
        parts.append(f"KV cache {load['kv_cache_used']:.0%}")
    if load["prefix_hit_rate"] is not None:
        parts.append(f"prefix hits {load['prefix_hit_rate']:.0%}")
    if load["watts"] is not None:
        parts.append(f"{load['watts']:.0f} W")
    if load["joules_per_token"] is not None:
        parts.append(f"{load['joules_per_token']:.2f} J/token")
    return " | ".join(parts)
