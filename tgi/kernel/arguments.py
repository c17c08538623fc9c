"""From the command line and the environment to Settings: what was given, what contradicts, what cannot be had yet."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tgi.kernel import rundir
from tgi.kernel.adapters import named_adapters
from tgi.kernel.errors import UserError
from tgi.kernel.messages import MOST_TOPS
from tgi.kernel.option import HIDDEN, flag, value_of
from tgi.kernel.settings import DEFAULTS, DRAFTS, MOST_SPECULATED, OPTIONS, Settings
from tgi.kernel.shards import refuse_shards


def load(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from command line flags (those that were given), then the environment, then defaults.

    Raises UserError for a value that does not parse, for those that contradict each other, and for what is not built.
    """
    if "HONCHO_PROCESS_NAME" in environ:  # honcho gives each of its processes a PORT of its own
        environ = {name: content for name, content in environ.items() if name != "PORT"}
    _refuse_empty_key(flags, environ)
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        given = None if flags.get(name) == () else flags.get(name)
        try:
            values[name] = value_of(name, option, given, getattr(DEFAULTS, name), environ)
        except ValueError as error:
            raise UserError(str(error), code=2) from error
    settings = Settings(**values, run_dir=rundir.default(values["port"]))
    _check(settings)
    refuse_shards(settings, environ)
    _refuse_unbuilt(settings)
    return _completed(settings)


def shown(settings: Settings) -> dict[str, Any]:
    """The settings that are not the defaults, by name, for a log: secrets are hidden."""
    return {name: HIDDEN if OPTIONS[name].secret else value for name, value in _changed(settings).items()}


def without_effect(settings: Settings) -> dict[str, str]:
    """The flags that ask for something and get nothing, with the reason."""
    return {flag(name): reason for name in _changed(settings) if (reason := OPTIONS[name].ignored)}


def _changed(settings: Settings) -> dict[str, Any]:
    """The settings that are not the defaults, by name."""
    return {name: value for name in OPTIONS if (value := getattr(settings, name)) != getattr(DEFAULTS, name)}


def _refuse_empty_key(flags: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Elsewhere an empty variable counts as not set. Here that would open a server that was meant to be closed."""
    for variable in OPTIONS["api_key"].variables("api_key"):
        if variable in environ and not environ[variable].strip() and not flags.get("api_key"):
            raise UserError(f"The environment variable {variable} is empty. Give it a key, or unset it.", code=2)


def _invalid(text: str) -> UserError:
    return UserError(f"Invalid argument: {text}")


def _check(settings: Settings) -> None:
    """What contradicts, in TGI's words where it has some."""
    tokens, length, total = settings.max_input_tokens, settings.max_input_length, settings.max_total_tokens
    if tokens is not None and length is not None:
        raise _invalid(
            f"Both `max_input_tokens` ({tokens}) and `max_input_length` ({length}) are set. Please define only "
            "`max_input_tokens` as `max_input_length is deprecated for naming consistency."
        )
    tokens = tokens or length
    if tokens is not None and total is not None and tokens >= total:
        raise _invalid(f"`max_input_tokens`({tokens}) must be < `max_total_tokens`({total})")
    if total == 1:
        raise _invalid("`max_total_tokens` must be >= 2: a prompt and what is generated have a token each. Given: 1")
    if settings.validation_workers == 0:
        raise _invalid("`validation_workers` must be > 0")
    batch = settings.max_batch_total_tokens
    if total is not None and batch is not None and total > batch:
        raise _invalid(f"`max_total_tokens` must be <= `max_batch_total_tokens`. Given: {total} and {batch}")
    for given, name in ((settings.ngrok_authtoken, "ngrok-authtoken"), (settings.ngrok_edge, "ngrok-edge")):
        if settings.ngrok and given is None:
            raise _invalid(f"`{name}` must be set when using ngrok tunneling")
    try:
        named_adapters(settings.lora_adapters)
    except ValueError as error:
        raise _invalid(str(error)) from error
    if settings.rope_factor is not None and settings.rope_factor < 1:
        raise _invalid(f"`rope_factor` must be >= 1. Given: {settings.rope_factor}")
    if settings.max_top_n_tokens > MOST_TOPS:
        raise _invalid(f"`max_top_n_tokens` must be <= {MOST_TOPS}. Given: {settings.max_top_n_tokens}")
    if settings.speculate is not None and settings.speculate > MOST_SPECULATED:
        raise _invalid(f"`speculate` must be <= {MOST_SPECULATED}. Given: {settings.speculate}")
    if settings.draft_model_id is not None and settings.speculate == 0:
        raise _invalid("`speculate` is 0, so the draft model would draft nothing. Leave out one of the two.")
    if settings.draft_model_revision is not None and settings.draft_model_id is None:
        raise _invalid("`draft_model_revision` is set, but no `draft_model_id` is given")
    for name in ("aip_predict_route", "aip_health_route"):
        if (route := getattr(settings, name)) is not None and not route.startswith("/"):
            raise _invalid(f"`{name}` must begin with a slash. Given: {route}")


def _refuse_unbuilt(settings: Settings) -> None:
    """What TGI has and this server has not, yet."""
    if settings.ngrok:
        raise _invalid("ngrok tunnels are not supported. Leave out --ngrok and run the tunnel beside the server.")
    if settings.quantize == "exl2":
        raise _invalid(
            "`quantize` is exl2, whose weights have other bits in each layer: they are not supported. Serve the "
            "original weights with --quantize int4 or int8, or a GPTQ or AWQ checkpoint."
        )
    if settings.rope_scaling == "dynamic":
        raise _invalid(
            "`rope_scaling` is dynamic, whose angles change with the longest sequence of a batch: it is not supported. "
            "Use --rope-scaling linear."
        )


def _completed(settings: Settings) -> Settings:
    """What follows from other settings: the old name of a limit, the keys that stand in a file."""
    limit = settings.max_input_tokens or settings.max_input_length
    speculate = settings.speculate
    if speculate is None and settings.draft_model_id is not None:
        speculate = DRAFTS
    keys = settings.api_key + _keys(settings.api_key_file)
    return replace(settings, max_input_tokens=limit, speculate=speculate, api_key=keys)


def _keys(file: str | None) -> tuple[str, ...]:
    """The keys of a key file, one per line."""
    if file is None:
        return ()
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").splitlines()  # editors may add a mark
    except OSError as error:
        raise _invalid(f"`api_key_file` {file} cannot be read: {error.strerror}. Name a file with keys.") from error
    except UnicodeDecodeError as error:
        raise _invalid(f"`api_key_file` {file} is not text in UTF-8. Write one key per line.") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise _invalid(f"`api_key_file` {file} holds no key. Write one per line.")
    return keys
