"""Settings from flags and environment: `load_settings` parses them and rejects contradictions, features that are not
supported, and more devices than one. Imported by scripts/install.py before any package is installed.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tgi.microkernel.admission.api_keys import parse_api_key, read_api_key_file
from tgi.microkernel.errors import UserError
from tgi.microkernel.host import rundir
from tgi.microkernel.settings.lora_adapters import named_adapters
from tgi.microkernel.settings.options import HIDDEN, flag, resolve_value
from tgi.microkernel.settings.served_models import ServedModel, served_models
from tgi.microkernel.settings.table import (
    DEFAULT_SPECULATED_TOKENS,
    DEFAULTS,
    MAX_SPECULATED_TOKENS,
    NOT_OF_WORKERS,
    OPTIONS,
    RELOADED_MODEL,
    WORKER_GROUPS,
    WORKER_OPERATIONS,
    Settings,
)

log = logging.getLogger(__name__)

# Environment variables that list the devices of a container; the first that is set counts.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

EVERY = ("all", "void")  # values of NVIDIA_VISIBLE_DEVICES that are not lists


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the given command line flags, then the environment, then defaults.

    Raises UserError for a value that cannot be parsed, for contradictions, and for features that are not supported.
    """
    if "HONCHO_PROCESS_NAME" in environ:  # honcho sets another PORT for each of its processes
        environ = {name: content for name, content in environ.items() if name != "PORT"}
    _reject_empty_key(flags, environ)
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        given = None if flags.get(name) == () else flags.get(name)
        try:
            values[name] = resolve_value(name, option, given, getattr(DEFAULTS, name), environ)
        except ValueError as error:
            raise UserError(str(error), code=2) from error
    settings = Settings(**values, run_dir=rundir.default_run_dir(values["port"]))
    _reject_contradictions(settings)
    load_served_models(settings)  # rejects what they cannot mean
    if (shards := count_shards(settings, environ)) > 1:
        settings = replace(settings, num_shard=shards)
    _reject_unsupported(settings)
    return _with_derived_values(settings)


def load_served_models(settings: Settings) -> list[ServedModel]:
    """The models of a server with several, as `served_models`. Raises UserError also as `load_settings`."""
    models = served_models(settings)
    for one in models:
        _reject_contradictions(one.settings)
        _reject_unsupported(one.settings)
    return [one._replace(settings=replace(one.settings, speculate=_default_speculate(one.settings))) for one in models]


def with_reloaded(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """The settings of a running server with those that `tgi reload` was given. Raises UserError as `load_settings`."""
    model = {name: getattr(DEFAULTS, name) for name in RELOADED_MODEL}
    derived = {name: getattr(DEFAULTS, name) for name in ("draft_model_dir", "adapters", "sampling_defaults")}
    values = model | derived | {name: value for name, value in given.items() if value is not None}
    settings = replace(settings, **values, max_input_length=None)
    _reject_contradictions(settings)
    _reject_unsupported(settings)
    return replace(settings, speculate=_default_speculate(settings))


def worker_settings(settings: Settings, chosen: Mapping[str, Any]) -> Settings:
    """The settings of a `tgi worker` that is started on another host, with these in addition; others are defaults."""
    own = {
        name: getattr(settings, name)
        for name, option in OPTIONS.items()
        if name in WORKER_OPERATIONS or (option.group in WORKER_GROUPS and name not in NOT_OF_WORKERS)
    }
    return replace(DEFAULTS, **(own | {**chosen}))


def to_environment(settings: Settings) -> dict[str, str]:
    """Environment variables from which `load_settings` reads these settings. Defaults are left out."""
    found = {}
    for name, value in _non_defaults(settings).items():
        option = OPTIONS[name]
        values = value if isinstance(value, tuple) else (value,)
        found[option.variables(name)[0]] = (option.separator or ",").join(map(str, values))
    return found


def non_default_settings(settings: Settings) -> dict[str, Any]:
    """The settings other than the defaults, by name, with secrets hidden."""
    return {name: HIDDEN if OPTIONS[name].secret else value for name, value in _non_defaults(settings).items()}


def ineffective_flags(settings: Settings) -> dict[str, str]:
    """Flags with values other than the defaults that have no effect -> reason."""
    return {flag(name): reason for name in _non_defaults(settings) if (reason := OPTIONS[name].ignored)}


def _non_defaults(settings: Settings) -> dict[str, Any]:
    """The settings other than the defaults, by name."""
    return {name: value for name in OPTIONS if (value := getattr(settings, name)) != getattr(DEFAULTS, name)}


def _reject_empty_key(flags: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Empty variables count as not set, but an empty API_KEY would serve without authentication by mistake."""
    for variable in OPTIONS["api_key"].variables("api_key"):
        if variable in environ and not environ[variable].strip() and not flags.get("api_key"):
            raise UserError(f"The environment variable {variable} is empty. Give it a key, or unset it.", code=2)


def _invalid(text: str) -> UserError:
    return UserError(f"Invalid argument: {text}")


def _reject_contradictions(settings: Settings) -> None:
    """Raises UserError for settings that contradict each other, with TGI's messages if it has them."""
    from tgi.microkernel.messages.protocol import (
        MAX_TOP_TOKENS,  # scripts/install.py imports this module without msgspec
    )

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
    if settings.response_store == "memory" and settings.api_workers > 1:
        text = "`response_store` memory is that of one front end: use `file`, or one of `api_workers`"
        raise _invalid(f"{text}. Given: {settings.api_workers}")
    for given, name in ((settings.ngrok_authtoken, "ngrok-authtoken"), (settings.ngrok_edge, "ngrok-edge")):
        if settings.ngrok and given is None:
            raise _invalid(f"`{name}` must be set when using ngrok tunneling")
    try:
        named_adapters(settings.lora_adapters)
    except ValueError as error:
        raise _invalid(str(error)) from error
    if settings.rope_factor is not None and settings.rope_factor < 1:
        raise _invalid(f"`rope_factor` must be >= 1. Given: {settings.rope_factor}")
    if settings.max_top_n_tokens > MAX_TOP_TOKENS:
        raise _invalid(f"`max_top_n_tokens` must be <= {MAX_TOP_TOKENS}. Given: {settings.max_top_n_tokens}")
    if settings.speculate is not None and settings.speculate > MAX_SPECULATED_TOKENS:
        raise _invalid(f"`speculate` must be <= {MAX_SPECULATED_TOKENS}. Given: {settings.speculate}")
    if settings.draft_model_id is not None and settings.speculate == 0:
        raise _invalid("`speculate` is 0, so the draft model would draft nothing. Leave out one of the two.")
    if settings.draft_model_revision is not None and settings.draft_model_id is None:
        raise _invalid("`draft_model_revision` is set, but no `draft_model_id` is given")
    if settings.resume_window < 0:
        raise _invalid(f"`resume_window` must be >= 0. Given: {settings.resume_window:g}")
    for line in settings.api_key:
        try:
            parse_api_key(line)
        except (ValueError, TypeError) as error:
            raise _invalid(f"`api_key`: {error}") from error
    if settings.ssl_keyfile is not None and settings.ssl_certfile is None:
        raise _invalid("`ssl_keyfile` is set, but no `ssl_certfile` is given. HTTPS needs both, or one file with both.")
    for name in ("listen", "tokenizer_listen", "connect"):
        if getattr(settings, name) and settings.keys is None:
            raise _invalid(
                f"`{name}` is set without `keys`, but links between hosts are always encrypted. Run `tgi keys new` "
                "and give --keys one of its files, or their directory"
            )
    listening = (("listen", "replicas", "scheduler"), ("tokenizer_listen", "validation_workers", "tokenizer"))
    for name, number, role in listening:
        address, processes = getattr(settings, name), getattr(settings, number)
        if address is not None and (last := int(address.rpartition(":")[2]) + processes - 1) > 65535:
            raise _invalid(
                f"`{number}` is {processes}, so the last {role} would listen at port {last}, and ports end at 65535. "
                f"Give {flag(name)} a lower port."
            )
    if settings.prefix_cache_dir is not None:
        if not settings.prefix_caching:
            raise _invalid("`prefix_cache_dir` is set, but `prefix_caching` is off. Leave out one of them")
        if settings.replicas > 1 or (settings.num_shard or 1) > 1:
            raise _invalid("`prefix_cache_dir` is for one worker of one rank, without `replicas` and `num_shard`")
    _reject_contradictory_ranks(settings)
    if settings.ray is not None and (settings.connect or settings.group or settings.worker == "remote"):
        raise _invalid("`ray` places the workers, so it excludes `connect`, `group` and a remote worker")
    if settings.worker == "remote" and settings.listen is None:
        raise _invalid("`worker` is remote, but no worker can connect without --listen tcp://ADDRESS:PORT")
    for name in ("aip_predict_route", "aip_health_route"):
        if (route := getattr(settings, name)) is not None and not route.startswith("/"):
            raise _invalid(f"`{name}` must begin with a slash. Given: {route}")


def _reject_contradictory_ranks(settings: Settings) -> None:
    """Raises UserError for settings that contradict each other about ranks on several hosts."""
    if settings.group is None:
        if settings.rank:
            raise _invalid("`rank` is set without `group`. Give --group tcp://HOST:PORT, the address of rank 0")
        return
    if settings.keys is None:
        raise _invalid("`group` is set without `keys`. Run `tgi keys new` and give --keys host.key")
    if settings.rank >= (ranks := settings.num_shard or 1) or ranks < 2:
        raise _invalid(f"`rank` must be < `num_shard`, of at least 2, with `group`. Given: {settings.rank} and {ranks}")
    if settings.replicas > 1:
        raise _invalid("`replicas` must be 1 with `group`: each replica has ranks of its own")


def _reject_unsupported(settings: Settings) -> None:
    """Raises UserError for features of TGI that this server does not have."""
    if settings.ngrok:
        raise _invalid("ngrok tunnels are not supported. Leave out --ngrok and run the tunnel separately.")
    if settings.device == "mps":
        raise _invalid(
            "`device` is mps, but the worker has no attention over a paged KV cache for Apple's GPU. Use --device cpu."
        )
    if settings.quantize == "exl2":
        raise _invalid(
            "`quantize` is exl2, whose bit widths differ between layers: not supported. Serve the "
            "original weights with --quantize int4 or int8, or a GPTQ or AWQ checkpoint."
        )
    if settings.rope_scaling == "dynamic":
        raise _invalid(
            "`rope_scaling` is dynamic, which scales by the longest sequence of a batch: not supported. "
            "Use --rope-scaling linear."
        )


def _with_derived_values(settings: Settings) -> Settings:
    """Resolves deprecated names, the default of speculate, and the file of keys, which are added to those given."""
    limit = settings.max_input_tokens or settings.max_input_length
    speculate = _default_speculate(settings)
    keys = settings.api_key + _read_keys(settings.api_key_file)
    return replace(settings, max_input_tokens=limit, speculate=speculate, api_key=keys, given_api_keys=settings.api_key)


def _default_speculate(settings: Settings) -> int | None:
    return DEFAULT_SPECULATED_TOKENS if settings.speculate is None and settings.draft_model_id else settings.speculate


def reread_api_keys(settings: Settings) -> tuple[str, ...]:
    """The value of `api_key` with the present content of the key file. Raises UserError if that is invalid."""
    return settings.given_api_keys + _read_keys(settings.api_key_file)


def _read_keys(file: str | None) -> tuple[str, ...]:
    return () if file is None else read_api_key_file(file)


# --- devices ---


def count_shards(settings: Settings, environ: Mapping[str, str]) -> int:
    """The number of ranks that compute the model, chosen as by TGI: --num-shard, else with --sharded every visible
    device. Raises UserError, with TGI's messages if it has them, for settings that contradict each other."""
    sharded, count = settings.sharded == "true", settings.num_shard
    if sharded and count is None:
        count = count_visible_devices(environ) // settings.replicas
        if count <= 1:
            raise UserError(f"not enough cuda devices: `sharded` is true but only found {count} CUDA devices")
    elif sharded and count is not None and count <= 1:
        raise UserError("Invalid argument: `sharded` is true but `num_shard` <= 1")
    if count is None:
        by_default = (
            settings.sharded is None
            and settings.ray is None
            and settings.device != "cpu"
            and settings.worker == "torch"
        )
        return (
            max(1, count_visible_devices(environ) // settings.replicas) if by_default and _names_devices(environ) else 1
        )
    if count < 1:
        raise UserError("Invalid argument: `num_shard` cannot be < 1")
    if count > 1 and settings.quantize == "exl2":
        raise UserError("Invalid argument: Sharding is currently not supported with `exl2` quantization")
    return count


def _names_devices(environ: Mapping[str, str]) -> bool:
    """Whether the environment says which devices to use."""
    return any(environ.get(name, "").strip() for name in VISIBLE)


def replica_devices(settings: Settings, environ: Mapping[str, str]) -> str | None:
    """The devices of one replica, as CUDA_VISIBLE_DEVICES names them: the first --num-shard of the visible ones for the
    first replica, and so on. None if it may use all devices, or there are none. Raises UserError if there are too
    few."""
    if settings.replicas + settings.replica_index == 1 or settings.device == "cpu" or settings.worker != "torch":
        return None
    named = next((environ[name] for name in VISIBLE if environ.get(name, "").strip()), "")
    if named and named.strip() not in EVERY:
        visible = named.split(",")
    else:
        count = count_visible_devices({VISIBLE[1]: EVERY[0]}) if shutil.which("nvidia-smi") else 0
        visible = [str(number) for number in range(count)]
    shards = settings.num_shard or 1
    own = visible[settings.replica_index * shards : (settings.replica_index + 1) * shards]
    replicas = max(settings.replicas, settings.replica_index + 1)
    if visible and len(own) < shards:
        raise UserError(
            f"{replicas} replicas with {shards} devices each need more than the {len(visible)} visible "
            "devices. Give fewer --replicas, or a smaller --num-shard."
        )
    return ",".join(own) or None


def count_visible_devices(environ: Mapping[str, str]) -> int:
    """The number of devices that the environment makes visible."""
    named = next((environ[name] for name in VISIBLE if environ.get(name, "").strip()), "")
    if named.strip() not in EVERY:
        return len(named.split(",")) if named else 0
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("nvidia-smi cannot count the devices: %s", error)
        return 0
    return len(listing.stdout.splitlines())
