"""TokenizerPool: all requests of a tokenizer process, without sockets or threads (sans-IO)."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tgi.hub.pooling import PoolingConfig
from tgi.microkernel.errors import ProtocolError
from tgi.microkernel.links.link import PeerDisconnected, PeerId, PeerResponds, PeerSilent, ReplicaId
from tgi.microkernel.links.liveness import ProgressClock
from tgi.microkernel.messages.protocol import (
    SUCCESSES,
    AdapterUpdated,
    Beat,
    Cancel,
    DeploymentLimits,
    End,
    FetchImage,
    FinishReason,
    Generate,
    Hello,
    ImageChunk,
    PromptLogprobs,
    Status,
    Stop,
    Tokenize,
    Tokenized,
    Tokens,
    UpdateAdapter,
)
from tgi.microkernel.observability import metrics
from tgi.microkernel.observability.flight_recorder import NO_RECORDER, Event, FlightRecorder
from tgi.microkernel.observability.log import ComplaintLimit
from tgi.microkernel.recovery.work_register import WorkRegister
from tgi.tokenizer.adapters import AdapterDirectory
from tgi.tokenizer.chat import ChatRenderer, RenderedChat
from tgi.tokenizer.encoder import (
    PromptEncoder,
    PromptRejection,
    UnconstrainedPrompt,
    max_generated_tokens,
    min_token_limit_error,
    pooled_limit_error,
    token_limit_error,
)
from tgi.tokenizer.encoding_jobs import EncodingJob, EncodingQueue, ExecutorName, encoding_size, executor_for
from tgi.tokenizer.message_checks import check_generate, check_image_chunk, check_prompt_logprobs, check_status
from tgi.tokenizer.output_processor import OutputProcessor
from tgi.tokenizer.request import RequestStage, TokenizerRequestState
from tgi.tokenizer.schedulers import SchedulerReplica, Schedulers
from tgi.tokenizer.structured_output.answer_grammar import AnswerGrammarBuilder
from tgi.tokenizer.structured_output.grammar import CheckedGrammar
from tgi.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tgi.microkernel.observability.otlp import Tracer

log = logging.getLogger(__name__)

UPDATES_REFUSED = "adapters cannot be changed: the tokenizers run without --allow-adapter-updates"
OVERLOADED = "too many long texts and grammars wait to be encoded"


class GrammarBuild(Protocol):
    """GrammarCompiler.build."""

    def __call__(self, grammar: bytes, chat: RenderedChat | None, is_wanted: Callable[[], bool]) -> CheckedGrammar:
        """Returns the grammar of an answer for the worker. Raises GrammarError."""


class TokenizationKey(NamedTuple):
    """Identifies a Tokenize whose answer is due."""

    api: PeerId
    rid: int


class TokenizerPool:
    """All requests of this process. `clock` returns seconds. `work_register` registers the requests in progress.

    Call `handle` with what the links receive, run `jobs` in threads and pass their results to `complete_job`, and send
    what `drain_outgoing` returns, also at the `deadline`. Call `run_trials` while no job runs.

    Each Generate gets exactly one End. Each Add gets exactly one End from the scheduler; a request is kept until both
    are done.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        chats: ChatRenderer,
        clock: Callable[[], float] = time.monotonic,
        tracer: "Tracer | None" = None,
        recorder: FlightRecorder = NO_RECORDER,
        build_grammar: GrammarBuild | None = None,
        work_register: WorkRegister | None = None,
        work_in_progress: Callable[[PeerId], bytes | None] = lambda peer: b"",
        tokenizers: int = 1,
        allow_adapter_updates: bool = True,
        pooling: PoolingConfig | None = None,
        image_token: str = "",
        images_first: bool = False,
        decoder_start: int | None = None,
    ) -> None:
        """Without `build_grammar` grammars are compiled in this process, without a limit on time and memory.
        `work_in_progress`: what a scheduler has, or had, in progress, as WorkRegister.in_progress; None: not known.
        `tokenizers`: how many the server has. `allow_adapter_updates`: whether front ends may change adapters.
        `pooling`: of a model that ends in a vector. `decoder_start`: of an encoder-decoder model, see PromptEncoder.
        `image_token`, `images_first`: of one that sees images
        (ImagePlaceholders)."""
        self._build_grammar = build_grammar or _build_in_process(AnswerGrammarBuilder(vocabulary))
        self.jobs = EncodingQueue()
        self._recorder = recorder
        self._work_register = WorkRegister() if work_register is None else work_register
        self._vocabulary = vocabulary
        self._encoder = PromptEncoder(vocabulary, chats, tracer, pooling, image_token, images_first, decoder_start)
        self._tracer = tracer
        self._clock = clock
        self._apis: dict[
            PeerId, dict[int, TokenizerRequestState]
        ] = {}  # per api, by the api's rid, until its End is sent
        self._requests: dict[int, TokenizerRequestState] = {}  # by the tokenizer's rid
        self._last_rid = 0
        self._schedulers = Schedulers(work_in_progress, tokenizers)
        self._assignments = self._schedulers.assignments  # of the live requests
        self._progress = ProgressClock()
        self._complaints = ComplaintLimit()
        self._limits: DeploymentLimits | None = None
        self._adapters = AdapterDirectory()
        self._allow_adapter_updates = allow_adapter_updates
        self._output_processor = OutputProcessor(vocabulary, self._work_register)
        self._prompt_messages: list[tuple[PeerId, Any]] = []
        self._messages: list[tuple[PeerId, Any]] = []
        self._api_handlers: dict[type, Callable[[PeerId, Any], None]] = {
            Hello: self._on_api_hello,
            PeerDisconnected: self._on_api_gone,
            Generate: self._on_generate,
            Tokenize: self._on_tokenize,
            UpdateAdapter: self._on_update_adapter,
            Cancel: self._on_cancel,
            ImageChunk: self._on_image_chunk,
        }
        self._scheduler_handlers: dict[type, Callable[[PeerId, Any], None]] = {
            Hello: self._on_scheduler_hello,
            PeerDisconnected: self._on_scheduler_gone,
            PeerSilent: self._on_scheduler_silent,
            PeerResponds: self._on_scheduler_responds,
            Beat: self._on_scheduler_beat,
            Status: self._on_status,
            AdapterUpdated: self._on_adapter_updated,
            PromptLogprobs: self._on_prompt_logprobs,
            Tokens: self._on_tokens,
            End: self._on_end,
            FetchImage: self._on_fetch_image,
        }

    @property
    def idle(self) -> bool:
        """Whether no request and no adapter update is pending."""
        return not self._requests and not self.jobs and self._adapters.idle

    def handle(self, peer: PeerId, message: Any) -> None:
        """Handles one message, or link event, from an api or the scheduler."""
        handlers = self._scheduler_handlers if peer.role == "scheduler" else self._api_handlers
        handler = handlers.get(type(message))
        if handler is None:
            self._complain("ignored a %s from %s", type(message).__name__, peer)
            return
        try:
            handler(peer, message)
        except ProtocolError as error:
            self._complain("rejected a malformed %s from %s: %s", type(message).__name__, peer, error)
            if isinstance(message, Generate):
                self._send(peer, End(message.rid, FinishReason.INVALID, f"malformed request: {error}"))

    def complete_job(self, key: Any, result: Any) -> None:
        """Takes the result of a job."""
        self._progress.record()
        if isinstance(result, Tokenized):
            self._send(key.api, result)
        elif key.rid not in self._requests:
            log.debug("a request was cancelled while it was encoded")
        elif isinstance(result, PromptRejection):
            self._trace_validation(key, result)
            self._finish(key, result.reason, result.message)
        elif isinstance(result, UnconstrainedPrompt):
            self._compile_grammar(key, result)
        else:
            key.set_prompt(result)
            if self._limits is not None:
                with self._work_register.working_on(key.context):
                    self._admit(key, self._limits)

    def drain_outgoing(self) -> list[tuple[PeerId, Any]]:
        """Returns the messages to send, in order: those about prompts come before Texts, and Texts before their End."""
        if self._assignments.waiting and self._schedulers.any_connected:
            self._resubmit()
        messages = [*self._prompt_messages, *self._output_processor.drain_texts(), *self._messages]
        self._prompt_messages, self._messages = [], []
        return messages

    def beat(self) -> Beat:
        """How the work progresses, here or in a scheduler. To be called every BEAT_SECONDS."""
        self._move_requests()  # suspects, after their time
        now, limit_ms = self._clock(), 0
        for replica in self._schedulers:
            limit_ms = max(limit_ms, replica.beat.limit_ms)
            if replica.beat.progress_age_ms is not None:
                self._progress.record_at(now - replica.beat.progress_age_ms / 1000)
        age = self._progress.tick(now, busy=bool(self._requests))
        if age is None:
            return Beat(None)
        encoding = sum(request.stage is RequestStage.ENCODING for request in self._requests.values())
        work = f"{len(self._requests)} in flight, {encoding} being encoded"
        return Beat(int(1000 * age), limit_ms, work)

    def deadline(self) -> float | None:
        """When `drain_outgoing` must be called even if nothing happens, by the clock; None: no such time."""
        return self._assignments.due_at if self._assignments.waiting and self._schedulers.any_connected else None

    # Messages from an api

    def _on_api_hello(self, api: PeerId, hello: Hello) -> None:
        self._apis[api] = {}
        self._send(api, self._status)

    def _on_api_gone(self, api: PeerId, gone: PeerDisconnected) -> None:
        for request in list(self._apis.get(api, {}).values()):
            self._drop_job(request)
            self._cancel_at_scheduler(request)
            self._detach_from_api(request)
        for key in self.jobs.queued_keys():
            if isinstance(key, TokenizationKey) and key.api == api:
                self._drop_job(key)
        self._adapters.remove_api(api)
        self._apis.pop(api, None)
        self._output_processor.remove_api(api)
        self._discard_messages(api)

    def _complain(self, message: str, *arguments: object) -> None:
        if self._complaints.allows_one():
            log.error(message, *arguments)

    def _on_generate(self, api: PeerId, generate: Generate) -> None:
        check_generate(generate)
        if generate.rid in self._apis[api]:
            self._complain("%s used rid %d twice; the second request is ignored", api, generate.rid)  # one End per rid
            return
        self._last_rid += 1
        request = TokenizerRequestState(self._last_rid, api, generate, self._clock())
        self._requests[request.rid] = request
        self._apis[api][generate.rid] = request
        self._encode(generate, request, partial(self._encoder.encode_generate, generate))

    def _on_tokenize(self, api: PeerId, tokenize: Tokenize) -> None:
        self._encode(tokenize, TokenizationKey(api, tokenize.rid), partial(self._encoder.encode_tokenize, tokenize))

    def _on_update_adapter(self, api: PeerId, update: UpdateAdapter) -> None:
        # A front end on another host has settings of its own. At a SIGHUP it may have what is loaded read again.
        if not self._allow_adapter_updates and not self._adapters.is_loaded(update.name, update.path):
            self._send(api, AdapterUpdated(update.rid, UPDATES_REFUSED))
            return
        self._last_rid += 1
        self._adapters.add_update(self._last_rid, api, update)
        self._update_adapters()

    def _on_cancel(self, api: PeerId, cancel: Cancel) -> None:
        request = self._apis[api].get(cancel.rid)
        if request is None:
            if self._drop_job(TokenizationKey(api, cancel.rid)):
                self._send(api, End(cancel.rid, FinishReason.CANCELLED))
            return
        if request.stage is RequestStage.CANCELLING:
            return
        self._drop_job(request)
        if not self._cancel_at_scheduler(request):
            self._finish(request, FinishReason.CANCELLED)

    def _on_image_chunk(self, api: PeerId, chunk: ImageChunk) -> None:
        check_image_chunk(chunk)
        request = self._apis[api].get(chunk.rid)
        if request is not None and (assigned := self._assignments.neighbour_of(request)) is not None:
            replica, rid = assigned
            assert replica.peer is not None
            self._send(replica.peer, chunk._replace(rid=rid))

    # Encoding

    def _encode(self, message: Generate | Tokenize, key: Any, run: Callable[[], Any]) -> None:
        """Encodes a short request at once, and makes a job of a long one or of one on trial."""
        size = encoding_size(message)
        run = partial(_run_or_fail, run, key)
        executor = executor_for(size)
        if executor is None and not message.alone:
            with self._work_register.working_on(message.context):
                self.complete_job(key, run())
        elif isinstance(message, Generate) and (error := self._length_error(message)):
            self.complete_job(key, PromptRejection(FinishReason.INVALID, error))
        else:
            client = _client_of(message, key.api)
            self._add_job(
                EncodingJob(key, run, executor or ExecutorName.TEXTS, client, size, message.context, message.alone)
            )

    def _length_error(self, generate: Generate) -> str:
        """Why a text is too long, if that is certain before it is encoded; else ""."""
        truncates = generate.truncate is not None or (
            generate.pooling is not None and generate.pooling.truncate is not None
        )
        if self._limits is None or truncates or generate.chat or generate.input_ids:
            return ""
        least = self._vocabulary.min_token_count(generate.inputs)
        if generate.pooling is not None:
            return pooled_limit_error(self._limits, least, "at least ") if least else ""
        return min_token_limit_error(self._limits, least, generate.max_new_tokens)

    def run_trials(self) -> None:
        """Encodes the texts on trial. To be called while no job runs, so that each is alone in progress."""
        while (job := self.jobs.take_trial(in_loop=True)) is not None:
            with self._work_register.working_on(job.context):
                self.complete_job(job.key, job.run())

    def _compile_grammar(self, request: TokenizerRequestState, unconstrained: UnconstrainedPrompt) -> None:
        """Makes a job of the grammar, unless the prompt exceeds the token limits anyway."""
        generate, prompt = request.generate, unconstrained.prompt
        if self._limits and token_limit_error(self._limits, prompt.token_count, generate.max_new_tokens):
            self.complete_job(request, prompt)
            return
        build = partial(self._build_grammar, is_wanted=lambda: request.rid in self._requests)
        run = partial(_run_or_fail, partial(self._encoder.compile_grammar, unconstrained, generate, build), request)
        size = len(generate.grammar) + len(generate.chat)
        client = _client_of(generate, request.api)
        self._add_job(EncodingJob(request, run, ExecutorName.GRAMMARS, client, size, generate.context, generate.alone))

    def _add_job(self, job: EncodingJob) -> None:
        for refused in self.jobs.add(job):
            metrics.tgi_encoding_jobs_dropped.labels(cause="overloaded").inc()
            if isinstance(refused.key, TokenizationKey):
                api, rid = refused.key
                self._send(api, Tokenized(rid, b"", b"", b"", b"", OVERLOADED, reason=FinishReason.OVERLOADED))
            else:
                self._finish(refused.key, FinishReason.OVERLOADED, OVERLOADED)

    def _drop_job(self, key: Any) -> bool:
        """Removes the queued job of a request whose client has left. Returns False if none is queued."""
        dropped = self.jobs.discard(key)
        if dropped:
            metrics.tgi_encoding_jobs_dropped.labels(cause="cancelled").inc()
        return dropped

    # Messages from schedulers

    def _on_scheduler_hello(self, scheduler: PeerId, hello: Hello) -> None:
        replica = self._schedulers.at(ReplicaId(hello.site, scheduler.replica))
        if replica.peer is not None:  # its connection, at another address, has not been noticed as lost yet
            self._on_scheduler_gone(replica.peer, PeerDisconnected())
        self._schedulers.connect(replica, scheduler, hello, self._clock())
        # Before its requests, which may need these adapters. It may know some of these changes.
        for update in (*self._adapters.changes.values(), *self._adapters.missed_update(replica.replica_id)):
            self._send(scheduler, update)

    def _send_updates(self, updates: list[UpdateAdapter], source: SchedulerReplica | None = None) -> None:
        """Sends all schedulers but `source` updates of adapters, or changes, of which some may not know."""
        for replica in self._schedulers:
            if replica.peer is not None and replica is not source:
                for update in updates:
                    self._send(replica.peer, update)

    def _submit(self, request: TokenizerRequestState, replica: SchedulerReplica) -> None:
        """Sends a live request to a scheduler, with the ids generated so far."""
        assert replica.peer is not None
        self._assignments.assign(request, replica, request.rid)
        self._send(replica.peer, request.add_message(self._clock()))

    def _resubmit(self) -> None:
        """Sends live requests that no scheduler has, at the limited rate."""
        for request, replica in self._assignments.next_due(self._clock()):
            with self._work_register.working_on(request.context):
                self._submit(request, replica)

    def _on_scheduler_gone(self, scheduler: PeerId, gone: PeerDisconnected) -> None:
        """The requests of a scheduler that has ended are sent to another one, or to its successor."""
        if (replica := self._schedulers.replica_of(scheduler)) is None:
            return
        self._discard_messages(scheduler)
        for request in self._schedulers.disconnect(replica, self._clock(), gone.planned):
            if request.stage is RequestStage.CANCELLING:
                self._finish(request, FinishReason.CANCELLED)
            elif request.stage is RequestStage.ENDED:
                del self._requests[request.rid]
            elif request.finish_reason is not None:  # complete; only the scheduler's End is missing
                self._finish(request, request.finish_reason)
            else:
                self._stamp(Event.SCHEDULER_LOST, request, scheduler.replica)
                self._assignments.wait(request)
        self._publish_status()

    def remove_scheduler(self, replica_id: ReplicaId) -> None:
        """A scheduler was retired: nothing waits for it any more. Does nothing if it is connected."""
        self._schedulers.remove(replica_id)
        self._limits = self._schedulers.limits
        self._update_adapters()
        self._publish_status()

    def _on_scheduler_silent(self, scheduler: PeerId, silent: PeerSilent) -> None:
        self._set_silent(scheduler, True)

    def _on_scheduler_responds(self, scheduler: PeerId, responds: PeerResponds) -> None:
        self._set_silent(scheduler, False)

    def _set_silent(self, scheduler: PeerId, silent: bool) -> None:
        log.warning("%s %s", scheduler, "does not respond" if silent else "responds again")
        if (replica := self._schedulers.replica_of(scheduler)) is not None:
            replica.silent = silent
        self._publish_status()
        self._move_requests()

    def _move_requests(self) -> None:
        """Sends the requests of replicas that do not compute to those that do, and cancels them where they were: what
        is still sent for them from there is dropped. A request moves only to a replica that computes, so it moves again
        only if that one fails, too."""
        for replica, request in self._schedulers.requests_to_move(self._clock()):
            assert replica.peer is not None
            self._send(replica.peer, Cancel(request.rid))
            self._assignments.remove(request)
            del self._requests[request.rid]
            self._last_rid += 1
            request.rid = self._last_rid
            self._requests[request.rid] = request
            self._assignments.wait(request)
            self._stamp(Event.SCHEDULER_LOST, request, replica.replica_id.replica)

    def _on_scheduler_beat(self, scheduler: PeerId, beat: Beat) -> None:
        if (replica := self._schedulers.replica_of(scheduler)) is not None:
            replica.beat = beat

    def _on_status(self, scheduler: PeerId, status: Status) -> None:
        check_status(status)
        if (replica := self._schedulers.replica_of(scheduler)) is None:
            return
        self._schedulers.set_status(replica, status)
        self._send_updates(self._adapters.record_changes(status.adapter_changes), replica)
        if status.limits is not None and (self._schedulers.status.ready or not self._adapters.loaded):
            self._adapters.loaded = self._schedulers.adapters  # else they are loaded again soon
        self._publish_status()
        self._move_requests()
        if status.limits is None or self._schedulers.limits is None:
            return
        if self._limits is None:
            metrics.set_length_limits(status.limits.max_input_tokens, status.limits.max_total_tokens)
        self._limits = self._schedulers.limits
        for request in list(self._requests.values()):
            if request.stage is RequestStage.HELD:
                with self._work_register.working_on(request.context):
                    self._admit(request, self._limits)

    def _on_adapter_updated(self, scheduler: PeerId, updated: AdapterUpdated) -> None:
        if (replica := self._schedulers.replica_of(scheduler)) is not None:
            self._adapters.record_answer(replica.replica_id, updated)
        self._update_adapters()

    def _update_adapters(self) -> None:
        """Answers the update of an adapter that all schedulers have answered, and sends them the next one."""
        if (completed := self._adapters.complete(self._schedulers.replica_ids)) is not None:
            if completed.api is not None:
                self._send(completed.api, completed.answer)
            self._send_updates(completed.taken_back)
        if (update := self._adapters.begin_next()) is not None:
            self._send_updates([update])

    def _on_prompt_logprobs(self, scheduler: PeerId, logprobs: PromptLogprobs) -> None:
        check_prompt_logprobs(logprobs)
        request = self._requests_at(scheduler).get(logprobs.rid)
        self._progress.record()
        if request is not None and request.stage is RequestStage.LIVE:
            with self._work_register.working_on(request.context):
                messages = request.prompt_logprob_messages(logprobs)
                self._prompt_messages += ((request.api, message) for message in messages)

    def _on_fetch_image(self, scheduler: PeerId, fetch: FetchImage) -> None:
        self._progress.record()
        request = self._requests_at(scheduler).get(fetch.rid)
        if request is not None and request.stage is RequestStage.LIVE:
            self._send(request.api, fetch._replace(rid=request.generate.rid))

    def _on_tokens(self, scheduler: PeerId, tokens: Tokens) -> None:
        self._progress.record()
        replica = self._schedulers.replica_of(scheduler)
        for rid in self._output_processor.process_tokens({} if replica is None else replica.requests, tokens):
            self._send(scheduler, Stop(rid))
        if tokens.load >= 0 and replica is not None:
            replica.set_load(tokens.load)

    def _on_end(self, scheduler: PeerId, end: End) -> None:
        replica = self._schedulers.replica_of(scheduler)
        if replica is None or (request := self._assignments.pop(replica, end.rid)) is None:
            log.debug("%s has ended request %d, which was taken from it", scheduler, end.rid)
            return
        if end.reason in SUCCESSES or request.finish_reason is not None:
            self._assignments.ended_well(request)
        if request.stage is RequestStage.CANCELLING:
            self._finish(request, FinishReason.CANCELLED, scheduler_end=end)
        elif request.stage is RequestStage.ENDED:
            del self._requests[end.rid]
        elif request.finish_reason is not None:  # the reason found here wins over the scheduler's
            self._finish(request, request.finish_reason, scheduler_end=end)
        else:
            self._finish(request, end.reason, end.message, end)

    def _requests_at(self, scheduler: PeerId) -> dict[int, TokenizerRequestState]:
        """The requests that a scheduler has, by rid. What it sends for others was generated before they were moved."""
        replica = self._schedulers.replica_of(scheduler)
        return {} if replica is None else replica.requests

    # Life cycle of a request

    def _admit(self, request: TokenizerRequestState, limits: DeploymentLimits) -> None:
        """Validates an encoded request, and sends it to the scheduler or rejects it."""
        prompt, max_new_tokens = request.prompt, request.generate.max_new_tokens
        if request.generate.pooling is None:
            error = token_limit_error(limits, prompt.token_count, max_new_tokens)
        else:
            error = pooled_limit_error(limits, prompt.token_count)
        error = error or prompt.grammar_error or self._adapters.resolve_adapter(request)
        if error:
            self._trace_validation(request, PromptRejection(FinishReason.INVALID, error))
            self._finish(request, FinishReason.INVALID, error)
            return
        allowed = max_generated_tokens(limits, prompt.token_count, max_new_tokens)
        request.start(self._vocabulary, self._encoder.format_tokens, allowed, limits.vocab_size)
        self._prompt_messages += ((request.api, message) for message in request.prompt_messages())
        request.submitted = self._clock()
        request.validation_us = int((request.submitted - request.received) * 1e6)
        self._trace_validation(request)
        self._stamp(Event.TOKENIZED, request, prompt.token_count)
        if request.finish_reason is not None:  # the resumed ids are complete
            self._finish(request, request.finish_reason)
        elif (replica := self._schedulers.choose(request, request.submitted)) is not None:
            self._submit(request, replica)
        else:
            self._stamp(Event.SCHEDULER_LOST, request)
            self._assignments.wait(request)

    def _stamp(self, event: Event, request: TokenizerRequestState, number: int = 0) -> None:
        self._recorder.stamp(event, request.context, number)

    def _trace_validation(self, request: TokenizerRequestState, rejection: PromptRejection | None = None) -> None:
        """Records the span "validate" of a request that was admitted or rejected."""
        if self._tracer is not None and request.context.traceparent:
            now = time.time()
            began = now - (self._clock() - request.received)
            self._tracer.record_span("validate", request.context.traceparent, began, now, failure=rejection)

    def _cancel_at_scheduler(self, request: TokenizerRequestState) -> bool:
        """Sends Cancel to the scheduler that has the request. Returns False if none has it."""
        if request.stage is not RequestStage.LIVE or (assigned := self._assignments.neighbour_of(request)) is None:
            return False
        replica, rid = assigned
        assert replica.peer is not None  # requests leave a scheduler that has ended
        self._send(replica.peer, Cancel(rid))
        request.stage = RequestStage.CANCELLING
        return True

    def _detach_from_api(self, request: TokenizerRequestState) -> None:
        """Removes a request whose api has disconnected, or keeps it until the scheduler's End."""
        self._apis[request.api].pop(request.generate.rid, None)
        if self._assignments.neighbour_of(request) is not None:
            request.stage = RequestStage.ENDED
        else:
            self._assignments.remove(request)
            del self._requests[request.rid]

    def _finish(
        self, request: TokenizerRequestState, reason: str, message: str = "", scheduler_end: End | None = None
    ) -> None:
        """Sends the last tokens and the End, and removes the request. The scheduler does not know it any more."""
        self._output_processor.flush_metrics()
        self._progress.record()
        if request.last_texts is not None:
            self._send(request.api, request.last_texts)
        with self._work_register.working_on(request.context):
            self._send(request.api, request.end_message(reason, message, scheduler_end))
        self._apis[request.api].pop(request.generate.rid, None)
        self._assignments.remove(request)
        del self._requests[request.rid]

    def _publish_status(self) -> None:
        status = self._status
        for api in self._apis:
            self._send(api, status)

    @property
    def _status(self) -> Status:
        """The status for the front ends."""
        return self._schedulers.status._replace(adapters=self._adapters.loaded)

    def _discard_messages(self, peer: PeerId) -> None:
        """Removes the queued messages for a peer that has disconnected: if it connects again before they are sent, they
        would reach its new connection."""
        self._prompt_messages = [one for one in self._prompt_messages if one[0] != peer]
        self._messages = [one for one in self._messages if one[0] != peer]

    def _send(self, peer: PeerId, message: Any) -> None:
        self._messages.append((peer, message))


def _client_of(message: Generate | Tokenize, api: PeerId) -> str:
    """Whose turn a job takes: that of the client, or of the api if the client is unknown."""
    return message.context.client or str(api)


def _run_or_fail(run: Callable[[], Any], key: Any) -> Any:
    """Runs a job. An exception fails its request only: a job changes nothing that other requests use."""
    try:
        return run()
    except Exception as error:
        log.exception("a request could not be encoded")
        message = f"the request could not be encoded: {type(error).__name__}"
        if isinstance(key, TokenizationKey):
            return Tokenized(key.rid, b"", b"", b"", b"", message)
        return PromptRejection(FinishReason.FAILED, message)


def _build_in_process(builder: AnswerGrammarBuilder) -> GrammarBuild:
    def build(grammar: bytes, chat: RenderedChat | None, is_wanted: Callable[[], bool]) -> CheckedGrammar:
        return builder.build(grammar, chat)

    return build
