"""A further rank of a worker: its main loop, which does what the first rank tells it."""

import contextlib
import gc
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tgi.microkernel.errors import UserError
from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId
from tgi.microkernel.messages.protocol import (
    PIPELINE_DEPTH,
    AdapterUpdated,
    Beat,
    Hello,
    ReadAdapter,
    ResetSlots,
    Step,
    UpdateAdapter,
)
from tgi.microkernel.processes.process import Process
from tgi.worker.distributed.rank_place import RankPlace
from tgi.worker.engine.interface import BadStep, Engine
from tgi.worker.lora.registry import FetchedAdapter

log = logging.getLogger(__name__)

# A rank whose host has vanished is noticed within this time, see curve.HEARTBEAT_TIMEOUT_MILLISECONDS.
LOSS_SECONDS = 4.5

# Environment variables that the first rank passes to the others.
RANK_MEMORY, RANK_RENDEZVOUS = "TGI_RANK_MEMORY", "TGI_RANK_RENDEZVOUS"


class Steps(Protocol):
    """What a further rank receives from the first one."""

    def receive(self) -> Iterable[tuple[PeerId, Any]]:
        """As Link.receive: what has arrived, with its sender."""


def ranks_socket(replica: int) -> str:
    """The socket to which the further ranks of a worker connect."""
    return f"worker-{replica}.ranks"


def place_from_environment(rank: int, ranks: int) -> RankPlace:
    """The place of a further rank."""
    memory = int(os.environ[RANK_MEMORY])
    return RankPlace(rank, ranks, Path(os.environ[RANK_RENDEZVOUS]), memory, rank, ranks)


@contextlib.contextmanager
def lost_rank_first(process: Process) -> Iterator[None]:
    """When another rank ends, an operation in which it takes part may fail. This gives the thread that watches the
    ranks the time to notice that, and to end this process, before an error is taken for one of its own."""
    try:
        yield
    except UserError:
        raise
    except Exception:
        process.extend_deadline(2 * LOSS_SECONDS)
        time.sleep(LOSS_SECONDS)
        raise


def serve_child_rank(process: Process, start_engine: Callable[[RankPlace], Engine]) -> None:
    """Runs a further rank that the first one has started, until it is told to end, or the first rank is gone."""
    process.publish_state("starting")
    engine = start_engine(place_from_environment(process.rank, process.settings.num_shard or 1))
    hello = process.hello()._replace(replica=process.rank)
    link = Link.connect(process.link_address(ranks_socket(process.replica)), hello)
    process.watch_link(link)
    serve_rank(process, engine, link)
    link.close()


def serve_rank(
    process: Process, engine: Engine, steps: Steps, answer: Callable[[AdapterUpdated], None] = lambda answer: None
) -> None:
    """Does what the first rank tells this one, until the process is told to end, or the first rank is gone. `answer`
    sends it something."""
    process.publish_state("ready", "ready", 100)
    gc.collect()
    gc.freeze()
    in_flight: deque[Any] = deque()
    fetched: dict[str, FetchedAdapter] = {}  # by path, until they are added, or others of their name are fetched
    while not process.stopping:
        process.wait(1.0)
        for peer, message in steps.receive():
            if isinstance(message, Step):
                # A supervisor of this rank alone replaces it if it hangs.
                limit = process.settings.hang_timeout
                limit = min(message.limit_ms / 1000 or limit, limit)
                process.begin_work(PIPELINE_DEPTH * limit, f"step {message.number} of epoch {message.epoch}")
                _compute(engine, message, in_flight)
                process.end_work()
            elif isinstance(message, ResetSlots):
                _collect(engine, in_flight, 0)
                engine.reset()
            elif isinstance(message, ReadAdapter):
                answer(AdapterUpdated(message.rid, _read_adapter(engine, message, fetched)))
            elif isinstance(message, UpdateAdapter):
                _update_adapter(engine, message, fetched)
            elif isinstance(message, PeerDisconnected):
                log.error("%s is gone", peer)
                return
            elif not isinstance(message, Hello):
                log.warning("dropped an unexpected %s from %s", type(message).__name__, peer)
        if process.beat_due:
            process.exchange_beats(Beat(None))


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


def _read_adapter(engine: Engine, wanted: ReadAdapter, fetched: dict[str, FetchedAdapter]) -> str:
    """Reads an adapter that the first rank is going to add. Returns why it cannot be used here, or ""."""
    try:
        found = engine.adapters.fetch_adapter(wanted.name, Path(wanted.path))
    except UserError as error:
        return str(error)
    if found.adapter.digest != wanted.digest:
        return f"The adapter in {wanted.path} differs from that on the host of rank 0. Copy its files to all hosts."
    for path in [path for path, other in fetched.items() if other.adapter.name == wanted.name]:
        del fetched[path]
    fetched[wanted.path] = found
    return ""


def _update_adapter(engine: Engine, update: UpdateAdapter, fetched: dict[str, FetchedAdapter]) -> None:
    """Adds or removes an adapter, which the first rank has done already."""
    if update.path:
        known = fetched.pop(update.path, None)
        engine.adapters.add_adapter(known or engine.adapters.fetch_adapter(update.name, Path(update.path)))
    else:
        engine.adapters.remove_adapter(update.name)
