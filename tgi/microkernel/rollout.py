"""The operations of `tgi restart` and `tgi scale`, which change the processes of a supervisor while the server serves.

An operation is a generator that the supervisor continues between its other work (control.py). It changes one process
after the other, and the next one only when the new process serves. So one that cannot start stops the operation, and
the processes that served before go on.
"""

import time
from collections.abc import Generator
from typing import Any

from tgi.microkernel.control import Operation
from tgi.microkernel.errors import UserError
from tgi.microkernel.rundir import SINGLE_ROLES
from tgi.microkernel.supervisor import DRAIN_ORDER, ProcessSpec, Supervisor

# Maximum of `tgi scale`, against mistyped numbers.
MAX_REPLICAS = 64

Waiting = Generator[str, None, None]


def start_operation(supervisor: Supervisor, command: dict[str, Any]) -> Operation:
    """The operation of a command that a supervisor was sent. Raises UserError if there is none, or as the operation."""
    match command:
        case {"command": "restart", "target": str(target)}:
            return (yield from restart(supervisor, target))
        case {"command": "scale", "role": str(role), "count": int(count)}:
            return (yield from scale(supervisor, role, count))
        case _:
            raise UserError("The server does not know this command: it runs another version of tgi.")


def restart(supervisor: Supervisor, target: str) -> Operation:
    """Replaces the processes of a role, or one process (`api-0`), one after the other.

    A front end or tokenizer is retired when a new one is ready: the front end finishes its requests, the requests of a
    tokenizer go on at another one. Scheduler and worker end before the new one starts, and requests wait for it.
    """
    specs = [spec for role in DRAIN_ORDER for spec in supervisor.processes(role) if target in (role, spec.name)]
    if not specs:
        raise UserError(f"This server has no process {target}; `tgi ps` lists them.")
    for spec in specs:
        if spec.role in SINGLE_ROLES:
            yield from _replace(supervisor, spec)
        else:
            new = yield from _add(supervisor, spec.role)
            yield from _retire(supervisor, spec)
            yield f"{new.name} has replaced {spec.name}"
    return f"restarted {target}"


def scale(supervisor: Supervisor, role: str, count: int) -> Operation:
    """Starts or retires front ends or tokenizers of this supervisor until there are `count`."""
    if role not in DRAIN_ORDER or role in SINGLE_ROLES:
        raise UserError(f"Only api and tokenizer can be scaled, not {role}.")
    if not 1 <= count <= MAX_REPLICAS:
        raise UserError(
            f"{count} processes of the role {role} are not possible: give a number from 1 to {MAX_REPLICAS}."
        )
    while len(supervisor.processes(role)) < count:
        yield from _add(supervisor, role)
    for spec in supervisor.processes(role)[count:]:
        yield from _retire(supervisor, spec)
    names = ", ".join(spec.name for spec in supervisor.processes(role))
    return f"running: {names}"


def _add(supervisor: Supervisor, role: str) -> Generator[str, None, ProcessSpec]:
    """Starts a process, and waits until it is ready."""
    spec = supervisor.add(role)
    yield from _wait_until_ready(supervisor, spec)
    supervisor.confirm(spec)
    return spec


def _wait_until_ready(supervisor: Supervisor, spec: ProcessSpec) -> Waiting:
    """Raises UserError, and retires the process, if it does not get ready."""
    deadline = time.monotonic() + supervisor.settings.start_timeout
    while True:
        if error := supervisor.start_error(spec):
            raise UserError(f"{spec.name} could not be started, and the other processes go on: {error}")
        state = supervisor.state(spec)
        if state is not None and state.state == "ready":
            return
        stage = state.stage if state is not None else ""
        if time.monotonic() > deadline:
            supervisor.retire(spec)
            raise UserError(
                f"{spec.name} was not ready within {supervisor.settings.start_timeout:g} s ({stage or 'starting'}), so "
                "it was ended, and the other processes go on."
            )
        yield f"{spec.name} starts" + (f": {stage}" if stage else "")


def _retire(supervisor: Supervisor, spec: ProcessSpec) -> Waiting:
    """Has a process hand over, and waits until it has ended."""
    supervisor.retire(spec)
    while not supervisor.has_retired(spec):
        yield f"{spec.name} drains"


def _replace(supervisor: Supervisor, spec: ProcessSpec) -> Waiting:
    """Has a process hand over to a new one of the same name, and waits until that is ready."""
    old = supervisor.replace(spec)
    deadline = time.monotonic() + supervisor.settings.start_timeout
    while (state := supervisor.state(spec)) is None or state.pid == old or state.state != "ready":
        if time.monotonic() > deadline:
            raise UserError(
                f"{spec.name} was not ready within {supervisor.settings.start_timeout:g} s; its supervisor goes on "
                "restarting it if it fails. The log says why."
            )
        stage = state.stage if state is not None and state.pid != old else ""
        yield f"{spec.name} starts again" + (f": {stage}" if stage else "")
    yield f"{spec.name} has been replaced"
