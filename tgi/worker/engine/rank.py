"""A further rank of a worker: its place in the group, and its main loop, which does what the first rank tells it."""

import gc
import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tgi.microkernel.link import Link, PeerDisconnected
from tgi.microkernel.process import Process
from tgi.microkernel.protocol import PIPELINE_DEPTH, Beat, Hello, ResetSlots, Step, UpdateAdapter
from tgi.worker.engine.interface import BadStep, Engine

log = logging.getLogger(__name__)

# Environment variables that the first rank passes to the others.
RANK_MEMORY, RANK_RENDEZVOUS = "TGI_RANK_MEMORY", "TGI_RANK_RENDEZVOUS"


class RankPlace(NamedTuple):
    """One rank's place in its group."""

    rank: int
    ranks: int
    rendezvous: Path  # a file, for torch.distributed
    memory: int  # file descriptor of memory that all ranks of the host share


def ranks_socket(replica: int) -> str:
    """The socket to which the further ranks of a worker connect."""
    return f"worker-{replica}.ranks"


def place_from_environment(rank: int, ranks: int) -> RankPlace:
    """The place of a further rank."""
    return RankPlace(rank, ranks, Path(os.environ[RANK_RENDEZVOUS]), int(os.environ[RANK_MEMORY]))


def serve_rank(process: Process, start_engine: Callable[[RankPlace], Engine]) -> None:
    """Runs a further rank until it is told to end, or the first rank is gone."""
    process.publish_state("starting")
    engine = start_engine(place_from_environment(process.rank, process.settings.num_shard or 1))
    hello = process.hello()._replace(replica=process.rank)
    link = Link.connect(process.link_address(ranks_socket(process.replica)), hello)
    process.watch_link(link)
    process.publish_state("ready", "ready", 100)
    gc.collect()
    gc.freeze()
    in_flight: deque[Any] = deque()
    while not process.stopping:
        process.wait(1.0)
        for peer, message in link.receive():
            if isinstance(message, Step):
                _compute(engine, message, in_flight)
            elif isinstance(message, ResetSlots):
                _collect(engine, in_flight, 0)
                engine.reset()
            elif isinstance(message, UpdateAdapter):
                _update_adapter(engine, message)
            elif isinstance(message, PeerDisconnected):
                log.error("%s is gone", peer)
                return
            elif not isinstance(message, Hello):
                log.warning("dropped an unexpected %s from %s", type(message).__name__, peer)
        if process.beat_due:
            process.exchange_beats(Beat(None))
    link.close()


def _compute(engine: Engine, step: Step, in_flight: deque[Any]) -> None:
    """Computes a step as the first rank does. Its results are not sent: all ranks have the same."""
    _collect(engine, in_flight, 0 if step.drafts else PIPELINE_DEPTH - 1)
    try:
        in_flight.append(engine.launch(step))
    except BadStep as error:
        log.error("step %d of epoch %d: %s", step.number, step.epoch, error)  # the first rank reports it
    if step.drafts:
        _collect(engine, in_flight, 0)


def _collect(engine: Engine, in_flight: deque[Any], left: int) -> None:
    """Waits for all steps but `left`."""
    while len(in_flight) > left:
        engine.collect(in_flight.popleft())


def _update_adapter(engine: Engine, update: UpdateAdapter) -> None:
    """Loads or unloads an adapter, which the first rank has done already."""
    if update.path:
        engine.adapters.add_adapter(engine.adapters.fetch_adapter(update.name, Path(update.path)))
    else:
        engine.adapters.remove_adapter(update.name)
