"""Bugs that the simulation must find: each replaces a function of the product by a wrong one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulation.faults import FaultConfig
from tests.simulation.simulation import SimulationConfig, draw_config
from tgi.api.admission import Admission
from tgi.api.downstream import Downstream
from tgi.api.health import Health
from tgi.api.requests import Generation, TokenizationRequest
from tgi.api.router import Router
from tgi.microkernel.links.link import Link, PeerDisconnected
from tgi.microkernel.links.liveness import SilenceDetector
from tgi.microkernel.messages.protocol import Cancel, End, FinishReason
from tgi.scheduler.adapters import WorkerAdapters
from tgi.scheduler.in_flight import StepPipeline
from tgi.scheduler.kv_cache import KVCacheManager
from tgi.scheduler.peers import Outbox, TokenizerPeers
from tgi.scheduler.scheduler import Scheduler
from tgi.scheduler.waiting_queue import WaitingQueue
from tgi.tokenizer.adapters import AdapterDirectory
from tgi.tokenizer.output_processor import OutputProcessor
from tgi.tokenizer.pool import TokenizerPool
from tgi.tokenizer.request import RequestStage, TokenizerRequestState
from tgi.tokenizer.resumable_streams import ResumableStream
from tgi.tokenizer.schedulers import SchedulerReplica
from tgi.worker.engine.loop import WorkerLoop

# Of a run, which ends as soon as the bug is found.
REQUESTS = 200
# Seeds that are tried if the first one does not find the bug any more.
MORE_SEEDS = 60


class PlantedBug:
    """`wrong(original)` makes the wrong function out of the right one. `seed` finds the bug soon, with these `changes`
    of its configuration."""

    def __init__(self, owner: Any, name: str, wrong: Callable[[Any], Any], seed: int, **changes: Any) -> None:
        self._seed = seed
        self._changes = changes
        self._owner = owner
        self._name = name
        self._wrong = wrong

    def configs(self) -> Iterator[SimulationConfig]:
        """The configuration that finds the bug, then others for the case that the product has changed."""
        for seed in (self._seed, *range(MORE_SEEDS)):
            yield draw_config(seed, REQUESTS)._replace(**{"replicas": 1} | self._changes)

    @contextmanager
    def planted(self) -> Iterator[None]:
        original = self._owner.__dict__[self._name]
        function = original.fget if isinstance(original, property) else original
        wrong = self._wrong(function)
        setattr(self._owner, self._name, property(wrong) if isinstance(original, property) else wrong)
        try:
            yield
        finally:
            setattr(self._owner, self._name, original)


def does_nothing(original: Any) -> Any:
    return lambda *arguments, **named: None


def answers(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *arguments, **named: value


def without_resume_ids(original: Any) -> Any:
    return lambda *arguments: original(*arguments)._replace(resume_ids=b"")


def ignoring(kind: type) -> Callable[[Any], Any]:
    """For `handle`-like methods: messages of this type are ignored."""

    def wrong(original: Any) -> Any:
        def handle(self: Any, *arguments: Any) -> Any:
            return None if any(isinstance(one, kind) for one in arguments) else original(self, *arguments)

        return handle

    return wrong


def ends_are_sent_twice(original: Any) -> Any:
    def extend(self: Outbox, messages: Any) -> None:
        messages = list(messages)
        original(self, messages)
        original(self, [one for one in messages if isinstance(one[1], End)])

    return extend


def ends_of_cancelled_requests_are_dropped(original: Any) -> Any:
    def end_requests(self: Scheduler, *arguments: Any) -> None:
        original(self, *arguments)
        kept = [one for one in self._outbox.take_all() if getattr(one[1], "reason", "") != FinishReason.CANCELLED]
        self._outbox.extend(kept)

    return end_requests


def cancel_is_not_forwarded(original: Any) -> Any:
    def cancel(self: TokenizerPool, request: TokenizerRequestState) -> bool:
        if request.stage is not RequestStage.LIVE or self._assignments.neighbour_of(request) is None:
            return False
        request.stage = RequestStage.CANCELLING
        return True

    return cancel


def no_loss_before_a_second_hello(original: Any) -> Any:
    def handle_hello(self: Link, *arguments: Any) -> Iterator[Any]:
        return (one for one in original(self, *arguments) if not isinstance(one[1], PeerDisconnected))

    return handle_hello


def nothing_is_lacking(original: Any) -> Any:
    def compare(self: WorkerAdapters) -> None:
        if self._reported is not None:
            self.loaded, self.known = self._reported, True

    return compare


def permit_is_kept(original: Any) -> Any:
    def deactivate(self: Router, request: Any) -> None:
        request.active = False

    return deactivate


def first_token_is_resent(original: Any) -> Any:
    """The tokenizer forgets the latest token when it sends a request again."""

    def add_message(self: TokenizerRequestState, now: float) -> Any:
        message = original(self, now)
        return message._replace(resume_ids=message.resume_ids[:-4])

    return add_message


def prompt_positions_are_not_resumed(original: Any) -> Any:
    def to_message(self: Generation, rid: int) -> Any:
        message = original(self, rid)
        return message if message.prompt_logprobs_from is None else message._replace(prompt_logprobs_from=0)

    return to_message


def pages_are_not_released(original: Any) -> Any:
    def release_later(self: KVCacheManager, requests: Any) -> None:
        original(self, requests[1:])

    return release_later


def pages_are_given_back_early(original: Any) -> Any:
    def give_back(self: KVCacheManager, request: Any, start: int) -> None:
        original(self, request, start + self._page_size)

    return give_back


def tokenizations_are_forgotten(original: Any) -> Any:
    def on_lost(self: Downstream[Any, Any], tokenizer: Any, *arguments: Any) -> None:
        for request in list(tokenizer.requests.values()):
            if isinstance(request, TokenizationRequest):
                self.assignments.remove(request)
        original(self, tokenizer, *arguments)

    return on_lost


def resubmitted_without(**fields: Any) -> Callable[[Any], Any]:
    """The front end leaves these fields out when it submits a request again."""

    def wrong(original: Any) -> Any:
        def to_message(self: Generation, rid: int) -> Any:
            message = original(self, rid)
            return message._replace(**fields) if message.context.attempt > 1 else message

        return to_message

    return wrong


def key_limits_are_ignored(original: Any) -> Any:
    return lambda self, client, count: original(self, client._replace(requests=None), count)


def in_order_of_arrival(original: Any) -> Any:
    return lambda self, share, head: (-share.priority, 0.0, False, head.arrival, share)


def nothing_is_silent(original: Any) -> Any:
    return lambda self, heard: ([], [])


STOPS_ABOVE_THE_SCHEDULER = FaultConfig(2.0, mean_stop_seconds=6.0, weights=(0, 1, 0, 0, 0), role_weights=(1, 1, 0, 0))
STOPPED_WORKERS = FaultConfig(3.0, mean_stop_seconds=20.0, weights=(0, 1, 0, 0, 0), role_weights=(0, 0, 0, 1))
RARELY_STOPPED_WORKERS = STOPPED_WORKERS._replace(mean_seconds=20.0)
POISONED_WORKERS: dict[str, Any] = {"poison_share": 0.02, "poison_roles": ("worker",), "clients": 10}
NO_FAULTS = FaultConfig(1e9)
WORKER_KILLS = FaultConfig(0.3, weights=(1, 0, 0, 0, 0), role_weights=(0, 0, 0, 1))
TOKENIZER_KILLS = WORKER_KILLS._replace(role_weights=(0, 1, 0, 0))
SCHEDULER_KILLS = WORKER_KILLS._replace(role_weights=(0, 0, 1, 0))
PLANTED_BUGS = {
    "front end forgets /tokenize requests of a lost tokenizer": PlantedBug(
        Downstream, "_on_lost", tokenizations_are_forgotten, seed=34, clients=160, faults=TOKENIZER_KILLS, patience=60.0
    ),
    "front end resubmits without the chat": PlantedBug(Generation, "to_message", resubmitted_without(chat=b""), seed=4),
    "front end resubmits without the grammar": PlantedBug(
        Generation, "to_message", resubmitted_without(grammar=b""), seed=9
    ),
    "front end ignores the limit of a key": PlantedBug(Admission, "_acquire", key_limits_are_ignored, seed=4),
    "tokenizer forgets what it has sent of a stream": PlantedBug(ResumableStream, "record", does_nothing, seed=43),
    "scheduler serves clients in the order of arrival": PlantedBug(
        WaitingQueue, "_key", in_order_of_arrival, seed=5, clients=160, faults=NO_FAULTS
    ),
    "scheduler does not load adapters into the next worker": PlantedBug(
        WorkerAdapters,
        "_compare",
        nothing_is_lacking,
        seed=1,
        adapter_share=0.1,
        faults=WORKER_KILLS,
    ),
    "front end resubmits without the ids received": PlantedBug(Generation, "to_message", without_resume_ids, seed=1),
    "front end asks for the whole prompt again": PlantedBug(
        Generation, "to_message", prompt_positions_are_not_resumed, seed=1
    ),
    "front end does not resubmit": PlantedBug(Downstream, "_on_lost", does_nothing, seed=30),
    "front end keeps permits": PlantedBug(Router, "_deactivate", permit_is_kept, seed=2),
    "front end is always healthy": PlantedBug(
        Health, "can_compute", answers(True), seed=1, faults=STOPPED_WORKERS._replace(role_weights=(0, 0, 1, 0))
    ),
    "tokenizer resubmits without the ids generated": PlantedBug(
        TokenizerRequestState, "add_message", without_resume_ids, seed=1
    ),
    "tokenizer resubmits without the latest id": PlantedBug(
        TokenizerRequestState, "add_message", first_token_is_resent, seed=1
    ),
    "tokenizer does not forward cancels": PlantedBug(
        TokenizerPool, "_cancel_at_scheduler", cancel_is_not_forwarded, seed=0
    ),
    "tokenizer ignores cancels": PlantedBug(TokenizerPool, "handle", ignoring(Cancel), seed=1),
    "tokenizer does not resubmit": PlantedBug(
        TokenizerPool, "_resubmit", does_nothing, seed=0, faults=SCHEDULER_KILLS, patience=60.0
    ),
    "tokenizer leaves requests at a replica whose worker does not compute": PlantedBug(
        TokenizerPool, "_move_requests", does_nothing, seed=24, replicas=2, tokenizers=1, faults=RARELY_STOPPED_WORKERS
    ),
    "tokenizer does not tell schedulers of changes of adapters": PlantedBug(
        AdapterDirectory,
        "record_changes",
        answers([]),
        seed=19,
        adapter_share=0.1,
        adapter_failures=0.3,
        replicas=2,
        faults=WORKER_KILLS._replace(role_weights=(0, 0, 1, 1)),
        restart_seconds=0.5,
    ),
    "scheduler does not try again to load an adapter": PlantedBug(
        WorkerAdapters,
        "_is_due",
        lambda original: lambda self, change, now: change.name not in self._failed,
        seed=43,
        adapter_share=0.1,
        adapter_failures=0.3,
        replicas=2,
        faults=WORKER_KILLS,
        restart_seconds=0.5,
    ),
    "tokenizer sends requests to a replica that drains": PlantedBug(
        SchedulerReplica,
        "takes_requests",
        lambda original: lambda self: not self.unfit,
        seed=57,
        replicas=2,
        step_seconds=0.05,
        faults=NO_FAULTS._replace(mean_seconds=2.0, weights=(0, 0, 0, 0, 1), role_weights=(0, 0, 1, 0)),
    ),
    "scheduler does not tell its suspects": PlantedBug(
        Scheduler, "suspects", answers(b""), seed=3, replicas=3, faults=NO_FAULTS, **POISONED_WORKERS
    ),
    "tokenizer keeps the requests of a lost front end": PlantedBug(
        TokenizerPool, "_cancel_at_scheduler", answers(True), seed=1
    ),
    "tokenizer sends no texts for a lost front end's successor": PlantedBug(
        OutputProcessor, "remove_api", lambda original: lambda self, api: self._builders.clear(), seed=45
    ),
    "tokenizer does not report its status again": PlantedBug(TokenizerPool, "_publish_status", does_nothing, seed=43),
    "scheduler sends ends twice": PlantedBug(Outbox, "extend", ends_are_sent_twice, seed=0),
    "scheduler does not end cancelled requests": PlantedBug(
        Scheduler, "_end_requests", ends_of_cancelled_requests_are_dropped, seed=2
    ),
    "scheduler ignores lost tokenizers": PlantedBug(
        Scheduler, "_handle_tokenizer_message", ignoring(PeerDisconnected), seed=8
    ),
    "scheduler ignores lost workers": PlantedBug(
        Scheduler, "_handle_worker_message", ignoring(PeerDisconnected), seed=43
    ),
    "scheduler does not report its status": PlantedBug(TokenizerPeers, "report_status", does_nothing, seed=29),
    "scheduler does not notice a stalled worker": PlantedBug(
        StepPipeline,
        "is_stalled",
        answers(False),
        faults=STOPPED_WORKERS,
        seed=26,
    ),
    "scheduler does not release pages": PlantedBug(KVCacheManager, "release_later", pages_are_not_released, seed=2),
    "scheduler gives back a page that its window needs": PlantedBug(
        KVCacheManager, "give_back", pages_are_given_back_early, seed=17
    ),
    "scheduler finds the pages of lost steps": PlantedBug(KVCacheManager, "forget", does_nothing, seed=48),
    "scheduler keeps the prefixes of a lost worker": PlantedBug(
        KVCacheManager, "worker_state_lost", does_nothing, seed=8
    ),
    "worker keeps the requests of a lost scheduler": PlantedBug(WorkerLoop, "_finish_steps", does_nothing, seed=1),
    "scheduler answers on the next connection": PlantedBug(Outbox, "discard", does_nothing, seed=32),
    "link does not notice that a front end is stopped": PlantedBug(
        SilenceDetector,
        "tick",
        nothing_is_silent,
        seed=13,
        faults=STOPS_ABOVE_THE_SCHEDULER._replace(role_weights=(1, 0, 0, 0)),
    ),
    "link begins no new session with a silent peer": PlantedBug(
        Link, "_begin_new_session", does_nothing, seed=2, faults=STOPS_ABOVE_THE_SCHEDULER
    ),
    "link reports no loss before a second Hello": PlantedBug(
        Link, "_handle_hello", no_loss_before_a_second_hello, seed=4
    ),
}
