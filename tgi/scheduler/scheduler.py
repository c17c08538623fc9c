"""The scheduler without sockets and clocks (sans-IO): messages go in with the time, steps and messages come out."""

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from tgi.microkernel.links.link import PeerDisconnected, PeerId, PeerResponds, PeerSilent
from tgi.microkernel.links.liveness import ProgressClock
from tgi.microkernel.messages.codec import ITEM_BYTES
from tgi.microkernel.messages.protocol import (
    END,
    ENDED,
    PROTOCOL,
    QUEUED,
    SUCCESSES,
    WORKER_LOST,
    AdapterUpdated,
    Add,
    Beat,
    Cancel,
    DeploymentLimits,
    End,
    FetchImage,
    FinishReason,
    HeldPages,
    Hello,
    ImageChunk,
    PagesTransferred,
    PredecessorState,
    RequestContext,
    Status,
    Step,
    StepResult,
    Stop,
    StoredPages,
    SuspectRecord,
    UpdateAdapter,
)
from tgi.microkernel.observability.flight_recorder import EVERY_REQUEST, NO_RECORDER, Event, FlightRecorder
from tgi.microkernel.observability.log import ComplaintLimit
from tgi.microkernel.recovery.crash_isolation import CrashIsolation
from tgi.microkernel.recovery.work_register import WorkRegister, among, join_in_progress, split_in_progress
from tgi.scheduler.columns import token_runs_message, tokens_message
from tgi.scheduler.counters import AdmittedRequests, Counters, FinishedStep
from tgi.scheduler.estimators import LATE_SECONDS, PrefillBudget, StepLimits, WaitEstimator
from tgi.scheduler.image_transfers import TRANSFER_SECONDS, ImageTransfers
from tgi.scheduler.in_flight import (
    FinishedRequests,
    InFlightStep,
    StepPipeline,
    distribute_token_runs,
    distribute_tokens,
    requests_in_progress,
    split_prompt_logprobs,
    split_vectors,
)
from tgi.scheduler.page_index import PageIndex, can_be_stored
from tgi.scheduler.peers import LoadReport, Outbox, TokenizerPeers, WorkerPeer
from tgi.scheduler.request import Request, TokenizerPeer, validation_error
from tgi.scheduler.speculation import Speculation
from tgi.scheduler.step_planner import StepPlanner
from tgi.scheduler.waiting_queue import WaitingQueue

log = logging.getLogger(__name__)

# A failed step was caused by one of its requests, so it weighs more than a crash, which may have other causes.
FAILED_STEP_STRIKES = 2
# Why a request is ended, for people.
LATE_IMAGE = f"an image has not reached the worker's host within {TRANSFER_SECONDS:.0f} s"
LACKS_MEMORY = "too little memory to compute this request, even alone and in the smallest steps; make it shorter"
# A scheduler that lived no longer than this, its start included, may have been ended by the first request it handled.
QUICK_DEATH_MS = 3000


class SchedulerConfig(NamedTuple):
    """The scheduler's settings."""

    prefix_caching: bool = True
    step_target: float = 0.2  # seconds that a step with prefill chunks may take that others wait for
    stall_limit: float = 60.0  # upper bound of the seconds after which an unanswered step makes the status unhealthy
    max_drafts: int = 0  # draft tokens per row and step; 0: no speculation
    draft_model: bool = False  # the worker has a draft model
    first_epoch: int = 1  # of its steps


class LostWorker(NamedTuple):
    """A worker whose cause of death is not known yet."""

    boot: bytes
    in_progress: dict[bytes, None]  # the names of the requests in its steps


def _has_pages_of(hello: Hello, lost: LostWorker | None) -> bool:
    """Whether a worker that has connected still has the pages that the lost one had computed. It is the next one, and
    the lost one was ended from outside: one that crashed may have written anywhere."""
    if lost is None or (report := hello.last_exit) is None:
        return False
    return hello.keeps_pages and report.outside and report.boot == lost.boot


class Scheduler:
    """Owns the requests of all tokenizers and schedules them on one worker.

    In a loop: pass what the links receive to `handle`; send what `plan` returns to `worker.peer` until it returns None;
    call `report_status`; send what `outgoing` yields; then, while the worker is busy, call `commit`. Deterministic: the
    same calls give the same outputs.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        recorder: FlightRecorder = NO_RECORDER,
        work_register: WorkRegister | None = None,
    ) -> None:
        """`work_register`: where the running batch is registered."""
        self.config = config
        self.work_register = WorkRegister() if work_register is None else work_register
        self._recorder = recorder
        self.counters = Counters()
        self.worker = WorkerPeer()
        self.pipeline = StepPipeline(config.stall_limit, config.first_epoch)
        self._planner: StepPlanner | None = None  # None until the first worker is ready
        self._queue = WaitingQueue()
        self._prefill_budget = PrefillBudget(config.step_target * 1e6)
        self._step_limits = StepLimits()
        self._speculation = Speculation(config.max_drafts, config.draft_model) if config.max_drafts else None
        self._outbox = Outbox()
        self._tokenizers = TokenizerPeers(self._outbox)
        self._images = ImageTransfers(self._outbox, self.worker)
        self._isolation = CrashIsolation()
        self._lost_worker: LostWorker | None = None  # until its successor connects
        self._generations: dict[int, Request] = {}  # by generation_id: the latest submission
        self._wait_estimator = WaitEstimator()
        self._progress = ProgressClock()
        self._complaints = ComplaintLimit()
        self.draining = False  # it is to end when its requests have ended; tokenizers send new ones elsewhere
        self.next_plan_at: float | None = None  # when the next step is due, if `plan` was called too early

    # --- input --------------------------------------------------------------------------------------------------------

    def handle(self, message: Any, source: PeerId, now: float) -> None:
        """Handles one message or event of a link. `now` is in seconds and never decreases."""
        if source.role == "worker":
            self._handle_worker_message(message, source, now)
        elif isinstance(message, Add) and (tokenizer := self._tokenizers.connected.get(source)) is not None:
            self._add_request(message, tokenizer, now)  # the most frequent message
        elif isinstance(message, PredecessorState) and source.role == "scheduler":
            self._take_over(message, now)
        else:
            self._handle_tokenizer_message(message, source, now)

    def _handle_tokenizer_message(self, message: Any, source: PeerId, now: float) -> None:
        connected = self._tokenizers.connected
        tokenizer = connected.get(source)
        if isinstance(message, Hello):
            connected[source] = TokenizerPeer(source)
            self._outbox.append(source, self._load().add_to(self._status(now)))
        elif tokenizer is None:
            return  # sent before its PeerDisconnected
        elif isinstance(message, Cancel | Stop):
            # The rid is unknown if the message crosses the request's End.
            if (request := tokenizer.requests.get(message.rid)) is not None:
                reason = FinishReason.STOP if isinstance(message, Stop) else FinishReason.CANCELLED
                with self.work_register.working_on(request.context):
                    self._end_request(request, reason, now)
        elif isinstance(message, ImageChunk):  # with an error: the loop hands on the others
            if message.error and (request := tokenizer.requests.get(message.rid)) is not None:
                self._end_request(request, FinishReason.FAILED, now, message.error)
        elif isinstance(message, UpdateAdapter):
            self.worker.adapters.request_update(source, message)
            self.report_status(now)
        elif isinstance(message, PeerDisconnected):
            for request in list(tokenizer.requests.values()):
                self._end_request(request, FinishReason.CANCELLED, now)
            self.worker.adapters.tokenizer_lost(source)
            del connected[source]
            if not message.planned:
                self._isolation.record_other_death()
            self._outbox.discard(source)
        else:
            self._complain_of(message, source)

    def _handle_worker_message(self, message: Any, source: PeerId, now: float) -> None:
        if isinstance(message, Hello) and self.worker.connect(source, message.site):
            self._blame_lost_worker(message, now)
            return
        if source != self.worker.peer:
            self.worker.record_waiting(source, message)
            self._connect_waiting_worker(now)
            return
        if isinstance(message, PeerSilent):
            self.worker.silent = not self.pipeline  # a worker that computes sends no beats
        else:
            self.worker.silent = False
        if isinstance(message, StepResult):
            self._handle_result(message, now)
        elif isinstance(message, Status):
            self._handle_worker_status(message, now)
        elif isinstance(message, HeldPages):
            self.worker.record_held_pages(message)
        elif isinstance(message, StoredPages):
            self.worker.stored_pages = message
        elif isinstance(message, PagesTransferred):
            self._progress.record()
            if self._planner is not None:
                self._planner.kv_cache.record_transferred(message)
        elif isinstance(message, AdapterUpdated):
            self._handle_adapter_updated(message, now)
        elif isinstance(message, FetchImage):
            self._handle_fetch(message, now)
        elif isinstance(message, PeerDisconnected):
            self._handle_worker_lost(now)
        elif not isinstance(message, PeerSilent | PeerResponds):
            self._complain_of(message, source)

    def _complain_of(self, message: Any, source: PeerId) -> None:
        if self._complaints.allows_one():
            log.warning("dropped an unexpected %s from %s", type(message).__name__, source)

    # --- output -------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Step | None:
        """The next step for the worker; None if the pipeline is full, if there is nothing to compute, or if it is not
        due yet: it is planned shortly before the worker needs it, so that requests that arrive until then take part."""
        if (planned := self._plan_step(now)) is not None:
            return planned.message
        counters = self.counters
        self._wait_estimator.observe(
            admitted=counters.admitted_requests,
            completed=counters.ended_requests,
            queued=self.queued,
            running=self.running,
            now=now,
        )
        return None

    def _plan_step(self, now: float) -> InFlightStep | None:
        planner, pipeline, isolation = self._planner, self.pipeline, self._isolation
        self.next_plan_at = None
        if planner is None or not pipeline.has_room or not self.ready:
            return None
        if now < (due_at := pipeline.plan_ahead_at):
            self.next_plan_at = due_at
            return None
        if isolation.turn_over:
            if pipeline:
                return None  # the steps in flight must be answered first, so that only one group is in progress
            isolation.next_turn()
            planner.begin_turn()
        latest, speculation = pipeline.latest, self._speculation
        if latest is not None and speculation is not None and speculation.should_wait(latest, planner.batch):
            return None
        step = planner.plan(pipeline.next_number, pipeline.epoch, ahead=latest is not None, now=now)
        if isolation.on_trial:
            skipped = 0
            while step is None and not pipeline and skipped < isolation.turns:
                isolation.next_turn()  # nothing to compute in this turn
                planner.begin_turn()
                step = planner.plan(pipeline.next_number, pipeline.epoch, ahead=False, now=now)
                skipped += 1
            isolation.record_step()
        if step is None:
            return None
        pipeline.add(step, now)
        self.counters.steps[step.method] += 1
        if step.admitted:
            self.counters.admitted_requests += step.admitted
            self.counters.admissions.append(AdmittedRequests(step.admitted, step.joined))
        return step

    def outgoing(self) -> Iterator[tuple[PeerId, tuple[Any, ...]]]:
        """(receiver, message) for all messages since the last call: for tokenizers, and for the worker those that are
        not steps."""
        if (index := self._page_index) is not None and self._planner is not None:
            assert self.worker.peer is not None
            for message in index.take_messages(self._planner.kv_cache.pool):
                self._outbox.append(self.worker.peer, message)
        return self._outbox.take_all()

    def commit(self) -> None:
        """Does the work that no step waits for. To be called when everything is sent; otherwise a later `plan` does
        it."""
        if self._planner is not None:
            self._planner.commit()

    def report_status(self, now: float) -> None:
        """Queues a status for all tokenizers if it has changed, and an update of the worker's adapters. To be called
        after every batch of messages, when the steps are sent, and at the `deadline`."""
        if (worker := self.worker.peer) is not None and (update := self.worker.adapters.take_update(now)) is not None:
            self._outbox.append(worker, update)
        if late := self._images.late(now):
            self._end_requests([(one, FinishReason.FAILED) for one in late], now, LATE_IMAGE)
        self._tokenizers.report_status(self._status(now), self._load(), now)

    def beat(self, now: float) -> Beat:
        """How the work progresses. To be called every BEAT_SECONDS."""
        age = self._progress.tick(now, busy=self.queued + self.running > 0)
        if age is None:
            return Beat(None)
        steps = self.pipeline.steps
        limit = self.pipeline.answer_limit if steps else TRANSFER_SECONDS if self._images.waiting else LATE_SECONDS
        return Beat(int(1000 * age), int(1000 * limit), steps[0].description if steps else f"{self.queued} queued")

    def deadline(self, now: float) -> float:
        """When `plan` and `report_status` must be called even if no message comes."""
        if (index := self._page_index) is not None and index.due:
            return now
        soonest = now + 3600.0
        update_at = self.worker.adapters.next_due_at
        own = self.pipeline.stalls_at(now), self.next_plan_at, self._images.due_at
        for due_at in (*own, self._tokenizers.reporter.due_at, update_at):
            if due_at is not None and due_at < soonest:
                soonest = due_at
        return max(now, soonest)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        planner = self._planner
        waiting = len(self._queue) + len(self._images.waiting)
        return waiting + len(planner.trial_queue) if planner is not None else waiting

    @property
    def running(self) -> int:
        """Requests that hold a slot of the worker."""
        return len(self._planner.batch) if self._planner else 0

    @property
    def computes(self) -> bool:
        """Whether it has requests that end if it goes on."""
        return self.running > 0 or (self.ready and self.queued > 0)

    @property
    def pages_used(self) -> int:
        """Pages of running requests, and of those that ended since the last `commit`."""
        return self._planner.kv_cache.pool.used if self._planner else 0

    @property
    def tokenizers(self) -> int:
        return len(self._tokenizers.connected)

    @property
    def loaded_adapters(self) -> int:
        return len(self.worker.adapters.loaded)

    @property
    def ready(self) -> bool:
        """Whether a request would be computed now."""
        return self.worker.status.ready

    @property
    def _page_index(self) -> PageIndex | None:
        """The pages that the worker keeps in files; None: it keeps none, or there is no worker."""
        return self._planner.kv_cache.index if self._planner is not None else None

    @property
    def idle(self) -> bool:
        """Whether it has no requests, and knows nothing that `begin_again` would lose."""
        nothing_in_flight = not self.pipeline and self.pipeline.has_room
        if (index := self._page_index) is not None and (index.busy or index.due):
            return False
        nothing_to_do = not self._tokenizers.requests and nothing_in_flight and not self.suspect_records
        return nothing_to_do and self.ready and self.worker.settled and not self.draining

    def begin_again(self) -> list[tuple[Any, PeerId]]:
        """Becomes a new, idle scheduler, with an empty prefix cache. Returns the messages to handle next, with their
        senders: they tell it its neighbours. The counters go on."""
        worker, counters = self.worker, self.counters
        assert worker.peer is not None
        status = worker.status._replace(limits=worker.limits, adapters=worker.adapters.loaded)
        tokenizers, predecessor = list(self._tokenizers.connected), self.successor_state
        index = self._page_index
        config = self.config._replace(first_epoch=self.pipeline.epoch + 1)
        Scheduler.__init__(self, config, self._recorder, self.work_register)
        self.counters = counters
        messages: list[tuple[Any, PeerId]] = [(predecessor, PeerId("scheduler", 0, b""))]
        messages.append((Hello(PROTOCOL, *worker.peer, site=worker.site), worker.peer))
        if index is not None:
            messages.append((StoredPages(b"".join(index.stored), index.most), worker.peer))
        messages.append((status, worker.peer))
        return messages + [(Hello(PROTOCOL, *peer), peer) for peer in tokenizers]

    def suspects(self, now: float) -> bytes:
        """The requests that no other replica may compute, a column as of a work register: those on trial or
        quarantined, and those that a worker had in progress that has died of an unknown cause, or that has not answered
        in time."""
        isolation, lost, stalled = self._isolation, self._lost_worker, self.pipeline.is_stalled(now)
        if not isolation.suspects and lost is None and not stalled:
            return b""
        suspects = dict.fromkeys(isolation.dangerous)
        if lost is not None:
            suspects |= lost.in_progress
        if stalled:
            suspects |= requests_in_progress(self.pipeline.steps)
        return join_in_progress(suspects)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _add_request(self, add: Add, tokenizer: TokenizerPeer, now: float) -> None:
        if (request := self._tokenizers.add_request(add, tokenizer, now)) is None:
            return
        if self._speculation is not None:
            self._speculation.add_request(request)
        self._recorder.stamp(Event.QUEUED, request.context, len(self._queue), self.running)
        self._queue.append(request)
        if request.context.generation_id and not self._replace_earlier(request, now):
            return
        if self._isolation.suspects and not self._admit_suspect(request, now):
            return
        finish_reason = None
        if add.resume_ids:
            self.counters.recomputed_tokens += request.generated_tokens
            finish_reason = request.finish_reason()
        if fault := validation_error(request, None if finish_reason else self.worker.limits):
            self._end_request(request, FinishReason.INVALID, now, fault)
        elif finish_reason:
            self._end_request(request, finish_reason, now)  # it was complete; only its End was lost
        else:
            if request.context.deadline_ms and not add.resume_ids:
                self._refuse_if_late(request, now)
            if request.images and request.state is QUEUED and self.ready:
                self._hold_for_images([request], now)

    def _replace_earlier(self, request: Request, now: float) -> bool:
        """Ends an earlier submission of the same generation, which its front end has moved to another tokenizer. False:
        this is the earlier one, and has been ended."""
        generation_id = request.context.generation_id
        other = self._generations.get(generation_id)
        if other is not None and other.context.attempt > request.context.attempt:
            self._end_request(request, FinishReason.CANCELLED, now)
            return False
        self._generations[generation_id] = request
        if other is not None:
            self._end_request(other, FinishReason.CANCELLED, now)
        return True

    def _refuse_if_late(self, request: Request, now: float) -> None:
        """Ends a new request at once if it is expected to wait beyond its deadline. One that may preempt others does
        not wait for the ends that the estimate counts."""
        planner = self._planner
        if planner is not None and planner.may_preempt(request.share):
            return
        full = planner is not None and planner.batch.full
        wait_ms = int(1000 * self._wait_estimator.wait_seconds(self._queue.ahead(request), full))
        late_ms = wait_ms - request.context.deadline_ms
        if late_ms > 0 and not self._isolation.is_on_trial(request):
            message = f"the request is expected to wait {late_ms / 1000:.1f} s beyond its timeout"
            self._end_requests([(request, FinishReason.OVERLOADED)], now, message, late_ms)

    def _hold_for_images(self, requests: Iterable[Request], now: float) -> None:
        """Takes those that lack images of other hosts out of the queue until the worker has them."""
        for request in requests:
            if request.images and request not in self._images.waiting and self._images.need(request, now):
                if self._planner is not None and request in self._planner.trial_queue:
                    del self._planner.trial_queue[request]
                else:
                    self._queue.remove(request)

    def _queue_again(self, requests: Iterable[Request]) -> None:
        """These do not wait for images any more."""
        for request in requests:
            self._queue.reinsert(request)
        if self._planner is not None:
            self._planner.put_on_trial()

    def _handle_fetch(self, fetch: FetchImage, now: float) -> None:
        self._progress.record()
        complete, failed = self._images.record(fetch, now)
        self._queue_again(complete)
        if failed:
            reason = FinishReason.OVERLOADED if fetch.overloaded else FinishReason.FAILED
            self._end_requests([(one, reason) for one in failed], now, fetch.error)

    def _admit_suspect(self, request: Request, now: float) -> bool:
        """Puts a request on trial whose like has crashed a process. False: it is quarantined, and has been answered."""
        if reason := self._isolation.quarantine_reason(request, now):
            self._end_request(request, FinishReason.QUARANTINED, now, reason)
            return False
        self._put_on_trial([request])
        return True

    def _end_request(self, request: Request, reason: FinishReason, now: float, message: str = "") -> None:
        self._end_requests([(request, reason)], now, message)

    def _end_requests(self, ended: FinishedRequests, now: float, message: str = "", retry_after_ms: int = 0) -> None:
        """Every request ends here, once."""
        self._progress.record()
        waited: list[Request] = []
        running: list[Request] = []
        for request, _ in ended:
            state, context = request.state, request.context
            if state is not QUEUED:
                running.append(request)
            elif request not in self._images.waiting:
                waited.append(request)
            request.state = END[state]
            if request.images:
                self._images.release(request)
            self._recorder.stamp(Event.ENDED, context, b=request.generated_tokens)
            del request.tokenizer.requests[request.rid]
            if context.generation_id and self._generations.get(context.generation_id) is request:
                del self._generations[context.generation_id]
        if running and self._planner is not None:
            self._planner.release(running)
        on_trial = self._discard_suspects(ended) if self._isolation.suspects else ()
        for request in waited:
            if request not in on_trial:
                self._queue.record_ended(request)
        self.counters.ended_requests += len(ended)
        self._outbox.extend(
            (one.tokenizer.peer, one.end_message(reason, message, now, retry_after_ms)) for one, reason in ended
        )

    def _discard_suspects(self, ended: FinishedRequests) -> list[Request]:
        """Returns those of these requests that were waiting for a slot on trial."""
        waited = []
        for request, reason in ended:
            self._isolation.discard(request, well=reason in SUCCESSES)
            if self._planner is not None and request in self._planner.trial_queue:
                del self._planner.trial_queue[request]
                waited.append(request)
        return waited

    # --- results ------------------------------------------------------------------------------------------------------

    def _handle_result(self, result: StepResult, now: float) -> None:
        if (answered := self.pipeline.pop_answered(result, now)) is None:
            return
        step, seconds, was_alone = answered
        planner = self._planner
        assert planner is not None
        vocab_size = planner.limits.vocab_size
        fault = result.error or step.mismatch(result, vocab_size)
        self.counters.finished_steps.append(
            FinishedStep(step.method, failed=fault != "", seconds=seconds, forward_seconds=result.forward_us / 1e6)
        )
        if result.out_of_memory:
            self._handle_lack_of_memory(step, planner, result.error, now)
            return
        if fault:
            self.pipeline.step_failed()
            self._requeue_running()
            cause, message = f"a step failed ({fault})", f"Server error: {fault}"
            self._blame(requests_in_progress([step]), now, cause, strikes=FAILED_STEP_STRIKES, message=message)
            return
        if result.row_errors and any(
            error and request.images
            for request, error in zip(step.requests_in_row_order, result.row_errors, strict=True)
        ):
            self._handle_faulty_images(step, planner, result, now)
            return
        if result.encoder_positions:
            self._prefill_budget.record_images(result.encoder_positions, result.encoder_us)
        self._prefill_budget.record_step(step.decode_rows, step.prefill_tokens, result.forward_us - result.encoder_us)
        self._step_limits.record(step.size, seconds)
        if was_alone and 0 < result.forward_us < 1e6 * seconds:
            self._step_limits.record_transit(seconds - result.forward_us / 1e6)
        self._progress.record()
        planner.size_limit.record_step()
        if planner.kv_cache.index is not None:
            planner.kv_cache.index.record_answered(result.number)
        if self._speculation is not None:
            self._speculation.record_step(step, result, now)
        if result.row_errors:
            self._end_faulty_rows(step, result, now)
        if step.prefill_tokens:
            for request in step.sampling_requests[step.decode_rows :]:
                self._recorder.stamp(Event.PREFILLED, request.context)
        if step.prompt_logprob_rows:
            self._send_prompt_logprobs(step, result, vocab_size, now)
        if step.pooled:
            self._end_pooled(step, result, now)
        if step.drafts:
            make_message = token_runs_message
            finished = distribute_token_runs(step, result, planner.kv_cache, self.counters)
        else:
            make_message = tokens_message
            finished = distribute_tokens(step, result, planner.batch.early_exits)
        self._tokenizers.queue_tokens(make_message, self.queued + self.running)
        if self._isolation.suspects:
            for request in step.sampling_requests:
                if step.message.number >= request.valid_from_step and (
                    released := self._isolation.record_token(request)
                ):
                    for one in among(self._tokenizers.requests, released):
                        self._stamp_trial(Event.RELEASED, one)
        if finished:
            self._end_requests(finished, now)

    def _handle_lack_of_memory(self, step: InFlightStep, planner: StepPlanner, fault: str, now: float) -> None:
        """Computes the requests again in smaller steps. Ends one that lacks memory in the smallest step, alone."""
        steps = [step, *self.pipeline.steps]
        self.pipeline.step_failed()
        planner.steps_failed(steps)
        tokens = step.decode_rows + step.prefill_tokens + sum(step.drafts)
        if planner.size_limit.reduce(tokens, step.requests):
            most = planner.size_limit.tokens
            log.warning("A step of %d tokens lacked memory (%s). Steps have at most %d now.", tokens, fault, most)
            return
        (request,) = step.requests
        if request.state is not ENDED:
            self._end_request(request, FinishReason.FAILED, now, f"{LACKS_MEMORY} ({fault})")

    def _handle_faulty_images(self, step: InFlightStep, planner: StepPlanner, result: StepResult, now: float) -> None:
        """Ends the requests whose images could not be computed, and computes the others again: what the step has
        written for an image is not what its pages are named after, and other requests may have found them."""
        faulty = [
            (request, error)
            for request, error in zip(step.requests_in_row_order, result.row_errors, strict=True)
            if error and step.message.number >= request.valid_from_step
        ]
        steps = [step, *self.pipeline.steps]
        self.pipeline.step_failed()
        planner.steps_failed(steps)
        for request, error in faulty:
            self._end_request(request, FinishReason.FAILED, now, error)

    def _end_faulty_rows(self, step: InFlightStep, result: StepResult, now: float) -> None:
        for request, fault in zip(step.requests_in_row_order, result.row_errors, strict=True):
            if fault and step.message.number >= request.valid_from_step:
                self._end_request(request, FinishReason.FAILED, now, fault)

    def _send_prompt_logprobs(self, step: InFlightStep, result: StepResult, vocab_size: int, now: float) -> None:
        for request, message in split_prompt_logprobs(step.prompt_logprob_rows, result, vocab_size):
            if step.message.number >= request.valid_from_step:
                request.prompt_logprobs_from += len(message.logprobs) // ITEM_BYTES
                self._outbox.append(request.tokenizer.peer, message)
                if request.prompt_only and not request.lacks_prompt_logprobs:
                    self._end_request(request, FinishReason.LENGTH, now)

    def _end_pooled(self, step: InFlightStep, result: StepResult, now: float) -> None:
        ended: FinishedRequests = []
        for request, vector in split_vectors(step, result):
            if step.message.number >= request.valid_from_step:
                request.vector = vector
                ended.append((request, FinishReason.LENGTH))
        if ended:
            self._end_requests(ended, now)

    # --- crashes ------------------------------------------------------------------------------------------------------

    def _blame_lost_worker(self, hello: Hello, now: float) -> None:
        """A worker has connected. If it replaces one that died, it tells how: the requests that the dead one had in
        progress are suspects, unless something else ended it, and whether it has its predecessor's pages."""
        lost, self._lost_worker = self._lost_worker, None
        if self._planner is not None and not _has_pages_of(hello, lost):
            self._planner.kv_cache.worker_state_lost()
        if lost is None or hello.boot == lost.boot:
            return  # only the connection was lost
        cause, outside = "the worker died", False
        if (report := hello.last_exit) is not None:
            if report.boot != lost.boot:
                # It is about a process in between, or before, if the lost one ended while it was loading.
                self._isolation.record_other_death()
                return
            cause, outside = f"the worker {report.cause}", report.outside
        self._blame(lost.in_progress, now, cause, outside=outside)

    def _take_over(self, predecessor: PredecessorState, now: float) -> None:
        """Takes over what the scheduler before this one knew, and blames the requests that it had in progress."""
        self.worker.adapters.take_over(predecessor.adapter_changes)
        self._isolation.restore(predecessor.suspects, now)
        if (report := predecessor.last_exit) is None:
            return
        in_progress = split_in_progress(report.in_progress)
        # How far the requests have come is not known. A death from outside, then, counts only if it came at once and if
        # one request was alone in progress: that is no accident if it happens again and again.
        if report.outside and (len(in_progress) > 1 or report.lived_ms > QUICK_DEATH_MS):
            in_progress = []
        cause = f"the scheduler {report.cause}"
        self._isolation.record_death(in_progress, now, cause=cause, outside=report.outside)

    @property
    def successor_state_changes(self) -> int:
        """Counts up when `successor_state` has changed."""
        return self._isolation.changes + self.worker.adapters.wanted_changes

    @property
    def successor_state(self) -> PredecessorState:
        """What a successor of this scheduler must know."""
        return PredecessorState(self.suspect_records, adapter_changes=[*self.worker.adapters.wanted.values()])

    @property
    def suspect_records(self) -> list[SuspectRecord]:
        """The suspects, for a successor."""
        return self._isolation.records

    def rejection(self, add: Add, now: float) -> End | None:
        """The answer to a request that must not be handled, since handling it would crash this process; else None."""
        if not self._isolation.suspects or not (reason := self._isolation.quarantine_reason(add, now)):
            return None
        return End(add.rid, FinishReason.QUARANTINED, reason)

    def _blame(
        self,
        in_progress: Collection[bytes],
        now: float,
        cause: str,
        *,
        outside: bool = False,
        strikes: int = 1,
        message: str = "",
    ) -> None:
        """The worker died, or a step failed, with the requests of these names in progress. Ends those that are
        quarantined by that, and puts the suspects among the others on trial. `message`: for the clients of the former;
        "": the reason of the quarantine."""
        isolation = self._isolation
        quarantined = isolation.record_death(in_progress, now, cause=cause, outside=outside, strikes=strikes)
        for request in among(self._tokenizers.requests, quarantined):
            reason = message or isolation.quarantine_reason(request, now)
            self._end_request(request, FinishReason.QUARANTINED, now, reason)
        self._put_on_trial(requests := among(self._tokenizers.requests, frozenset(in_progress)))
        if tried := sum(map(isolation.is_on_trial, requests)):
            log.warning("%d requests are on trial: %s", tried, cause)

    def _put_on_trial(self, requests: Iterable[Request]) -> None:
        """The suspects among these requests are computed in the turns of their groups from now on, without drafts."""
        for request in requests:
            if self._isolation.find(request) is not None:
                request.drafter = None
                self._isolation.admit(request)
                self._stamp_trial(Event.ON_TRIAL, request)
        if self._planner is not None:
            self._planner.put_on_trial()

    def _stamp_trial(self, event: Event, request: Request) -> None:
        suspect = self._isolation.find(request)
        self._recorder.stamp(event, request.context, 0 if suspect is None else suspect.strikes)

    # --- worker -------------------------------------------------------------------------------------------------------

    def _handle_worker_status(self, status: Status, now: float) -> None:
        was_ready = self.ready
        self.worker.update_status(status)
        if self.ready and not was_ready:
            self._recorder.stamp(Event.WORKER_UP, RequestContext(request_key=EVERY_REQUEST))
        if self._planner is None and (limits := self.worker.limits) is not None:
            self._set_limits(limits, now)
        if self.ready and self._planner is not None and (held := self.worker.take_held_pages()):
            self._adopt_pages(self._planner, held)
        if self.ready and self._planner is not None and (stored := self.worker.take_stored_pages()) is not None:
            self._use_stored_pages(self._planner, stored)
        if self.ready and not was_ready and self._planner is not None:
            self._hold_for_images([*self._queue.waiting(), *self._planner.trial_queue], now)
        self.report_status(now)

    def _set_limits(self, limits: DeploymentLimits, now: float) -> None:
        """The first worker's limits hold for the life of the deployment."""
        self._planner = StepPlanner(
            limits,
            prefix_caching=self.config.prefix_caching,
            prefill_budget=self._prefill_budget,
            step_limits=self._step_limits,
            queue=self._queue,
            counters=self.counters,
            adapters=self.worker.adapters,
            isolation=self._isolation,
            work_register=self.work_register,
            speculation=self._speculation,
            recorder=self._recorder,
        )
        self._planner.put_on_trial()
        for request in [*self._queue.waiting(), *self._planner.trial_queue]:
            if fault := validation_error(request, limits):
                self._end_request(request, FinishReason.INVALID, now, fault)

    def _adopt_pages(self, planner: StepPlanner, held: list[HeldPages]) -> None:
        """Fills the prefix cache with the pages that the worker has computed for the scheduler before this one."""
        if self.config.prefix_caching and self.pipeline.next_number == 1:  # no step has overwritten any of them
            pages = planner.kv_cache.adopt(held)
            log.info("The worker still holds %d KV pages from before this scheduler was started", pages)

    def _use_stored_pages(self, planner: StepPlanner, stored: StoredPages) -> None:
        limits = planner.limits
        if not self.config.prefix_caching or not can_be_stored(limits.groups):
            return
        try:
            planner.kv_cache.index = PageIndex(stored, limits.pages, limits.page_size)
        except ValueError as error:
            log.error("%s tells of pages in files that no worker has: %s. They are not used.", self.worker.peer, error)

    def _handle_adapter_updated(self, answer: AdapterUpdated, now: float) -> None:
        if (forwarded := self.worker.adapters.take_answer(answer, now)) is not None:
            self._outbox.append(*forwarded)
        self.report_status(now)

    def _handle_worker_lost(self, now: float) -> None:
        assert self.worker.peer is not None
        self._recorder.stamp(Event.WORKER_DOWN, RequestContext(request_key=EVERY_REQUEST))
        self._outbox.discard(self.worker.peer)
        self._lost_worker = LostWorker(self.worker.peer.boot, requests_in_progress(self.pipeline.steps))
        self.worker.disconnect()
        self._step_limits.worker_lost()
        self.counters.worker_losses += 1
        self._queue_again(self._images.worker_lost())
        steps = [*self.pipeline.steps]
        self.pipeline.worker_lost()
        if (planner := self._planner) is not None:
            if (index := planner.kv_cache.index) is not None:
                index.abandon(planner.kv_cache.pool)
                planner.kv_cache.index = None
            planner.steps_failed(steps, WORKER_LOST)  # the others may be kept: see _blame_lost_worker
        self._connect_waiting_worker(now)
        self.report_status(now)

    def _connect_waiting_worker(self, now: float) -> None:
        if (taken := self.worker.take_waiting()) is not None:
            peer, messages = taken
            for message in messages:
                self._handle_worker_message(message, peer, now)

    def _requeue_running(self) -> None:
        """The worker's state is void: returns all running requests to the queue."""
        if self._planner is not None:
            self._planner.worker_state_lost()

    # --- status -------------------------------------------------------------------------------------------------------

    def _load(self) -> LoadReport:
        queued, estimator = self.queued, self._wait_estimator
        wait = estimator.wait_seconds(queued, full=self._planner is not None and self._planner.batch.full)
        return LoadReport(
            queued=queued,
            running=self.running,
            predicted_wait_ms=int(wait * 1000),
            mean_end_interval_ms=int(estimator.completion_interval * 1000),
        )

    def _status(self, now: float) -> Status:
        """The status for tokenizers, without load. Unhealthy while steps are in flight and none is answered, and while
        the worker is silent although it has nothing to compute."""
        worker, status, stage = self.worker, self.worker.status, ""
        if self.pipeline.is_stalled(now):
            stage = "the worker finishes no step"
        elif worker.silent and status.ready and not worker.adapters.changing:
            stage = "the worker does not respond"
        return Status(
            ready=status.ready,
            healthy=status.healthy and not stage,
            stage=stage or status.stage,
            percent=status.percent,
            limits=worker.limits if worker.adapters.known else None,  # tokenizers admit requests when they know both
            adapters=worker.adapters.loaded,
            suspects=self.suspects(now),
            draining=self.draining,
            adapter_changes=[*worker.adapters.wanted.values()],
        )
