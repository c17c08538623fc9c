"""The command `tgi`: up, one command per role, ps, down, import. Everything it starts is a supervised child process."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from tgi import __version__
from tgi.kernel.errors import UserError
from tgi.kernel.settings import DERIVED, Settings, environment_names, load


class Errors(click.Group):
    """Prints a UserError as one message and exits; everything else is a defect and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(error.code)


@click.group(cls=Errors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="tgi")
def main() -> None:
    """A text generation server that speaks TGI's HTTP contract."""


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command one option per setting; what was not given arrives as None."""
    for setting in reversed(fields(Settings)):
        meta = setting.metadata
        if DERIVED in meta:
            continue
        names = ["--" + setting.name.replace("_", "-"), setting.name]
        if meta["short"]:
            names.insert(0, meta["short"])
        variables = ", ".join(environment_names(setting.name, meta))
        kind: dict[str, Any] = {"help": f"{meta['help']} [{variables}]", "default": None}
        if setting.type is bool and setting.default is True:
            names[0] = f"{names[0]}/--no-{names[0][2:]}"
        elif setting.type is bool:
            kind |= {"is_flag": True, "flag_value": True}
        elif meta["choices"]:
            kind["type"] = click.Choice(meta["choices"])
        elif meta["parse"] in (int, float):
            kind["type"] = meta["parse"]
        elif meta["parse"] is not str:
            kind["type"] = click.FLOAT
        if meta["repeat"]:
            kind |= {"multiple": True, "default": None}
        command = click.option(*names, **kind)(command)
    return command


@main.command()
@settings_options
def up(**flags: Any) -> None:
    """Run the whole server: front ends, tokenizers, scheduler and worker, supervised."""
    _run(load(flags), ("api", "tokenizer", "scheduler", "worker"))


def _role_command(role: str, help: str) -> None:
    @main.command(role, help=help)
    @settings_options
    def command(**flags: Any) -> None:
        _run(load(flags), (role,))


_role_command("api", "Run the front ends alone (the other roles are started elsewhere with the same TGI_RUN).")
_role_command("tokenizer", "Run the tokenizer pool alone.")
_role_command("scheduler", "Run the scheduler alone.")
_role_command("worker", "Run the worker alone.")


def _run(settings: Settings, roles: tuple[str, ...]) -> None:
    """Supervises the processes of these roles until a signal ends them."""
    from tgi.kernel import log, metrics, rundir
    from tgi.kernel.progress import Progress
    from tgi.kernel.spawn import Spec
    from tgi.kernel.supervise import Supervisor, listening_socket

    log.configure("tgi", settings.log_level, settings.json_output)
    for number in (signal.SIGTERM, signal.SIGHUP):  # until there is a supervisor: as Ctrl-C, with everything cleaned up
        signal.signal(number, signal.default_int_handler)
    rundir.create(settings.run_dir)
    first = not rundir.holders(settings.run_dir)
    locks = [rundir.Lock(settings.run_dir, role) for role in roles]
    if first:
        metrics.clear(settings.run_dir / "metrics")
    else:
        metrics.forget_dead(settings.run_dir / "metrics")
    metrics.use(settings.run_dir / "metrics")
    specs: list[Spec] = []
    progress = Progress(settings, title=" + ".join(roles) if len(roles) < 4 else "tgi")
    if "api" in roles:
        try:
            listener = listening_socket(settings.hostname, settings.port, settings.reuse_port)
        except OSError as error:
            raise UserError(
                f"Cannot listen on {settings.hostname}:{settings.port}: {error.strerror}. "
                "Choose another port with --port, or stop what uses it (`tgi ps` lists servers of yours)."
            ) from error
        settings = replace(settings, port=listener.getsockname()[1])  # port 0 has become a real one
        port = listener.detach()  # the supervisor's from here on
        specs += [Spec("api", place, port) for place in range(settings.api_workers)]
    settings = progress.settings = _with_model(settings, roles, progress)
    if "tokenizer" in roles:
        specs += [Spec("tokenizer", place) for place in range(settings.validation_workers)]
    if "scheduler" in roles:
        specs.append(Spec("scheduler", 0))
    if "worker" in roles:
        specs.append(Spec("worker", 0))
    try:
        Supervisor(settings, specs, lambda: progress.tick(spec.name for spec in specs)).run()
    finally:
        for lock in locks:
            lock.release()


def _with_model(settings: Settings, roles: tuple[str, ...], progress: Any) -> Settings:
    """The settings with the model directory that all roles read: found, downloaded or imported here, once."""
    from tgi.hub.card import read_card
    from tgi.hub.resolve import DEFAULT_MODEL, model_directory

    named = replace(settings, model_id=settings.model_id or DEFAULT_MODEL)
    if not {"tokenizer", "worker"} & set(roles):
        return named
    hub_cache = Path(settings.huggingface_hub_cache) if settings.huggingface_hub_cache else None
    directory = model_directory(settings.model_id, settings.revision, hub_cache=hub_cache, progress=progress.stage)
    read_card(directory)  # refuses here, once and in the foreground, what no role could serve
    return replace(named, model_dir=directory)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ps(as_json: bool) -> None:
    """List the running servers of this user: processes, pids, states, boot ids, memory."""
    from tgi.kernel import rundir

    rows = [row for run in rundir.all_of_user() for row in _processes(run)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    columns = ("run", "name", "pid", "state", "stage", "boot", "memory_mb")
    table = [columns, *(tuple(str(row[column]) for column in columns) for row in rows)]
    widths = [max(len(line[k]) for line in table) for k in range(len(columns))]
    for line in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _processes(run: Path) -> list[dict[str, Any]]:
    """One row per living process of a run directory, supervisors first."""
    import psutil

    from tgi.kernel import rundir

    def row(name: str, pid: int, state: str, stage: str, boot: str, percent: int) -> dict[str, Any] | None:
        try:
            memory = psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            return None
        return {
            "run": str(run), "name": name, "pid": pid, "state": state, "stage": stage, "percent": percent,
            "boot": boot, "memory_mb": round(memory / 2**20, 1),
        }  # fmt: skip

    claims: dict[int, list[str]] = {}
    for claim, pid in rundir.holders(run).items():
        claims.setdefault(pid, []).append(claim)
    rows = [row("supervisor", pid, "running", "+".join(names), "", 100) for pid, names in claims.items()]
    if claims:
        rows += [row(s.name, s.pid, s.state, s.stage, s.boot, s.percent) for s in rundir.read_states(run)]
    return [entry for entry in rows if entry]


@main.command()
@click.option("--port", "-p", type=int, help="The server on this port; without it, that in TGI_RUN or the only one.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds to wait for its end.")
def down(port: int | None, timeout: float) -> None:
    """Drain and end a running server."""
    from tgi.kernel import rundir

    named = port is not None or bool(os.environ.get("TGI_RUN"))
    runs = [rundir.default(port or 0)] if named else rundir.all_of_user()
    alive = {run: holders for run in runs if run.is_dir() and (holders := rundir.holders(run))}
    if not alive:
        raise UserError("No tgi server of yours is running" + (f" on port {port}." if port is not None else "."))
    if len(alive) > 1:
        names = ", ".join(run.name for run in alive)
        raise UserError(f"Several servers are running ({names}): say which one with --port.")
    (run,) = alive
    asked: set[int] = set()
    deadline = time.monotonic() + timeout
    while holders := rundir.holders(run):
        for pid in set(holders.values()) - asked - {rundir.NAMELESS}:
            with contextlib.suppress(ProcessLookupError):  # has just ended
                os.kill(pid, signal.SIGTERM)
            asked.add(pid)
        if time.monotonic() > deadline:
            raise UserError(f"The server in {run} did not end within {timeout:g} s; it may still be draining.")
        time.sleep(0.05)


@main.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
def import_(file: Path, directory: Path) -> None:
    """Turn a GGUF FILE into an ordinary model DIRECTORY."""
    from tgi.hub.resolve import import_gguf
    from tgi.kernel.progress import Progress

    import_gguf(file, directory, Progress(None, title="import").stage)
    click.echo(directory)
