"""Logs of every process: one line of text, or one JSON object per line with --json-output."""

import json
import logging
import sys
import time

from tgi.kernel.errors import UserError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "warning": logging.WARNING,
          "error": logging.ERROR, "trace": logging.DEBUG, "off": logging.CRITICAL}  # fmt: skip

# What logging itself puts on a record; whatever else is there came in through `extra` and is a field.
_OWN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(process: str, level: str, json_output: bool) -> None:
    """Sends all logging of this process to standard error. `process` names it in each line ("worker-0")."""
    if level.lower() not in LEVELS:
        raise UserError(f"Unknown log level {level!r}: expected one of {', '.join(LEVELS)}", code=2)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if json_output else _Text(process))
    logging.basicConfig(level=LEVELS[level.lower()], handlers=[handler], force=True)
    for noisy in ("urllib3", "filelock", "httpx", "httpcore", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(max(LEVELS[level.lower()], logging.WARNING))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname:<7} {self._process:<11} {record.getMessage()}{extra}"
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
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry | _fields(record), default=str, ensure_ascii=False)
