"""The Python that runs this program: which packages it has, and how it is started for child processes.

No process imports from the current directory: files there may have the names of modules. `python -m` puts that
directory first on the module search path, unless it is told not to by `-P`.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import tgi
from tgi.kernel.errors import FATAL, UserError

ADVICE = "install what is missing with `pip install tgi-server` (in a clone: `pip install .`)"


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module in a child process. Start it with `environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's environment for a child of the same Python, which finds this package where this process has.

    PYTHONPATH keeps its directories. Its empty entries, which mean the current directory, are left out.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    here = str(Path(tgi.__file__).absolute().parent.parent)
    if here not in sys.path[1:]:  # found by the hook of an editable installation, or in the current directory
        paths.append(here)
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def require(packages: Iterable[str], what: str) -> None:
    """Raises UserError if one of these packages cannot be imported. `what` needs them, in words: "The worker"."""
    if missing := [name for name in packages if not _found(name)]:
        raise UserError(
            f"{what} needs {', '.join(missing)}, which {sys.executable} cannot import: {ADVICE}.",
            code=FATAL,
        )


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
