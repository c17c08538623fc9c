"""The worker loop: receives steps from the scheduler, keeps up to two of them in flight, and sends results back."""

import gc
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tgi.microkernel.links.link import Link, PeerDisconnected, PeerId
from tgi.microkernel.messages.protocol import (
    PIPELINE_DEPTH,
    Beat,
    Hello,
    ImageChunk,
    NeedImage,
    Status,
    Step,
    StepResult,
    TransferPages,
    UpdateAdapter,
)
from tgi.microkernel.processes.process import Process
from tgi.microkernel.recovery.exit_causes import is_lack_of_memory
from tgi.worker.energy import EnergyMeter
from tgi.worker.engine.interface import Engine, OutOfMemory, Poisoned
from tgi.worker.lora.registry import AdapterUpdates

if TYPE_CHECKING:
    from tgi.worker.engine.page_files import PageFiles
    from tgi.worker.vision.received_images import ReceivedImages

log = logging.getLogger(__name__)

# How long to wait for a message while the device computes and no step is queued, before the device is polled again.
POLL_SECONDS = 0.001
# After this long without a message, a queued step or a step in flight the engine may prefault memory.
IDLE_SECONDS = 0.01
# After this long without any it gives memory back.
RELEASE_SECONDS = 2.0


class WorkerLoop:
    """The main loop of a worker. Reports the progress of start-up, then serves one scheduler at a time."""

    def __init__(self, process: Process, link: Link) -> None:
        self._process = process
        self._link = link
        self._status = Status(False, True, "starting", 0)
        self._queued: deque[Step | TransferPages | UpdateAdapter] = deque()
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._oldest: Step | None = None  # of the steps in flight
        self._step_began_at = 0.0  # when it became the oldest, by time.monotonic
        self._epoch = 0
        self._scheduler: PeerId | None = None
        self._may_prefault = True  # the engine may have memory left to prefault
        self._may_release = False  # the engine may have memory to give back
        self._latest_message_at = 0.0  # by time.monotonic
        self._meter: EnergyMeter | None = None
        self._page_files: PageFiles | None = None
        self._images: ReceivedImages | None = None
        process.watch_link(link)

    def progress(self, stage: str, percent: int) -> None:
        """Reports the progress of start-up to the scheduler and extends the watchdog's deadline."""
        self._process.extend_deadline(self._process.settings.start_timeout)
        status = Status(False, True, stage, percent)
        if status == self._status:
            return
        self._status = status
        self._process.publish_state("starting", stage, percent)
        for peer, message in self._link.receive():
            if isinstance(message, Hello):
                self._scheduler = peer
            elif not isinstance(message, PeerDisconnected):
                log.warning("dropped %s from %s: the model is loading", type(message).__name__, peer)
        self._link.broadcast(status)
        self._link.flush()

    def serve(
        self,
        engine: Engine,
        meter: EnergyMeter | None = None,
        page_files: "PageFiles | None" = None,
        images: "ReceivedImages | None" = None,
    ) -> None:
        """Computes steps until the process is asked to stop. Records what `meter` measures, keeps pages in
        `page_files`, and receives `images` of other hosts. Raises Poisoned."""
        self._meter, self._page_files, self._images = meter, page_files, images
        updates = self.begin_serving(engine)
        gc.collect()
        gc.freeze()
        while not self._process.stopping:
            self._process.wait(self.wait_seconds())
            self.run_once(engine, updates)
        self._process.publish_state("draining")
        self._drain(engine)
        if page_files is not None:
            page_files.close()
        if images is not None:
            images.close()

    def begin_serving(self, engine: Engine) -> AdapterUpdates:
        """Reports that the worker is ready. Returns the adapter updates to pass to `run_once`."""
        updates = AdapterUpdates(engine.adapters, self._process.wake_loop)
        self._status = Status(True, True, "ready", 100, engine.limits, adapters=engine.adapters.loaded_adapters)
        self._process.publish_state("ready", "ready", 100)
        if self._page_files is not None:
            self._link.broadcast(self._page_files.report())
        self._link.broadcast(self._status)
        self._link.flush()
        return updates

    def run_once(self, engine: Engine, updates: AdapterUpdates) -> None:
        """One iteration of the loop: receives messages, launches a step, and sends the results that are ready. Raises
        Poisoned."""
        received = self._receive(engine, updates)
        self._begin_others(updates)
        self._apply_adapter_updates(engine, updates)
        if self._page_files is not None:
            self._send_all(self._page_files.take_answers())
        if self._images is not None:
            self._send_all(self._images.take_answers())
        self._launch_next(engine)
        self._collect_done(engine)
        if received:
            self._may_prefault = self._may_release = True
            self._latest_message_at = time.monotonic()
        elif self._may_prefault and not (self._queued or self._in_flight):
            self._may_prefault = engine.prefault_memory()
        elif self._may_release and not (self._queued or self._in_flight) and self._is_idle():
            engine.release_memory()
            self._may_release = False
        if self._process.beat_due:
            self._process.exchange_beats(self._beat())
            if self._meter is not None:
                self._meter.record()

    def wait_seconds(self) -> float:
        """How long to wait for a message before the next iteration."""
        if self._queued:
            return 0.0
        if self._in_flight:
            return POLL_SECONDS
        return IDLE_SECONDS if self._may_prefault else RELEASE_SECONDS

    def _is_idle(self) -> bool:
        return time.monotonic() - self._latest_message_at >= RELEASE_SECONDS

    def _beat(self) -> Beat:
        """How the step that is computed progresses."""
        if not self._in_flight:
            return Beat(None)
        age = time.monotonic() - self._step_began_at
        return Beat(int(1000 * age), self._in_flight[0][0].limit_ms, _describe(self._in_flight[0][0]))

    def _receive(self, engine: Engine, updates: AdapterUpdates) -> bool:
        """Handles all messages. Returns whether there were any."""
        received = False
        for peer, message in self._link.receive():
            received = True
            if isinstance(message, Hello):
                log.debug("%s has connected", peer)
                self._finish_steps(engine)
                held_pages = engine.held_pages()
                engine.reset()
                updates.discard_all()
                if self._images is not None:
                    self._images.reset()
                self._scheduler = peer
                self._epoch = 0
                for held in held_pages:
                    self._link.send(peer, held)
                if self._page_files is not None:
                    self._link.send(peer, self._page_files.report())
                self._link.send(peer, self._status)
                self._link.flush()
            elif isinstance(message, PeerDisconnected):
                log.debug("%s has disconnected", peer)
                if peer == self._scheduler:
                    self._finish_steps(engine)  # the slots stay: their pages are reported to the next scheduler
                    updates.discard_all()
                    if self._images is not None:
                        self._images.reset()
                    self._scheduler = None
            elif isinstance(message, Step | UpdateAdapter) or (
                isinstance(message, TransferPages) and self._page_files is not None
            ):
                self._queued.append(message)
            elif isinstance(message, NeedImage) and self._images is not None:
                self._images.need(message)
            elif isinstance(message, ImageChunk) and self._images is not None:
                self._images.receive(message)
            else:
                log.warning("dropped an unexpected %s from %s", type(message).__name__, peer)
        return received

    def _begin_others(self, updates: AdapterUpdates) -> None:
        """Begins the transfers and the adapter updates before which all steps are launched."""
        while self._queued and not isinstance(message := self._queued[0], Step):
            self._queued.popleft()
            if isinstance(message, UpdateAdapter):
                updates.submit_update(message)
            elif self._page_files is not None:
                self._page_files.submit(message, self._process.wake_loop)

    def _send_all(self, answers: Sequence[tuple[Any, ...]]) -> None:
        if self._scheduler is not None and answers:
            for answer in answers:
                self._link.send(self._scheduler, answer)
            self._link.flush()

    def _apply_adapter_updates(self, engine: Engine, updates: AdapterUpdates) -> None:
        """Applies the adapter updates that are ready, and sends their answers."""
        for answer, changed in updates.apply_ready():
            if changed:
                self._status = self._status._replace(adapters=engine.adapters.loaded_adapters)
                self._link.broadcast(self._status)
            if self._scheduler is not None:
                self._link.send(self._scheduler, answer)
            self._link.flush()

    def _finish_steps(self, engine: Engine) -> None:
        """Drops queued steps, and waits for those in flight, whose results are not wanted."""
        self._queued.clear()
        while self._in_flight:
            step, pending = self._in_flight.popleft()
            try:
                engine.collect(pending)
            except Exception as error:
                _failed_result(error, step)
        self._set_step_deadline()

    def _launch_next(self, engine: Engine) -> None:
        if not self._queued or len(self._in_flight) >= PIPELINE_DEPTH:
            return
        if not isinstance(step := self._queued[0], Step):
            return  # the step before it was launched in this iteration
        self._queued.popleft()
        if step.epoch < self._epoch:
            return
        if step.epoch > self._epoch:
            later = [one for one in self._queued if not isinstance(one, Step) or one.epoch >= step.epoch]
            self._finish_steps(engine)
            engine.reset()
            self._queued.extend(later)
            self._epoch = step.epoch
        self._set_step_deadline(step)
        try:
            self._in_flight.append((step, engine.launch(step)))
        except Exception as error:
            self._drain(engine)
            self._send_failure(error, step)
            self._set_step_deadline()

    def _collect_done(self, engine: Engine) -> None:
        """Sends the results that are ready. Waits for one only if no further step may be launched."""
        while self._in_flight and (len(self._in_flight) >= PIPELINE_DEPTH or engine.is_done(self._in_flight[0][1])):
            self._collect_oldest(engine)

    def _drain(self, engine: Engine) -> None:
        while self._in_flight:
            self._collect_oldest(engine)

    def _collect_oldest(self, engine: Engine) -> None:
        step, pending = self._in_flight.popleft()
        try:
            self._send_result(engine.collect(pending))
        except Exception as error:
            self._send_failure(error, step)
        self._set_step_deadline()

    def _set_step_deadline(self, *launching: Step) -> None:
        """Sets the watchdog's deadline for the steps in flight and those that are being launched."""
        steps = [step for step, _ in self._in_flight] + [*launching]
        if not steps:
            self._oldest = None
            self._process.end_work()
            return
        if steps[0] is not self._oldest:
            self._oldest, self._step_began_at = steps[0], time.monotonic()
        hang_timeout = self._process.settings.hang_timeout
        seconds = 0.0
        for step in steps:
            seconds += min(step.limit_ms / 1000 or hang_timeout, hang_timeout)
        self._process.begin_work(seconds, _describe(steps[0]), self._step_began_at)

    def _send_failure(self, error: Exception, step: Step) -> None:
        """Answers a step that raised `error`. Raises Poisoned if the worker cannot continue after it."""
        if isinstance(error, Poisoned) and _lacks_memory(cause := error.__cause__):
            # Ranks differ after it. The requests are not the cause, so they must not be in progress when this worker
            # ends.
            text = f"{type(cause).__name__}: {cause}"
            self._send_result(StepResult(step.number, step.epoch, b"", b"", b"", error=text, out_of_memory=True))
        self._send_result(_failed_result(error, step))

    def _send_result(self, result: StepResult) -> None:
        if result.error:
            log.error("step %d of epoch %d failed: %s", result.number, result.epoch, result.error)
        if self._scheduler is not None:
            self._link.send(self._scheduler, result)
            self._link.flush()


def _describe(step: Step) -> str:
    return f"step {step.number} of epoch {step.epoch}: {len(step.samples)} rows"


def _failed_result(error: Exception, step: Step) -> StepResult:
    """The result of a step that raised `error`. Raises Poisoned if the worker cannot continue after it."""
    if isinstance(error, Poisoned):
        raise error
    log.error("step %d of epoch %d raised", step.number, step.epoch, exc_info=error)
    text = f"{type(error).__name__}: {error}"
    return StepResult(step.number, step.epoch, b"", b"", b"", error=text, out_of_memory=_lacks_memory(error))


def _lacks_memory(error: BaseException | None) -> bool:
    return isinstance(error, OutOfMemory) or (isinstance(error, Exception) and is_lack_of_memory(error))
