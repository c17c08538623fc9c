"""Starts commands of `tgi` for tests, most of them as forks of one process that has imported what they import.

Imports are most of the processor time that a command takes, and a run of all tests starts hundreds. A forked
command has the arguments, the environment, the working directory and the output that a new interpreter would have, and
the tree below it has all of its processes. A command whose environment is not that of the tests gets a new interpreter,
since imports may depend on it. So do tests of the start itself, with `subprocess`.

As a program this module is the process that forks: `python -m tests.live.commands DESCRIPTOR`, with one end of a socket
pair, in the directory of the checkout.
"""

import functools
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO

import tgi.__main__
from tgi import server
from tgi.microkernel.messages.protocol import ROLES
from tgi.microkernel.processes.fork_server import READY, SINGLE_THREADED, ForkedProcess, ForkServer, fork_roles
from tgi.microkernel.processes.process import name_process, run_and_exit
from tgi.microkernel.settings.table import Settings

ROOT = Path(__file__).parents[2]
# The environment of all tests. No test is running when this module is imported.
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}
# Variables that no import reads, and one that torch sets in this process.
PER_COMMAND = ("PYTEST_CURRENT_TEST", "TGI_RUN", "TORCHINDUCTOR_CACHE_DIR")
# Variables of requests to the fork server, with descriptors.
OUTPUT, ERRORS = "TGI_TEST_OUTPUT", "TGI_TEST_ERRORS"
# What `tgi` imports later than the fork servers of the product do.
IMPORTED = ("tgi.cli", "tgi.process_views", "tgi.worker.fake_worker.fake_worker")
START_SECONDS = 240.0  # for the imports, on a busy machine
POLL_SECONDS = 0.005


class ForkedCommand:
    """A forked command: what tests use of `subprocess.Popen`."""

    def __init__(self, process: ForkedProcess, stdout: IO[str] | None) -> None:
        self._process = process
        self.pid = process.pid
        self.stdout = stdout

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["tgi"], timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Command = ForkedCommand | subprocess.Popen[str]
_starting = threading.Lock()  # tests start servers in several threads; the fork server answers one request at a time


def start(*arguments: str, cwd: Path | None = None, **variables: str) -> Command:
    """Starts `tgi ARGUMENTS` with these variables besides those of the tests. Its output is a pipe for both streams."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
    if not _is_forkable(environment):
        return subprocess.Popen(
            [sys.executable, "-m", "tgi", *arguments], env=environment, cwd=cwd, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    read, write = os.pipe()
    try:
        process = _fork(arguments, environment, cwd, output=write, errors=write)
    finally:
        os.close(write)
    return ForkedCommand(process, open(read, encoding="utf-8"))


def run(
    *arguments: str, check: bool = False, timeout: float | None = None, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Runs `tgi ARGUMENTS` as `subprocess.run` does, with these variables besides those of the tests."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
    if not _is_forkable(environment):
        command = [sys.executable, "-m", "tgi", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=check, timeout=timeout)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = _fork(arguments, environment, None, output=output.fileno(), errors=errors.fileno())
        command = ForkedCommand(process, None)
        try:
            code = command.wait(timeout)
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()
            raise
        output.seek(0)
        errors.seek(0)
        done = subprocess.CompletedProcess(["tgi", *arguments], code, output.read(), errors.read())
    if check:
        done.check_returncode()
    return done


def _is_forkable(environment: Mapping[str, str]) -> bool:
    """Whether a fork of the fork server is what a new interpreter with this environment would be."""
    names = {name for name in environment.keys() | ENVIRONMENT.keys() if environment.get(name) != ENVIRONMENT.get(name)}
    return sys.platform == "linux" and names <= {*PER_COMMAND}


def _fork(
    arguments: Sequence[str], environment: Mapping[str, str], cwd: Path | None, output: int, errors: int
) -> ForkedProcess:
    with _starting:
        request = [str(cwd or Path.cwd()), *arguments]
        return _fork_server().start(request, environment, {OUTPUT: output, ERRORS: errors}, START_SECONDS)


@functools.cache
def _fork_server() -> ForkServer:
    """The process that forks the commands of this one. It ends with this process."""
    connection, requests = socket.socketpair()
    with requests:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(requests.fileno())],
            env=ENVIRONMENT, cwd=ROOT, pass_fds=[requests.fileno()], process_group=0,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return ForkServer(None, connection)


def main() -> None:
    """Imports, then forks commands. In a forked process: the command."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    name_process("tgi fork server of tests")  # its forks cannot name themselves if it has not
    os.environ.update(SINGLE_THREADED)
    for preload in server.preloads(Settings(), ROLES).values():
        preload()
    for module in IMPORTED:
        import_module(module)
    del sys.path[0]  # the checkout, as `python -m tgi` leaves the current directory out
    requests.sendall(READY)
    directory, *arguments = fork_roles(requests)
    os.chdir(directory)
    output, errors = int(os.environ.pop(OUTPUT)), int(os.environ.pop(ERRORS))
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in {output, errors}:
        os.close(descriptor)
    name_process(shlex.join(["tgi", *arguments]))
    sys.argv = [str(Path(tgi.__main__.__file__)), *arguments]
    run_and_exit(tgi.__main__.tgi)


if __name__ == "__main__":
    main()
