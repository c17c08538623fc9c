"""Settings as options of a command line, grouped in its help, and errors as one message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from tgi import INTERRUPTED
from tgi.kernel.errors import UserError
from tgi.kernel.option import Option, boolean, flag
from tgi.kernel.settings import DEFAULTS, GROUPS, OPTIONS

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
HELP_ALL = "help_all"  # the option, and the key in a context's meta: hidden settings and all variables are shown
MAX_CHOICES = 14  # characters of choices that stand in the place of a value's type
COLUMN = 30  # the width of the flags; the explanation of a longer one begins below it
VARIABLES = (
    "Each setting is an environment variable too: its flag in capitals with underscores (MAX_BEST_OF for "
    "--max-best-of), or the one that is named. A flag wins over a variable."
)


class Value(click.ParamType):  # type: ignore[type-arg]  # not generic in older ones
    """A setting's value, read as everywhere."""

    def __init__(self, option: Option) -> None:
        self.name = option.read.__name__
        self._option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuses what the setting refuses, in its words."""
        try:
            return self._option.parse(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


class SettingsCommand(click.Command):
    """A command that takes the settings. Its help shows them by group; those that are hidden or have no effect are left
    to --help-all."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the groups in their order, then the command's other options."""
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
                rows.append(("…", f"{left[group]} more, which few need: --help-all"))
            _write(formatter, group, rows)
        _write(formatter, "Help", [record for record in others if record])


def _write(formatter: click.HelpFormatter, heading: str, rows: list[tuple[str, str]]) -> None:
    with formatter.section(heading):
        formatter.write_dl([(names.ljust(COLUMN), meaning) for names, meaning in rows], col_max=COLUMN)


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command one option per setting; what was not given arrives as None. The command is a SettingsCommand."""
    show = click.option(
        "--help-all",
        HELP_ALL,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_help_all,
        help="Show all settings, those without effect too, and all variables.",
    )
    command = show(command)
    for name, option in reversed(OPTIONS.items()):
        switches = [option.short] if option.short else []
        kind: dict[str, Any] = {"default": None}
        if option.read is boolean and getattr(DEFAULTS, name) is False:
            switches.append(flag(name))
            kind |= {"is_flag": True, "flag_value": True}
        elif option.read is boolean:
            switches.append(f"{flag(name)}/--no-{flag(name)[2:]}")
        else:
            switches.append(flag(name))
            kind["type"] = Value(option)
            kind["metavar"] = _choices(option) or option.read.__name__.upper()
            kind["multiple"] = bool(option.separator)
        command = click.option(*switches, name, **kind)(command)
    return command


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _choices(option: Option) -> str:
    """The choices, where they are short enough to stand behind the flag."""
    choices = "|".join(option.choices)
    return choices if len(choices) <= MAX_CHOICES else ""


def _explanation(name: str, option: Option, everything: bool) -> str:
    """What a setting means, then its choices, its default and the variables; of these only those that do not follow
    from the flag, unless `everything` is shown."""
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
def told() -> Iterator[None]:
    """Prints a UserError as one message and exits, without one at Ctrl-C; everything else is a defect and keeps its
    traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except UserError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(error.code) from None
