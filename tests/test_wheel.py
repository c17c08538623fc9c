"""The wheel is built from the source distribution and computes with its own kernels where there is no compiler."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from tgi.worker.host_cpu import CPU_VARIABLE, kernel_set
from tgi.worker.instruction_sets import BY_NAME, InstructionSet

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# What a build reads. It runs in a copy, since setuptools writes to the directory that it builds.
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "requirements", "setup.py", "tgi")
CHECK = ROOT / "scripts" / "check_wheel.py"
SMALLER = ("avx2", "neon")  # what is tested besides the set in use
TESTED = ("bfloat16", "float32")  # element types; other tests need the same libraries, so they are compiled once


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("sdist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    done = build("sdist", copy, out)
    assert done.returncode == 0, done.stderr
    (archive,) = out.iterdir()
    with tarfile.open(archive) as packed:
        packed.extractall(out, filter="data")
    (unpacked,) = (path for path in out.iterdir() if path.is_dir())
    return unpacked


def build(kind: str, directory: Path, out: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Calls setuptools as pip does, in this environment, which has it."""
    call = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    return subprocess.run(
        [sys.executable, "-P", "-c", call], cwd=directory, env=os.environ | environment, capture_output=True, text=True
    )


def usable_sets() -> list[InstructionSet]:
    """The instruction set in use, and a smaller one if it has that."""
    best = kernel_set()
    if best is None:
        return []
    return [one for one in BY_NAME.values() if one == best or (one.name in SMALLER and one.features <= best.features)]


def test_the_wheel_brings_kernels_that_compute_where_there_is_no_compiler(distribution: Path, tmp_path: Path) -> None:
    names = [f"{one.name}:{element}" for one in usable_sets() for element in TESTED]
    done = build("wheel", distribution, tmp_path, TGI_WHEEL_KERNELS=",".join(names) or "none")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("tgi_server-0.1.0-py3-none-")
    assert wheel.name.endswith("-any.whl") == (not names)
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    # torch and the other dependencies come from this environment. Its own editable tgi does not.
    (site,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    for one in usable_sets():
        environment = {"PATH": str(python.parent), "XDG_CACHE_HOME": str(tmp_path / "cache"), CPU_VARIABLE: one.name}
        checked = subprocess.run(
            [python, CHECK, *TESTED], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stderr
        assert checked.stdout.count("computes as torch does") == len(TESTED)
        assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"CXX": "/nowhere/g++", "XDG_CACHE_HOME": "empty"},
            "The CPU kernels cannot be compiled: /nowhere/g++ cannot be run: [Errno 2] No such file or directory: "
            "'/nowhere/g++'. TGI_WHEEL_KERNELS=none builds without them.",
        ),
        (
            {"TGI_WHEEL_KERNELS": "avx3"},
            "TGI_WHEEL_KERNELS is 'avx3': 'avx3' is not one of all, none, amx, avx512_bf16, avx512, avx2",
        ),
    ],
)
def test_a_missing_compiler_or_an_unknown_set_ends_the_build_with_a_message(
    environment: dict[str, str], told: str, distribution: Path, tmp_path: Path
) -> None:
    done = build("wheel", distribution, tmp_path, **environment)
    assert done.returncode != 0
    assert told in done.stderr
    assert not any(tmp_path.glob("*.whl"))


def test_a_wheel_without_kernels_is_for_every_platform(distribution: Path, tmp_path: Path) -> None:
    assert build("wheel", distribution, tmp_path, TGI_WHEEL_KERNELS="none").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tgi_server-0.1.0-py3-none-any.whl"]


def test_an_editable_installation_compiles_nothing(distribution: Path, tmp_path: Path) -> None:
    done = build("editable", distribution, tmp_path, CXX="/nowhere/g++", XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*.whl"))) == 1
