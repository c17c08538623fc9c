"""Entry points of the commands, and `python -m tgi`.

Secrets are removed from the process's arguments before anything else, and Ctrl-C ends a command without a traceback
even during imports. Nothing is imported from the current directory, except this package itself if `python -m` finds it
there.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current directory
    if sys.modules["tgi"].__file__ is None:  # a directory tgi without this package, such as the parent of a clone
        del sys.modules["tgi"]

import shlex
from importlib import import_module

from tgi import INTERRUPTED
from tgi.microkernel.errors import ForkedRole


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
        return
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except ForkedRole as forked:
        arguments = forked.arguments
    from tgi.microkernel.processes.process import run_role

    run_role(arguments)


def _hide_secrets(command: str) -> None:
    """Hides secrets among the arguments in the list of processes, which all users can see."""
    from tgi.microkernel.settings.options import without_secrets
    from tgi.microkernel.settings.table import OPTIONS

    shown = without_secrets(sys.argv[1:], OPTIONS)
    if shown != sys.argv[1:]:
        import setproctitle

        setproctitle.setproctitle(shlex.join([command, *shown]))


if __name__ == "__main__":
    tgi()
