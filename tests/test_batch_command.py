"""`tgi batch` without a server."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tgi import batch

HOLD = """
import tempfile, sys, time
from tgi import batch
tempfile.tempdir = sys.argv[1]
with batch._own_directory() as path:
    (path / "run").mkdir()
    print(path, flush=True)
    time.sleep(1000)
"""


def test_a_directory_of_a_killed_command_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next command with a server of its own, which leaves that of one that runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = subprocess.Popen([sys.executable, "-P", "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with batch._own_directory():
            assert left.exists()
        other.kill()
    assert left.exists()
    with batch._own_directory() as own:
        assert list(tmp_path.iterdir()) == [own]
    assert list(tmp_path.iterdir()) == []
