"""The tables of conftest.py name paths that exist."""

from pathlib import Path

import pytest

from tests.conftest import LONGEST_FILES, MARKERS

TESTS = Path(__file__).parent


@pytest.mark.parametrize("path", [*LONGEST_FILES, *(path for paths in MARKERS.values() for path in paths)])
def test_a_path_of_the_tables_exists(path: str) -> None:
    assert list(TESTS.glob(f"{path}*")) if not path.endswith("/") else (TESTS / path).is_dir()
