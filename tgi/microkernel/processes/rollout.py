"""The operations of `tgi restart`, `tgi scale` and `tgi reload`, which change the processes of a supervisor while the
server serves.

An operation is a generator that the supervisor continues between its other work (control.py). It retires processes only
when those that replace them are ready. So if one cannot start, the operation stops and the processes that served before
go on.
"""

import time
from collections.abc import Generator, Iterable
from typing import Any

from tgi.microkernel.errors import UserError
from tgi.microkernel.host.rundir import SINGLE_ROLES
from tgi.microkernel.links.discovery import MAX_PORT, nth_address
from tgi.microkernel.observability.progress import TOKENIZERS
from tgi.microkernel.processes.child import ProcessSpec
from tgi.microkernel.processes.control import Operation
from tgi.microkernel.processes.supervisor import DRAIN_ORDER, Supervisor
from tgi.microkernel.settings.table import Settings

# Maximum of `tgi scale`, against mistyped numbers.
MAX_REPLICAS = 64

# What `tgi scale` calls a scheduler with its worker.
REPLICA = "replica"

Waiting = Generator[str, None, None]


def start_operation(supervisor: Supervisor, command: dict[str, Any]) -> Operation:
    """The operation of a command that a supervisor was sent. Raises UserError if there is none, or as the operation."""
    match command:
        case {"command": "restart", "target": str(target)}:
            return (yield from restart(supervisor, target))
        case {"command": "scale", "role": str(role), "count": int(count)}:
            return (yield from scale(supervisor, role, count))
        case {"command": "settings"}:
            return supervisor.settings.to_json()
        case {"command": "reload", "settings": str(settings), "drain_first": bool(drain_first)}:
            return (yield from reload(supervisor, Settings.from_json(settings), drain_first))
        case _:
            raise UserError("The server does not know this command: it runs another version of tgi.")


def restart(supervisor: Supervisor, target: str) -> Operation:
    """Replaces the processes of a role, or one process (`api-0`), one after the other.

    A front end or tokenizer is retired when a new one is ready: the front end finishes its requests, the requests of a
    tokenizer go on at another one. Scheduler and worker end before the new one starts, and requests wait for it; with
    several replicas their requests are finished first: the scheduler of a worker is replaced with it.
    """
    specs = [spec for role in DRAIN_ORDER for spec in supervisor.processes(role) if target in (role, spec.name)]
    if not specs:
        raise UserError(f"This server has no process {target}; `tgi ps` lists them.")
    for spec in specs:
        if spec.role in SINGLE_ROLES:
            drained = _scheduler_of(supervisor, spec) if supervisor.settings.replicas > 1 else None
            yield from _replace(supervisor, spec, drained)
        else:
            (new,) = _start(supervisor, [spec.role], spec.pipeline)
            yield from _confirm(supervisor, [new])
            yield from _retire(supervisor, [spec])
            yield f"{new.name} has replaced {spec.name}"
    return f"restarted {target}"


def scale(supervisor: Supervisor, role: str, count: int) -> Operation:
    """Starts or retires front ends, tokenizers or replicas of this supervisor until there are `count`."""
    if role != REPLICA and (role not in DRAIN_ORDER or role in SINGLE_ROLES):
        raise UserError(f"Only api, media, tokenizer and replica can be scaled, not {role}.")
    if supervisor.settings.models and role != "api":
        raise UserError(
            "Only the front ends of a server of several models can be scaled. The processes of a model are settings of "
            "its own (replicas, validation-workers)."
        )
    if role == "media" and not supervisor.settings.sees_images:
        raise UserError("This server has no media processes: its model is served without images.")
    if not 1 <= count <= MAX_REPLICAS:
        raise UserError(
            f"{count} processes of the role {role} are not possible: give a number from 1 to {MAX_REPLICAS}."
        )
    if role == REPLICA:
        return (yield from _scale_replicas(supervisor, count))
    while len(supervisor.processes(role)) < count:
        yield from _confirm(supervisor, _start(supervisor, [role]))
    for spec in supervisor.processes(role)[count:]:
        yield from _retire(supervisor, [spec])
    names = ", ".join(spec.name for spec in supervisor.processes(role))
    return f"running: {names}"


def _scale_replicas(supervisor: Supervisor, count: int) -> Operation:
    """`scale` for schedulers, each with a worker of its own. One that is retired gets no new requests and finishes its
    own; what is left after graceful_termination_timeout goes on at another one."""
    roles = SINGLE_ROLES[:1] if supervisor.settings.worker == "remote" else SINGLE_ROLES
    if any(len(supervisor.processes(role)) != supervisor.settings.replicas for role in roles):
        raise UserError("Only a supervisor that runs schedulers and workers can change the number of replicas.")
    listen = supervisor.settings.listen
    if listen is not None and int(nth_address(listen, count - 1).rpartition(":")[2]) > MAX_PORT:
        raise UserError(
            f"{count} schedulers cannot listen at {listen} and the ports after it: ports end at {MAX_PORT}."
        )
    while supervisor.settings.replicas < count:
        new = _start(supervisor, reversed(roles))
        yield from _confirm(supervisor, new)
        supervisor.set_replicas(supervisor.settings.replicas + 1)
        (scheduler,) = (spec for spec in new if spec.role == "scheduler")
        yield from _await_tokenizers(supervisor, scheduler)
    while supervisor.settings.replicas > count:
        last = supervisor.settings.replicas - 1
        supervisor.set_replicas(last)
        retired = [[spec for spec in supervisor.processes(role) if spec.index == last] for role in roles]
        yield from _drain(supervisor, retired[0])  # the scheduler
        for specs in retired:
            yield from _retire(supervisor, specs)
    names = ", ".join(spec.name for role in roles for spec in supervisor.processes(role))
    return f"running: {names}"


def reload(supervisor: Supervisor, settings: Settings, drain_first: bool) -> Operation:
    """Replaces the model: starts a second pipeline with as many processes of each role, and retires the first one.

    The new front ends begin to accept connections when their own pipeline is ready, and the old ones finish their
    requests with the old model. With `drain_first` the old pipeline ends before the new one loads its model; in between
    the new front ends answer 503.
    """
    if others := supervisor.other_supervisors():
        pids = ", ".join(map(str, sorted(others)))
        raise UserError(f"Other supervisors run processes of this server (pids {pids}): end them before `tgi reload`.")
    require_reloadable(supervisor.settings)
    old = [spec for role in DRAIN_ORDER for spec in supervisor.processes(role)]
    if {spec.role for spec in old} - {"media"} != {*DRAIN_ORDER} - {"media"}:
        raise UserError("Only a server of one `tgi up` can be reloaded: this supervisor does not run all roles.")
    pipeline = supervisor.create_pipeline(settings)
    below = [spec.role for spec in reversed(old) if spec.role not in ("api", "media")]
    below += ["media"] * (settings.media_workers if settings.sees_images else 0)
    front_ends = [spec.role for spec in old if spec.role == "api"]
    try:
        if drain_first:
            new = _start(supervisor, front_ends, pipeline)  # not ready before the others, but they answer
            yield from _retire_in_order(supervisor, old)
            new += _start(supervisor, below, pipeline)
            yield from _confirm(supervisor, new)
        else:
            yield from _confirm(supervisor, _start(supervisor, below, pipeline))
            yield from _confirm(supervisor, _start(supervisor, front_ends, pipeline))
    except UserError as error:
        new = [spec for role in DRAIN_ORDER for spec in supervisor.processes(role) if spec.pipeline == pipeline]
        yield from _retire_in_order(supervisor, new)
        supervisor.remove_pipeline(pipeline)
        if not drain_first:
            raise UserError(f"{error} The previous model goes on.") from error
        yield from _confirm(supervisor, _start(supervisor, below + front_ends))
        raise UserError(f"{error} The previous model serves again.") from error
    previous = supervisor.settings.pipeline
    supervisor.switch_to_pipeline(pipeline)
    yield from _retire_in_order(supervisor, old)
    supervisor.remove_pipeline(previous)
    return f"serving {settings.model_id}"


def load(supervisor: Supervisor, settings: Settings, pipeline: int) -> Waiting:
    """Starts the processes of one of several models, all but the front ends. If one cannot start, ends them all and
    raises UserError."""
    supervisor.create_pipeline(settings, pipeline)
    counts = {
        "worker": settings.replicas,
        "scheduler": settings.replicas,
        "tokenizer": settings.validation_workers,
        "media": settings.media_workers if settings.sees_images else 0,
    }
    roles = [role for role, number in counts.items() for _ in range(number)]
    try:
        yield from _confirm(supervisor, _start(supervisor, roles, pipeline))
    except UserError:
        yield from unload(supervisor, pipeline)
        raise


def unload(supervisor: Supervisor, pipeline: int) -> Waiting:
    """Ends the processes of one of several models, which has no requests."""
    specs = [spec for role in DRAIN_ORDER for spec in supervisor.processes(role) if spec.pipeline == pipeline]
    yield from _retire_in_order(supervisor, specs)
    supervisor.remove_pipeline(pipeline)


def sleep(supervisor: Supervisor, pipeline: int) -> Waiting:
    """Ends the workers of a model, which have its weights and KV cache. The other processes stay."""
    yield from _retire(supervisor, [spec for spec in supervisor.processes("worker") if spec.pipeline == pipeline])


def wake(supervisor: Supervisor, pipeline: int) -> Waiting:
    """Starts the workers of a model that sleeps. If one cannot start, ends all its processes and raises UserError."""
    schedulers = [spec for spec in supervisor.processes("scheduler") if spec.pipeline == pipeline]
    try:
        yield from _confirm(supervisor, _start(supervisor, ["worker"] * len(schedulers), pipeline))
    except UserError:
        yield from unload(supervisor, pipeline)
        raise


def require_reloadable(settings: Settings) -> None:
    """Raises UserError if a server with these settings cannot serve two models for a while."""
    if settings.models:
        raise UserError(
            "A server of several models cannot be reloaded. POST /v1/models/NAME/unload and the next request load one "
            "of its models anew, from its files as they are then."
        )
    if settings.ray is not None:
        raise UserError(
            "A server with --ray cannot be reloaded: its nodes connect to the schedulers of the present model. End it "
            "with `tgi down`, and start it with the other model."
        )
    if settings.listen is not None or settings.tokenizer_listen is not None:
        raise UserError(
            "A server with --listen or --tokenizer-listen cannot be reloaded: processes of other hosts serve the "
            "present model."
        )


def _start(supervisor: Supervisor, roles: Iterable[str], pipeline: int | None = None) -> list[ProcessSpec]:
    return [supervisor.add(role, pipeline) for role in roles]


def _confirm(supervisor: Supervisor, specs: list[ProcessSpec]) -> Waiting:
    """Waits until processes that were added are ready. If one does not get ready, ends all and raises UserError."""
    deadline = time.monotonic() + supervisor.settings.start_timeout
    while waiting := [spec for spec in specs if not _is_ready(supervisor, spec)]:
        error = next(
            (f"{spec.name} could not be started: {e}" for spec in specs if (e := supervisor.start_error(spec))), ""
        )
        if not error and time.monotonic() > deadline:
            names = ", ".join(spec.name for spec in waiting)
            error = f"{names} did not get ready within {supervisor.settings.start_timeout:g} s."
        if error:
            yield from _retire(supervisor, specs)
            raise UserError(error)
        yield "starting: " + ", ".join(_with_stage(supervisor, spec) for spec in waiting)
    for spec in specs:
        supervisor.confirm(spec)


def _await_tokenizers(supervisor: Supervisor, scheduler: ProcessSpec) -> Waiting:
    """Waits until the tokenizers have found a new scheduler: from then on it gets requests."""
    deadline = time.monotonic() + supervisor.settings.start_timeout
    while (state := supervisor.state(scheduler)) is not None and time.monotonic() < deadline:
        states = [supervisor.state(spec) for spec in supervisor.processes("tokenizer")]
        if state.facts.get(TOKENIZERS, 0) >= sum(one is not None and one.state == "ready" for one in states):
            return
        yield f"starting: {scheduler.name} (waiting for the tokenizers)"


def _is_ready(supervisor: Supervisor, spec: ProcessSpec) -> bool:
    """A scheduler whose worker is on another host is ready when it has a stage: it waits for that worker."""
    state = supervisor.state(spec)
    waits = spec.role == "scheduler" and supervisor.settings.worker == "remote"
    return state is not None and (state.state == "ready" or (waits and bool(state.stage)))


def _with_stage(supervisor: Supervisor, spec: ProcessSpec) -> str:
    """The name of a process that starts, with the stage that it has reported."""
    state = supervisor.state(spec)
    return f"{spec.name} ({state.stage})" if state is not None and state.stage else spec.name


def _retire(supervisor: Supervisor, specs: list[ProcessSpec]) -> Waiting:
    """Has processes hand over, and waits until they have ended."""
    for spec in specs:
        supervisor.retire(spec)
    while left := [spec.name for spec in specs if not supervisor.has_retired(spec)]:
        yield f"draining: {', '.join(left)}"


def _drain(supervisor: Supervisor, specs: list[ProcessSpec]) -> Waiting:
    """Has processes finish their requests and end, and waits for that for graceful_termination_timeout."""
    for spec in specs:
        supervisor.retire(spec, drain=True)
    deadline = time.monotonic() + supervisor.settings.graceful_termination_timeout
    while time.monotonic() < deadline and (left := [one.name for one in specs if not supervisor.has_retired(one)]):
        yield f"draining: {', '.join(left)}"


def _retire_in_order(supervisor: Supervisor, specs: list[ProcessSpec]) -> Waiting:
    """`_retire` for the processes of a pipeline, role by role, so that each can finish its requests."""
    for role in DRAIN_ORDER:
        yield from _retire(supervisor, [spec for spec in specs if spec.role == role])


def _scheduler_of(supervisor: Supervisor, spec: ProcessSpec) -> ProcessSpec | None:
    """The scheduler of a replica's scheduler or worker; None if another supervisor runs it."""
    found = ((one.pipeline, one.index, one) for one in supervisor.processes("scheduler"))
    return next((one for *place, one in found if place == [spec.pipeline, spec.index]), None)


def _replace(supervisor: Supervisor, spec: ProcessSpec, drained: ProcessSpec | None = None) -> Waiting:
    """Has a process hand over to a new one of the same name, and waits until that is ready. `drained`: a scheduler that
    finishes its requests first, within graceful_termination_timeout, and is replaced, too."""
    replaced = []  # with the pids of those that end
    if drained is not None:
        pid = supervisor.replace(drained, drain=True)
        replaced.append((drained, pid))
        deadline = time.monotonic() + supervisor.settings.graceful_termination_timeout
        while _runs(supervisor, drained, pid):
            if time.monotonic() > deadline:
                supervisor.replace(drained)
                break
            yield f"draining: {drained.name}"
    if spec != drained:
        replaced.append((spec, supervisor.replace(spec)))
    deadline = time.monotonic() + supervisor.settings.start_timeout
    while waiting := [_progress(supervisor, *one) for one in replaced if not _is_new(supervisor, *one)]:
        names = ", ".join(waiting)
        if time.monotonic() > deadline:
            raise UserError(
                f"{names}: not ready within {supervisor.settings.start_timeout:g} s; its supervisor goes on restarting "
                "it if it fails. The log says why."
            )
        yield f"replacing: {names}"


def _runs(supervisor: Supervisor, spec: ProcessSpec, pid: int | None) -> bool:
    """Whether the process with this pid still runs."""
    state = supervisor.state(spec)
    return state is not None and state.pid == pid


def _is_new(supervisor: Supervisor, spec: ProcessSpec, old: int | None) -> bool:
    """Whether another process than that with the pid `old` is ready."""
    state = supervisor.state(spec)
    return state is not None and state.pid != old and state.state == "ready"


def _progress(supervisor: Supervisor, spec: ProcessSpec, old: int | None) -> str:
    """The name of a process that is replaced, with the stage of the new one."""
    return spec.name if _runs(supervisor, spec, old) else _with_stage(supervisor, spec)
