"""`tgi worker`: connects to the scheduler, loads the model, sizes the KV cache, and serves steps."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgi.hub.model_config import content_hash
from tgi.hub.pooling import read_pooling_config
from tgi.microkernel.host.rundir import received_images, scheduler_socket
from tgi.microkernel.links.link import Link, end_sessions
from tgi.microkernel.messages.protocol import LastExit
from tgi.microkernel.observability.progress import WorkerFacts
from tgi.microkernel.processes.fork_server import leave_fork_server
from tgi.microkernel.processes.process import Process
from tgi.microkernel.settings.loading import VISIBLE, replica_devices
from tgi.microkernel.settings.table import Settings
from tgi.worker.distributed.rank_place import RankPlace
from tgi.worker.energy import EnergyMeter, find_counters, gpu_uuids
from tgi.worker.engine.host_group import HostGroup, join_group
from tgi.worker.engine.interface import Engine, Poisoned
from tgi.worker.engine.loop import WorkerLoop
from tgi.worker.engine.rank import lost_rank_first, serve_child_rank, serve_rank
from tgi.worker.engine.rank_group import LeadingEngine, RankGroup
from tgi.worker.fake_worker.fake_worker import FakeEngine, FakeWorkerConfig, read_answers
from tgi.worker.host_cpu import configure_thread_waiting, limit_instruction_set, request_reproducible_mkl, take_cores
from tgi.worker.lora.registry import load_adapters

if TYPE_CHECKING:
    from tgi.worker.engine.engine import TorchEngine
    from tgi.worker.engine.page_files import PageFiles
    from tgi.worker.engine.pooling_engine import PoolingEngine
    from tgi.worker.vision.received_images import ReceivedImages

log = logging.getLogger(__name__)


def main(process: Process) -> None:
    """Runs until SIGTERM. Raises UserError where the model or the settings do not allow a start; exits with status 1 if
    the device is lost."""
    if process.settings.ray is not None:
        from tgi.worker.placement.driver import serve_on_ray

        serve_on_ray(process)
        return
    if process.rank:
        serve_child_rank(process, partial(_start_torch_engine, process, partial(_publish_progress, process)))
        return
    if process.settings.rank:
        _serve_host_rank(process)
        return
    if (devices := replica_devices(process.settings, os.environ)) is not None:
        os.environ[VISIBLE[0]] = devices  # also for the further ranks
    settings = process.settings
    model = content_hash(settings.model_dir)
    ranks = settings.num_shard or 1
    group: RankGroup | HostGroup | None = None
    link: Link | None = None
    try:
        if settings.group is not None:
            group = HostGroup(process, ranks, model)
            if (place := group.meet()) is None:
                return
            process.last_exit = group.last_exit(process.last_exit)
        elif ranks > 1 and settings.worker == "torch":
            _require_divisible(settings.model_dir, ranks)
            group = RankGroup(process, ranks)
            place = group.place
        else:
            place = None
        hello = process.hello(model)._replace(keeps_pages=_keeps_pages(process.last_exit))
        link = process.connect_link(_scheduler_address(process), hello)
        loop = WorkerLoop(process, link)
        loop.progress("starting", 0)
        with lost_rank_first(process) if group is not None else contextlib.nullcontext():
            engine, facts, page_files = _start_engine(process, loop.progress, place)
            process.facts = facts._asdict()
            if group is not None:
                group.wait_for_ranks()
                engine = LeadingEngine(engine, group)
            if isinstance(group, HostGroup):
                engine.adapters.on_fetch = group.confirm_adapter
            loop.serve(engine, _energy_meter(settings, place), page_files, _received_images(process))
        end_sessions([link])
    except Poisoned:
        log.critical("the worker cannot continue; its supervisor starts another", exc_info=True)
        sys.exit(1)
    finally:
        if group is not None:
            group.close()
        if link is not None:
            link.close()


def _require_divisible(directory: Path, ranks: int) -> None:
    """Raises UserError if the model cannot be divided among these ranks, before they start. What else is wrong with it
    they find when they load it."""
    from tgi.worker.decoder_config import UnsupportedConfig
    from tgi.worker.distributed.sharding import local_config, shard_decoder
    from tgi.worker.models.config_reader import read_config, read_decoder_config

    try:
        config = read_decoder_config(read_config(directory))
    except (UnsupportedConfig, KeyError):
        return
    for rank in range(ranks):
        local_config(config, shard_decoder(config, rank, ranks))


def _keeps_pages(last_exit: LastExit | None) -> bool:
    """Whether this process shares the pages of its predecessor. Then it was forked with all modules imported."""
    startup = sys.modules.get("tgi.worker.engine.startup")
    return startup is not None and startup.keeps_pages(last_exit)


def _energy_meter(settings: Settings, place: RankPlace | None) -> EnergyMeter:
    """The meter of the devices of this worker's ranks on this host. The first replica measures the processors."""
    return EnergyMeter(find_counters(gpu_uuids(1 if place is None else place.local_ranks), not settings.replica_index))


def _received_images(process: Process) -> "ReceivedImages | None":
    """The images of other hosts; None: the model reads text alone."""
    if not process.settings.sees_images:
        return None
    from tgi.worker.vision.received_images import ReceivedImages

    return ReceivedImages(received_images(process.run_dir, process.settings.replica_index), process.wake_loop)


def _serve_host_rank(process: Process) -> None:
    """Runs a further rank whose first rank is a process of another supervisor."""
    settings = process.settings
    found = join_group(process, content_hash(settings.model_dir))
    if found is None:
        return
    place, link = found
    progress = partial(_publish_progress, process)
    progress("starting", 0)
    with lost_rank_first(process):
        engine, _, _ = _start_engine(process, progress, place)
        serve_rank(process, engine, link, link.send)
    link.close()


def _publish_progress(process: Process, stage: str, percent: int) -> None:
    """Reports the progress of the start-up of a further rank, and extends its deadline."""
    process.extend_deadline(process.settings.start_timeout)
    process.publish_state("starting", stage, percent)


def _scheduler_address(process: Process) -> str:
    """The address of this worker's scheduler, in the run directory or with --connect on another host."""
    index, elsewhere = process.settings.replica_index, process.settings.connect
    return elsewhere[index] if elsewhere else process.link_address(scheduler_socket(index, "back"))


def _start_engine(
    process: Process, progress: Callable[[str, int], None], place: RankPlace | None
) -> "tuple[Engine, WorkerFacts, PageFiles | None]":
    settings = process.settings
    if settings.worker == "scripted":
        fake = FakeEngine(_fake_worker_config(settings))
        load_adapters(fake.adapters, settings.adapters)
        return fake, WorkerFacts.of(settings, fake.limits, device="none", kernels="none: the worker is scripted"), None
    engine = _start_torch_engine(process, progress, place)
    assert engine.served is not None  # set by start_engine
    return engine, engine.served, engine.page_files


def _start_torch_engine(
    process: Process, progress: Callable[[str, int], None], place: RankPlace | None
) -> "TorchEngine | PoolingEngine":
    settings = process.settings
    configure_thread_waiting()
    limit_instruction_set(settings.cpu)
    request_reproducible_mkl()
    rank, ranks = (0, 1) if place is None else (place.local_rank, place.local_ranks)
    replicas = max(settings.replicas, settings.replica_index + 1)
    if ranks * replicas > 1:
        take_cores(settings.replica_index * ranks + rank, replicas * ranks)
    progress("importing torch", 0)
    if (pooling := read_pooling_config(settings.model_dir)) is not None:
        from tgi.worker.engine.pooling_startup import start_pooling_engine

        return start_pooling_engine(settings, pooling, progress)
    from tgi.worker.engine.startup import start_engine  # imports torch, which the fake worker does not need

    # Several workers of a host have cores of their own, which a process inherits.
    requests = process.fork_requests if ranks * replicas == 1 else None
    share = None if requests is None else partial(leave_fork_server, requests)
    return start_engine(settings, progress, place, share, process.last_exit)


def _fake_worker_config(settings: Settings) -> FakeWorkerConfig:
    """The fake worker's limits: those of the settings, the vocabulary of the model, defaults for the rest."""
    chosen: dict[str, Any] = {
        "max_total_tokens": settings.max_total_tokens,
        "max_batch_prefill_tokens": settings.max_batch_prefill_tokens,
        "slots": settings.max_batch_size,
        "step_us": settings.scripted_step_us,
        "vocab_size": _vocab_size(settings.model_dir),
        "answers": None if settings.scripted_answers is None else read_answers(Path(settings.scripted_answers)),
    }
    config = FakeWorkerConfig(**{name: value for name, value in chosen.items() if value is not None})
    if settings.max_batch_total_tokens is not None:
        config = config._replace(pages=max(1, settings.max_batch_total_tokens // config.page_size))
    return config


def _vocab_size(directory: Path) -> int | None:
    path = directory / "config.json"
    if not path.is_file():
        return None
    size = json.loads(path.read_text()).get("vocab_size")
    return size if isinstance(size, int) else None
