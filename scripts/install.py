#!/usr/bin/env python3
"""Runs `pip install` with the given arguments for this Python and shows progress in MB and seconds. If pip fails, its
whole output is printed.

Runs before anything is installed, so it needs only Python. Called by scripts/venv and scripts/load.
"""

import os
import queue
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tgi.microkernel.progress import Progress, format_duration, format_megabytes

TICK_SECONDS = 0.25
# Without a terminal, smaller packages get no line.
MIN_LINE_BYTES = 5_000_000
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
# Lines of pip's output, versions 23 to 26.
FETCHING = re.compile(r"\s*Downloading (?P<name>\S+) \((?P<size>[\d.]+) (?P<unit>bytes|kB|MB|GB)\)")
LOOKING = re.compile(r"Collecting (?P<name>[^\s<>=!~;\[(]+)")
INSTALLING = re.compile(r"Installing collected packages: (?P<names>.*)")


class Installation:
    """Follows pip's output. Call `tick` while pip writes nothing."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch  # pip's temporary directory, where a file grows while it is fetched
        self._terminal = sys.stderr.isatty()
        self._progress = Progress(None, "pip")
        self._began = time.monotonic()
        self._file, self._size = "", 0  # the current download
        self._fetched = 0
        self._packages = 0  # to be installed; 0: not known yet
        self._there = 0  # packages installed before

    def line(self, line: str) -> None:
        """Takes a line of pip's output."""
        self._complete()
        if found := FETCHING.match(line):
            if not found["name"].endswith(".metadata"):
                self._file = found["name"].rpartition("/")[2]
                self._size = int(float(found["size"]) * UNITS[found["unit"]])
        elif found := INSTALLING.match(line):
            self._packages, self._there = len(found["names"].split(",")), _installed()
            self._progress.show_stage(f"installing {self._count}", 0)
        elif (found := LOOKING.match(line)) and self._terminal:
            self._progress.show_stage(f"looking up {found['name']}", 0)
        self.tick()

    def tick(self) -> None:
        """Updates the progress of the download or installation."""
        if self._file:
            if self._shown:
                have = max(map(_size, self._scratch.rglob(self._file)), default=0)
                self._progress.show_stage(self._stage, min(99.0, 100 * have / self._size), self._size)
        elif self._packages:
            done = min(99.0, 100 * (_installed() - self._there) / self._packages)
            self._progress.show_stage(f"installing {self._count}", done)

    def end(self) -> str:
        """The summary."""
        self._complete()
        taken = format_duration(time.monotonic() - self._began)
        return f"Installed {self._count} in {taken}; {format_megabytes(self._fetched)} were fetched."

    @property
    def _count(self) -> str:
        return f"{self._packages} package{'' if self._packages == 1 else 's'}"

    @property
    def _stage(self) -> str:
        name, version, *_ = f"{self._file}-".split("-")
        return f"fetching {name} {version}".strip()

    @property
    def _shown(self) -> bool:
        return self._terminal or self._size >= MIN_LINE_BYTES

    def _complete(self) -> None:
        """Counts the current download as complete."""
        if self._file:
            if self._shown:
                self._progress.show_stage(self._stage, 100, self._size)
            self._fetched += self._size
            self._file = ""


def _installed() -> int:
    return sum(1 for _ in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # moved in the meantime
        return 0


def said(pip: "subprocess.Popen[str]") -> Iterator[str]:
    """Yields the lines of pip's output, and "" while pip writes nothing."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=TICK_SECONDS)
        except queue.Empty:
            yield ""
            continue
        if line is None:
            return
        yield line


def main(arguments: list[str]) -> int:
    """Returns pip's exit code."""
    command = [sys.executable, "-P", "-m", "pip", "install", "--progress-bar=off", "--no-input"]
    command += ["--disable-pip-version-check", *arguments]
    output = []
    with tempfile.TemporaryDirectory(prefix="tgi-install-") as scratch:
        installation = Installation(Path(scratch))
        environment = os.environ | {"TMPDIR": scratch, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        ) as pip:  # fmt: skip
            try:
                for line in said(pip):
                    if line:
                        output.append(line)
                        installation.line(line)
                    else:
                        installation.tick()
            except KeyboardInterrupt:
                pip.terminate()
                raise
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[K")
    print("".join(output) if pip.returncode else installation.end(), file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: pip ends, too, and its temporary directory is removed
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
