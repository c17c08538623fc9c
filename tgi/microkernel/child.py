"""Starts child processes that run a role: those of the supervisor, and the further ranks of a worker."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tgi.microkernel import interpreter
from tgi.microkernel.process import PARENT_FD, PARENT_PID, SETTINGS
from tgi.microkernel.settings import Settings


class StartedChild(NamedTuple):
    """A process that was started, and the writing end of its pipe. The child reads EOF when this process ends for any
    reason; close it when the child has ended."""

    process: "subprocess.Popen[bytes]"
    pipe: int


def start_child(
    settings: Settings,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
) -> StartedChild:
    """Starts `python -m tgi.microkernel ARGUMENTS`, with these further variables and file descriptors. To be called by
    the main thread: the child is killed when the thread that has started it ends. Raises OSError."""
    parent_end, pipe = os.pipe()
    own = {SETTINGS: settings.to_json(), PARENT_PID: str(os.getpid()), PARENT_FD: str(parent_end)}
    try:
        process = subprocess.Popen(
            interpreter.python_command("tgi.microkernel", *arguments),
            env={**interpreter.child_environment(), **environment, **own},
            pass_fds=[parent_end, *inherited],
            stdin=subprocess.DEVNULL,
            # Its own process group: signals of the terminal (Ctrl-C, hang-up) reach the supervisor only, which drains
            # the roles in order.
            process_group=0,
        )
    except OSError:
        os.close(pipe)
        raise
    finally:
        os.close(parent_end)
    return StartedChild(process, pipe)
