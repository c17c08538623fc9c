"""`tgi scheduler`: the loop between the tokenizers' link and the worker's."""

import gc
import logging
import time

from tgi.kernel import tracing
from tgi.kernel.link import Gone, Link
from tgi.kernel.messages import Result
from tgi.kernel.presence import Hello
from tgi.kernel.process import Process
from tgi.scheduler.core import Config, Core
from tgi.scheduler.meter import Meter
from tgi.scheduler.spans import Spans

log = logging.getLogger(__name__)

# So many objects more than there were let the garbage collector look through them, all at once and in a pass. What the
# core makes is freed without it, so only a growing number of requests calls it.
GARBAGE = 50_000


def main(process: Process) -> None:
    """Runs until SIGTERM, then until the requests that run have ended or the supervisor's patience has."""
    settings = process.settings
    front = Link.bind(process.address("sched-0.front"), process.hello())
    back = Link.bind(process.address("sched-0.back"), process.hello())
    process.watch(front)
    process.watch(back)
    core = Core(
        Config(
            settings.prefix_caching,
            settings.step_target,
            settings.stall_limit,
            settings.speculate or 0,
            settings.draft_model_id is not None,
        )
    )
    meter = Meter()
    tracer = tracing.tracer(settings, process.name)
    spans = Spans(tracer) if tracer is not None else None
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    try:
        while not process.stopping or core.running:
            now = time.monotonic()
            process.state(*_state(process, core))
            process.wait(core.deadline(now) - now)
            _turn(core, front, back, meter, spans)
    finally:
        front.close()
        back.close()
        if tracer is not None:
            tracer.close()


def _turn(core: Core, front: Link, back: Link, meter: Meter, spans: Spans | None) -> None:
    """Takes what has come, keeps the worker busy first, then tells the neighbours, then keeps the books."""
    now = time.monotonic()
    for link in (back, front):
        for peer, message in link.receive():
            if isinstance(message, Hello):
                log.debug("%s is up", peer)
                _agree(message.model, front, back)
            elif isinstance(message, Gone):
                log.debug("%s is gone", peer)
            if spans is not None:
                spans.came(peer, message)
            if isinstance(message, Result):
                meter.result(core, message, peer, now)
            else:
                core.handle(message, peer, now)
    while core.below.worker is not None and (step := meter.plan(core, now)) is not None:
        back.send(core.below.worker, step)
    back.flush()
    core.tick(now)
    for peer, message in core.outgoing():
        if spans is not None:
            spans.went(peer, message)
        (back if peer.role == "worker" else front).send(peer, message)
    back.flush()
    front.flush()
    core.settle()
    meter.publish(core, now)


def _agree(model: str, *links: Link) -> None:
    """The first neighbour that names its model sets it for this scheduler's life: links refuse any other."""
    for link in links:
        if model and not link.me.model:
            link.me = link.me._replace(model=model)


def _state(process: Process, core: Core) -> tuple[str, str, int]:
    if process.stopping:
        return "draining", "", 0
    return ("ready", "", 100) if core.ready else ("starting", "waiting for the worker", 0)
