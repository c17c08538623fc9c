"""The loaded LoRA adapters that requests may name, and the pending requests to load or unload adapters."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tgi.microkernel.links.link import PeerId, ReplicaId
from tgi.microkernel.messages.protocol import AdapterUpdated, LoadedAdapter, UpdateAdapter, record_change
from tgi.tokenizer.request import TokenizerRequestState

MAX_STAMP = 2**64 - 1  # of a change: messages hold no higher number


@dataclass
class RequestedUpdate:
    """An update that an api has requested."""

    api: PeerId | None  # None: it has disconnected
    api_rid: int
    update: UpdateAdapter  # as the schedulers get it, with the tokenizer's rid
    previous: UpdateAdapter  # the change of its name before this one
    answers: dict[ReplicaId, AdapterUpdated] = field(default_factory=dict)  # by scheduler


class CompletedUpdate(NamedTuple):
    """An update that all schedulers have answered."""

    api: PeerId | None
    answer: AdapterUpdated
    taken_back: list[UpdateAdapter]  # the change that undoes it, if one scheduler has failed and another one has not


class AdapterDirectory:
    """Loaded adapters as the schedulers report them, and UpdateAdapter messages until all schedulers have answered.

    The schedulers get one update at a time, so the state to which one that fails is taken back is known.
    """

    def __init__(self) -> None:
        self.loaded: list[LoadedAdapter] = []
        self.changes: dict[str, UpdateAdapter] = {}  # by name: the latest that schedulers have carried out
        self._waiting: deque[RequestedUpdate] = deque()
        self._current: RequestedUpdate | None = None  # with the schedulers
        self._last_stamp = 0

    @property
    def idle(self) -> bool:
        """Whether no api waits for an answer."""
        return not self._waiting and (self._current is None or self._current.api is None)

    def is_loaded(self, name: str, path: str) -> bool:
        """Whether the adapter in this directory has this name."""
        return any((adapter.name, adapter.path) == (name, path) for adapter in self.loaded)

    def resolve_adapter(self, request: TokenizerRequestState) -> str:
        """Sets the digest of the adapter that a request names. Returns an error for the client, or "".

        A resumed request keeps the digest of the adapter that generated its ids, and fails later if that adapter is
        not loaded any more.
        """
        sampling = request.generate.sampling
        if not sampling.adapter or (request.generate.resume_ids and sampling.adapter_digest):
            return ""
        digest = next((adapter.digest for adapter in self.loaded if adapter.name == sampling.adapter), None)
        if digest is None:
            return f"`adapter_id` {sampling.adapter} not found"
        request.generate = request.generate._replace(sampling=sampling._replace(adapter_digest=digest))
        return ""

    def add_update(self, rid: int, api: PeerId, update: UpdateAdapter) -> None:
        previous = UpdateAdapter(0, update.name, "")  # known when it begins
        self._waiting.append(RequestedUpdate(api, update.rid, update._replace(rid=rid), previous))

    def begin_next(self) -> UpdateAdapter | None:
        """The next update for all schedulers; None if one is with them, or there is none."""
        if self._current is not None or not self._waiting:
            return None
        self._current = current = self._waiting.popleft()
        name = current.update.name
        loaded = next((adapter.path for adapter in self.loaded if adapter.name == name), "")
        current.previous = self.changes.get(name, UpdateAdapter(0, name, loaded))
        current.update = current.update._replace(stamp=self._next_stamp())
        return current.update

    def _next_stamp(self) -> int:
        """The stamp of an update. The next number is left for the change that takes it back: later ones hold."""
        known = max((change.stamp for change in self.changes.values()), default=0)
        self._last_stamp = min(MAX_STAMP - 1, max(int(1e6 * time.time()), 2 + max(self._last_stamp, known)))
        return self._last_stamp

    def record_changes(self, changes: list[UpdateAdapter]) -> list[UpdateAdapter]:
        """Takes the changes that a scheduler has carried out. Returns those that are new here."""
        if (current := self._current) is not None:
            for change in changes:  # one that was stamped earlier may be carried out after the update began
                of_name = change.name == current.update.name
                if of_name and current.update.replaces(change) and change.replaces(current.previous):
                    current.previous = change
        return [change for change in changes if record_change(self.changes, change)]

    def missed_update(self, scheduler: ReplicaId) -> list[UpdateAdapter]:
        """The update that a scheduler that has just connected has to answer."""
        current = self._current
        return [] if current is None or scheduler in current.answers else [current.update]

    def record_answer(self, scheduler: ReplicaId, answer: AdapterUpdated) -> None:
        """Takes a scheduler's answer to the update that it has."""
        if (current := self._current) is not None and answer.rid == current.update.rid:
            current.answers[scheduler] = answer

    def complete(self, schedulers: set[ReplicaId]) -> CompletedUpdate | None:
        """Removes the update that is with the schedulers if all these have answered it. If one has failed, the error
        is the answer, and the change is taken back where it has not."""
        current = self._current
        if current is None or not current.answers or not schedulers <= current.answers.keys():
            return None
        self._current, taken_back = None, []
        errors = [one.error for one in current.answers.values()]
        error = next(filter(None, errors), "")
        if error and "" in errors:
            taken_back = [current.previous._replace(rid=0, stamp=current.update.stamp + 1)]
        return CompletedUpdate(current.api, AdapterUpdated(current.api_rid, error), self.record_changes(taken_back))

    def remove_api(self, api: PeerId) -> None:
        """An api has disconnected. An update that is with the schedulers stays: it may have to be taken back."""
        self._waiting = deque(one for one in self._waiting if one.api != api)
        if self._current is not None and self._current.api == api:
            self._current.api = None
