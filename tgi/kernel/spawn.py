"""Starts one supervised process and holds what its supervisor needs to know of it."""

import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tgi.kernel import interpreter
from tgi.kernel.process import Beat
from tgi.kernel.settings import Settings

# What a child finds in its environment.
SETTINGS, PARENT_PID, PARENT_FD, LISTEN_FD = "TGI_CHILD_SETTINGS", "TGI_PARENT_PID", "TGI_PARENT_FD", "TGI_LISTEN_FD"


def last_words(run: Path, name: str) -> Path:
    """The file in which a child that ends with the exit code FATAL says why."""
    return run / "state" / f"{name}.error"


@dataclass(frozen=True)
class Spec:
    """One process to keep alive."""

    role: str
    place: int
    listen_fd: int | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.place}"


class Child:
    """A running process. To be made in the main thread: the parent-death signal is tied to the spawning thread."""

    def __init__(self, spec: Spec, settings: Settings) -> None:
        self.spec = spec
        self.started = time.monotonic()
        self.beat = Beat(settings.run_dir / f"{spec.name}.beat")
        self.beat.promise(self.started + settings.start_timeout)
        # The child holds the reading end: when this process ends, however it ends, the child reads EOF.
        parent_end, self._held = os.pipe()
        inherited = [parent_end] if spec.listen_fd is None else [parent_end, spec.listen_fd]
        environment = interpreter.environment() | spec.environment
        environment |= {SETTINGS: settings.to_json(), PARENT_PID: str(os.getpid()), PARENT_FD: str(parent_end)}
        if spec.listen_fd is not None:
            environment[LISTEN_FD] = str(spec.listen_fd)
        self._process = subprocess.Popen(
            interpreter.command("tgi.kernel.child", spec.role, str(spec.place)),
            env=environment,
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            # A group of its own: what a terminal sends to all of its group (Ctrl-C, hang-up) reaches the supervisor
            # alone, which drains the floors in order.
            process_group=0,
        )
        os.close(parent_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: the signal that ended it), else None."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def overdue(self) -> bool:
        """Whether it has broken its promise to give a sign of life."""
        return time.monotonic() > self.beat.deadline()

    def close(self) -> None:
        """Lets go of an ended process."""
        os.close(self._held)
