"""The rules of the house: who may import whom, and that nothing is ever unpickled."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tgi"
ROOMS = ("kernel", "hub", "api", "tokenizer", "scheduler", "worker")
MAY_IMPORT = {
    "kernel": {"kernel"},
    "hub": {"hub", "kernel"},
    **{role: {role, "hub", "kernel"} for role in ("api", "tokenizer", "scheduler", "worker")},
}
# Library -> the rooms that may import it. hub converts in a child process that exits; that file is named.
ONLY_IN = {
    "torch": {"worker", "hub/gguf/convert.py"},
    "triton": {"worker"},
    "transformers": {"worker", "hub/gguf/convert.py"},
    "falcon": {"api"},
    "uvicorn": {"api"},
    "asyncio": {"api"},
    "llguidance": {"hub", "tokenizer", "worker"},
    "zmq": {"kernel"},
    "msgpack": {"kernel"},
    "opentelemetry": {"kernel/trace.py"},
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, lazily or not."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_keeps_the_rules(path: Path) -> None:
    here = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "tgi" and len(parts) > 1 and parts[1] in ROOMS and here in ROOMS:
            assert parts[1] in MAY_IMPORT[here], f"{path} imports {name}"
        allowed = ONLY_IN.get(parts[0])
        if allowed is not None:
            assert here in allowed or str(path.relative_to(PACKAGE)) in allowed, f"{path} imports {name}"
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} does not say its job in its first line"


def test_the_rules_cover_every_room() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ROOMS)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_unpickled(path: Path) -> None:
    text = path.read_text()
    found = re.findall(r"\b(?:import pickle|pickle\.|recv_pyobj|send_pyobj|torch\.load\(|import dill|joblib)", text)
    assert found == []
