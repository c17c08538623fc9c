"""The loaded LoRA adapters that requests may name, and the pending requests to load or unload adapters."""

import time
from typing import NamedTuple

from tgi.microkernel.links.link import PeerId, ReplicaId
from tgi.microkernel.messages.protocol import AdapterUpdated, LoadedAdapter, UpdateAdapter, record_change
from tgi.tokenizer.request import TokenizerRequestState

MAX_STAMP = 2**64 - 1  # of a change: messages hold no higher number


class PendingUpdate(NamedTuple):
    """An update that not all schedulers have answered."""

    api: PeerId | None  # None: it has disconnected
    update: UpdateAdapter  # with the api's rid
    previous: str  # the path of the adapter that had the name; "": none had it
    answers: dict[ReplicaId, AdapterUpdated]  # by scheduler


class AdapterDirectory:
    """Loaded adapters as the schedulers report them, and UpdateAdapter messages until all schedulers have answered."""

    def __init__(self) -> None:
        self.loaded: list[LoadedAdapter] = []
        self.changes: dict[str, UpdateAdapter] = {}  # by name: the latest that schedulers have carried out
        self._digests: dict[str, bytes] = {}
        self._pending: dict[int, PendingUpdate] = {}  # by the tokenizer's rid

    @property
    def idle(self) -> bool:
        """Whether no api waits for an answer."""
        return all(pending.api is None for pending in self._pending.values())

    def set_loaded(self, loaded: list[LoadedAdapter]) -> None:
        """Replaces the list of loaded adapters. One that no scheduler has now stays if the latest change of its name
        loads it: they are told of that."""
        names = {adapter.name for adapter in loaded}
        loaded = loaded + [one for one in self.loaded if one.name not in names and self._is_wanted(one)]
        if loaded != self.loaded:
            self.loaded = loaded
            self._digests = {adapter.name: adapter.digest for adapter in loaded}

    def _is_wanted(self, adapter: LoadedAdapter) -> bool:
        change = self.changes.get(adapter.name)
        return change is not None and change.path == adapter.path

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

    def add_update(self, rid: int, api: PeerId, update: UpdateAdapter) -> UpdateAdapter:
        """Records an api's update. Returns it with the tokenizer's rid, for the schedulers."""
        previous = next((adapter.path for adapter in self.loaded if adapter.name == update.name), "")
        update = update._replace(stamp=self._next_stamp())
        self._pending[rid] = PendingUpdate(api, update, previous, {})
        return update._replace(rid=rid)

    def _next_stamp(self) -> int:
        known = (*self.changes.values(), *(pending.update for pending in self._pending.values()))
        latest = max((change.stamp for change in known), default=0)
        return min(MAX_STAMP, max(int(1e6 * time.time()), 1 + latest))

    def record_changes(self, changes: list[UpdateAdapter]) -> None:
        """Takes the changes that a scheduler has carried out."""
        for change in changes:
            record_change(self.changes, change)

    def missing_changes(self, known: list[UpdateAdapter]) -> list[UpdateAdapter]:
        """The changes that a scheduler lacks that knows these."""
        theirs = {change.name: change for change in known}
        return [change for change in self.changes.values() if change.replaces(theirs.get(change.name))]

    def pending_updates(self, scheduler: ReplicaId) -> list[UpdateAdapter]:
        """The updates that this scheduler has not answered, for one that has just connected."""
        return [one.update._replace(rid=rid) for rid, one in self._pending.items() if scheduler not in one.answers]

    def record_answer(self, scheduler: ReplicaId, answer: AdapterUpdated) -> None:
        """A scheduler has answered an update."""
        if (pending := self._pending.get(answer.rid)) is not None:
            pending.answers[scheduler] = answer

    def completed_updates(self, schedulers: set[ReplicaId]) -> list[tuple[PeerId, AdapterUpdated]]:
        """Removes the updates that all these schedulers have answered. Returns the apis and the answers for them: an
        error, if one has failed. Then the change is to be taken back where it has not."""
        completed = []
        for rid, (api, update, previous, answers) in list(self._pending.items()):
            if answers and schedulers <= answers.keys():
                failed = next((one for one in answers.values() if one.error), None)
                if failed is not None and any(not one.error for one in answers.values()):
                    record_change(self.changes, update._replace(path=previous, stamp=self._next_stamp()))
                del self._pending[rid]
                answer = failed or next(iter(answers.values()))
                if api is not None:
                    completed.append((api, answer._replace(rid=update.rid)))
        return completed

    def remove_api(self, api: PeerId) -> None:
        """An api has disconnected. Its pending updates stay: one that fails at some schedulers is still to be taken
        back."""
        for rid, pending in self._pending.items():
            if pending.api == api:
                self._pending[rid] = pending._replace(api=None)
