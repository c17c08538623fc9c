"""The entry point of a supervised process: `python -P -m tgi.kernel.child ROLE PLACE`, settings in its environment."""

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys

from tgi.kernel import interpreter, log, metrics
from tgi.kernel.errors import FATAL, UserError
from tgi.kernel.process import Process
from tgi.kernel.settings import Settings
from tgi.kernel.spawn import LISTEN_FD, PARENT_FD, PARENT_PID, SETTINGS, last_words

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Becomes the role that the supervisor asked for, and ends with it."""
    role, place = sys.argv[1], int(sys.argv[2])
    _die_with_parent(int(os.environ[PARENT_PID]))
    _name_process(f"tgi {role} {place}")
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # not the terminal's own group: `stty tostop` must not stop its logs
    faulthandler.enable()
    settings = Settings.from_json(os.environ.pop(SETTINGS))
    log.configure(f"{role}-{place}", settings)
    metrics.use(settings.run_dir / "metrics")
    listen = os.environ.pop(LISTEN_FD, "")
    process = Process(
        settings, role, place, listen_fd=int(listen) if listen else None, parent_fd=int(os.environ.pop(PARENT_FD))
    )
    process.state("starting")
    try:
        importlib.import_module(f"tgi.{role}.main").main(process)
    except UserError as error:
        _end(process, str(error))
    except ImportError as error:
        logging.getLogger(__name__).debug("cannot run", exc_info=True)
        _end(process, f"{process.name} cannot run, since an import fails ({error}): {interpreter.ADVICE}.")


def _end(process: Process, words: str) -> None:
    """Ends this process for good: its supervisor ends, too, with these words."""
    try:
        last_words(process.run_dir, process.name).write_text(words)
    except OSError:
        logging.getLogger(__name__).error("%s", words)
    sys.exit(FATAL)


def _die_with_parent(parent: int) -> None:
    """The system kills this process when its supervisor dies, however it dies (Linux; elsewhere the pipe tells)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _name_process(title: str) -> None:
    import setproctitle

    setproctitle.setproctitle(title)


if __name__ == "__main__":
    main()
