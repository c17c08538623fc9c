"""The virtual environments of the client libraries, one per group, since their pinned dependencies conflict.

    python = environment("openai")

Each is created on first use in the user's cache directory, which all checkouts share, and again when its requirements
or the Python version change.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
ENVIRONMENTS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tgi-tests" / "clients"
GROUPS = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def environment(group: str) -> Path:
    """The Python of a group's environment, which is created if missing. Safe to call from several processes at once."""
    requirements = REQUIREMENTS / f"{group}.txt"
    digest = hashlib.blake2b(requirements.read_bytes() + sys.version.encode(), digest_size=10).hexdigest()
    directory = ENVIRONMENTS / f"{group}-{digest}"
    python, installed = directory / "bin" / "python", directory / "installed"
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with (ENVIRONMENTS / f"{group}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (installed.exists() and python.exists()):
            # The requirements are complete, so nothing is resolved. Most of the bytecode would never be used.
            _run("-m", "uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(directory))
            install = ("-m", "uv", "pip", "install", "--quiet", "--no-deps", "--python", str(python))
            _run(*install, "-r", str(requirements))
            installed.touch()
    return python


def _run(*arguments: str) -> None:
    """Runs this Python. Raises RuntimeError with its output if it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
