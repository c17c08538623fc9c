"""Starts a process tree: takes run directory, port, model and adapters, then supervises until a signal ends it."""

import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tgi.kernel import arguments, interpreter, log, metrics, rundir, tracing
from tgi.kernel.adapters import named_adapters
from tgi.kernel.errors import UserError
from tgi.kernel.progress import Progress
from tgi.kernel.settings import GENERATION_CONFIGS, Settings
from tgi.kernel.shards import warn_of_idle_devices
from tgi.kernel.spawn import Spec
from tgi.kernel.summary import short
from tgi.kernel.supervise import Supervisor, listening_socket
from tgi.runtime import compute_type, report

ROLES = ("api", "tokenizer", "scheduler", "worker")
# What the worker imports besides what every role does (the packages of requirements/worker.txt).
WORKER_PACKAGES = ("torch", "safetensors", "numpy", "transformers", "gguf")

logger = logging.getLogger(__name__)


def run(settings: Settings, roles: Sequence[str]) -> None:
    """Supervises the processes of these roles until a signal ends them."""
    log.configure("tgi", settings)
    for number in (signal.SIGTERM, signal.SIGHUP):  # until there is a supervisor: as Ctrl-C, with everything cleaned up
        signal.signal(number, signal.default_int_handler)
    if "worker" in roles and settings.worker == "torch":
        interpreter.require(WORKER_PACKAGES, "The worker")
    tracing.check(settings)
    rundir.create(settings.run_dir)
    first = not rundir.holders(settings.run_dir)
    locks = [rundir.Lock(settings.run_dir, role) for role in roles]
    for role in roles:
        rundir.remove_states(settings.run_dir, role)
    if first:
        metrics.clear(settings.run_dir / "metrics")
    else:
        metrics.forget_dead(settings.run_dir / "metrics")
    metrics.use(settings.run_dir / "metrics")
    specs: list[Spec] = []
    progress = Progress(settings, title=" + ".join(roles) if len(roles) < len(ROLES) else "tgi")
    exposition = None
    if "api" in roles:
        listener = _listen(settings)
        settings = replace(settings, port=listener.getsockname()[1])  # port 0 has become a real one
        port = listener.detach()  # the supervisor's from here on
        specs += [Spec("api", place, port) for place in range(settings.api_workers)]
        if settings.prometheus_port is not None:
            from tgi.kernel.exposition import Exposition  # most servers do without its HTTP library

            exposition = Exposition(settings.hostname, settings.prometheus_port, settings.run_dir / "metrics")
    _announce(settings)  # a start that is refused before shows its reason alone
    if "api" in roles and settings.compute_type is None:
        settings = replace(settings, compute_type=compute_type(settings))
    settings = progress.settings = _with_model(settings, roles, progress)
    if "tokenizer" in roles:
        specs += [Spec("tokenizer", place) for place in range(settings.validation_workers)]
    if "scheduler" in roles:
        specs.append(Spec("scheduler", 0))
    if "worker" in roles:
        specs.append(Spec("worker", 0))
    try:
        Supervisor(settings, specs, lambda: progress.tick(spec.name for spec in specs)).run()
    finally:
        if exposition:
            exposition.close()
        for lock in locks:
            lock.release()


def _announce(settings: Settings) -> None:
    """Logs what the server was asked for, and what of it has no effect."""
    if given := arguments.shown(settings):
        logger.debug("Arguments other than the defaults", extra=given)
    if nothing := arguments.without_effect(settings):
        told = ", ".join(f"{name} ({reason})" for name, reason in nothing.items())
        logger.warning("Accepted for compatibility, without effect: %s", told)
    if settings.trust_remote_code:
        logger.warning("`trust_remote_code` is set: Python code that comes with the model may run")
    warn_of_idle_devices(settings, os.environ)
    if settings.env:
        logger.info(report(settings))


def _listen(settings: Settings) -> socket.socket:
    try:
        return listening_socket(settings.hostname, settings.port, settings.reuse_port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            advice = "Give --hostname an address of this machine, 127.0.0.1 for itself alone or 0.0.0.0 for all."
        else:
            advice = "Choose another port with --port, or stop what uses it (`tgi ps` lists servers of yours)."
        raise UserError(f"Cannot listen on {settings.hostname}:{settings.port}: {error.strerror}. {advice}") from error


def _with_model(settings: Settings, roles: Sequence[str], progress: Progress) -> Settings:
    """The settings with the model directory that all roles read: found, downloaded or imported here, once."""
    from tgi.hub.card import read_card, sampling_defaults
    from tgi.hub.origin import commit, pipeline_tag
    from tgi.hub.overlay import Changes, changed
    from tgi.hub.resolve import DEFAULT_MODEL, model_directory

    named = replace(settings, model_id=settings.model_id or DEFAULT_MODEL)
    if not {"tokenizer", "worker"} & set(roles):
        return named
    fetched = partial(
        model_directory,
        hub_cache=_path(settings.huggingface_hub_cache),
        code=settings.trust_remote_code,
        progress=progress.stage,
    )
    directory = fetched(settings.model_id, settings.revision, weights=settings.weights_cache_override is None)
    known = replace(
        named,
        model_sha=commit(directory),
        model_pipeline_tag=pipeline_tag(directory),
        model_source=_source(settings, directory, commit(directory)),
    )
    generation = settings.generation_config
    changes = Changes(
        rope_factor=1.0 if settings.rope_scaling and settings.rope_factor is None else settings.rope_factor,
        tokenizer_config=_path(settings.tokenizer_config_path),
        weights=_path(settings.weights_cache_override),
        generation_config=None if generation in GENERATION_CONFIGS else _path(generation),
    )
    directory = changed(directory, changes, settings.run_dir / "models")
    read_card(directory)  # refuses here, once and in the foreground, what no role could serve
    known = replace(known, model_dir=directory)
    if generation != "tgi":
        known = replace(known, sampling_defaults=sampling_defaults(directory))
    logger.debug("Sampling defaults of /v1: %s", known.sampling_defaults.given)
    return _with_adapters(_with_draft(known, fetched), progress) if "worker" in roles else known


def _source(settings: Settings, directory: Path, sha: str | None) -> str:
    """Where the model is from, in words."""
    if settings.model_id is None:
        return f"the demo model, imported to {short(directory)}"
    if sha is not None:
        return f"the Hugging Face Hub, commit {sha[:12]}, in {short(directory)}"
    imported = directory != Path(settings.model_id).expanduser().absolute()
    return f"{settings.model_id}, imported to {short(directory)}" if imported else short(directory)


def _with_draft(settings: Settings, fetched: Callable[[str, str | None], Path]) -> Settings:
    """The settings with the directory of the draft model, if they name one."""
    if settings.draft_model_id is None:
        return settings
    from tgi.hub.card import read_card

    directory = fetched(settings.draft_model_id, settings.draft_model_revision)
    read_card(directory)
    return replace(settings, draft_model_dir=directory)


def _with_adapters(settings: Settings, progress: Progress) -> Settings:
    """The settings with the directories of the adapters that they name."""
    from tgi.hub.resolve import adapter_directory

    found = []
    for adapter in named_adapters(settings.lora_adapters):
        if adapter.name == settings.model_id:
            raise UserError(f"The LoRA adapter {adapter.name} has the base model's name. Give it another: NAME=PATH")
        directory = adapter_directory(adapter, hub_cache=_path(settings.huggingface_hub_cache), progress=progress.stage)
        found.append((adapter.name, str(directory)))
    return replace(settings, adapters=tuple(found))


def _path(name: str | None) -> Path | None:
    return Path(name).expanduser().absolute() if name else None
