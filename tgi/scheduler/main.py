"""`tgi scheduler`: the loop between the tokenizers' link and the worker's."""

import gc
import logging
import time
from pathlib import Path

from tgi.microkernel import tracing
from tgi.microkernel.link import Link, PeerDisconnected
from tgi.microkernel.process import Process
from tgi.microkernel.protocol import Hello, StepResult
from tgi.scheduler.journal import JournalWriter, RecordedScheduler
from tgi.scheduler.metrics import RequestSpans, SchedulerMetrics
from tgi.scheduler.scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)

# Net allocations of container objects that start a pass of the garbage collector. The scheduler makes no reference
# cycles, so a pass finds nothing, and it may take longer than a step. Only a growing number of requests starts one.
GC_THRESHOLD = 50_000


def main(process: Process) -> None:
    """Runs until SIGTERM, then until the running requests have ended or the supervisor's grace period is over."""
    settings = process.settings
    front = Link.bind(process.link_address("sched-0.front"), process.hello())
    back = Link.bind(process.link_address("sched-0.back"), process.hello())
    process.watch_link(front)
    process.watch_link(back)
    config = SchedulerConfig(
        prefix_caching=settings.prefix_caching,
        step_target=settings.step_target,
        stall_limit=settings.stall_limit,
        max_drafts=settings.speculate or 0,
        draft_model=settings.draft_model_id is not None,
    )
    scheduler, journal = Scheduler(config), None
    if settings.journal is not None:
        journal = JournalWriter(Path(settings.journal), process.boot, config, settings.journal_size << 20)
        scheduler = RecordedScheduler(config, journal)
    metrics = SchedulerMetrics()
    tracer = tracing.create_tracer(settings, process.name)
    spans = RequestSpans(tracer) if tracer is not None else None
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    try:
        while not process.stopping or scheduler.running:
            now = time.monotonic()
            process.publish_state(*_process_state(process, scheduler))
            process.wait(scheduler.deadline(now) - now)
            _run_once(scheduler, front, back, metrics, spans)
    finally:
        front.close()
        back.close()
        if tracer is not None:
            tracer.close()
        if journal is not None:
            journal.close()


def _run_once(
    scheduler: Scheduler, front: Link, back: Link, metrics: SchedulerMetrics, spans: RequestSpans | None
) -> None:
    """Handles received messages, sends steps first so that the worker stays busy, then other messages, then commits."""
    now = time.monotonic()
    for link in (back, front):
        for peer, message in link.receive():
            if isinstance(message, Hello):
                log.debug("%s is connected", peer)
                _agree_on_model(message.model, front, back)
            elif isinstance(message, PeerDisconnected):
                log.debug("%s is gone", peer)
            if spans is not None:
                spans.message_received(peer, message)
            if isinstance(message, StepResult):
                metrics.handle_result(scheduler, message, peer, now)
            else:
                scheduler.handle(message, peer, now)
    while scheduler.worker.peer is not None and (step := metrics.plan(scheduler, now)) is not None:
        back.send(scheduler.worker.peer, step)
    back.flush()
    scheduler.report_status(now)
    for peer, message in scheduler.outgoing():
        if spans is not None:
            spans.message_sent(peer, message)
        (back if peer.role == "worker" else front).send(peer, message)
    back.flush()
    front.flush()
    scheduler.commit()
    metrics.publish(scheduler, now)


def _agree_on_model(model: str, *links: Link) -> None:
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
