"""The worker's loop: takes steps from the scheduler, keeps up to two of them on the device, sends results back."""

import gc
import logging
from collections import deque
from typing import Any, Protocol

from tgi.kernel.link import Gone, Link, Peer
from tgi.kernel.messages import Adapt, Result, Step
from tgi.kernel.presence import Hello, Limits, Status
from tgi.kernel.process import BEAT_SECONDS, Process
from tgi.worker.adapting import Adapting
from tgi.worker.lora.shelf import Shelf

log = logging.getLogger(__name__)

# The scheduler runs one step ahead, so no more than two are under way.
DEPTH = 2
# While the device computes and no step waits: how long to listen for the next before looking at the device again.
GLANCE_SECONDS = 0.001
# After so long without anything to do there is time for what nobody waits for.
QUIET_SECONDS = 0.01


class Engine(Protocol):
    """What computes steps. Steps are launched and collected in order."""

    limits: Limits
    adapters: Shelf

    def reset(self) -> None:
        """Forgets all requests."""

    def spare(self) -> bool:
        """Does a little of what saves time later, while nobody waits. False: nothing is left of it."""

    def launch(self, step: Step) -> Any:
        """Starts a step and returns it as pending. On a device without a queue of its own this computes it."""

    def done(self, pending: Any) -> bool:
        """Whether `collect` would return at once."""

    def collect(self, pending: Any) -> Result:
        """Waits for a step's result."""


class Poisoned(Exception):
    """The device or the process is beyond repair: the worker must end, and its supervisor start another."""


class Loop:
    """One worker's life on its link. Tells how start-up goes, then serves one scheduler at a time."""

    def __init__(self, process: Process, link: Link) -> None:
        self._process = process
        self._link = link
        self._status = Status(False, True, "starting", 0)
        self._steps: deque[Step] = deque()
        self._pending: deque[tuple[Step, Any]] = deque()
        self._epoch = 0
        self._scheduler: Peer | None = None
        self._spare = True  # the engine may have something to do while nobody waits
        self._early: list[tuple[Peer, Adapt]] = []  # came while the model was loading
        process.watch(link)

    def progress(self, stage: str, percent: int) -> None:
        """Start-up has come this far. Also keeps the watchdog patient and greets a scheduler that has come up."""
        self._process.promise(self._process.settings.start_timeout)
        status = Status(False, True, stage, percent)
        if status == self._status:
            return
        self._status = status
        self._process.state("starting", stage, percent)
        for peer, message in self._link.receive():
            if isinstance(message, Hello):
                self._scheduler = peer
            elif isinstance(message, Adapt):
                self._early.append((peer, message))
        self._link.broadcast(status)
        self._link.flush()

    def serve(self, engine: Engine) -> None:
        """Computes steps until the process is asked to stop."""
        adapting = Adapting(engine.adapters, self._process.wake)
        self._status = Status(True, True, "ready", 100, engine.limits, adapters=engine.adapters.listed)
        self._process.state("ready", "ready", 100)
        self._link.broadcast(self._status)
        self._link.flush()
        gc.collect()
        gc.freeze()
        for peer, message in self._early:
            adapting.ask(peer, message)
        while not self._process.stopping:
            self._process.wait(self._patience())
            quiet = not self._listen(engine, adapting)
            self._adapt(engine, adapting)
            self._launch(engine)
            self._collect(engine)
            if not quiet:
                self._spare = True
            elif self._spare and not (self._steps or self._pending):
                self._spare = engine.spare()
        self._process.state("draining")
        self._drain(engine)

    def _patience(self) -> float:
        if self._steps:
            return 0.0
        if self._pending:
            return GLANCE_SECONDS
        return QUIET_SECONDS if self._spare else BEAT_SECONDS

    def _listen(self, engine: Engine, adapting: Adapting) -> bool:
        """Whether there was anything to hear."""
        heard = False
        for peer, message in self._link.receive():
            heard = True
            if isinstance(message, Hello):
                log.debug("%s is up", peer)
                self._forget(engine)
                adapting.forget()
                self._scheduler = peer
                self._epoch = 0
                self._link.send(peer, self._status)
                self._link.flush()
            elif isinstance(message, Gone):
                log.debug("%s is gone", peer)
                if peer == self._scheduler:
                    self._forget(engine)
                    adapting.forget()
                    self._scheduler = None
            elif isinstance(message, Step):
                self._steps.append(message)
            elif isinstance(message, Adapt):
                adapting.ask(peer, message)
            else:
                log.warning("dropped an unexpected %s from %s", type(message).__name__, peer)
        return heard

    def _adapt(self, engine: Engine, adapting: Adapting) -> None:
        """Lists and answers what has been loaded."""
        for peer, adapted, changed in adapting.answers():
            if changed:
                self._status = self._status._replace(adapters=engine.adapters.listed)
                self._link.broadcast(self._status)
            if peer == self._scheduler:
                self._link.send(peer, adapted)
            self._link.flush()

    def _forget(self, engine: Engine) -> None:
        """Nothing of what was under way matters any more."""
        self._steps.clear()
        while self._pending:
            step, pending = self._pending.popleft()
            try:
                engine.collect(pending)
            except Exception as error:
                _survive(error, step)
        engine.reset()

    def _launch(self, engine: Engine) -> None:
        if not self._steps or len(self._pending) >= DEPTH:
            return
        step = self._steps.popleft()
        if step.epoch < self._epoch:
            return
        if step.epoch > self._epoch:
            waiting = [later for later in self._steps if later.epoch >= step.epoch]
            self._forget(engine)
            self._steps.extend(waiting)
            self._epoch = step.epoch
        try:
            self._pending.append((step, engine.launch(step)))
        except Exception as error:
            self._drain(engine)
            self._send(_survive(error, step))

    def _collect(self, engine: Engine) -> None:
        """Sends the results that are there. Waits only when the device has its fill."""
        while self._pending and (len(self._pending) >= DEPTH or engine.done(self._pending[0][1])):
            self._collect_one(engine)

    def _drain(self, engine: Engine) -> None:
        while self._pending:
            self._collect_one(engine)

    def _collect_one(self, engine: Engine) -> None:
        step, pending = self._pending.popleft()
        try:
            result = engine.collect(pending)
        except Exception as error:
            result = _survive(error, step)
        self._send(result)

    def _send(self, result: Result) -> None:
        if result.error:
            log.error("step %d of epoch %d failed: %s", result.number, result.epoch, result.error)
        if self._scheduler is not None:
            self._link.send(self._scheduler, result)
            self._link.flush()


def _survive(error: Exception, step: Step) -> Result:
    """The failed step's result, if the worker can go on after `error`; otherwise raises it."""
    if isinstance(error, MemoryError):
        raise Poisoned(f"out of memory in step {step.number}") from error
    if isinstance(error, Poisoned):
        raise error
    log.error("step %d of epoch %d raised", step.number, step.epoch, exc_info=error)
    return Result(step.number, step.epoch, b"", b"", b"", error=f"{type(error).__name__}: {error}")
