"""What a setting consists of (SettingOption), and the parsers of its value."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from ipaddress import ip_address, ip_network
from math import inf
from socket import SOCK_STREAM, getaddrinfo
from typing import Any, NamedTuple
from urllib.parse import urlsplit

HIDDEN = "(hidden)"  # shown instead of a secret
OPTION = "option"  # the key of a dataclass field's metadata
_TCP_ADDRESS = re.compile(r"(tcp://(?:[^\s/:@\[\]*;,]+|\[[0-9a-f:.]+\])):(\d{1,5})(?:-(\d{1,5}))?", re.IGNORECASE)
MAX_PORTS = 256  # of one address with a range of ports
_ENDPOINT = re.compile(r"(?:(https?)://)?([^\s/:@\[\]]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?/?", re.IGNORECASE)


class SettingOption(NamedTuple):
    """One setting. Its flag is the name of its dataclass field with dashes."""

    group: str  # heading in the help
    help: str
    read: Callable[[str], Any]  # parses text; raises ValueError with a message for the user
    env: tuple[str, ...] | None = None  # environment variables; None: the flag's name in upper case
    also: tuple[str, ...] = ()  # further variables, read if none of those is set
    over: tuple[str, ...] = ()  # variables that override even the flag
    choices: tuple[str, ...] = ()
    short: str = ""
    separator: str = ""  # set: the flag is repeatable, and its variable is a list with this separator
    ignored: str = ""  # why the setting is accepted but has no effect
    secret: bool = False  # never shown
    unset: str = ""  # describes a default of None or ()
    hidden: bool = False  # listed only by --help-all, as are ignored settings

    def variables(self, name: str) -> tuple[str, ...]:
        """The environment variables of the setting `name`, in order of precedence after the flag."""
        return ((name.upper(),) if self.env is None else self.env) + self.also

    @property
    def meaning(self) -> str:
        """The help text, with the reason if the setting has no effect."""
        return f"{self.help} No effect: {self.ignored}." if self.ignored else self.help

    def default(self, value: Any) -> str:
        """The default as text."""
        if value is None or value == ():
            return self.unset
        return ("off", "on")[value] if isinstance(value, bool) else str(value)

    def parse(self, text: str) -> Any:
        """Parses one value. Raises ValueError with a message for the user."""
        value = self.read(text)
        if self.choices and value not in self.choices:
            raise ValueError(f"{text!r} is not one of {', '.join(self.choices)}")
        return value


def setting(group: str, default: Any, help: str, read: Callable[[str], Any], **more: Any) -> Any:
    """A dataclass field for a setting; `more` are further fields of SettingOption."""
    return field(default=default, metadata={OPTION: SettingOption(group, help, read, **more)})


def flag(name: str) -> str:
    """The command line flag of a setting."""
    return "--" + name.replace("_", "-")


def without_secrets(arguments: Sequence[str], options: Mapping[str, SettingOption]) -> list[str]:
    """The command line with secrets hidden: `--api-key KEY` and `--api-key=KEY` without the key."""
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


# --- parsers of values. Their names are shown as the types of settings. ---


def text(value: str) -> str:
    """Any text that is not blank."""
    if not value.strip():
        raise ValueError("it is empty")
    return value


def boolean(value: str) -> bool:
    """true or false in any common spelling."""
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _whole(value: str) -> int:
    """An integer."""
    if not (value.isascii() and value.removeprefix("-").isdecimal()):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def integer(value: str) -> int:
    """An integer >= 0."""
    if (found := _whole(value)) < 0:
        raise ValueError(f"{value!r} is below 0")
    return found


def count(value: str) -> int:
    """An integer >= 1."""
    if (found := _whole(value)) <= 0:
        raise ValueError(f"{value!r} is not above 0")
    return found


def size(value: str) -> int:
    """A number of bytes >= 1, with or without a unit: 2000000, 2GB, 512MiB."""
    return count(str(size_or_0(value)))


def size_or_0(value: str) -> int:
    """A number of bytes >= 0, with or without a unit."""
    found = re.fullmatch(r"(\d+) ?(?:([KMGT])(i?))?B?", value, re.ASCII | re.IGNORECASE)
    if found is None:
        raise ValueError(f"{value!r} is not a number of bytes, such as 2000000, 2GB or 512MiB")
    digits, prefix, binary = found.groups("")
    factor: int = (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    return int(digits) * factor


def counts(value: str) -> tuple[int, ...]:
    """A comma-separated list of integers >= 1."""
    return tuple(count(part.strip()) for part in value.split(","))


def batch_sizes(value: str) -> tuple[int, ...]:
    """A comma-separated list of integers >= 1, or 0."""
    if value.strip() == "0":
        return (0,)
    try:
        return counts(value)
    except ValueError as error:
        raise ValueError(f"{error}; give numbers above 0 with commas between them, or 0 alone for none") from error


def number(value: str) -> float:
    """A finite number."""
    try:
        found = float(value)
    except ValueError:
        found = inf
    if not -inf < found < inf:
        raise ValueError(f"{value!r} is not a number")
    return found


# 31 years: timers and the messages between processes hold it.
MAX_SECONDS = 1e9


def seconds(value: str) -> float:
    """A duration > 0 in seconds, at most MAX_SECONDS."""
    if not 0 < (found := number(value)) <= MAX_SECONDS:
        raise ValueError(f"{value!r} is not a number of seconds above 0 and at most {MAX_SECONDS:.0f}")
    return found


def share(value: str) -> float:
    """A fraction: > 0, <= 1."""
    if not 0 < (found := number(value)) <= 1:
        raise ValueError(f"{value!r} is not above 0 and at most 1")
    return found


def proper_share(value: str) -> float:
    """A fraction: > 0, < 1."""
    if not 0 < (found := number(value)) < 1:
        raise ValueError(f"{value!r} is not above 0 and below 1")
    return found


def tcp_port(value: str) -> int:
    """A TCP port; 0 means any free port."""
    if not 0 <= (found := _whole(value)) <= 65535:
        raise ValueError(f"{value!r} is not a port number: they go from 0 to 65535")
    return found


def address(value: str) -> str:
    """An IP address to listen on. A name, such as localhost, is resolved, to an IPv4 address where it has one."""
    with suppress(ValueError):
        ip_address(value)
        return value
    try:
        found = [where[0] for *_, where in getaddrinfo(value, None, type=SOCK_STREAM)]
    except (OSError, UnicodeError):
        raise ValueError(
            f"{value!r} is neither an IP address, such as 127.0.0.1, nor a name that can be resolved, such as localhost"
        ) from None
    return str(min(found, key=lambda ip: ":" in str(ip)))


def network(value: str) -> str:
    """An IP address, or a network of addresses."""
    try:
        return str(ip_network(value))
    except ValueError:
        raise ValueError(f"{value!r} is neither an IP address nor a network, such as 10.0.0.0/8") from None


def tcp_address(value: str) -> str:
    """The address of a link between hosts: tcp://HOST:PORT, an IPv6 address in brackets."""
    found = _TCP_ADDRESS.fullmatch(value.strip())
    if found is None or found[3] is not None or not 0 < int(found[2]) <= 65535 or not _is_host(found[1]):
        raise ValueError(f"{value!r} is not an address such as tcp://192.0.2.1:3100 or tcp://[2001:db8::1]:3100")
    return value.strip()


def tcp_addresses(value: str) -> tuple[str, ...]:
    """Addresses of links between hosts, with commas between them: tcp://HOST:PORT, or tcp://HOST:FIRST-LAST for several
    ports. Returns them with one port each."""
    addresses = []
    for part in value.split(","):
        found = _TCP_ADDRESS.fullmatch(part.strip())
        host, first, last = found.groups() if found else ("", "0", None)
        ports = range(int(first), int(last or first) + 1)
        if not 0 < len(ports) <= MAX_PORTS or not 0 < ports[0] <= ports[-1] <= 65535 or not _is_host(host):
            raise ValueError(
                f"{part.strip()!r} is not an address such as tcp://192.0.2.1:3100, tcp://[2001:db8::1]:3100, or, for "
                f"at most {MAX_PORTS} ports, tcp://192.0.2.1:3100-3103"
            )
        addresses += [f"{host}:{port}" for port in ports]
    return tuple(dict.fromkeys(addresses))


def ray_address(value: str) -> str:
    """The address of a Ray cluster, HOST:PORT, or auto. Other words and schemes have meanings of their own for Ray:
    local would start a cluster."""
    found = value.strip()
    try:
        if found != "auto":
            tcp_address(f"tcp://{found}")
    except ValueError:
        raise ValueError(f"{value!r} is not an address such as 192.0.2.1:6379, nor auto") from None
    return found


def _is_host(url: str) -> bool:
    """Whether a port may follow, and what stands in brackets, if anything, is an IPv6 address. Names are resolved
    later."""
    try:
        parts = urlsplit(f"{url}:1")
        return bool(parts.hostname) and parts.port == 1
    except ValueError:
        return False


def endpoint(value: str) -> str:
    """The gRPC address of a collector: http://HOST:PORT, https://HOST:PORT, or HOST:PORT, which means http. Only https
    may omit the port, since gRPC's default, 443, is the port of TLS."""
    found = _ENDPOINT.fullmatch(value.strip())
    scheme, host, port = found.groups() if found else ("", "", "")
    secure = (scheme or "").lower() == "https"
    if not host or (port is None and not secure) or not 0 < int(port or 443) <= 65535:
        raise ValueError(f"{value!r} is not an address of a collector, such as http://127.0.0.1:4317")
    return f"{'https' if secure else 'http'}://{host}" + (f":{port}" if port else "")


def resolve_value(name: str, option: SettingOption, given: Any, default: Any, environ: Mapping[str, str]) -> Any:
    """A setting's value: the flag's if it was `given` (not None), else the environment's, else `default`.

    An empty environment variable counts as not set. Raises ValueError, naming the variable.
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
