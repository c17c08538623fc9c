"""Settings as options of a command line, and errors as one message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from tgi import INTERRUPTED
from tgi.kernel.errors import UserError
from tgi.kernel.option import Option, boolean, flag
from tgi.kernel.settings import DEFAULTS, OPTIONS

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


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


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command one option per setting; what was not given arrives as None."""
    for name, option in reversed(OPTIONS.items()):
        switches = [option.short] if option.short else []
        kind: dict[str, Any] = {"help": _help(name, option), "default": None}
        if option.read is boolean and getattr(DEFAULTS, name) is False:
            switches.append(flag(name))
            kind |= {"is_flag": True, "flag_value": True}
        elif option.read is boolean:
            switches.append(f"{flag(name)}/--no-{flag(name)[2:]}")
        else:
            switches.append(flag(name))
            kind["type"] = Value(option)
            kind["metavar"] = "|".join(option.choices) or option.read.__name__.upper()
            kind["multiple"] = bool(option.separator)
        command = click.option(*switches, name, **kind)(command)
    return command


def _help(name: str, option: Option) -> str:
    words = f"{option.help} No effect: {option.ignored}." if option.ignored else option.help
    variables = ", ".join(option.over + option.variables(name))
    return f"{words} [{variables}]" if variables else words


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
