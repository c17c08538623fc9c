"""Starts a server: creates the run directory, listens, resolves model and adapters, then supervises all processes."""

import contextlib
import errno
import logging
import os
import platform
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tgi import __version__
from tgi.api.tls import ServerCertificate
from tgi.hub import memory
from tgi.microkernel.errors import UserError
from tgi.microkernel.host import interpreter, rundir
from tgi.microkernel.host.terminal import ControllingTerminal
from tgi.microkernel.links import curve
from tgi.microkernel.links.discovery import resolve_name
from tgi.microkernel.messages.protocol import ROLES
from tgi.microkernel.observability import flight_recorder, log, metrics, tracing
from tgi.microkernel.observability.progress import Progress, StageReport, abbreviated_path
from tgi.microkernel.processes import rollout
from tgi.microkernel.processes.child import ProcessSpec
from tgi.microkernel.processes.fork_server import ForkServer, start_fork_servers
from tgi.microkernel.processes.model_manager import ModelManager
from tgi.microkernel.processes.model_table import SOCKET_NAME
from tgi.microkernel.processes.supervisor import Supervisor, listening_socket, raise_file_limit
from tgi.microkernel.settings.loading import (
    ineffective_flags,
    load_served_models,
    non_default_settings,
    with_reloaded,
)
from tgi.microkernel.settings.lora_adapters import named_adapters
from tgi.microkernel.settings.served_models import ServedModel
from tgi.microkernel.settings.table import GENERATION_CONFIGS, MTP, Settings
from tgi.worker.preload import Preload

logger = logging.getLogger(__name__)

# The first scheduler listens for Ray's nodes at the port of the server and this.
RAY_PORT_OFFSET = 100

# The packages of requirements/worker.txt.
WORKER_PACKAGES = ("torch", "safetensors", "transformers", "gguf", "typing_extensions")
# Of these, and PIL, those that load images.
MEDIA_PACKAGES = ("safetensors", "transformers", "PIL")


def run_server(settings: Settings, roles: Sequence[str]) -> None:
    """Runs these roles until a signal ends them. Raises UserError if they cannot run."""
    log.configure_logging("tgi", settings)
    if settings.worker == "remote":
        roles = [role for role in roles if role != "worker"]
    _check_hosts(settings, roles)
    served = load_served_models(settings)
    if served and not {*ROLES} <= {*roles}:
        raise UserError("Only `tgi up` serves several models: it starts the processes of each. Name one model here.")
    raise_file_limit()
    fork_servers = start_fork_servers(preloads(settings, roles))
    preload = Preload.of(settings)
    terminal = ControllingTerminal()
    # Until the supervisor handles signals. A SIGHUP that reloads files has nothing to do yet.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda *args: signal.default_int_handler(*args) if terminal.has_hung_up() else None)
    computes = "worker" in roles and settings.ray is None  # on this host
    if computes and settings.worker == "torch":
        interpreter.require_packages(WORKER_PACKAGES, "The worker")
    tracing.check_tracing(settings)
    if "api" in roles and settings.ssl_certfile is not None:
        ServerCertificate(settings.ssl_certfile, settings.ssl_keyfile)  # rejects files that cannot be used
    rundir.create_run_dir(settings.run_dir)
    first = not rundir.lock_holders(settings.run_dir)
    settings = replace(settings, pipeline=0 if first else rundir.read_pipeline(settings.run_dir))
    counts = {
        "api": settings.api_workers,
        "media": settings.media_workers,
        "tokenizer": settings.validation_workers,
    }
    # The single roles first, which reject a second server.
    claims = [
        rundir.claim_process(settings.run_dir, role)
        for role in reversed(ROLES)
        for _ in range(counts.get(role, 1))
        if role in roles
    ]
    rundir.remove_leftovers(settings.run_dir)
    if first:
        metrics.remove_all_samples(settings.run_dir / "metrics")
        flight_recorder.remove_rings(settings.run_dir)
        rundir.forget_server(settings.run_dir)
    else:
        metrics.fold_dead_processes(settings.run_dir / "metrics")
    metrics.use_directory(settings.run_dir / "metrics")
    progress = Progress(settings, title=" + ".join(roles) if len(roles) < len(ROLES) else "tgi")
    metrics_server = port = None
    if "api" in roles:
        listener = _listen(settings)
        settings = replace(settings, port=listener.getsockname()[1])  # port 0: the port that the kernel chose
        port = listener.detach()  # closed by the supervisor
    has_other_hosts = settings.listen or settings.tokenizer_listen or settings.connect or settings.group
    if settings.prometheus_port is not None and ("api" in roles or has_other_hosts):
        metrics_server = metrics.MetricsServer(
            settings.hostname, settings.prometheus_port, settings.run_dir / "metrics"
        )
    if settings.ray is not None and settings.listen is None:
        settings = _with_link_for_ray(settings)
    _announce(settings)  # after checks that may reject the start, whose error is then the only output
    if "api" in roles and settings.compute_type is None:
        settings = replace(settings, compute_type=compute_type(settings))
    if served:
        settings = progress.settings = replace(
            settings,
            model_id=", ".join(one.name for one in served),
            models=tuple(f"{one.name}={one.settings.model_id}" for one in served),
        )
    else:
        settings = progress.settings = _with_model(settings, roles, progress)
    # Also for a model that reads text alone: `tgi reload` may follow with another one.
    media_lock = rundir.create_media_directory(settings.run_dir) if "media" in roles else None
    if served:
        for claim in [claim for claim in claims if claim.role in ("media", "tokenizer")]:  # each has those of its own
            claim.lock.release()
            claims.remove(claim)
    elif "media" in roles and settings.sees_images:
        interpreter.require_packages(MEDIA_PACKAGES, "Loading images")
    else:
        for claim in [claim for claim in claims if claim.role == "media"]:
            claim.lock.release()
            claims.remove(claim)
    specs = [
        ProcessSpec(
            role,
            index if role in rundir.SINGLE_ROLES else replica,
            listen_fd=port if role == "api" else None,
            lock=None if role in rundir.SINGLE_ROLES else lock,
            pipeline=settings.pipeline,
            index=index,
        )
        for role, replica, lock in reversed(claims)
        for index in range(settings.replicas if role in rundir.SINGLE_ROLES else 1)
        if not served or role == "api"  # the others are started with each model
    ]

    def on_tick() -> None:
        progress.show_process_states((spec.name for spec in specs), models.failed if models else ())

    def fork_server(role: str, settings: Settings) -> ForkServer | None:
        preloaded = role == "worker" and preload is not None and Preload.of(settings) == preload
        return fork_servers.get("worker" if preloaded else "roles")

    models: ModelManager | None = None
    supervisor = Supervisor(settings, specs, terminal, on_tick, fork_server)
    try:
        models = _model_manager(supervisor, settings, served) if served else None
        supervisor.run(partial(rollout.start_operation, supervisor), models)
    finally:
        if metrics_server:
            metrics_server.close()
        for started in fork_servers.values():
            started.close()
        if media_lock is not None:
            media_lock.release()
        for lock in [claim.lock for claim in claims] + [spec.lock for spec in specs if spec.lock is not None]:
            lock.release()


def _model_manager(supervisor: Supervisor, settings: Settings, served: Sequence[ServedModel]) -> ModelManager:
    """What loads and unloads the models of a server with several."""

    def resolve(model: Settings, report: Callable[[str], None]) -> Settings:
        found = _with_model(model, ROLES, StageReport(report))
        if found.sees_images:
            interpreter.require_packages(MEDIA_PACKAGES, "Loading images")
        return found

    def fits(model: Settings) -> bool:
        free = memory.free_bytes(_device_of_worker(settings.run_dir))
        return free is None or memory.needed_bytes(model) <= free

    path = settings.run_dir / SOCKET_NAME
    return ModelManager(path, served, settings.max_loaded_models, supervisor, resolve, fits)


def preloads(settings: Settings, roles: Sequence[str]) -> dict[str, Callable[[], None]]:
    """What the fork servers for processes of these roles import: one what all of them do, and one what the worker does
    besides, torch above all."""
    worker = Preload.of(settings) if "worker" in roles else None
    modules = [f"tgi.{role}.main" for role in roles if role != "worker" or worker is None]

    def import_modules() -> None:
        for module in modules:
            import_module(module)

    preloads = {"roles": import_modules} if modules else {}
    if worker is not None:
        preloads["worker"] = worker.run
    return preloads


def _check_hosts(settings: Settings, roles: Sequence[str]) -> None:
    """Raises UserError if these roles cannot use the settings of links between hosts, or the key file is not usable."""
    if not roles:
        raise UserError("`tgi worker --worker remote` has nothing to run. Leave out --worker remote.")
    if settings.connect and "scheduler" in roles:
        raise UserError(
            "--connect names processes of other hosts, but this command runs a scheduler. Start single roles here: "
            "`tgi worker`, `tgi tokenizer` or `tgi api`."
        )
    if settings.ray is not None and not {"scheduler", "worker"} <= {*roles}:
        raise UserError("--ray is for `tgi up`, whose workers it places. A single role runs where it is started.")
    if settings.ray is not None and settings.listen is not None:
        curve.host_file(settings.keys or "")
    if settings.rank and tuple(roles) != ("worker",):
        raise UserError("--rank is for `tgi worker`: a server, or another role, has no further rank of a worker.")
    if settings.group is not None and "worker" in roles:
        curve.load_group_keys(settings.keys or "")
    if settings.listen is not None and "scheduler" in roles:
        curve.load_scheduler_keys(settings.keys or "")
    if settings.tokenizer_listen is not None and "tokenizer" in roles:
        curve.load_tokenizer_keys(settings.keys or "")
    if settings.connect and {"tokenizer", "worker"} & set(roles):
        curve.load_host_keys(settings.keys or "")
    if settings.connect and "api" in roles:
        curve.load_api_keys(settings.keys or "")
    if settings.connect and "worker" in roles:
        _check_workers_schedulers(settings)


def _check_workers_schedulers(settings: Settings) -> None:
    """Raises UserError unless --connect names one scheduler for each worker. A name that cannot be resolved yet is
    tried again by the worker."""
    names = ", ".join(settings.connect)
    if len(settings.connect) != settings.replicas:
        raise UserError(
            f"--connect names {len(settings.connect)} schedulers ({names}) for {settings.replicas} worker(s), and a "
            "worker serves one scheduler. Name as many addresses as --replicas."
        )
    for address in settings.connect:
        name = urlsplit(address).hostname or ""
        with contextlib.suppress(OSError):
            if len(found := resolve_name(name)) > 1:
                raise UserError(
                    f"The name {name} of --connect has {len(found)} addresses ({', '.join(found)}), and a worker "
                    "serves one scheduler. Name one of them, or the name of one host."
                )


def _with_link_for_ray(settings: Settings) -> Settings:
    """Has the schedulers listen for the workers on Ray's nodes, with keys of this server alone."""
    directory = settings.run_dir / "keys"
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier server
    curve.create_keys(directory)
    host = _address_towards(settings.ray or "")
    port = settings.port + RAY_PORT_OFFSET
    return replace(settings, listen=f"tcp://{f'[{host}]' if ':' in host else host}:{port}", keys=str(directory))


def _address_towards(ray: str) -> str:
    """The address of this host on the network of a Ray cluster; all addresses if that is not known."""
    named = os.environ.get("RAY_ADDRESS", "") if ray == "auto" else ray
    url = urlsplit(f"//{named}")
    try:
        family, _, _, _, address = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return "0.0.0.0"


def reloaded_settings(settings: Settings, given: Mapping[str, Any], drain_first: bool) -> Settings:
    """The settings with which `tgi reload` starts another model next to a running server with `settings`. Downloads the
    model if necessary.

    Raises UserError if this server cannot be reloaded, if the model cannot be served, or, without `drain_first`, if
    there is not enough memory for both.
    """
    rollout.require_reloadable(settings)
    changed = with_reloaded(settings, given)
    changed = _with_model(changed, ROLES, Progress(None, title="tgi"))
    if not drain_first:
        supervisor = rundir.lock_holders(settings.run_dir).get("scheduler", "self")
        memory.require_memory(changed, _device_of_worker(settings.run_dir), Path(f"/proc/{supervisor}"))
    return changed


def _device_of_worker(run: Path) -> str:
    """The device that the worker has reported: "cpu", or the name of a GPU. "" if it is not ready."""
    return next((str(state.facts.get("device", "")) for state in rundir.read_states(run) if state.role == "worker"), "")


def _announce(settings: Settings) -> None:
    """Logs settings other than the defaults, and those without effect."""
    if given := non_default_settings(settings):
        logger.debug("Arguments other than the defaults", extra=given)
    if ineffective := ineffective_flags(settings):
        flags = ", ".join(f"{name} ({reason})" for name, reason in ineffective.items())
        logger.warning("Accepted for compatibility, without effect: %s", flags)
    if settings.trust_remote_code:
        logger.warning("`trust_remote_code` is set: Python code that comes with the model may run")
    if settings.env:
        logger.info(runtime_report(settings))


def _listen(settings: Settings) -> socket.socket:
    try:
        return listening_socket(settings.hostname, settings.port, settings.reuse_port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            advice = "Give --hostname an address of this machine, 127.0.0.1 for local clients only or 0.0.0.0 for all."
        elif error.errno == errno.EACCES:
            advice = (
                "This user may not open ports below 1024. Choose another one with --port; a reverse proxy, or the "
                "capability CAP_NET_BIND_SERVICE, can give clients this one."
            )
        else:
            advice = "Choose another port with --port, or stop the program that uses it (`tgi ps` lists your servers)."
        raise UserError(f"Cannot listen on {settings.hostname}:{settings.port}: {error.strerror}. {advice}") from error


def _with_model(settings: Settings, roles: Sequence[str], progress: Progress) -> Settings:
    """Adds the model directory, which is found, downloaded or imported here once for all roles, and what it implies."""
    from tgi.hub.model_config import pipeline_tag, read_model_config, read_sampling_defaults, snapshot_commit
    from tgi.hub.overrides import ModelOverrides, overridden_directory
    from tgi.hub.pooling import read_pooling_config
    from tgi.hub.resolver import DEFAULT_MODEL, model_directory
    from tgi.hub.vision_towers import vision_family

    named = replace(settings, model_id=settings.model_id or DEFAULT_MODEL)
    if not {"media", "tokenizer", "worker"} & set(roles):
        return named
    fetch = partial(
        model_directory,
        hub_cache=_path(settings.huggingface_hub_cache),
        code=settings.trust_remote_code,
        progress=progress.show_stage,
    )
    has_worker = "worker" in roles and settings.ray is None
    reads_weights = has_worker and settings.needs_weights  # no other role does
    directory = fetch(
        settings.model_id, settings.revision, weights=reads_weights and settings.weights_cache_override is None
    )
    known = replace(
        named,
        model_sha=snapshot_commit(directory),
        model_pipeline_tag=pipeline_tag(directory),
        model_source=_source(settings, directory, snapshot_commit(directory)),
    )
    generation = settings.generation_config
    changes = ModelOverrides(
        rope_factor=1.0 if settings.rope_scaling and settings.rope_factor is None else settings.rope_factor,
        tokenizer_config=_path(settings.tokenizer_config_path),
        weights=_path(settings.weights_cache_override),
        generation_config=None if generation in GENERATION_CONFIGS else _path(generation),
    )
    directory = overridden_directory(directory, changes, settings.run_dir / "models")
    read_model_config(directory, weights=reads_weights)  # rejects an unsupported model before any process starts
    if read_pooling_config(directory) is not None:
        _require_no_generation_settings(settings)
    known = replace(
        known, model_dir=directory, sees_images=settings.media_workers > 0 and vision_family(directory) is not None
    )
    if generation != "tgi":
        known = replace(known, sampling_defaults=read_sampling_defaults(directory))
    logger.debug("Sampling defaults of /v1: %s", known.sampling_defaults.given)
    return _with_adapters(_with_draft(known, fetch), progress) if has_worker else known


# Settings that a model that ends in a vector does not have, with their values of "not set".
GENERATION_SETTINGS = {
    "draft_model_id": (None,), "speculate": (None, 0), "lora_adapters": (None,), "quantize": (None,),
    "num_shard": (None, 1), "ray": (None,), "group": (None,),
}  # fmt: skip


def _require_no_generation_settings(settings: Settings) -> None:
    """Raises UserError for a setting that needs a model that generates text."""
    for name, unset in GENERATION_SETTINGS.items():
        if getattr(settings, name) not in unset:
            raise UserError(
                f"--{name.replace('_', '-')} is for models that generate text: this one makes a vector of its input. "
                "Start without it."
            )


def _source(settings: Settings, directory: Path, sha: str | None) -> str:
    """The origin of the model, for the summary."""
    if settings.model_id is None:
        return f"the demo model, imported to {abbreviated_path(directory)}"
    if sha is not None:
        return f"the Hugging Face Hub, commit {sha[:12]}, in {abbreviated_path(directory)}"
    imported = directory != Path(settings.model_id).expanduser().absolute()
    return (
        f"{settings.model_id}, imported to {abbreviated_path(directory)}" if imported else abbreviated_path(directory)
    )


def _with_draft(settings: Settings, fetch: Callable[[str, str | None], Path]) -> Settings:
    """Adds the directory of the draft model, if one is named."""
    if settings.draft_model_id in (None, MTP):
        return settings
    from tgi.hub.model_config import is_draft_head, read_model_config
    from tgi.hub.weight_files import weight_files

    assert settings.draft_model_id is not None
    directory = fetch(settings.draft_model_id, settings.draft_model_revision)
    if not is_draft_head(directory):
        read_model_config(directory, weights=settings.needs_weights)
    elif settings.needs_weights:
        weight_files(directory)  # rejects a damaged head before any process starts
    return replace(settings, draft_model_dir=directory)


def _with_adapters(settings: Settings, progress: Progress) -> Settings:
    """Adds the directories of the named adapters."""
    from tgi.hub.resolver import adapter_directory

    found = []
    for adapter in named_adapters(settings.lora_adapters):
        if adapter.name == settings.model_id:
            raise UserError(f"The LoRA adapter {adapter.name} has the base model's name. Give it another: NAME=PATH")
        directory = adapter_directory(
            adapter, hub_cache=_path(settings.huggingface_hub_cache), progress=progress.show_stage
        )
        found.append((adapter.name, str(directory)))
    return replace(settings, adapters=tuple(found))


def _path(name: str | None) -> Path | None:
    return Path(name).expanduser().absolute() if name else None


# --- --env and x-compute-type ---


ABSENT = "N/A"
# TGI misspells this name, and clients expect it.
TGI_SPELLINGS = {"nvidia-h100-80gb-hbm3": "nvidia-h100-80fb-hbm3"}


def runtime_report(settings: Settings) -> str:
    """The text of --env, in the order of TGI's report."""
    lines = [
        "Runtime environment:",
        f"Target: {platform.machine()}-{platform.system().lower()}",
        f"Version: {__version__} on Python {platform.python_version()}",
        f"Commit sha: {settings.git_sha or 'N/A'}",
        f"Docker label: {settings.docker_label or 'N/A'}",
        f"nvidia-smi: {nvidia_smi()}",
    ]
    return "\n".join(lines)


def compute_type(settings: Settings) -> str:
    """The value of x-compute-type, as TGI computes it: number of GPUs and name of the first, or "gpu+optimized"."""
    names = nvidia_smi("--query-gpu=name", "--format=csv,noheader").strip()
    if settings.device == "cpu" or names == ABSENT:
        return "gpu+optimized"
    name = names.splitlines()[0].strip().lower().replace(" ", "-")
    return f"{settings.num_shard or 1}-{TGI_SPELLINGS.get(name, name)}"


def nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi after a line break, or ABSENT."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ABSENT
    return "\n" + done.stdout if done.returncode == 0 and done.stdout.strip() else ABSENT
