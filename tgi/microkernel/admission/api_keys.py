"""API keys with the share and the limits of the client that sends them, as --api-key and --api-key-file name them.

One key per line, then its options, in any order:

    KEY weight=2 priority=1 requests=16 tokens-per-minute=60000
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError

# Weights of clients' shares.
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
# Either way.
MAX_PRIORITY = 1_000_000
# Of requests at once, and of tokens per minute.
MAX_COUNT = 1_000_000_000_000


class ApiKey(NamedTuple):
    """A key. None means no limit."""

    key: str
    weight: float = 1.0  # of the client's share
    priority: int = 0  # requests of a higher priority are admitted first
    requests: int | None = None  # at once
    tokens_per_minute: int | None = None  # of prompts and answers together


def _weight(text: str) -> float:
    if not MIN_WEIGHT <= (found := float(text)) <= MAX_WEIGHT:
        raise ValueError
    return found


def _priority(text: str) -> int:
    if abs(found := int(text)) > MAX_PRIORITY:
        raise ValueError
    return found


def _count(text: str) -> int:
    if not 1 <= (found := int(text)) <= MAX_COUNT:
        raise ValueError
    return found


# Option: field, how its value is read, and what it must be.
OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "weight": ("weight", _weight, f"a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"),
    "priority": ("priority", _priority, f"an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}"),
    "requests": ("requests", _count, f"an integer from 1 to {MAX_COUNT}"),
    "tokens-per-minute": ("tokens_per_minute", _count, f"an integer from 1 to {MAX_COUNT}"),
}


def parse_api_key(line: str) -> ApiKey:
    """The key of a line. Raises ValueError with a message that does not quote the key."""
    key, *words = line.split()
    values: dict[str, Any] = {}
    while words and "=" in words[-1]:
        name, _, value = words.pop().partition("=")
        if name not in OPTIONS:
            raise ValueError(f"{name!r} is no option of a key. Choose from {', '.join(OPTIONS)}")
        field, read, expected = OPTIONS[name]
        if field in values:
            raise ValueError(f"the option {name} is given twice")
        try:
            values[field] = read(value)
        except ValueError:
            raise ValueError(f"{name}={value} must be {expected}") from None
    return ApiKey(" ".join((key, *words)), **values)


def read_api_key_file(file: str) -> tuple[str, ...]:
    """The lines of a key file that are not empty. Raises UserError."""
    try:
        # utf-8-sig: with or without a byte order mark.
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise _invalid(f"`api_key_file` {file} cannot be read: {error.strerror}. Name a file with keys.") from error
    except UnicodeDecodeError as error:
        raise _invalid(f"`api_key_file` {file} is not text in UTF-8. Write one key per line.") from error
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                parse_api_key(line)
        except ValueError as error:
            raise _invalid(f"line {number} of `api_key_file` {file}: {error}.") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise _invalid(f"`api_key_file` {file} holds no key. Write one per line.")
    return keys


def _invalid(text: str) -> UserError:
    return UserError(f"Invalid argument: {text}")
