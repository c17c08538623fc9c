"""The command `tgi`: up, one command per role, and those that SECTIONS lists.

Settings become options of a command in `settings_options`; UserErrors are printed without a traceback.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click

from tgi import INTERRUPTED, __version__
from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.loading import load_settings
from tgi.microkernel.settings.options import SettingOption, boolean, counts, flag
from tgi.microkernel.settings.served_models import is_named_model
from tgi.microkernel.settings.table import DEFAULTS, GROUPS, MTP, OPTIONS, RELOADED_LIMITS, RELOADED_MODEL, Settings

# The headings of `tgi --help`, with their commands.
SECTIONS = {
    "Server": ("up", "ps", "top", "restart", "scale", "reload", "down", "why", "keys"),
    "Single roles": ("api", "media", "tokenizer", "scheduler", "worker"),
    "Models": ("plan", "download-weights", "import"),
    "Tools": ("chat", "doctor", "bench", "batch", "replay", "print-schema", "watermark", "completion"),
}

# Names from other servers (vLLM, SGLang, llama.cpp, Ollama, systemd) -> what to use here.
COMMANDS_OF_OTHERS = {
    "serve": "tgi up", "run": "tgi up", "start": "tgi up", "launch": "tgi up", "stop": "tgi down", "kill": "tgi down",
    "status": "tgi ps", "list": "tgi ps", "ls": "tgi ps", "show": "tgi ps", "pull": "tgi download-weights",
    "download": "tgi download-weights", "convert": "tgi import", "version": "tgi --version",
    "help": "tgi --help", "logs": "the standard error of `tgi up`, where all processes log",
}  # fmt: skip
FLAGS_OF_OTHERS = {
    "--tensor-parallel-size": "num_shard", "--tp": "num_shard", "--tp-size": "num_shard",
    "--data-parallel-size": "replicas", "--dp": "replicas", "--dp-size": "replicas",
    "--max-model-len": "max_total_tokens", "--context-length": "max_total_tokens", "--ctx-size": "max_total_tokens",
    "--max-num-seqs": "max_batch_size", "--max-running-requests": "max_batch_size", "--parallel": "max_batch_size",
    "--max-num-batched-tokens": "max_batch_prefill_tokens", "--chunked-prefill-size": "max_batch_prefill_tokens",
    "--max-total-num-tokens": "max_batch_total_tokens", "--mem-fraction-static": "memory_fraction",
    "--gpu-memory-utilization": "cuda_memory_fraction", "--quantization": "quantize",
    "--model": "model_id", "--model-path": "model_id", "--host": "hostname",
    "--download-dir": "huggingface_hub_cache", "--chat-template": "tokenizer_config_path",
    "--lora-modules": "lora_adapters", "--lora-paths": "lora_adapters", "--lora": "lora_adapters",
    "--speculative-model": "draft_model_id", "--model-draft": "draft_model_id",
    "--num-speculative-tokens": "speculate",
    "--models-preset": "models", "--models-max": "max_loaded_models", "--sleep-idle-seconds": "model_ttl",
    "--served-model-name": "models",
    "--cache-type-k": "kv_cache_dtype", "--kv-cache-type": "kv_cache_dtype",
}  # fmt: skip

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

HELP_ALL = "help_all"  # name of the option, and key in click's context: show hidden settings and all variables

MAX_CHOICES = 14  # maximum length of a list of choices that is shown instead of the type

COLUMN = 30  # width of the column of flags; after a longer flag the explanation starts on the next line

VARIABLES = (
    "Each setting is an environment variable too: its flag in capitals with underscores (MAX_BEST_OF for "
    "--max-best-of), or the name given. A flag overrides a variable."
)


# --- settings as options of a command ---


class ParsedType(click.ParamType):  # type: ignore[type-arg]  # not generic in older ones
    """The click type of what `parse` reads from text. Its ValueError is the error message."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


def _setting_type(option: SettingOption) -> ParsedType:
    return ParsedType(option.read.__name__, option.parse)


def rates(value: str) -> tuple[float, ...]:
    """A comma-separated list of numbers above 0."""
    found = tuple(float(part) for part in value.split(","))
    if not all(0 < one < 1e6 for one in found):
        raise ValueError(f"{value!r} has a number that is not between 0 and a million")
    return found


class SettingsCommand(click.Command):
    """A command with all settings as options. Its help shows them by group; hidden settings and settings without effect
    are shown by --help-all only."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses; another server's name of a setting is rejected with the name here. --model-id NAME=SOURCE is one of
        --models."""
        try:
            return super().parse_args(ctx, _with_named_models(args))
        except click.NoSuchOption as error:
            if name := FLAGS_OF_OTHERS.get(error.option_name):
                raise click.UsageError(f"No such option {error.option_name!r}. Here it is {flag(name)}.", ctx) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the groups in order, then the command's other options."""
        everything = bool(ctx.meta.get(HELP_ALL))
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        left: dict[str, int] = dict.fromkeys(GROUPS, 0)
        others = []
        for param in self.get_params(ctx):
            option = OPTIONS.get(param.name or "")
            if option is None:
                others.append(param.get_help_record(ctx))
            elif everything or not (option.hidden or option.ignored):
                record = param.get_help_record(ctx)
                assert record is not None
                groups[option.group].append((record[0], _explanation(param.name or "", option, everything)))
            else:
                left[option.group] += 1
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(VARIABLES)
        for group, rows in groups.items():
            if left[group]:
                rows.append(("…", f"{left[group]} rarely needed: --help-all"))
            _write(formatter, group, rows)
        _write(formatter, "Help", [record for record in others if record])


def _with_named_models(args: list[str]) -> list[str]:
    """The arguments with --models in place of --model-id where its value is NAME=SOURCE."""
    found: list[str] = []
    for arg in args:
        flag, _, value = arg.partition("=")
        if flag == "--model-id" and is_named_model(value):
            found.append(f"--models={value}")
        elif found and found[-1] == "--model-id" and is_named_model(arg):
            found[-1:] = ["--models", arg]
        else:
            found.append(arg)
    return found


def _write(formatter: click.HelpFormatter, heading: str, rows: list[tuple[str, str]]) -> None:
    with formatter.section(heading):
        formatter.write_dl([(names.ljust(COLUMN), meaning) for names, meaning in rows], col_max=COLUMN)


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds one option per setting; options that are not given are None. For a SettingsCommand."""
    show = click.option(
        "--help-all",
        HELP_ALL,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_help_all,
        help="Show all settings, including those without effect, and all variables.",
    )
    command = show(command)
    return _with_options(command, OPTIONS)


def _with_options(command: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Adds one option per setting named."""
    for name in reversed([*names]):
        option = OPTIONS[name]
        switches = [option.short] if option.short else []
        kind: dict[str, Any] = {"default": None}
        if option.read is boolean and getattr(DEFAULTS, name) is False:
            switches.append(flag(name))
            kind |= {"is_flag": True, "flag_value": True}
        elif option.read is boolean:
            switches.append(f"{flag(name)}/--no-{flag(name)[2:]}")
        else:
            switches.append(flag(name))
            kind["type"] = _setting_type(option)
            kind["metavar"] = _choices(option) or option.read.__name__.upper()
            kind["multiple"] = bool(option.separator)
        command = click.option(*switches, name, help=option.meaning, **kind)(command)
    return command


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _choices(option: SettingOption) -> str:
    """The choices, if they are short enough to follow the flag."""
    choices = "|".join(option.choices)
    return choices if len(choices) <= MAX_CHOICES else ""


def _explanation(name: str, option: SettingOption, everything: bool) -> str:
    """The help of a setting, its choices, default and variables. Without `everything`, a variable with the name of the
    flag is left out."""
    facts = []
    if option.choices and not _choices(option):
        facts.append("one of: " + ", ".join(option.choices))
    facts.append(f"default: {option.default(getattr(DEFAULTS, name))}")
    variables = option.over + option.variables(name)
    shown = [variable for variable in variables if everything or (name.upper() not in variables)]
    if shown:
        facts.append("variable: " + ", ".join(shown))
    return f"{option.meaning} [{'; '.join(facts)}]"


@contextmanager
def user_errors_reported() -> Iterator[None]:
    """Prints a UserError without a traceback and exits with its code. Ctrl-C exits silently. Other exceptions are
    defects and keep their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except UserError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(error.code) from None


# --- the commands ---


class CommandGroup(click.Group):
    """Reports UserErrors of its commands, and shows the commands by section in its help."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; a UserError becomes one message and exit code."""
        with user_errors_reported():
            return super().invoke(ctx)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Finds the command; another server's name of one is rejected with what to use here."""
        if args[0] not in self.commands and (here := COMMANDS_OF_OTHERS.get(args[0])):
            here = here if " the " in f" {here}" else f"`{here}`"
            raise click.UsageError(f"No such command {args[0]!r}. Here it is {here}.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the sections with the first sentence of each command's help."""
        width = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                limit = formatter.width - width - 6
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names]
                )


@click.group(cls=CommandGroup, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="tgi")
def main() -> None:
    """A text generation server that speaks TGI's HTTP contract.

    `tgi up` serves a small demo model on port 3000, `tgi up MODEL` another one.
    """


@main.command(cls=SettingsCommand)
@click.argument("model", required=False, type=_setting_type(OPTIONS["model_id"]))
@settings_options
def up(model: str | None, **flags: Any) -> None:
    """Run the whole server.

    Starts and supervises front ends, tokenizers, scheduler and worker. MODEL is short for --model-id MODEL.
    """
    from tgi.microkernel.messages.protocol import ROLES
    from tgi.server import run_server

    if model is not None:
        if model.lower() in ("true", "false"):
            raise click.UsageError(f"Got unexpected extra argument ({model}): a flag that is on or off takes no value.")
        if flags["model_id"] is not None:
            raise click.UsageError(f"Two models are named: {model} and --model-id {flags['model_id']}.")
        flags["model_id"] = model
    run_server(load_settings(flags), ROLES)


def _role_command(role: str, help: str) -> None:
    @main.command(role, help=help, cls=SettingsCommand)
    @settings_options
    def command(**flags: Any) -> None:
        from tgi.server import run_server

        if flags["listen"] is not None and role != "scheduler":  # as a variable it may be meant for another command
            raise UserError(
                f"`tgi {role}` runs no scheduler, whose address --listen is. Tokenizers listen at --tokenizer-listen.",
                code=2,
            )
        if flags["tokenizer_listen"] is not None and role != "tokenizer":
            raise UserError(f"`tgi {role}` runs no tokenizer, whose address --tokenizer-listen is.", code=2)
        run_server(load_settings(flags), (role,))


_role_command("api", "Run only the front ends; the other roles are started separately with the same TGI_RUN.")

_role_command("media", "Run only the processes that load images.")

_role_command("tokenizer", "Run only the tokenizer pool.")

_role_command("scheduler", "Run only the scheduler.")

_role_command("worker", "Run only the worker.")


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("source", metavar="INPUT.jsonl", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("output", metavar="OUTPUT.jsonl", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("arguments", metavar="[MODEL] [OPTIONS OF tgi up]", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", help="URL of a running server; default: start one for these requests.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Key of the running server.")
@click.option("--concurrency", type=click.IntRange(min=1), default=64, show_default=True, help="Requests at once.")
def batch(
    source: Path, output: Path, arguments: tuple[str, ...], url: str | None, api_key: str | None, concurrency: int
) -> None:
    """Answer the requests of a file.

    Each line of INPUT.jsonl is a request as in OpenAI's Batch API: {"custom_id": "1", "method": "POST", "url":
    "/v1/chat/completions", "body": {…}}. OUTPUT.jsonl has the results in the same order, with an error where there is
    no answer. After Ctrl-C, or if it was killed, the same command goes on where it has stopped.
    """
    from tgi.batch import run_batch

    if url is not None and arguments:
        given = " ".join(arguments)
        raise click.UsageError(f"With --url no server is started, so {given} has no effect: leave it out.")
    run_batch(source, output, url, api_key, concurrency, arguments)


@main.command()
@click.argument("url", required=False)
@click.option("--api", type=click.Choice(("chat", "completions", "tgi")), help="Default: chat if models are listed.")
@click.option(
    "--model", "models", multiple=True, help="Name of a model; repeatable: in turn. Default: the first listed."
)
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Key of the server.")
@click.option(
    "--workload",
    default="random",
    show_default=True,
    metavar="NAME|FILE",
    help="random, sharegpt, shared-prefix, multi-turn, agent; or a file: ShareGPT's JSON, or JSON lines of bodies.",
)
@click.option("--input-tokens", type=click.IntRange(1, 1 << 20), help="Of each prompt or turn.")
@click.option("--output-tokens", type=click.IntRange(1, 1 << 20), help="Of each answer.")
@click.option("--shared-tokens", type=click.IntRange(0, 1 << 20), help="Of a prefix that all prompts have.")
@click.option("--turns", type=click.IntRange(1, 1000), help="Questions in a conversation.")
@click.option("--spread", type=click.FloatRange(0, 1), help="Lengths vary by up to this share.")
@click.option(
    "--concurrency", type=ParsedType("list", counts), help="Requests at once, one after the other: 1,8,32 (default)."
)
@click.option(
    "--rate", "rates", type=ParsedType("list", rates), help="Poisson arrivals per second, one after the other: 1,2,4."
)
@click.option(
    "--requests", type=click.IntRange(1, 10_000_000), help="Of each load; default: 10 for each at once, or 30 s."
)
@click.option("--warm-up", type=click.IntRange(0, 10_000), help="Requests before each load, which are not counted.")
@click.option("--timeout", type=click.FloatRange(0.1), default=600.0, show_default=True, help="Seconds of a request.")
@click.option("--slo", help="Counts requests that meet all, such as ttft=500ms,itl=50ms,total=20s.")
@click.option("--seed", type=click.IntRange(0), help="Of texts and arrivals; default: random, so that no cache helps.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the result there.")
@click.option(
    "--html", "html_file", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with plots there."
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="A.json B.json",
    help="Compare two results instead of measuring.",
)
def bench(
    url: str | None, json_file: Path | None, html_file: Path | None, compare: tuple[Path, Path] | None, **options: Any
) -> None:
    """Measure a server that speaks OpenAI's or TGI's API: this one or another.

    Sends streamed requests and prints throughput, and percentiles of the time to the first token (TTFT), between tokens
    (ITL) and of whole requests, in milliseconds.
    """
    from tgi.bench import command

    if compare is not None:
        command.compare(*compare)
    elif url is None:
        raise click.UsageError("Give the URL of a server, such as http://127.0.0.1:3000.")
    else:
        command.measure(url, json_file, html_file, **options)


def one_server_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the option that shows one of several running servers."""
    return click.option("--port", "-p", type=int, help="Port of the server; default: all of yours.")(command)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@one_server_option
def ps(as_json: bool, port: int | None) -> None:
    """List the running servers of this user.

    Shows model, address and version of each server; state and memory of each process, the seconds since its latest beat
    and since it has finished a part of its work, and what it works on, also those of the hosts that are connected; and
    the requests in quarantine: they have crashed processes. A narrow terminal lacks some columns.
    """
    from tgi.process_views import list_processes

    list_processes(port, as_json)


@main.command()
@click.option("--once", is_flag=True, help="Print one frame; needs no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--seconds", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="Between two frames.")
@one_server_option
def top(once: bool, as_json: bool, seconds: float, port: int | None) -> None:
    """Show the running servers of this user, refreshed.

    Per server: model, address, requests, tokens per second, KV cache, prefix cache, time to first token. Per process:
    state, CPU, memory, the seconds since its latest beat and since it has finished a part of its work, and what it
    works on. A narrow terminal lacks some columns. Ends with q or Ctrl-C.
    """
    from tgi.process_views import print_frame, show_frames

    if once or as_json:
        print_frame(port, as_json)
    else:
        show_frames(port, seconds)


def port_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the option that chooses one of several running servers."""
    meaning = "Port of the server; default: the server in TGI_RUN, or the only one."
    return click.option("--port", "-p", type=int, help=meaning)(command)


def _running_server(port: int | None) -> Path:
    """The run directory of the server that a command is for. Raises UserError if none runs, or if several do."""
    from tgi.microkernel.host import rundir

    named = port is not None or bool(os.environ.get("TGI_RUN"))
    runs = [rundir.default_run_dir(port or 0)] if named else rundir.user_run_dirs()
    if named:
        rundir.check_run_dir(runs[0])
    alive = [run for run in runs if run.is_dir() and rundir.lock_holders(run)]
    if not alive:
        raise UserError("You have no running tgi server" + (f" on port {port}." if port is not None else "."))
    if len(alive) > 1:
        names = ", ".join(run.name for run in alive)
        raise UserError(f"Several servers are running ({names}): say which one with --port.")
    return alive[0]


@main.command()
@click.argument("url", required=False)
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Key of the server.")
@click.option("--model", help="Name of a model; default: the first that the server lists.")
@click.option("--system", default="", help="System prompt.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="Default: the model's.")
@click.option("--max-tokens", type=click.IntRange(1), help="Of an answer.")
@port_option
def chat(
    url: str | None,
    api_key: str | None,
    model: str | None,
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    port: int | None,
) -> None:
    """Chat in the terminal, with the running server or with the one at URL.

    Lines of standard input are questions. Ctrl-C ends an answer, Ctrl-D the chat; /help shows the commands.
    """
    from tgi.chat import chat
    from tgi.microkernel.processes.process_table import Deployment

    if url is None:
        run = _running_server(port)
        deployment = Deployment(run)
        deployment.refresh()
        url = deployment.served["url"].split(", ")[0]
        if not url:
            raise UserError(f"The server in {run} has no front end. Give the URL of one that has.")
    elif port is not None:
        raise click.UsageError("URL and --port name two servers: leave one out.")
    parameters = {"temperature": temperature, "max_tokens": max_tokens}
    chat(url, api_key, model, system, {name: value for name, value in parameters.items() if value is not None})


@main.command()
@click.argument("process", metavar="ROLE[-N]")
@port_option
def restart(process: str, port: int | None) -> None:
    """Replace the processes of a role, or one process.

    One after the other, without a lost or failed request: requests in flight continue.
    """
    run = _running_server(port)
    for supervisor in _supervisors_of(run, process):
        _carry_out(run, supervisor, {"command": "restart", "target": process})


@main.command()
@click.argument("role", type=click.Choice(["api", "tokenizer", "replica", "media"]))
@click.argument("count", type=click.IntRange(min=1))
@click.option("--supervisor", type=int, help="Pid of the supervisor, if several run this role.")
@port_option
def scale(role: str, count: int, supervisor: int | None, port: int | None) -> None:
    """Change the number of front ends, media processes, tokenizers or replicas (schedulers with a worker each).

    Requests in flight continue. The number holds until the server ends.
    """
    run = _running_server(port)
    supervisors = _supervisors_of(run, "scheduler" if role == "replica" else role)
    if supervisor is None and len(supervisors) > 1:
        pids = ", ".join(map(str, supervisors))
        raise UserError(f"Several supervisors run the role {role} (pids {pids}): say which one with --supervisor.")
    if supervisor is not None and supervisor not in supervisors:
        raise UserError(f"The process {supervisor} is no supervisor of the role {role}: `tgi ps` lists them.")
    _carry_out(run, supervisor or supervisors[0], {"command": "scale", "role": role, "count": count})


def reload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the settings that `tgi reload` can change."""
    return _with_options(command, RELOADED_MODEL + RELOADED_LIMITS)


@main.command()
@reload_options
@click.option("--drain-first", is_flag=True, help="End the running model before the new one is loaded.")
@port_option
def reload(drain_first: bool, port: int | None, **given: Any) -> None:
    """Serve another model, without a failed request.

    The new model starts next to the old one and takes the new requests when it is ready; the old one finishes its own.
    Settings of the model that are not given return to their defaults, all others stay.
    """
    from tgi.microkernel.host import rundir
    from tgi.microkernel.processes import control
    from tgi.server import reloaded_settings

    if given["model_id"] is None:
        raise UserError("`tgi reload` needs --model-id: the model to serve from now on.", code=2)
    run = _running_server(port)
    supervisor = _supervisors_of(run, "scheduler")[0]
    *_, present = control.carry_out(rundir.control_socket(run, supervisor), {"command": "settings"})
    try:
        settings = reloaded_settings(Settings.from_json(present), given, drain_first)
    except UserError as error:
        raise UserError(f"{error} The previous model goes on.", code=error.code) from error
    command = {"command": "reload", "settings": settings.to_json(), "drain_first": drain_first}
    _carry_out(run, supervisor, command)


def _supervisors_of(run: Path, process: str) -> list[int]:
    """The pids of the supervisors that run a role, or one process of it. Raises UserError if none does."""
    from tgi.microkernel.host import rundir

    holders = rundir.lock_holders(run)
    single = rundir.role_of(process) in rundir.SINGLE_ROLES
    names = {process} if not single else {rundir.role_of(process)}
    found = [pid for claim, pid in holders.items() if names & {claim, rundir.role_of(claim)}]
    if not found:
        raise UserError(f"There is no process {process} in {run}: `tgi ps` lists them.")
    return list(dict.fromkeys(found))


def _carry_out(run: Path, supervisor: int, command: dict[str, Any]) -> None:
    """Has a supervisor carry out a command, and prints what it does."""
    from tgi.microkernel.host import rundir
    from tgi.microkernel.processes import control

    for progress in control.carry_out(rundir.control_socket(run, supervisor), command):
        click.echo(progress)


@main.command()
@port_option
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds to wait until it has ended.")
def down(port: int | None, timeout: float) -> None:
    """Drain and stop a running server."""
    from tgi.microkernel.host import rundir

    run = _running_server(port)
    asked: set[int] = set()
    deadline = time.monotonic() + timeout
    while holders := rundir.lock_holders(run):
        for pid in set(holders.values()) - asked - {rundir.UNKNOWN_PID}:
            with contextlib.suppress(ProcessLookupError):  # the process has just ended
                os.kill(pid, signal.SIGTERM)
            asked.add(pid)
        if time.monotonic() > deadline:
            raise UserError(f"The server in {run} did not end within {timeout:g} s; it may still be draining.")
        time.sleep(0.05)
    click.echo(f"The server in {run} has ended.")


@main.command()
@click.argument("request_id")
@click.option("--port", "-p", type=int, help="Port of the server; default: the server in TGI_RUN, or any of yours.")
def why(request_id: str, port: int | None) -> None:
    """Tell where the time of a request went.

    REQUEST_ID is the header x-request-id of its answer, or the `id` in an answer or event of OpenAI's routes. The
    latest requests are known: about 3,000 of each process.
    """
    from tgi.microkernel.host import rundir
    from tgi.microkernel.observability import flight_recorder, request_timeline

    named = port is not None or bool(os.environ.get("TGI_RUN"))
    runs = [rundir.default_run_dir(port or 0)] if named else rundir.user_run_dirs()
    recorded = [flight_recorder.read_stamps(run) for run in runs]
    found = [(stamps, key) for stamps in recorded for key in flight_recorder.find_requests(stamps, request_id)]
    if not found:
        raise UserError(
            f"No process remembers a request {request_id!r}. Its id is in the header x-request-id of its answer, or is "
            "the `id` of an answer of OpenAI's routes."
        )
    for number, (stamps, key) in enumerate(found, 1):
        if len(found) > 1:
            click.echo(f"{'' if number == 1 else chr(10)}Request {number} of {len(found)} with this id")
        for line in request_timeline.explain(stamps, key):
            click.echo(line)


@main.command()
@click.option("--hostname", default="0.0.0.0", show_default=True, help="Address that the server would listen on.")
@click.option("--port", "-p", type=int, default=3000, show_default=True, help="Port that the server would listen on.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(hostname: str, port: int, as_json: bool) -> None:
    """Tell what this machine can do, and what to change.

    Looks at packages, processor, kernels, memory, GPUs, disk, limits and the port. Exits with 1 if a server cannot
    start.
    """
    from tgi import doctor

    findings = list(doctor.examine(hostname, port))
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings]))
    else:
        click.echo("\n".join(doctor.lines(findings)))
    sys.exit(any(finding.prevents for finding in findings))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete commands and options.

    For example in ~/.bashrc: eval "$(tgi completion bash)"
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, "tgi", "_TGI_COMPLETE").source())


@main.group()
def keys() -> None:
    """Make the keys of links between hosts."""


@keys.command("new")
@click.argument("directory", type=click.Path(path_type=Path), default="tgi-keys")
def keys_new(directory: Path) -> None:
    """Make the keys of a deployment on several hosts, in DIRECTORY.

    Copy to each host only the file that it needs. Keep scheduler.key on the hosts of schedulers.
    """
    from tgi.microkernel.links import curve

    scheduler, host, tokenizer, api = curve.create_keys(directory)
    click.echo(f"{scheduler}  for schedulers: tgi up --listen tcp://ADDRESS:PORT --keys {scheduler}")
    click.echo(f"{host}  copy to hosts with workers: tgi worker --connect tcp://HOST:PORT --keys {host.name}")
    click.echo(f"{tokenizer}  copy to hosts with tokenizers: tgi tokenizer --connect … --keys {tokenizer.name}")
    click.echo(f"{api}  copy to hosts with front ends alone: tgi api --connect tcp://HOST:PORT --keys {api.name}")


# Settings of `tgi plan`.
PLANNED = (
    "model_id", "revision", "dtype", "num_shard", "replicas", "quantize", "kv_cache_dtype", "lora_adapters",
    "draft_model_id", "draft_model_revision", "max_total_tokens", "max_batch_size", "max_batch_prefill_tokens",
    "max_batch_total_tokens", "memory_fraction", "cuda_memory_fraction",
)  # fmt: skip


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the settings that a plan takes into account."""
    return _with_options(command, PLANNED)


@main.command()
@plan_options
@click.option("--devices", required=True, help="Such as 8xH100, 2xA100-40GB,1xL4, 4x80GB or cpu:64GB.")
@click.option("--requests", type=click.IntRange(1), default=16, show_default=True, help="Wanted on each replica.")
@click.option("--tokens", type=click.IntRange(1), default=1000, show_default=True, help="Length of a typical request.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan(devices: str, requests: int, tokens: int, as_json: bool, **given: Any) -> None:
    """Tell what fits on which devices, from config.json alone.

    For each division into tensor parallel ranks and replicas: weights, tokens of KV cache and requests at once, which
    one to choose and the command that runs it. Neither weights nor devices are needed. Draft models, LoRA adapters and
    GGUF files are planned too.
    """
    from tgi.hub.resolver import adapter_directory, plannable_model
    from tgi.microkernel.settings.lora_adapters import named_adapters
    from tgi.worker.planning.deployment_plan import PlanRequest, make_plan
    from tgi.worker.planning.devices import parse_devices
    from tgi.worker.planning.report import describe

    chosen = {name: value for name, value in given.items() if value is not None}
    settings, wanted = Settings(**chosen), parse_devices(devices)
    try:
        adapters = named_adapters(settings.lora_adapters)
    except ValueError as error:
        raise UserError(f"{error}.", code=2) from error
    draft = settings.draft_model_id
    request = PlanRequest(
        plannable_model(settings.model_id, settings.revision),
        settings,
        wanted,
        tokens,
        requests,
        draft=None if draft in (None, MTP) else plannable_model(draft, settings.draft_model_revision),
        adapters=tuple(adapter_directory(adapter, weights=False) for adapter in adapters),
        replicas=chosen.pop("replicas", None),
        arguments=tuple(
            word
            for name in PLANNED
            if name in chosen and name != "num_shard"
            for word in (flag(name), str(chosen[name]))
        ),
    )
    found = make_plan(request)
    click.echo(json.dumps(asdict(found), indent=2) if as_json else describe(found))


@main.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
def import_(file: Path, directory: Path) -> None:
    """Convert a GGUF FILE to a model DIRECTORY with safetensors."""
    from tgi.hub.resolver import import_gguf
    from tgi.microkernel.observability.progress import Progress

    import_gguf(file, directory, Progress(None, title="import").show_stage)
    click.echo(directory)


@main.command("download-weights")
@click.argument("model_id")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--extension", default=".safetensors", show_default=True, help="Only .safetensors is accepted.")
@click.option("--auto-convert/--no-auto-convert", default=True, help="No effect: pickled weights are never read.")
@click.option("--trust-remote-code", is_flag=True, help="Also download the Python code of the model.")
@click.option("--merge-lora", is_flag=True, help="Not supported: rejected.")
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
    """Download MODEL_ID from the Hub to the cache.

    Files that are cached are not downloaded again. Prints the directory.
    """
    from tgi.hub.model_config import read_model_config
    from tgi.hub.resolver import model_directory
    from tgi.microkernel.observability import log
    from tgi.microkernel.observability.progress import Progress
    from tgi.microkernel.settings.table import Settings

    log.configure_logging("tgi", Settings(log_level=logger_level, json_output=json_output))
    if extension != ".safetensors":
        raise UserError(f"Weights with the extension {extension} are not read. Leave out --extension.")
    if merge_lora:
        raise UserError(
            "--merge-lora is not supported. Serve the base model with the adapter: --model-id BASE --lora-adapters ID."
        )
    progress = Progress(None, title="download")
    directory = model_directory(model_id, revision, code=trust_remote_code, progress=progress.show_stage)
    read_model_config(directory)  # rejects a model that cannot be served
    click.echo(directory)


@main.command()
@click.argument("journal", type=click.Path(path_type=Path))
def replay(journal: Path) -> None:
    """Repeat the scheduler's decisions from a JOURNAL (--journal).

    Compares them with the recorded ones, bit for bit. Exits with 1 at the first difference.
    """
    from tgi.scheduler.journal import read_journal
    from tgi.scheduler.replay import describe
    from tgi.scheduler.replay import replay as repeat

    recorded = read_journal(journal)
    divergence = repeat(recorded)
    click.echo(describe(recorded, divergence))
    raise SystemExit(divergence is not None)


@main.command("print-schema")
@click.option("--kserve", is_flag=True, help="Include the routes of `tgi up --kserve`.")
def print_schema(kserve: bool) -> None:
    """Print the OpenAPI document of the HTTP routes as JSON."""
    from tgi.api.openapi import document

    click.echo(json.dumps(document(kserve), indent=2))


@main.command()
@click.argument("file", type=click.File(encoding="utf-8"), default="-")
@click.option("--model-id", help="Model that may have generated the text; default: the demo model.")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--gamma", type=float, default=0.5, show_default=True, help="The server's --watermark-gamma.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="The server's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def watermark(
    file: IO[str], model_id: str | None, revision: str | None, gamma: float, device: str, as_json: bool
) -> None:
    """Detect whether a text was generated with `watermark`.

    Reads FILE, or standard input. The text must not include the prompt.

    Model, gamma and device must be those of the server that generated the text: green tokens depend on them.
    """
    from tgi.hub.resolver import model_directory
    from tgi.microkernel.host import interpreter
    from tgi.server import WORKER_PACKAGES

    interpreter.require_packages(WORKER_PACKAGES, "`tgi watermark`")
    from tgi.worker.sampling.watermark import Z_THRESHOLD, detect_watermark_in_text

    if not 0 < gamma < 1:
        raise UserError(f"--gamma is {gamma:g}; it must be above 0 and below 1.")
    found = detect_watermark_in_text(file.read(), model_directory(model_id, revision), gamma, device)
    if as_json:
        summary = found._asdict() | {"share": found.share, "chance": found.chance, "marked": found.marked}
        click.echo(json.dumps(summary, indent=2))
        return
    click.echo(
        f"{found.green} of {found.counted} tokens are green ({found.share:.1%}); by chance {gamma:.1%} would be."
    )
    click.echo(f"z = {found.z:.2f}, which happens by chance with probability {found.chance:.2g}.")
    found_or_not = "The text carries the watermark" if found.marked else "No watermark was found"
    click.echo(f"{found_or_not} of this model with gamma {gamma:g} on {device} (z must be above {Z_THRESHOLD:g}).")
