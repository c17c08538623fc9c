"""Fork servers: the process that one forks is a child of the supervisor, is its own in all that it shares, and outlives
the fork server. Each program below stands for a supervisor."""

import os
import socket
import subprocess
import sys

import pytest

from tgi.microkernel.processes.child import start_forked
from tgi.microkernel.processes.fork_server import ForkServer

PREFIX = """
import os, signal, sys, time
from tgi.microkernel.errors import ForkedRole
from tgi.microkernel.processes import fork_server
from tgi.microkernel.processes.fork_server import ForkServerLost, start_fork_servers

def preload():
    import decimal

def broken():
    raise ImportError("a library is missing")

def threaded():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

def ended(process):
    while (code := process.poll()) is None:
        time.sleep(0.005)
    return code

supervisor = os.getpid()
try:
    servers = start_fork_servers({"first": broken, "roles": preload, "threaded": threaded})
    server = servers["roles"]
"""
IN_FORKED_PROCESS = """
except ForkedRole as forked:
    arguments = forked.arguments
"""

CHILD = """
    read, write = os.pipe()
    child = server.start(["worker", "0"], {"NAME": "ä\\udcff"}, {"OUTPUT": write}, 60)
    assert ended(child) == 7
    os.close(write)
    print(os.read(read, 1000).decode())
    assert not os.path.exists(f"/proc/{child.pid}"), "a zombie"
    try:
        servers.pop("threaded").start(["sleep"], {}, {}, 60)
    except ForkServerLost:
        sleeping = [servers[name].start(["sleep"], {}, {}, 60) for name in servers]
    sleeping[0].send_signal(signal.SIGTERM)
    assert ended(sleeping[0]) == -signal.SIGTERM
    for one in servers.values():
        one.close()
        one.close()
    assert sleeping[1].poll() is None, "it ends with the fork server"
    sleeping[1].send_signal(signal.SIGINT)  # of the terminal
    time.sleep(0.01)
    sleeping[1].send_signal(signal.SIGKILL)
    assert ended(sleeping[1]) == -signal.SIGKILL
    sys.exit()
"""
REPORT = """
if arguments == ["sleep"]:
    time.sleep(600)
assert not threading.active_count() > 1
state = {
    "arguments": arguments, "parent": os.getppid() == supervisor, "group": os.getpgrp() == os.getpid(),
    "imported": "decimal" in sys.modules, "environment": os.environ["NAME"], "variables": len(os.environ),
    "descriptors": len(os.listdir("/proc/self/fd")) - 1, "input": os.readlink("/proc/self/fd/0"),
}
os.write(int(os.environ["OUTPUT"]), ascii(state).encode())
raise SystemExit(7)
"""


def supervise(program: str, role: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import threading\n{PREFIX}{program}{IN_FORKED_PROCESS}{role}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "have started 1 threads, so it forks no processes" in done.stderr
    return done.stdout


LEAVING = """
import os, signal, socket, sys, threading, time
from tgi.microkernel.processes import fork_server
from tgi.microkernel.processes.fork_server import ForkServer, adopting_orphans, leave_fork_server

def role(arguments):
    state = {
        "arguments": arguments, "parent": os.getppid() == supervisor, "loaded": loaded, "variables": len(os.environ),
        "threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd")) - 1,
    }
    os.write(int(os.environ["OUTPUT"]), ascii(state).encode())
    os._exit(7)

def wait(process):
    while (code := process.poll()) is None:
        time.sleep(0.005)
    return code

fork_server.run_role = role
supervisor, loaded = os.getpid(), "nothing"
connection, requests = socket.socketpair()
server = ForkServer(None, connection)
assert not server.is_ready()
with adopting_orphans():
    if (worker := os.fork()) == 0:
        connection.close()
        os.setpgid(0, 0)
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        loaded = "weights"
        leave_fork_server(requests)
        loaded = "changed later"
        time.sleep(600)
    requests.close()
    while not server.is_ready():
        time.sleep(0.005)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    assert server.is_ready()
    read, write = os.pipe()
    for _ in range(2):
        assert wait(server.start(["worker", "0"], {}, {"OUTPUT": write}, 60)) == 7
        print(os.read(read, 1000).decode())
        assert server.is_ready()
    server.close()
    assert not server.is_ready()
    assert os.waitstatus_to_exitcode(os.waitpid(-worker, 0)[1]) == 0, "it ends with its connection"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there are no fork servers")
def test_a_process_leaves_a_fork_server_behind_with_what_it_has_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = {
        "arguments": ["worker", "0"], "parent": True, "loaded": "weights", "variables": 1, "threads": 1,
        "descriptors": 4,
    }  # fmt: skip
    assert [eval(line) for line in done.stdout.splitlines()] == [expected, expected]


FORKING = """
import os, signal, socket, sys, threading
from tgi.microkernel.processes import fork_server
from tgi.microkernel.processes.fork_server import count_threads, fork_role

def role(arguments):
    state = {
        "arguments": arguments, "parent": os.getppid() == parent, "group": os.getpgrp() == os.getpgid(parent),
        "loaded": loaded, "variables": len(os.environ), "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "default": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    }
    os.write(int(os.environ["OUTPUT"]), ascii(state).encode())
    os.read(int(os.environ["INPUT"]), 1)
    os._exit(7)

fork_server.run_role = role
parent, loaded = os.getpid(), "imports"
wake, write_wake = socket.socketpair()
write_wake.setblocking(False)
signal.set_wakeup_fd(write_wake.fileno())
signal.signal(signal.SIGTERM, lambda *_: None)
output, write = os.pipe()
wait, end = os.pipe()
assert count_threads() == 1
children = []
for rank in ("1", "2"):
    children.append(fork_role(["worker", "0", rank], {}, {"OUTPUT": write, "INPUT": wait}))
    print(os.read(output, 1000).decode())
ended, killed = children
codes = []
waiting = [threading.Thread(target=lambda: codes.append(killed.wait())) for _ in range(2)]
for thread in waiting:
    thread.start()
assert killed.poll() is None
killed.send_signal(signal.SIGKILL)
for thread in waiting:
    thread.join()
assert codes == [-signal.SIGKILL] * 2
killed.send_signal(signal.SIGKILL)
os.write(end, b".")
assert ended.wait() == 7
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process is forked with torch")
def test_a_process_forks_children_which_share_what_it_has_imported_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    expected = {"parent": True, "group": True, "loaded": "imports", "variables": 2, "descriptors": 5, "default": True}
    assert [eval(line) for line in done.stdout.splitlines()] == [
        {"arguments": ["worker", "0", rank], **expected} for rank in ("1", "2")
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the supervisor starts new interpreters")
def test_a_forked_process_is_a_child_of_the_supervisor_with_an_environment_and_descriptors_of_its_own() -> None:
    assert eval(supervise(CHILD, REPORT)) == {
        "arguments": ["worker", "0"], "parent": True, "group": True, "imported": True, "environment": "ä\udcff",
        "variables": 2, "descriptors": 4, "input": "/dev/null",
    }  # fmt: skip


def test_without_its_fork_server_a_process_is_a_new_interpreter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tgi.microkernel.host.interpreter.python_command", lambda *_: ["sleep", "600"])
    connection, requests = socket.socketpair()
    requests.close()
    server = ForkServer(subprocess.Popen(["sleep", "600"]).pid, connection)
    for _ in range(2):
        child = start_forked(server, ["worker", "0"], os.environ, {})
        assert isinstance(child, subprocess.Popen)
        child.kill()
        child.wait()
    assert [message[:16] for message in caplog.messages] == ["The fork server "]
