"""What `tgi ps` and `tgi top` show: the processes of all hosts of a deployment, and its load."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tgi.microkernel import rundir
from tgi.microkernel.errors import UserError
from tgi.microkernel.host_reports import read_other_hosts
from tgi.microkernel.process_table import HostSampler
from tgi.microkernel.protocol import HostReport

# Between the two samples of a single frame.
SAMPLE_SECONDS = 1.0

COLUMNS = ("host", "name", "pid", "state", "stage", "cpu", "memory_mb", "beat_age", "progress_age", "work")

# Escape sequences: another screen without a cursor, and back; the first column of the first line; clear to the end.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Deployment:
    """The deployment to which a run directory of this host belongs."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.reports: list[HostReport] = []  # that of this host, then the others
        self._sampler = HostSampler(run)

    def refresh(self) -> bool:
        """Reads the present reports. Returns False if nothing runs here."""
        own = self._sampler.sample()
        self.reports = [own, *read_other_hosts(self.run, own.site)] if own.processes else []
        return bool(self.reports)

    def rows(self) -> list[dict[str, Any]]:
        """One row per process, as in `tgi ps --json`."""
        names = [report.host for report in self.reports]
        rows = []
        for report in self.reports:
            # Two run directories of a machine, as in tests, or two machines of one name.
            host = report.host if names.count(report.host) == 1 else f"{report.host}/{report.site[:4]}"
            for row in report.processes:
                progress = _seconds(row.progress_age_ms, report)
                rows.append({
                    "run": str(self.run), "host": host, "name": row.name, "pid": row.pid, "state": row.state,
                    "stage": row.stage, "percent": row.percent, "boot": row.boot,
                    "memory_mb": round(row.memory_bytes / 2**20, 1),
                    "cpu": None if row.cpu_percent < 0 else round(row.cpu_percent, 1),
                    "beat_age": _seconds(row.beat_age_ms, report), "progress_age": progress, "work": row.work,
                })  # fmt: skip
        return rows

    def load(self) -> dict[str, Any]:
        """The load of all hosts together; None for what cannot be told."""
        loads = [report.load for report in self.reports]

        def total(name: str) -> Any:
            return sum(getattr(load, name) for load in loads)

        pages, prompt_tokens = total("kv_pages_used") + total("kv_pages_free"), total("prompt_tokens")
        first = [load.first_token_ms for load in loads if load.first_token_ms >= 0]
        return {
            "running": total("running"),
            "queued": total("queued"),
            "tokens_per_second": round(total("tokens_per_second"), 1),
            "first_token_ms": round(sum(first) / len(first), 1) if first else None,
            "kv_cache_used": round(total("kv_pages_used") / pages, 3) if pages else None,
            "prefix_hit_rate": round(min(1.0, total("cached_tokens") / prompt_tokens), 3) if prompt_tokens else None,
        }


def _seconds(milliseconds: int, report: HostReport) -> float | None:
    """An age in a report, at present; None if there is none."""
    return None if milliseconds < 0 else round((milliseconds + report.age_ms) / 1000, 1)


def table(rows: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """The rows as lines with aligned columns, and a heading."""
    cells = [columns, *(tuple("" if row[column] is None else str(row[column]) for column in columns) for row in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


# --- tgi top ----------------------------------------------------------------------------------------------------------


def print_frame(as_json: bool) -> None:
    """Prints one frame of `tgi top`."""
    deployments = [one for one in map(Deployment, rundir.user_run_dirs()) if one.refresh()]
    if deployments:
        time.sleep(SAMPLE_SECONDS)
    deployments = [one for one in deployments if one.refresh()]
    if as_json:
        found = [{"run": str(one.run), "load": one.load(), "processes": one.rows()} for one in deployments]
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_frame(deployments)))


def show_frames(seconds: float) -> None:
    """Shows frames on the terminal until q or Ctrl-C. Raises UserError without a terminal."""
    if not sys.stdout.isatty() or not sys.stdin.isatty():
        raise UserError("`tgi top` needs a terminal. Print one frame with --once, or --json.", code=2)
    known: dict[Path, Deployment] = {}
    with _screen():
        while True:
            known = {run: known.get(run) or Deployment(run) for run in rundir.user_run_dirs()}
            lines = _frame([one for one in known.values() if one.refresh()])
            sys.stdout.write(_repainted(lines, *shutil.get_terminal_size()))
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


def _frame(deployments: list[Deployment]) -> list[str]:
    """The lines of a frame."""
    if not deployments:
        return ["You have no running tgi server."]
    lines = []
    for deployment in deployments:
        lines += [_headline(deployment), *table(deployment.rows(), COLUMNS), ""]
    return lines[:-1]


def _headline(deployment: Deployment) -> str:
    load, hosts = deployment.load(), len(deployment.reports)
    parts = [
        str(deployment.run) + (f", {hosts} hosts" if hosts > 1 else ""),
        f"{load['running']} running, {load['queued']} queued",
        f"{load['tokens_per_second']:.1f} tokens/s",
    ]
    if load["first_token_ms"] is not None:
        parts.append(f"first token {load['first_token_ms']:.0f} ms")
    if load["kv_cache_used"] is not None:
        parts.append(f"KV cache {load['kv_cache_used']:.0%}")
    if load["prefix_hit_rate"] is not None:
        parts.append(f"prefix hits {load['prefix_hit_rate']:.0%}")
    return " | ".join(parts)
