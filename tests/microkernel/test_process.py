"""The heartbeat that a process and its supervisor share, the stages of a start, and the id of a served model."""

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
