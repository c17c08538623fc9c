"""Logs of every process: one line of text, or one JSON object per line with --json-output.

Messages, fields and exceptions may contain input of clients. Their length is therefore limited, with a note of how much
was cut, and control characters are escaped: a client can neither fill the disk with one request nor forge a log line.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.table import Settings

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "warning": logging.WARNING,
          "error": logging.ERROR, "trace": logging.DEBUG, "off": logging.CRITICAL + 1}  # fmt: skip
COLOURS = {logging.DEBUG: 34, logging.INFO: 32, logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
NOISY = ("urllib3", "filelock", "httpx", "httpcore", "httpx2", "httpcore2", "huggingface_hub")

# Limits in characters, before escaping: of a message, of a field, of a value in a field that is an object, of all
# fields of a record, and of a traceback.
MAX_MESSAGE, MAX_FIELD, MAX_VALUE, MAX_FIELDS, MAX_EXCEPTION = 4096, 1024, 256, 8192, 32768
# Control characters: line breaks of any kind, and characters that move the cursor of a terminal.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

# Attributes that logging sets on a record. All others come from `extra` and are fields.
_LOGGING_ATTRIBUTES = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "brief"}


# Largest interval of a ComplaintLimit.
MAX_COMPLAINT_SECONDS = 60.0


class Brief(NamedTuple):
    """How a record with many fields, which has this as its field `brief`, is shown as text above level debug: by one
    line in place of its message, and by these of its fields, on a terminal by none. `details` returns more fields, for
    where all are shown: those that take time to make."""

    line: str
    fields: tuple[str, ...]
    details: Callable[[], dict[str, Any]] = dict


class ComplaintLimit:
    """Limits the log records that others can cause at will. The interval between two of them doubles from `seconds` up
    to a minute, and is the first one again when there was no cause for a minute."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._first = self._interval = seconds
        self._due = 0.0  # by time.monotonic

    def allows_one(self) -> bool:
        """Whether to log a record now."""
        now = time.monotonic()
        if now < self._due:
            return False
        quiet = now > self._due + MAX_COMPLAINT_SECONDS
        self._interval = self._first if quiet else min(2 * self._interval, MAX_COMPLAINT_SECONDS)
        self._due = now + self._interval
        return True


def configure_logging(process: str, settings: Settings) -> None:
    """Sends all logging of this process to standard error. `process` names it in each line ("worker-0").

    Raises UserError for an invalid log_level.
    """
    level, targets = parse_levels(settings.log_level)
    terminal = sys.stderr.isatty()
    coloured = terminal if settings.log_colorize is None else settings.log_colorize
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if settings.json_output else _Text(process, coloured, terminal))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for target in NOISY:
        logging.getLogger(target).setLevel(max(level, logging.WARNING))
    for target, own in targets.items():
        logging.getLogger(target).setLevel(own)


def parse_levels(text: str) -> tuple[int, dict[str, int]]:
    """The default level and those of single targets, from e.g. "warn" or "info,tgi.api=debug".

    TGI's targets (text_generation_router, …) all mean "tgi".
    """
    level, targets = logging.INFO, {}
    for directive in text.split(","):
        target, _, name = directive.strip().rpartition("=")
        if name.lower() not in LEVELS:
            raise UserError(f"Unknown log level {name!r}: expected one of {', '.join(LEVELS)}.", code=2)
        if target:
            targets["tgi" if target.startswith("text_generation") else target] = LEVELS[name.lower()]
        else:
            level = LEVELS[name.lower()]
    return level, targets


def _message(record: logging.LogRecord) -> str:
    return _cut(record.getMessage(), MAX_MESSAGE)


def _fields(record: logging.LogRecord, brief: Brief | None = None) -> dict[str, object]:
    """The record's fields, with `brief` those that it names. Fields beyond MAX_FIELDS characters in total are cut
    completely."""
    given = vars(record)
    if brief is not None:
        given = {key: given[key] for key in brief.fields}
    elif (known := given.get("brief")) is not None:
        given = given | known.details()
    fields: dict[str, object] = {}
    left = MAX_FIELDS
    for key, value in given.items():
        if key in _LOGGING_ATTRIBUTES:
            continue
        bounded, size = _bounded(value, MAX_FIELD)
        left -= len(key) + size
        fields[key] = bounded if left >= 0 else f"[{size} characters cut]"
    return fields


def _bounded(value: object, limit: int) -> tuple[object, int]:
    """A field's value cut to `limit`, and its size as JSON. An object above the limit keeps its keys, with each value
    cut; any other value becomes text, cut."""
    shown = json.dumps(value, default=str, ensure_ascii=False)
    if len(shown) <= limit:
        return value, len(shown)
    if isinstance(value, dict):
        parts = {key: _bounded(part, min(limit, MAX_VALUE))[0] for key, part in value.items()}
        if (size := len(json.dumps(parts, default=str, ensure_ascii=False))) <= MAX_FIELDS // 2:
            return parts, size
    text = _cut(value if isinstance(value, str) else shown, limit)
    return text, len(text)


def _exception(record: logging.LogRecord, formatter: logging.Formatter) -> str:
    """The traceback. If it is too long, its middle is cut: both ends matter more."""
    assert record.exc_info is not None
    text = formatter.formatException(record.exc_info)
    if len(text) <= MAX_EXCEPTION:
        return text
    half = MAX_EXCEPTION // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}[{len(text) - limit} characters cut]"


def _escaped(text: str) -> str:
    """The text with control characters escaped as in a Python literal."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _is_debugged(record: logging.LogRecord) -> bool:
    """Whether details of the record's target are logged."""
    return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


class _Text(logging.Formatter):
    """Time, level, process, where in the program, message, fields. The lines of a traceback are indented, so that none
    of them looks like a record."""

    def __init__(self, process: str, coloured: bool, terminal: bool = False) -> None:
        super().__init__()
        self._process = process
        self._coloured = coloured
        self._terminal = terminal

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:<7}"
        if self._coloured:
            level = f"\x1b[{COLOURS.get(record.levelno, 0)}m{level}\x1b[0m"
        brief: Brief | None = getattr(record, "brief", None)
        if brief is not None and self._terminal and not _is_debugged(record):
            return f"{_time(record)[11:19]} {level} {_escaped(_cut(brief.line, MAX_MESSAGE))}"
        message = _message(record) if brief is None else _cut(brief.line, MAX_MESSAGE)
        if record.args:  # without arguments a message is the program's own, and may have several lines
            message = _escaped(message)
        fields = _fields(record, None if _is_debugged(record) else brief)
        extra = "".join(f" {key}={_escaped(str(value))}" for key, value in fields.items())
        place = f"{record.name}:{record.lineno}"
        line = f"{_time(record)} {level} {self._process:<11} {place}: {message}{extra}"
        if not record.exc_info:
            return line
        lines = _exception(record, self).split("\n")
        return "\n    ".join([line, *map(_escaped, lines)])


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "timestamp": _time(record),
            "level": record.levelname,
            "process": self._process,
            "target": record.name,
            "filename": record.filename,
            "line_number": record.lineno,
            "message": _message(record),
        }
        if record.exc_info:
            entry["exception"] = _exception(record, self)
        line = json.dumps(entry | _fields(record), default=str, ensure_ascii=False)
        return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line)
