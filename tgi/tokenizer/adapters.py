"""The loaded LoRA adapters that requests may name, and the pending requests to load or unload adapters."""

import time
from collections import deque
from typing import NamedTuple

from tgi.microkernel.links.link import PeerId, ReplicaId
from tgi.microkernel.messages.protocol import AdapterUpdated, LoadedAdapter, UpdateAdapter, record_change
from tgi.tokenizer.request import TokenizerRequestState

MAX_STAMP = 2**64 - 1  # of a change: messages hold no higher number


class PendingUpdate(NamedTuple):
    """An update that an api has requested."""

    rid: int  # the tokenizer's
    api: PeerId | None  # None: it has disconnected
    update: UpdateAdapter  # with the api's rid


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
        self._digests: dict[str, bytes] = {}
        self._pending: deque[PendingUpdate] = deque()  # the first one may be with the schedulers
        self._sent: UpdateAdapter | None = None  # the first one as it was sent
        self._previous = ""  # the path of the adapter that had its name; "": none had it
        self._answers: dict[ReplicaId, AdapterUpdated] = {}  # to it, by scheduler

    @property
    def idle(self) -> bool:
        """Whether no api waits for an answer."""
        return all(pending.api is None for pending in self._pending)

    def set_loaded(self, loaded: list[LoadedAdapter]) -> None:
        if loaded != self.loaded:
            self.loaded = loaded
            self._digests = {adapter.name: adapter.digest for adapter in loaded}

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
        if (digest := self._digests.get(sampling.adapter)) is None:
            return f"`adapter_id` {sampling.adapter} not found"
        request.generate = request.generate._replace(sampling=sampling._replace(adapter_digest=digest))
        return ""

    def add_update(self, rid: int, api: PeerId, update: UpdateAdapter) -> None:
        self._pending.append(PendingUpdate(rid, api, update))

    def begin_next(self) -> UpdateAdapter | None:
        """The next update for all schedulers; None if one is with them, or there is none."""
        if self._sent is not None or not self._pending:
            return None
        rid, _, update = self._pending[0]
        loaded = next((adapter.path for adapter in self.loaded if adapter.name == update.name), "")
        self._previous = self.changes[update.name].path if update.name in self.changes else loaded
        self._sent, self._answers = update._replace(rid=rid, stamp=self._next_stamp()), {}
        return self._sent

    def _next_stamp(self) -> int:
        known = [change.stamp for change in self.changes.values()]
        sent = 0 if self._sent is None else self._sent.stamp
        return min(MAX_STAMP, max(int(1e6 * time.time()), 1 + max(sent, *known, 0)))

    def record_changes(self, changes: list[UpdateAdapter]) -> list[UpdateAdapter]:
        """Takes the changes that a scheduler has carried out. Returns those that are new here."""
        return [change for change in changes if record_change(self.changes, change)]

    def missed_update(self, scheduler: ReplicaId) -> list[UpdateAdapter]:
        """The update that a scheduler that has just connected has to answer."""
        return [self._sent] if self._sent is not None and scheduler not in self._answers else []

    def record_answer(self, scheduler: ReplicaId, answer: AdapterUpdated) -> None:
        if self._sent is not None and answer.rid == self._sent.rid:
            self._answers[scheduler] = answer

    def complete(self, schedulers: set[ReplicaId]) -> CompletedUpdate | None:
        """Removes the update that is with the schedulers if all these have answered it. If one has failed, the error
        is the answer, and the change is taken back where it has not."""
        if (sent := self._sent) is None or not self._answers or not schedulers <= self._answers.keys():
            return None
        _, api, update = self._pending.popleft()
        failed = next((one for one in self._answers.values() if one.error), None)
        taken_back = []
        if failed is not None and any(not one.error for one in self._answers.values()):
            taken_back = [sent._replace(rid=0, path=self._previous, stamp=self._next_stamp())]
        self._sent = None
        answer = AdapterUpdated(update.rid, failed.error if failed is not None else "")
        return CompletedUpdate(api, answer, self.record_changes(taken_back))

    def remove_api(self, api: PeerId) -> None:
        """An api has disconnected. An update that is with the schedulers stays: it may have to be taken back."""
        sent = 0 if self._sent is None else self._sent.rid
        left = [one._replace(api=None) if one.api == api else one for one in self._pending]
        self._pending = deque(one for one in left if one.api is not None or one.rid == sent)
