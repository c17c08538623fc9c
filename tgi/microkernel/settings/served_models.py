"""Several models of one server: their names, and the settings that one of them has of its own (--models)."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.options import integer, seconds
from tgi.microkernel.settings.table import DEFAULTS, OPTIONS, RELOADED_LIMITS, RELOADED_MODEL, Settings

# Each has a directory of sockets, whose name has at most two digits.
MAX_MODELS = 64
NAMED_MODEL = re.compile(r"([A-Za-z0-9][\w.:/-]{0,127})=(.+)", re.ASCII)
LOADED_AT = ("start", "first-use")
# The settings of a table in the file: those of a model, its limits and its processes.
OWN_SETTINGS = (*RELOADED_MODEL, *RELOADED_LIMITS, "device", "num_shard", "replicas", "validation_workers")

# Settings without a meaning for one model, with their values of "not set".
ONLY_FOR_SEVERAL = {"load_models": DEFAULTS.load_models, "model_ttl": None, "max_loaded_models": None}
HOSTS_SETTINGS = ("listen", "tokenizer_listen", "connect", "group", "ray")


class ServedModel(NamedTuple):
    """One of several models of a server."""

    name: str
    settings: Settings  # those of the server, with the model's own
    ttl: float | None = None  # seconds without a request until it is unloaded; None: never
    at_start: bool = True  # loaded at start, not by the first request


def is_named_model(text: str) -> bool:
    """Whether the value of --model-id is NAME=SOURCE, and not a path with an equals sign."""
    return NAMED_MODEL.fullmatch(text) is not None and not Path(text).expanduser().exists()


def served_models(settings: Settings) -> list[ServedModel]:
    """The models of a server with several, in order; [] for a server of one. Pipeline n + 1 serves the n-th of them.
    Raises UserError for what --models cannot mean."""
    if not settings.models:
        for name, unset in ONLY_FOR_SEVERAL.items():
            if getattr(settings, name) != unset:
                source = settings.model_id or "SOURCE"
                raise _invalid(f"`{name}` is for models with a name. Name it: --model-id NAME={source}")
        return []
    for name in HOSTS_SETTINGS:
        if getattr(settings, name):
            raise _invalid(f"`{name}` and several models exclude each other: all their processes run on this host")
    if settings.model_id is not None:
        raise _invalid(
            f"`model_id` is {settings.model_id}, and several models are named, too. Name this one as well: "
            f"--model-id NAME={settings.model_id}"
        )
    tables: dict[str, dict[str, Any]] = {}
    for entry in settings.models:
        named = NAMED_MODEL.fullmatch(entry)
        found = {named[1]: {"model-id": named[2]}} if named and is_named_model(entry) else _tables_of_file(entry)
        for name, table in found.items():
            if name in tables:
                raise _invalid(f"`models` names two models {name}. Give each a name of its own")
            tables[name] = table
    if len(tables) > MAX_MODELS:
        raise _invalid(f"`models` names {len(tables)} models; a server has at most {MAX_MODELS}")
    return [_served_model(settings, name, table) for name, table in tables.items()]


def _tables_of_file(entry: str) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file, by the name of the model."""
    try:
        content = tomllib.loads(Path(entry).expanduser().read_text())
    except OSError as error:
        text = f"{entry!r} is neither NAME=SOURCE nor a file that can be read ({error.strerror})"
        raise _invalid(f"`models`: {text}. Give --model-id NAME=SOURCE, or --models FILE.toml") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(f"`models`: {entry} is not TOML: {error}") from error
    if not content or not all(isinstance(table, dict) for table in content.values()):
        raise _invalid(f'`models`: {entry} must consist of a table for each model: ["NAME"] and model-id = "SOURCE"')
    if odd := next((name for name in content if NAMED_MODEL.fullmatch(f"{name}=x") is None), None):
        raise _invalid(
            f"`models`: {entry} has the name {odd[:128]!r}. Names consist of letters, digits and . _ : / -, at most 128"
        )
    return content


def _served_model(server: Settings, name: str, table: Mapping[str, Any]) -> ServedModel:
    given = {
        key.replace("-", "_"): ",".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in table.items()
    }
    try:
        ttl = _ttl(given.pop("ttl")) if "ttl" in given else server.model_ttl
        at = given.pop("load", server.load_models)
        if at not in LOADED_AT:
            raise ValueError(f"`load` is {at!r}. It must be one of {', '.join(LOADED_AT)}")
        if "model_id" not in given:
            raise ValueError("`model-id` is missing: a Hub id, a directory or a .gguf file")
        if odd := next((key for key in given if key not in OWN_SETTINGS), None):
            raise ValueError(f"`{odd}` is no setting of one model. Known: ttl, load, {', '.join(OWN_SETTINGS)}")
        own = {key: OPTIONS[key].parse(value) for key, value in given.items()}
    except ValueError as error:
        raise _invalid(f"`models`, {name}: {error}") from error
    return ServedModel(name, replace(server, **own, models=(), served_name=name), ttl, at == "start")


def _ttl(value: str) -> float | None:
    """Seconds; 0: never."""
    return None if value.strip() == "0" and integer(value) == 0 else seconds(value)


def _invalid(text: str) -> UserError:
    return UserError(f"Invalid argument: {text}.")
