"""Where the commands begin, and `python -m tgi`: secrets leave the list of arguments before anything else happens, and
Ctrl-C ends a command without a traceback while it is imported, too.

Nothing is imported from the current directory; `python -m` may find this package itself there, of course.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current directory
    if sys.modules["tgi"].__file__ is None:  # a directory called tgi without this package in it: the parent of a clone
        del sys.modules["tgi"]

import shlex
from importlib import import_module

from tgi import INTERRUPTED


def tgi() -> None:
    """The command `tgi`."""
    _begin("tgi", "tgi.cli")


def launcher() -> None:
    """The command `text-generation-launcher`."""
    _begin("text-generation-launcher", "tgi.launcher")


def _begin(command: str, module: str) -> None:
    try:
        _hide_secrets(command)
        import_module(module).main()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _hide_secrets(command: str) -> None:
    """Rewrites the arguments that others see in the list of processes, if there is a secret among them."""
    from tgi.kernel.option import without_secrets
    from tgi.kernel.settings import OPTIONS

    shown = without_secrets(sys.argv[1:], OPTIONS)
    if shown != sys.argv[1:]:
        import setproctitle

        setproctitle.setproctitle(shlex.join([command, *shown]))


if __name__ == "__main__":
    tgi()
