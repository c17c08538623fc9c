"""Layering: which package may import which, which libraries belong to which package, and no unpickling."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tgi"
PACKAGES = ("microkernel", "hub", "api", "tokenizer", "scheduler", "worker")
MAY_IMPORT = {
    "microkernel": {"microkernel"},
    "hub": {"hub", "microkernel"},
    **{role: {role, "hub", "microkernel"} for role in ("api", "tokenizer", "scheduler", "worker")},
}
# Library -> the packages or files that may import it.
ONLY_IN = {
    "torch": {"worker", "hub/gguf/convert.py"},
    "triton": {"worker"},
    "transformers": {"worker", "hub/gguf/convert.py"},
    "falcon": {"api"},
    "uvicorn": {"api"},
    "asyncio": {"api"},
    "llguidance": {"hub", "tokenizer", "worker"},
    "zmq": {"microkernel"},
    "msgpack": {"microkernel"},
    "opentelemetry": {"microkernel/otlp.py"},
    "ray": {"worker/placement/driver.py", "worker/placement/rank_actor.py"},
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """All modules that the file imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_and_docstring_of_each_file(path: Path) -> None:
    package = package_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "tgi" and len(parts) > 1 and parts[1] in PACKAGES and package in PACKAGES:
            assert parts[1] in MAY_IMPORT[package], f"{path} imports {name}"
        allowed = ONLY_IN.get(parts[0])
        if allowed is not None:
            assert package in allowed or str(path.relative_to(PACKAGE)) in allowed, f"{path} imports {name}"
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"


def test_all_packages_are_covered() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(PACKAGES)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_unpickles(path: Path) -> None:
    text = path.read_text()
    found = re.findall(r"\b(?:import pickle|pickle\.|recv_pyobj|send_pyobj|torch\.load\(|import dill|joblib)", text)
    assert found == []
