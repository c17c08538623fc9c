"""The heartbeat that a process and its supervisor share, the stages of a start, the id of a served model, and the end
of a process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tgi.microkernel.processes import process as process_module
from tgi.microkernel.processes.process import Heartbeat, StartStages, served_model_id

WRITER = """
import sys
from pathlib import Path
from tgi.microkernel.processes.process import Heartbeat
beat = Heartbeat(Path(sys.argv[1]))
beat.set_deadline(1.0)
print(flush=True)
while True:
    beat.set_deadline(2.0)
    beat.set_deadline(3.0)
"""

ENDING = """
import atexit, os, sys, threading, time, zmq
from tgi.microkernel.links.link import LINGER_SECONDS
from tgi.microkernel.processes.process import run_and_exit

def raises(error):
    raise error

def works():
    atexit.register(print, "of atexit")
    threading.Thread(target=time.sleep, args=(600,)).start()
    push.connect(sys.argv[1])
    push.send(b"the last message")
    push.close(int(1000 * LINGER_SECONDS))
    print("done", end="")

context = zmq.Context()
pull = context.socket(zmq.PULL)
address = f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}"
ends = [works, lambda: sys.exit(3), lambda: sys.exit("too late"), lambda: raises(KeyError("why"))]
if len(sys.argv) > 1:
    push = zmq.Context.instance().socket(zmq.PUSH)
    run_and_exit(ends[int(sys.argv[2])])
import subprocess
for number in range(len(ends)):
    again = [sys.executable, *sys.orig_argv[1:3], address, str(number)]
    process = subprocess.run(again, capture_output=True, text=True)
    print(process.returncode, process.stdout, process.stderr.splitlines()[-1:], sep="|")
print(pull.recv() if pull.poll(1000) else "nothing")
"""


def test_heartbeat_is_never_read_half_written(tmp_path: Path) -> None:
    """A supervisor that read a wrong deadline would kill a healthy process."""
    beat = Heartbeat(tmp_path / "beat")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "beat")], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen: set[float] = set()
        while not seen >= {2.0, 3.0}:
            seen |= {beat.read_deadline() for _ in range(200_000)}
        process.kill()
    assert seen <= {1.0, 2.0, 3.0}


def test_model_id_depends_on_quantization() -> None:
    assert served_model_id("abc", "int8") == served_model_id("abc", "eetq") != served_model_id("abc", "int4")
    assert "abc" == served_model_id("abc", None) == served_model_id("abc", "gptq") != served_model_id("abc", "int8")
    assert len({served_model_id("abc", made, cache) for made in ("int8", None) for cache in ("fp8_e5m2", None)}) == 4
    assert served_model_id("", "int8", "fp8_e5m2") == ""  # unknown


def test_stages_of_a_start_are_summed_until_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(process_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process_module, "age_of_process", lambda: 0.5)
    stages, ended = StartStages(), []
    for spent, stage in ((0.0, "starting"), (1.0, "weights"), (2.0, "weights"), (1.0, "starting"), (0.25, ""), (9, "")):
        now[0] += spent
        ended.append(stages.enter(stage))
    assert ended == [False] * 4 + [True, False]
    assert str(stages) == "4.75 s: interpreter 0.50, starting 1.25, weights 3.00"


def test_a_process_ends_with_its_exit_code_and_what_it_has_sent() -> None:
    """And waits neither for threads nor for what is registered with atexit."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "0|done|[]",
        "3||[]",
        "1||['too late']",
        "1||[\"KeyError: 'why'\"]",
        "b'the last message'",
    ], done.stderr
