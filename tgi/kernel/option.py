"""What there is to say of one setting: its names, its meaning, and how its text is read."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from ipaddress import ip_address
from math import inf
from typing import Any, NamedTuple

HIDDEN = "(hidden)"  # what is shown of a secret
OPTION = "option"  # the key of a dataclass field's metadata
_ENDPOINT = re.compile(r"(?:(https?)://)?([^\s/:@\[\]]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?/?", re.IGNORECASE)


class Option(NamedTuple):
    """One setting. Its flag is its field's name with dashes."""

    group: str  # the heading that it stands under in the help
    help: str
    read: Callable[[str], Any]  # from text; raises ValueError in words for a reader
    env: tuple[str, ...] | None = None  # environment names; None: the flag's own name in upper case
    also: tuple[str, ...] = ()  # further names, read when none of those is set
    over: tuple[str, ...] = ()  # names that beat even the flag
    choices: tuple[str, ...] = ()
    short: str = ""
    separator: str = ""  # the flag may be repeated, and its variable holds several values with this between them
    ignored: str = ""  # why it is accepted and has no effect
    secret: bool = False  # never to be shown
    unset: str = ""  # what holds in place of a default that is None or empty
    hidden: bool = False  # listed by --help-all alone, as is what is ignored

    def variables(self, name: str) -> tuple[str, ...]:
        """The environment variables of the setting `name`, in the order in which they count after the flag."""
        return ((name.upper(),) if self.env is None else self.env) + self.also

    @property
    def meaning(self) -> str:
        """The help, and why it has no effect if it has none."""
        return f"{self.help} No effect: {self.ignored}." if self.ignored else self.help

    def default(self, value: Any) -> str:
        """The setting's default in words."""
        if value is None or value == ():
            return self.unset
        return ("off", "on")[value] if isinstance(value, bool) else str(value)

    def parse(self, text: str) -> Any:
        """One value. Raises ValueError, in words, for a text that is none."""
        value = self.read(text)
        if self.choices and value not in self.choices:
            raise ValueError(f"{text!r} is not one of {', '.join(self.choices)}")
        return value


def setting(group: str, default: Any, help: str, read: Callable[[str], Any], **more: Any) -> Any:
    """A dataclass field that is a setting; `more` are fields of Option."""
    return field(default=default, metadata={OPTION: Option(group, help, read, **more)})


def flag(name: str) -> str:
    """How a setting is written on the command line."""
    return "--" + name.replace("_", "-")


def without_secrets(arguments: Sequence[str], options: Mapping[str, Option]) -> list[str]:
    """A command line that may be shown: `--api-key KEY` and `--api-key=KEY` without the key."""
    secret = {flag(name) for name, option in options.items() if option.secret}
    shown = []
    for number, argument in enumerate(arguments):
        name, given, _ = argument.partition("=")
        if number and arguments[number - 1] in secret:
            argument = HIDDEN
        elif given and name in secret:
            argument = f"{name}={HIDDEN}"
        shown.append(argument)
    return shown


# How values are read. The names of these functions are shown as the type of a setting.


def text(value: str) -> str:
    """Anything but nothing."""
    if not value.strip():
        raise ValueError("it is empty")
    return value


def boolean(value: str) -> bool:
    """true or false, as people write them in environment variables."""
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _whole(value: str) -> int:
    """A whole number, which may be below 0."""
    if not (value.isascii() and value.removeprefix("-").isdecimal()):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def integer(value: str) -> int:
    """0, 1, 2, …"""
    if (found := _whole(value)) < 0:
        raise ValueError(f"{value!r} is below 0")
    return found


def count(value: str) -> int:
    """1, 2, 3, …"""
    if (found := _whole(value)) <= 0:
        raise ValueError(f"{value!r} is not above 0")
    return found


def counts(value: str) -> tuple[int, ...]:
    """Whole numbers above 0 with commas between them."""
    return tuple(count(part.strip()) for part in value.split(","))


def batch_sizes(value: str) -> tuple[int, ...]:
    """The same, or 0 alone."""
    if value.strip() == "0":
        return (0,)
    try:
        return counts(value)
    except ValueError as error:
        raise ValueError(f"{error}; give numbers above 0 with commas between them, or 0 alone for none") from error


def number(value: str) -> float:
    """A number with or without a point; neither infinite nor none."""
    try:
        found = float(value)
    except ValueError:
        found = inf
    if not -inf < found < inf:
        raise ValueError(f"{value!r} is not a number")
    return found


def seconds(value: str) -> float:
    """A duration above 0."""
    if (found := number(value)) <= 0:
        raise ValueError(f"{value!r} is not a number of seconds above 0")
    return found


def share(value: str) -> float:
    """A part of a whole: above 0, at most 1."""
    if not 0 < (found := number(value)) <= 1:
        raise ValueError(f"{value!r} is not above 0 and at most 1")
    return found


def proper_share(value: str) -> float:
    """A part of a whole that is neither nothing nor all of it."""
    if not 0 < (found := number(value)) < 1:
        raise ValueError(f"{value!r} is not above 0 and below 1")
    return found


def tcp_port(value: str) -> int:
    """The number of a TCP port; 0 takes any that is free."""
    if not 0 <= (found := _whole(value)) <= 65535:
        raise ValueError(f"{value!r} is not a port number: they go from 0 to 65535")
    return found


def address(value: str) -> str:
    """An IP address to listen on."""
    try:
        ip_address(value)
    except ValueError:
        raise ValueError(f"{value!r} is not an IP address, such as 127.0.0.1") from None
    return value


def endpoint(value: str) -> str:
    """Where a collector listens for gRPC: http://HOST:PORT, https://HOST:PORT, or HOST:PORT, which is http. Over TLS
    the port may be left out; otherwise gRPC would take TLS's, 443, without TLS."""
    found = _ENDPOINT.fullmatch(value.strip())
    scheme, host, port = found.groups() if found else ("", "", "")
    secure = (scheme or "").lower() == "https"
    if not host or (port is None and not secure) or not 0 < int(port or 443) <= 65535:
        raise ValueError(f"{value!r} is no address of a collector, such as http://127.0.0.1:4317")
    return f"{'https' if secure else 'http'}://{host}" + (f":{port}" if port else "")


def value_of(name: str, option: Option, given: Any, default: Any, environ: Mapping[str, str]) -> Any:
    """A setting's value: from the environment or the `default` where its flag was not `given` (None).

    An environment variable that is empty counts as not set. Raises ValueError, naming the variable.
    """
    for variable in option.over + (option.variables(name) if given is None else ()):
        if not (content := environ.get(variable, "")).strip():
            continue
        try:
            if not option.separator:
                return option.parse(content)
            parts = (part.strip() for part in content.split(option.separator))
            return tuple(option.parse(part) for part in parts if part)
        except ValueError as error:
            raise ValueError(f"The environment variable {variable} cannot be used: {error}.") from error
    return default if given is None else given
