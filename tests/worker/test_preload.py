"""What the fork server of workers imports starts no thread, and torch computes with several in the forked process."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import os
from tgi.worker.preload import Preload

def threads():
    return len(os.listdir("/proc/self/task"))

Preload(None).run()
import torch
assert threads() == 1
torch.set_num_threads(2)
if (pid := os.fork()) == 0:
    torch.nn.functional.softmax(torch.zeros(2000, 2000), -1)
    os._exit(threads())
_, status = os.waitpid(pid, 0)
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="there are no fork servers")
def test_the_imports_of_workers_start_no_thread() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
