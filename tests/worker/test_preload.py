"""What fork servers import starts no thread and, for workers, is none of the libraries that few models need; torch
computes with several threads in the forked process."""

import os
import subprocess
import sys

import pytest

from tgi.microkernel.processes.fork_server import SINGLE_THREADED

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="there are no fork servers")]

THREADS = """
import os, sys

def threads():
    return len(os.listdir("/proc/self/task"))
"""
COMPUTES = """
from tgi.worker.preload import Preload
Preload(None).run()
heavy = {"transformers", "safetensors.torch", "torch._dynamo", "triton"}  # which take seconds
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import torch
assert threads() == 1
torch.set_num_threads(2)
if (pid := os.fork()) == 0:
    torch.nn.functional.softmax(torch.zeros(2000, 2000), -1)
    os._exit(threads())
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status))
"""
IMPORTS = """
from tgi.microkernel.messages.protocol import ROLES
from tgi.microkernel.settings.table import Settings
from tgi.server import preloads
preloads(Settings(), ROLES)["roles"]()
print(threads())
"""


@pytest.mark.parametrize(("program", "count"), [(COMPUTES, 2), (IMPORTS, 1)], ids=["workers", "other roles"])
def test_imports_start_no_thread(program: str, count: int) -> None:
    environment = os.environ | SINGLE_THREADED
    command = [sys.executable, "-c", THREADS + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout) == (0, f"{count}\n"), done.stderr
