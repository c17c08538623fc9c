"""The heart of a tokenizer process, without sockets: messages and encoded texts go in, messages and jobs come out."""

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tgi.kernel import metrics
from tgi.kernel.link import Gone, Peer
from tgi.kernel.messages import (
    Adapt,
    Adapted,
    Cancel,
    End,
    Generate,
    PromptLogprobs,
    Reason,
    Stop,
    Tokenize,
    Tokenized,
    Tokens,
)
from tgi.kernel.presence import Hello, Limits, Status
from tgi.tokenizer import limits
from tgi.tokenizer.adapters import Adapters
from tgi.tokenizer.chat import Chats
from tgi.tokenizer.encode import Encoder, Refusal
from tgi.tokenizer.jobs import Job, lane_of
from tgi.tokenizer.request import Request, Stage
from tgi.tokenizer.steps import Steps
from tgi.tokenizer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tgi.kernel.trace import Tracer

log = logging.getLogger(__name__)

NO_SCHEDULER = "waiting for the scheduler"


class Pool:
    """All requests of this process. `clock` gives seconds.

    Call `handle` with what the links receive, run `jobs` somewhere and give their results to `finished`, and send
    what `outgoing` returns. Each Generate gets one End, and each Add one End from the scheduler: a record lives until
    both have come.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        chats: Chats,
        clock: Callable[[], float] = time.monotonic,
        tracer: "Tracer | None" = None,
    ) -> None:
        self.jobs: deque[Job] = deque()
        self._vocabulary = vocabulary
        self._encoder = Encoder(vocabulary, chats, tracer)
        self._tracer = tracer
        self._clock = clock
        self._apis: dict[Peer, dict[int, Request]] = {}  # of each api, by its own rid, until the End is sent
        self._requests: dict[int, Request] = {}  # by our rid
        self._rid = 0
        self._scheduler: Peer | None = None
        self._limits: Limits | None = None
        self._adapters = Adapters()
        self._status = Status(False, True, NO_SCHEDULER, 0)
        self._steps = Steps(vocabulary)
        self._prompts: list[tuple[Peer, Any]] = []
        self._messages: list[tuple[Peer, Any]] = []
        self._from_api: dict[type, Callable[[Peer, Any], None]] = {
            Hello: self._api_up,
            Gone: self._api_gone,
            Generate: self._generate,
            Tokenize: self._tokenize,
            Adapt: self._adapt,
            Cancel: self._cancel,
        }
        self._from_scheduler: dict[type, Callable[[Peer, Any], None]] = {
            Hello: self._scheduler_up,
            Gone: self._scheduler_gone,
            Status: self._status_changed,
            Adapted: self._adapted,
            PromptLogprobs: self._prompt_logprobs,
            Tokens: self._tokens,
            End: self._ended,
        }

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._requests and self._adapters.idle

    def handle(self, peer: Peer, message: Any) -> None:
        """Takes one message, or event of a link, from a neighbour."""
        handlers = self._from_scheduler if peer.role == "scheduler" else self._from_api
        handler = handlers.get(type(message))
        if handler is None:
            log.warning("ignored a %s from %s", type(message).__name__, peer)
        else:
            handler(peer, message)

    def outgoing(self) -> list[tuple[Peer, Any]]:
        """What is to be sent, in order: prompts before texts, and an End always behind its tokens."""
        messages = [*self._prompts, *self._steps.take(), *self._messages]
        self._prompts, self._messages = [], []
        return messages

    # From an api

    def _api_up(self, api: Peer, hello: Hello) -> None:
        self._apis[api] = {}
        self._send(api, self._status)

    def _api_gone(self, api: Peer, gone: Gone) -> None:
        for request in list(self._apis.get(api, {}).values()):
            self._withdraw(request)
            self._close(request)
        self._adapters.api_gone(api)
        self._apis.pop(api, None)
        self._steps.forget(api)

    def _generate(self, api: Peer, asked: Generate) -> None:
        self._rid += 1
        request = Request(self._rid, api, asked, self._clock())
        self._requests[request.rid] = request
        self._apis[api][asked.rid] = request
        self._encode(asked, request, partial(self._encoder.prompt, asked))

    def _tokenize(self, api: Peer, asked: Tokenize) -> None:
        self._encode(asked, api, partial(self._encoder.tokenized, asked))

    def _adapt(self, api: Peer, asked: Adapt) -> None:
        self._rid += 1
        order = self._adapters.ask(self._rid, api, asked)
        if self._scheduler is not None:
            self._send(self._scheduler, order)

    def _encode(self, asked: Generate | Tokenize, key: Any, result: Callable[[], Any]) -> None:
        """Does it now, or makes it a job."""
        if (lane := lane_of(asked)) is None:
            self.finished(key, result())
        else:
            self.jobs.append(Job(key, result, lane))

    def finished(self, key: Any, result: Any) -> None:
        """Takes the result of a job."""
        if isinstance(result, Tokenized):
            self._send(key, result)
        elif key.rid not in self._requests:
            log.debug("a request left while it was encoded")
        elif isinstance(result, Refusal):
            self._validated(key, result)
            self._finish(key, result.reason, result.message)
        else:
            key.encoded(result)
            if self._limits is not None:
                self._admit(key, self._limits)

    def _cancel(self, api: Peer, cancel: Cancel) -> None:
        request = self._apis[api].get(cancel.rid)
        if request is None or request.stage is Stage.CANCELLING:
            return
        if not self._withdraw(request):
            self._finish(request, Reason.CANCELLED)

    # From the scheduler

    def _scheduler_up(self, scheduler: Peer, hello: Hello) -> None:
        self._scheduler = scheduler
        for order in self._adapters.again():
            self._send(scheduler, order)
        for request in list(self._requests.values()):
            if request.stage is Stage.LIVE:
                self._send(scheduler, request.add())

    def _scheduler_gone(self, scheduler: Peer, gone: Gone) -> None:
        if scheduler != self._scheduler:
            return
        self._scheduler = None
        for request in list(self._requests.values()):
            if request.stage is Stage.CANCELLING:
                self._finish(request, Reason.CANCELLED)
            elif request.stage is Stage.ENDED:
                del self._requests[request.rid]
            elif request.reason is not None:  # its last token has come, only the End is lost
                self._finish(request, request.reason)
        self._show(Status(False, True, NO_SCHEDULER, 0, self._limits, adapters=self._adapters.loaded))

    def _status_changed(self, scheduler: Peer, status: Status) -> None:
        self._show(status)
        if status.limits is None:
            return
        if self._limits is None:
            metrics.limits(status.limits.max_input_tokens, status.limits.max_total_tokens)
        self._limits = status.limits
        self._adapters.told(status.adapters)
        for request in list(self._requests.values()):
            if request.stage is Stage.HELD:
                self._admit(request, self._limits)

    def _adapted(self, scheduler: Peer, answer: Adapted) -> None:
        if (told := self._adapters.answered(answer)) is not None:
            self._send(*told)

    def _prompt_logprobs(self, scheduler: Peer, told: PromptLogprobs) -> None:
        request = self._requests.get(told.rid)
        if request is not None and request.stage is Stage.LIVE:
            self._prompts += ((request.api, piece) for piece in request.tell(told))

    def _tokens(self, scheduler: Peer, tokens: Tokens) -> None:
        for rid in self._steps.decode(self._requests, tokens):
            self._send(scheduler, Stop(rid))

    def _ended(self, scheduler: Peer, end: End) -> None:
        request = self._requests.get(end.rid)
        if request is None:
            log.warning("the scheduler ended a request that is not there")
        elif request.stage is Stage.CANCELLING:
            self._finish(request, Reason.CANCELLED, below=end)
        elif request.stage is Stage.ENDED:
            del self._requests[end.rid]
        elif request.reason is not None:  # its last token has come, whatever the scheduler thinks of it
            self._finish(request, request.reason, below=end)
        else:
            self._finish(request, end.reason, end.message, end)

    # The life of a request

    def _admit(self, request: Request, known: Limits) -> None:
        """Checks an encoded request against the limits and passes it on."""
        prompt, asked = request.prompt, request.asked.max_new_tokens
        problem = limits.refusal(known, prompt.tokens, asked) or prompt.fault or self._adapters.give(request)
        if problem:
            self._validated(request, Refusal(Reason.INVALID, problem))
            self._finish(request, Reason.INVALID, problem)
            return
        most = limits.new_tokens(known, prompt.tokens, asked)
        request.begin(self._vocabulary, self._encoder.marks, most, known.vocab_size)
        self._prompts += ((request.api, told) for told in request.prompted())
        request.submitted = self._clock()
        request.validation_us = int((request.submitted - request.received) * 1e6)
        self._validated(request)
        if request.reason is not None:  # the ids of an earlier life are all that was asked for
            self._finish(request, request.reason)
        elif self._scheduler is not None:
            self._send(self._scheduler, request.add())

    def _validated(self, request: Request, refusal: Refusal | None = None) -> None:
        """Traces what has just become of a request: it was passed on, or refused."""
        if self._tracer is not None and request.asked.trace:
            now = time.time()
            began = now - (self._clock() - request.received)
            self._tracer.record("validate", request.asked.trace, began, now, failure=refusal)

    def _withdraw(self, request: Request) -> bool:
        """Nobody wants this request any more. Whether the scheduler knows of it, and has now been told."""
        if request.stage is not Stage.LIVE or self._scheduler is None:
            return False
        self._send(self._scheduler, Cancel(request.rid))
        request.stage = Stage.CANCELLING
        return True

    def _close(self, request: Request) -> None:
        """The api is done with this request. The record stays until the scheduler is, too."""
        self._apis[request.api].pop(request.asked.rid, None)
        if request.stage in (Stage.LIVE, Stage.CANCELLING) and self._scheduler is not None:
            request.stage = Stage.ENDED
        else:
            del self._requests[request.rid]

    def _finish(self, request: Request, reason: str, message: str = "", below: End | None = None) -> None:
        """The End of a request that the scheduler does not know, or no longer; its last tokens go before it."""
        self._steps.measured()
        if request.last is not None:
            self._send(request.api, request.last.message())
        self._send(request.api, request.end(reason, message, below))
        self._apis[request.api].pop(request.asked.rid, None)
        del self._requests[request.rid]

    def _show(self, status: Status) -> None:
        self._status = status
        for api in self._apis:
            self._send(api, status)

    def _send(self, peer: Peer, message: Any) -> None:
        self._messages.append((peer, message))
