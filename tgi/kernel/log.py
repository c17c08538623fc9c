"""Logs of every process: one line of text, or one JSON object per line with --json-output."""

import json
import logging
import sys
import time

from tgi.kernel.errors import UserError
from tgi.kernel.settings import Settings

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "warning": logging.WARNING,
          "error": logging.ERROR, "trace": logging.DEBUG, "off": logging.CRITICAL + 1}  # fmt: skip
COLOURS = {logging.DEBUG: 34, logging.INFO: 32, logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
NOISY = ("urllib3", "filelock", "httpx", "httpcore", "huggingface_hub")

# What logging itself puts on a record; whatever else is there came in through `extra` and is a field.
_OWN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(process: str, settings: Settings) -> None:
    """Sends all logging of this process to standard error. `process` names it in each line ("worker-0").

    Raises UserError for a log_level that is none.
    """
    level, targets = levels(settings.log_level)
    coloured = sys.stderr.isatty() if settings.log_colorize is None else settings.log_colorize
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if settings.json_output else _Text(process, coloured))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for target in NOISY:
        logging.getLogger(target).setLevel(max(level, logging.WARNING))
    for target, own in targets.items():
        logging.getLogger(target).setLevel(own)


def levels(text: str) -> tuple[int, dict[str, int]]:
    """The level of all logs, and those of single targets: "warn", "info,tgi.api=debug".

    TGI's targets are names of its programs (text_generation_router, …), which are all "tgi" here.
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


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class _Text(logging.Formatter):
    """Time, level, process, where in the program, message, fields."""

    def __init__(self, process: str, coloured: bool) -> None:
        super().__init__()
        self._process = process
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {key}={value}" for key, value in _fields(record).items())
        level = f"{record.levelname:<7}"
        if self._coloured:
            level = f"\x1b[{COLOURS.get(record.levelno, 0)}m{level}\x1b[0m"
        place = f"{record.name}:{record.lineno}"
        line = f"{_time(record)} {level} {self._process:<11} {place}: {record.getMessage()}{extra}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


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
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry | _fields(record), default=str, ensure_ascii=False)
