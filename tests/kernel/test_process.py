"""What a process and its supervisor share."""

import subprocess
import sys
from pathlib import Path

from tgi.kernel.process import Beat, served

PROMISES = """
import sys
from pathlib import Path
from tgi.kernel.process import Beat
beat = Beat(Path(sys.argv[1]))
beat.promise(1.0)
print(flush=True)
while True:
    beat.promise(2.0)
    beat.promise(3.0)
"""


def test_a_promise_is_never_seen_half_written(tmp_path: Path) -> None:
    """A supervisor that read a moment in the past would kill a process that is well."""
    beat = Beat(tmp_path / "beat")
    with subprocess.Popen(
        [sys.executable, "-c", PROMISES, str(tmp_path / "beat")], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen: set[float] = set()
        while not seen >= {2.0, 3.0}:
            seen |= {beat.deadline() for _ in range(200_000)}
        process.kill()
    assert seen <= {1.0, 2.0, 3.0}


def test_a_model_in_other_bits_is_another_model() -> None:
    assert served("abc", "int8") == served("abc", "eetq") != served("abc", "int4")
    assert "abc" == served("abc", None) == served("abc", "gptq") != served("abc", "int8")
    assert len({served("abc", made, cache) for made in ("int8", None) for cache in ("fp8_e5m2", None)}) == 4
    assert served("", "int8", "fp8_e5m2") == ""  # not known yet
