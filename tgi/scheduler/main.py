"""`tgi scheduler`: the loop between the links of the worker, of other hosts and of the tokenizers."""

import gc
import logging
import time
from pathlib import Path
from typing import Any

from tgi.microkernel.errors import ProtocolError
from tgi.microkernel.host.rundir import scheduler_socket, successor_path
from tgi.microkernel.links import curve
from tgi.microkernel.links.discovery import nth_address
from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId, end_sessions
from tgi.microkernel.messages.protocol import (
    IMAGE_CHUNK_BYTES,
    Add,
    Beat,
    Hello,
    ImageChunk,
    PredecessorState,
    StepResult,
    decode,
    encode,
)
from tgi.microkernel.observability import tracing
from tgi.microkernel.observability.flight_recorder import RingRecorder, ring_path
from tgi.microkernel.observability.progress import TOKENIZERS
from tgi.microkernel.processes.process import Process
from tgi.scheduler.journal import JournalWriter, RecordedScheduler
from tgi.scheduler.metrics import RequestSpans, SchedulerMetrics
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)

# Net allocations of container objects that start a pass of the garbage collector. The scheduler makes no reference
# cycles, so a pass finds nothing, and it may take longer than a step. Only a growing number of requests starts one.
GC_THRESHOLD = 50_000


def main(process: Process) -> None:
    """Runs until SIGTERM, then until its requests have ended or the supervisor's grace period is over. If it is told to
    hand over, the tokenizers submit its requests to another scheduler."""
    settings = process.settings
    front, back = (
        Link.bind(process.link_address(scheduler_socket(settings.replica_index, side)), process.hello())
        for side in ("front", "back")
    )
    links = [back, front]
    if settings.listen is not None:
        address = nth_address(settings.listen, settings.replica_index)
        links.insert(1, Link.bind(address, process.hello(), curve.load_scheduler_keys(settings.keys or "")))
    for link in links:
        process.watch_link(link)
    config = SchedulerConfig(
        prefix_caching=settings.prefix_caching,
        step_target=settings.step_target,
        stall_limit=settings.stall_limit,
        max_drafts=settings.speculate or 0,
        draft_model=settings.draft_model_id is not None,
    )
    recorder = RingRecorder(ring_path(process.run_dir, process.name))
    register = process.work_register
    scheduler, journal = Scheduler(config, recorder, register), None
    if settings.journal is not None:
        journal = JournalWriter(Path(settings.journal), process.boot, config, settings.journal_size << 20)
        scheduler = RecordedScheduler(config, journal, recorder, register)
    successor_file = SuccessorFile(successor_path(process.run_dir, process.name))
    own = PeerId(process.role, process.replica, process.boot)
    scheduler.handle(successor_file.read()._replace(last_exit=process.last_exit), own, time.monotonic())
    metrics = SchedulerMetrics(settings.served_name or str(settings.model_id))
    tracer = tracing.create_tracer(settings, process.name)
    spans = RequestSpans(tracer) if tracer is not None else None
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    try:
        while not process.stopping or (scheduler.computes and not process.handing_over):
            now = time.monotonic()
            scheduler.draining = process.stopping
            process.facts = {TOKENIZERS: scheduler.tokenizers}
            process.publish_state(*_process_state(process, scheduler))
            successor_file.write_changes(scheduler)
            process.wait(scheduler.deadline(now) - now)
            run_once(scheduler, links, metrics, spans)
            if isinstance(scheduler, RecordedScheduler):
                scheduler.begin_file_when_idle(time.monotonic())
            if process.beat_due:
                process.exchange_beats(scheduler.beat(time.monotonic()))
        end_sessions(links)
    finally:
        for link in links:
            link.close()
        if tracer is not None:
            tracer.close()
        if journal is not None:
            journal.close()


def run_once(scheduler: Scheduler, links: list[Link], metrics: SchedulerMetrics, spans: RequestSpans | None) -> None:
    """Handles received messages, sends steps first so that the worker stays busy, then other messages, then commits.
    States in the work register what is in progress."""
    now, register = time.monotonic(), scheduler.work_register
    for link in links:
        for peer, message in link.receive():
            if isinstance(message, StepResult):  # the most frequent message
                with register.working_on_batch():
                    metrics.handle_result(scheduler, message, peer, now)
                continue
            if isinstance(message, Hello):
                log.debug("%s is connected", peer)
                _agree_on_model(message.model, links)
            elif isinstance(message, PeerDisconnected):
                log.debug("%s is gone", peer)
            elif isinstance(message, Beat):
                continue  # the worker responds, which the link observes
            if isinstance(message, ImageChunk) and not message.error:
                if scheduler.worker.peer is not None and len(message.data) <= IMAGE_CHUNK_BYTES:
                    _send(links, scheduler.worker.peer, message)
                continue
            if spans is not None:
                spans.message_received(peer, message)
            if isinstance(message, Add):
                if (rejection := scheduler.rejection(message, now)) is not None:
                    link.send(peer, rejection)
                    continue
                with register.working_on(message.context):
                    scheduler.handle(message, peer, now)
            else:
                scheduler.handle(message, peer, now)
    with register.working_on_batch():
        while scheduler.worker.peer is not None and (step := metrics.plan(scheduler, now)) is not None:
            _send(links, scheduler.worker.peer, step)
        _flush(links)
        scheduler.report_status(now)
        for peer, message in scheduler.outgoing():
            if spans is not None:
                spans.message_sent(peer, message)
            _send(links, peer, message)
        _flush(links)
        scheduler.commit()
    metrics.publish(scheduler, now)


class SuccessorFile:
    """What the successor of the scheduler must know, in a file that only the scheduler writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = 0  # Scheduler.successor_state_changes

    def read(self) -> PredecessorState:
        """What the previous scheduler has written."""
        try:
            kept = decode(self._path.read_bytes())
        except FileNotFoundError:
            return PredecessorState([])
        except (OSError, ProtocolError) as error:
            log.warning("ignored %s, which is damaged: %s", self._path, error)
            return PredecessorState([])
        return kept if isinstance(kept, PredecessorState) else PredecessorState([])

    def write_changes(self, scheduler: Scheduler) -> None:
        """Replaces the file if it has changed. If it cannot be written, this process works on."""
        if scheduler.successor_state_changes == self._written:
            return
        self._written = scheduler.successor_state_changes
        draft = self._path.with_suffix(".draft")
        try:
            draft.write_bytes(encode(scheduler.successor_state))
            draft.replace(self._path)
        except OSError as error:
            log.error(
                "cannot write %s: the next scheduler does not know the suspects and the changes of adapters (%s)",
                self._path, error.strerror,
            )  # fmt: skip


def _send(links: list[Link], peer: PeerId, message: tuple[Any, ...]) -> None:
    """Queues a message on the link that has this peer. Dropped if the peer has disconnected."""
    for link in links:
        if peer in link.peers:
            link.send(peer, message)


def _flush(links: list[Link]) -> None:
    for link in links:
        link.flush()


def _agree_on_model(model: str, links: list[Link]) -> None:
    """Adopts the model of the first neighbour that names one for the life of this scheduler: the links then reject
    peers with another model."""
    for link in links:
        if model and not link.own_hello.model:
            link.own_hello = link.own_hello._replace(model=model)


def _process_state(process: Process, scheduler: Scheduler) -> tuple[str, str, int]:
    """State, stage and percent for `Process.publish_state`."""
    if process.stopping:
        return "draining", "", 0
    return ("ready", "", 100) if scheduler.ready else ("starting", "waiting for the worker", 0)
