#!/usr/bin/env python3
"""Runs `pip install` with the given arguments for this Python and shows progress in MB and seconds. If pip fails, its
whole output is printed.

The variable TORCH_INDEX names a package index that is searched besides pip's own, such as one with builds of torch for
the CPU. Of two builds of one version pip takes the one with a suffix (2.13.0+cpu).

Runs before anything is installed, so it needs only Python. Called by scripts/venv and scripts/load; the
environment of the tests comes from scripts/uv_install.py.
"""

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).parent.parent))

from tgi.microkernel.observability.progress import Progress, format_duration, format_megabytes

TICK_SECONDS = 0.25
# Without a terminal, smaller packages get no line.
MIN_LINE_BYTES = 5_000_000
INDEX_VARIABLE = "TORCH_INDEX"
# torch for Linux without a suffix in its version is a build for CUDA. Older versions of pip fetch it before they look
# up the libraries that it needs.
CUDA_BUILD = re.compile(r"Collecting nvidia-|\s*Downloading (\S*/)?torch-[\d.]+-\S*linux\S*\.whl \(")
CUDA_SIZE = "about 2.8 GB to fetch, 5 GB on disk"
CPU_SIZE = "0.3 GB to fetch, 1.3 GB on disk"
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last: Windows' driver, in WSL
INDEX_PAGE = "https://pytorch.org/get-started/locally"
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
        self._is_cuda = False  # the build of torch

    def line(self, line: str) -> None:
        """Takes a line of pip's output."""
        self._complete()
        if CUDA_BUILD.match(line) and not self._is_cuda:
            self._is_cuda = True
            self._say(cuda_notice())
        if found := FETCHING.match(line):
            if not found["name"].endswith(".metadata"):
                self._file = unquote(found["name"].rpartition("/")[2])
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

    def _say(self, text: str) -> None:
        sys.stderr.write(f"\x1b[K{text}\n" if self._terminal else f"{text}\n")
        sys.stderr.flush()

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


def cuda_notice() -> str:
    """What a build of torch for CUDA costs, and how to avoid that on a machine without an NVIDIA driver."""
    notice = f"pip: this torch comes with NVIDIA's CUDA libraries: {CUDA_SIZE}."
    if any(map(os.path.exists, DRIVER_FILES)) or shutil.which("nvidia-smi"):
        return notice
    return (
        f"{notice}\nThis machine has no NVIDIA driver, so a build for the CPU does the same ({CPU_SIZE}): end this "
        f"with Ctrl-C and start it again with {INDEX_VARIABLE}=URL in front, the index that {INDEX_PAGE} shows for CPU."
    )


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
    if index := os.environ.get(INDEX_VARIABLE, "").strip():
        command += ["--extra-index-url", index]
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
