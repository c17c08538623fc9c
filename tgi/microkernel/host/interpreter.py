"""The Python interpreter of this program: which packages it has, and how child processes of it are started.

No process imports from the current directory, where files may have the names of modules. `python -m` would put that
directory first on the module search path; `-P` prevents it.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import tgi
from tgi.microkernel.errors import FATAL, UserError

INSTALL_ADVICE = "install what is missing with `pip install tgi-server` (in a clone: `pip install .`)"


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module in a child process. Start it with `child_environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """The environment for a child process, which imports this package from the same directory as this process.

    PYTHONPATH keeps its directories, except for empty entries, which mean the current directory.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    here = str(Path(tgi.__file__).absolute().parent.parent)
    if here not in sys.path[1:]:  # imported by the hook of an editable installation, or from the current directory
        paths.append(here)
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def require_packages(packages: Iterable[str], what: str) -> None:
    """Raises UserError if one of these packages cannot be imported. `what` names what needs them: "The worker"."""
    if missing := [name for name in packages if not _is_installed(name)]:
        raise UserError(
            f"{what} needs {', '.join(missing)}, which {sys.executable} cannot import: {INSTALL_ADVICE}.",
            code=FATAL,
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
