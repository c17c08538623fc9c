"""Which LoRA adapters the worker has loaded, and the updates that bring it to those wanted."""

import logging
from typing import NamedTuple

from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.protocol import AdapterUpdated, LoadedAdapter, UpdateAdapter, record_change

log = logging.getLogger(__name__)

# A wanted change that the worker cannot make is tried again after the first time, which doubles up to the second.
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class SentUpdate(NamedTuple):
    """The update that the worker has not answered."""

    rid: int  # ours
    change: UpdateAdapter
    request: tuple[PeerId, int] | None  # the tokenizer that requests it, and its rid; None: it is one of those wanted


class Failure(NamedTuple):
    """Attempts of a wanted change that the worker could not make."""

    interval: float  # seconds until the next one
    due_at: float


class WorkerAdapters:
    """Reconciles the worker's adapters with those wanted: the ones that the settings name, with `wanted`.

    A change is wanted when a worker has carried it out for a tokenizer, or when a tokenizer tells of it. The scheduler
    keeps `wanted` in a file for its successor. The worker is sent one update at a time: first what it lacks of
    those wanted (`restoring` is true until each has been tried), then the requested ones, in the order of their stamps.

    The worker applies an update when it has begun all steps that were sent before. So the adapters that `is_loaded`
    finds when a step is planned are there when it is computed.
    """

    def __init__(self) -> None:
        self.loaded: list[LoadedAdapter] = []  # what tokenizers are told: as the worker has it, or is to have it again
        self.known = False  # whether `loaded` is known, which it is once a worker has tried to get all that are wanted
        self.wanted: dict[str, UpdateAdapter] = {}  # by name: the latest change
        self.wanted_changes = 0  # counts up when `wanted` changes
        self.restoring = False  # the worker has not yet tried to make all changes that are wanted
        self._reported: list[LoadedAdapter] | None = None  # by the worker; None: none is ready
        self._lacking: list[UpdateAdapter] = []  # the wanted changes that a ready worker does not show
        self._failed: dict[str, Failure] = {}  # of those, by name
        self._requests: dict[tuple[PeerId, int], UpdateAdapter] = {}  # unanswered, by tokenizer and its rid
        self._sent: SentUpdate | None = None
        self._last_rid = 0

    @property
    def changing(self) -> bool:
        """Whether the worker has an update to answer."""
        return self._sent is not None

    @property
    def settled(self) -> bool:
        """Whether `loaded` and `wanted` say all: nothing is requested, or to be tried again."""
        return not (self._lacking or self._requests or self._sent)

    def is_loaded(self, digest: bytes) -> bool:
        """Whether the worker certainly has the adapter with this digest: it reported it, and has no update of that name
        to answer."""
        changing = self._sent.change.name if self._sent is not None else None
        return any(one.digest == digest and one.name != changing for one in self._reported or ())

    def request_update(self, tokenizer: PeerId, update: UpdateAdapter) -> None:
        """Takes an update that a tokenizer requests, or, with rid 0, a change that it tells of."""
        if update.rid:
            self._requests[tokenizer, update.rid] = update
        else:
            self._want(update)

    def take_over(self, changes: list[UpdateAdapter]) -> None:
        """Takes what the scheduler before this one wanted."""
        for change in changes:
            self._want(change)

    def worker_reported(self, loaded: list[LoadedAdapter]) -> None:
        """Takes the adapters of a worker that is ready."""
        self._reported = loaded
        self._compare()

    def worker_lost(self) -> None:
        """What it has not answered is sent to the next one."""
        self._reported = self._sent = None
        self._compare()

    def tokenizer_lost(self, tokenizer: PeerId) -> None:
        """Drops the tokenizer's requests. An update that was sent to the worker already is still carried out, and
        wanted: other schedulers may not have got it."""
        self._requests = {key: update for key, update in self._requests.items() if key[0] != tokenizer}

    @property
    def next_due_at(self) -> float | None:
        """When `take_update` is to be called to try again what has failed; None: there is no such time."""
        if not self._failed or self._sent is not None:
            return None
        return min(one.due_at for one in self._failed.values())

    def take_update(self, now: float) -> UpdateAdapter | None:
        """The update to send to the worker; None if it has one to answer, or needs none."""
        if self._reported is None or self._sent is not None or not (self._lacking or self._requests):
            return None  # nearly always
        if (change := next((one for one in self._lacking if self._is_due(one, now)), None)) is not None:
            request = None
        elif self._requests:
            request, change = min(self._requests.items(), key=lambda item: item[1].stamp)
            if (later := self.wanted.get(change.name)) is not None and later.replaces(change):
                change = later  # the request came late: it changes nothing
        else:
            return None
        self._last_rid += 1
        self._sent = SentUpdate(self._last_rid, change, request)
        return change._replace(rid=self._last_rid)

    def take_answer(self, answer: AdapterUpdated, now: float) -> tuple[PeerId, AdapterUpdated] | None:
        """Handles the worker's answer. Returns the tokenizer that requested the update and the answer for it, or None
        if no tokenizer waits for it."""
        if (sent := self._sent) is None or answer.rid != sent.rid:
            log.debug("dropped the answer to an unknown adapter update")
            return None
        self._sent = None
        if sent.request is None:
            self._record_attempt(sent.change, answer.error, now)
            return None
        if not answer.error and sent.change.stamp:
            self._want(sent.change)
        if self._requests.pop(sent.request, None) is None:
            return None
        tokenizer, rid = sent.request
        return tokenizer, answer._replace(rid=rid)

    def _want(self, change: UpdateAdapter) -> None:
        if record_change(self.wanted, change):
            self.wanted_changes += 1
            self._failed.pop(change.name, None)
            self._compare()

    def _compare(self) -> None:
        """Compares what is wanted with what the worker reports."""
        if self._reported is None:
            self._lacking, self._failed, self.restoring = [], {}, False
            return
        paths = {one.name: one.path for one in self._reported}
        lacking = {one.name: one for one in self.wanted.values() if paths.get(one.name, "") != one.path}
        self._lacking = sorted(lacking.values(), key=lambda one: (one.path != "", one.stamp))  # unload first
        for name in [name for name in self._failed if name not in lacking]:
            del self._failed[name]
            if name in self.wanted:
                log.info("Adapter %s is loaded now", name)
        self.restoring = len(self._failed) < len(lacking)
        if not self.restoring:
            self.loaded, self.known = self._reported, True

    def _is_due(self, change: UpdateAdapter, now: float) -> bool:
        failure = self._failed.get(change.name)
        return failure is None or failure.due_at <= now

    def _record_attempt(self, change: UpdateAdapter, error: str, now: float) -> None:
        """Takes the worker's answer to a wanted change, unless a later one has replaced that."""
        if change not in self._lacking:
            return
        error, failure = error or "the worker does not list it", self._failed.get(change.name)
        interval = FIRST_RETRY_SECONDS if failure is None else min(2 * failure.interval, MAX_RETRY_SECONDS)
        self._failed[change.name] = Failure(interval, now + interval)
        self._compare()
        if failure is not None:
            log.debug("adapter %s still cannot be loaded: %s", change.name, error)
            return
        log.error(
            "The worker could not load adapter %s from %s: %s. It tries again after %g s, then at intervals that grow "
            "to %g s. Until then other replicas get the requests with this adapter; where none has it, they fail.",
            change.name, change.path, error.rstrip("."), FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS,
        )  # fmt: skip
