"""A Ray actor that runs one rank of a worker, `tgi worker`, on the node where Ray has placed it. Imports no ray: the
driver makes an actor of the class.

The rank is a child process that the kernel kills when the actor's process ends, so no rank is left behind if Ray or the
node's raylet ends.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tgi import __version__
from tgi.microkernel.host import interpreter, rundir
from tgi.microkernel.processes.process import LAST_EXIT, PARENT_PID
from tgi.microkernel.settings.table import OPTIONS

# The child of an actor: asks the kernel to be killed with the actor, then runs the command line.
CHILD = f"""
import os, runpy
from tgi.microkernel.processes.process import die_with_parent
die_with_parent(int(os.environ.pop("{PARENT_PID}")))
runpy.run_module("tgi", run_name="__main__", alter_sys=True)
"""
# Lines of the log that the driver has not fetched yet; of more the oldest are dropped.
MAX_LINES = 1000
STOP_SECONDS = 3.0
# Ray ends an actor with its driver or its raylet. Should it fail to, the actor ends when no report was asked for in
# this time: its rank could not be told anything, and would keep a device.
LEASE_SECONDS = 30.0
# The directory of an actor: this and the pid of its process.
DIRECTORY = f"{tempfile.gettempdir()}/tgi-ray-{os.getuid()}-"


class RankReport(NamedTuple):
    """What an actor tells the driver."""

    incarnation: str  # of the actor: Ray has restarted it if this has changed
    version: str  # of tgi on the node
    host: str  # address of the node, as the driver has told Ray
    port: int  # free when the actor began, for the link of a group whose first rank it is
    order: str  # of the command that runs or has ended; "" if there was none
    exit_code: int | None  # of the command, once it has ended
    state: rundir.ProcessState | None  # of the worker process
    lines: list[str]  # of the log since the previous report


class RankActor:
    """One rank. All methods return at once, but for `stop`."""

    def __init__(self, host: str | None = None) -> None:
        """`host`: the address of this node; None: as Ray knows it."""
        self._incarnation = os.urandom(8).hex()
        self._host = host or _node_address()
        self._port = _free_port(self._host)
        self._order = ""
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._asked_at = time.monotonic()
        threading.Thread(target=self._keep_lease, daemon=True).start()
        _remove_leftovers()
        self._directory = Path(f"{DIRECTORY}{os.getpid()}")  # short: sockets lie in it, whose paths have a limit
        self._directory.mkdir(mode=0o700)
        # In memory alone, so that nothing is left on the node's disk however this process ends. Other processes of this
        # user can open it as long as this process lives, and its child lives no longer.
        self._key_file = os.memfd_create("tgi-host-key")
        os.fchmod(self._key_file, 0o600)

    def start(self, order: str, settings: Mapping[str, str], keys: str, last_exit: str) -> None:
        """Runs `tgi worker` with these settings, by environment variable, and the content of the hosts' key file. Ends
        the command that runs. `last_exit`: how the worker before this one has ended, if that is known, for the first
        process of the command; the command itself knows how those after it ended."""
        self._end()
        self._order = order
        directory = self._directory / "run"
        os.ftruncate(self._key_file, 0)
        os.pwrite(self._key_file, keys.encode(), 0)
        variables = {variable for name, option in OPTIONS.items() for variable in option.variables(name) + option.over}
        environment = {name: value for name, value in interpreter.child_environment().items() if name not in variables}
        pid = os.getpid()
        own = {PARENT_PID: str(pid), "TGI_RUN": str(directory), "TGI_KEYS": f"/proc/{pid}/fd/{self._key_file}"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, "worker"],
            env=environment | dict(settings) | own | ({LAST_EXIT: last_exit} if last_exit else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def report(self) -> RankReport:
        self._asked_at = time.monotonic()
        code = None if self._process is None else self._process.poll()
        if code is not None and self._reader is not None:
            self._reader.join(STOP_SECONDS)
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        running = self._process is not None and code is None
        state = rundir.read_state(self._directory / "run", rundir.process_name("worker", 0)) if running else None
        return RankReport(self._incarnation, __version__, self._host, self._port, self._order, code, state, lines)

    def stop(self) -> None:
        self._end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _keep_lease(self) -> None:
        """Ends this process, and the kernel its child, if the driver does not ask any more."""
        while time.monotonic() - self._asked_at < LEASE_SECONDS:
            time.sleep(1.0)
        os._exit(1)

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line.rstrip("\n"))


def _remove_leftovers() -> None:
    """Removes the directories of this user's actors that were killed."""
    for path in Path(DIRECTORY).parent.glob(f"{Path(DIRECTORY).name}*"):
        pid = path.name.rpartition("-")[2]
        if path.lstat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _node_address() -> str:
    """The address of this node, by which the others of the cluster reach it."""
    import ray

    return str(ray.util.get_node_ip_address())


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])
