"""A watched link ends its process when it cannot do its work."""

import subprocess
import sys
from pathlib import Path

DEFECT = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from tests.microkernel.test_link import hello
from tgi.microkernel.links.link import Link
from tgi.microkernel.processes.watched_link import WatchedLink

address = "ipc://" + sys.argv[1]
process = SimpleNamespace(wake_loop=lambda: None, run_dir=Path(sys.argv[1]).parent)
low = WatchedLink(process, Link.bind(address, hello("worker")))
up = WatchedLink(process, Link.connect(address, hello("worker", 1)))
while not (received := [*low.receive()]):
    time.sleep(0.01)
low.send((object(),), received[0][0])
time.sleep(60)
"""


def test_an_exception_in_its_thread_ends_the_process(tmp_path: Path) -> None:
    """Else it would hear no message of the other ranks, and not notice their end."""
    done = subprocess.run([sys.executable, "-c", DEFECT, str(tmp_path / "link")], capture_output=True, text=True)
    assert (done.returncode, "the link of the ranks has failed" in done.stderr) == (1, True), done.stderr
