"""The command `tgi`: up, one command per role, ps, down, import, download-weights, print-schema,
watermark."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import IO, Any

import click

from tgi import __version__
from tgi.kernel.arguments import load
from tgi.kernel.errors import UserError
from tgi.options import CONTEXT, SettingsCommand, settings_options, told

# The headings of `tgi --help`, with their commands.
SECTIONS = {
    "Server": ("up", "ps", "down"),
    "Single roles": ("api", "tokenizer", "scheduler", "worker"),
    "Models": ("download-weights", "import"),
    "Tools": ("print-schema", "watermark"),
}


class Group(click.Group):
    """Its commands' UserErrors are told as one message, and its help shows the commands by section."""

    def invoke(self, ctx: click.Context) -> Any:
        with told():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections with the first sentence of each command."""
        width = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                limit = formatter.width - width - 6
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names]
                )


@click.group(cls=Group, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="tgi")
def main() -> None:
    """A text generation server that speaks TGI's HTTP contract.

    `tgi up` serves a small demo model on port 3000, `tgi up --model-id ID` another one.
    """


@main.command(cls=SettingsCommand)
@settings_options
def up(**flags: Any) -> None:
    """Run the whole server.

    That is front ends, tokenizers, scheduler and worker, supervised.
    """
    from tgi.tree import ROLES, run

    run(load(flags), ROLES)


def _role_command(role: str, help: str) -> None:
    @main.command(role, help=help, cls=SettingsCommand)
    @settings_options
    def command(**flags: Any) -> None:
        from tgi.tree import run

        run(load(flags), (role,))


_role_command("api", "Run the front ends alone; other roles run elsewhere with the same TGI_RUN.")
_role_command("tokenizer", "Run the tokenizer pool alone.")
_role_command("scheduler", "Run the scheduler alone.")
_role_command("worker", "Run the worker alone.")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def ps(as_json: bool) -> None:
    """List the running servers of this user.

    Of each process: pid, state, boot id, memory.
    """
    from tgi.kernel import rundir

    rows = [row for run in rundir.all_of_user() for row in _processes(run)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("No tgi server of yours is running.", err=True)
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
    if named:
        rundir.check(runs[0])
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


@main.command("download-weights")
@click.argument("model_id")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--extension", default=".safetensors", show_default=True, help="Only .safetensors is taken.")
@click.option("--auto-convert/--no-auto-convert", default=True, help="No effect: pickled weights are never read.")
@click.option("--trust-remote-code", is_flag=True, help="Fetch the Python code that comes with the model, too.")
@click.option("--merge-lora", is_flag=True, help="Not supported, refused.")
@click.option("--logger-level", default="INFO", show_default=True, help="debug, info, warn or error.")
@click.option("--json-output", is_flag=True, help="Log in JSON, one object per line.")
def download_weights(
    model_id: str,
    revision: str | None,
    extension: str,
    auto_convert: bool,
    trust_remote_code: bool,
    merge_lora: bool,
    logger_level: str,
    json_output: bool,
) -> None:
    """Fetch MODEL_ID from the Hub into the cache.

    What is there is not fetched again. Prints the directory.
    """
    from tgi.hub.card import read_card
    from tgi.hub.resolve import model_directory
    from tgi.kernel import log
    from tgi.kernel.progress import Progress
    from tgi.kernel.settings import Settings

    log.configure("tgi", Settings(log_level=logger_level, json_output=json_output))
    if extension != ".safetensors":
        raise UserError(f"Weights with the extension {extension} are not read. Leave out --extension.")
    if merge_lora:
        raise UserError(
            "--merge-lora is not supported. Serve the base model with the adapter: --model-id BASE --lora-adapters ID."
        )
    progress = Progress(None, title="download")
    directory = model_directory(model_id, revision, code=trust_remote_code, progress=progress.stage)
    read_card(directory)  # refuses what could not be served
    click.echo(directory)


@main.command("print-schema")
@click.option("--kserve", is_flag=True, help="With KServe's routes, as `tgi up --kserve` serves them.")
def print_schema(kserve: bool) -> None:
    """Print the OpenAPI document of the HTTP routes as JSON."""
    from tgi.api.openapi import document

    click.echo(json.dumps(document(kserve), indent=2))


@main.command()
@click.argument("file", type=click.File(encoding="utf-8"), default="-")
@click.option("--model-id", help="The model that is said to have written it. Without it: the demo model.")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--gamma", type=float, default=0.5, show_default=True, help="The server's --watermark-gamma.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="The server's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def watermark(
    file: IO[str], model_id: str | None, revision: str | None, gamma: float, device: str, as_json: bool
) -> None:
    """Tell whether a text was generated with `watermark`.

    The text is in FILE, or without it on standard input.

    Model, gamma and kind of device must be those of the server that made the text: each gives other green tokens.
    Without the prompt: give the generated text alone.
    """
    from tgi.hub.resolve import model_directory
    from tgi.kernel import interpreter
    from tgi.tree import WORKER_PACKAGES

    interpreter.require(WORKER_PACKAGES, "`tgi watermark`")
    from tgi.worker.detection import THRESHOLD, detect_text

    if not 0 < gamma < 1:
        raise UserError(f"--gamma is {gamma:g}; it must be above 0 and below 1.")
    found = detect_text(file.read(), model_directory(model_id, revision), gamma, device)
    if as_json:
        told = found._asdict() | {"share": found.share, "chance": found.chance, "marked": found.marked}
        click.echo(json.dumps(told, indent=2))
        return
    click.echo(
        f"{found.green} of {found.counted} tokens are green ({found.share:.1%}); by chance {gamma:.1%} would be."
    )
    click.echo(f"z = {found.z:.2f}, which happens by chance with probability {found.chance:.2g}.")
    verdict = "The text carries the watermark" if found.marked else "No watermark was found"
    click.echo(f"{verdict} of this model with gamma {gamma:g} on {device} (z must be above {THRESHOLD:g}).")
