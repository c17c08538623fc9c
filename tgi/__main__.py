"""Where the commands begin, and `python -m tgi`: Ctrl-C ends them without a traceback while they are imported, too.

Nothing is imported from the current directory; `python -m` may find this package itself there, of course.
"""

import sys
from importlib import import_module

from tgi import INTERRUPTED


def tgi() -> None:
    """The command `tgi`."""
    _begin("tgi.cli")


def launcher() -> None:
    """The command `text-generation-launcher`."""
    _begin("tgi.launcher")


def _begin(module: str) -> None:
    try:
        import_module(module).main()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory
    tgi()
