"""Nothing that comes from outside is unpickled. `lint-imports` checks layers and libraries, ruff docstrings."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tgi"


def test_no_file_unpickles() -> None:
    unpickling = re.compile(r"\b(?:import pickle|pickle\.|recv_pyobj|send_pyobj|torch\.load\(|import dill|joblib)")
    files = [*PACKAGE.rglob("*.py")]
    assert files
    assert [path for path in files if unpickling.search(path.read_text())] == []
