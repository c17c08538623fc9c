"""The loaded LoRA adapters that requests may name, and the pending requests to load or unload adapters."""

from typing import NamedTuple

from tgi.microkernel.link import PeerId, Place
from tgi.microkernel.protocol import AdapterUpdated, LoadedAdapter, UpdateAdapter
from tgi.tokenizer.request import TokenizerRequestState


class PendingUpdate(NamedTuple):
    """An update that not all schedulers have answered."""

    api: PeerId
    update: UpdateAdapter  # with the api's rid
    answers: dict[Place, AdapterUpdated]  # by the place of the scheduler


class AdapterDirectory:
    """Loaded adapters as the schedulers report them, and UpdateAdapter messages until all schedulers have answered."""

    def __init__(self) -> None:
        self.loaded: list[LoadedAdapter] = []
        self._digests: dict[str, bytes] = {}
        self._pending: dict[int, PendingUpdate] = {}  # by the tokenizer's rid

    @property
    def idle(self) -> bool:
        """Whether no UpdateAdapter is pending."""
        return not self._pending

    def set_loaded(self, loaded: list[LoadedAdapter]) -> None:
        """Replaces the list of loaded adapters."""
        if loaded != self.loaded:
            self.loaded = loaded
            self._digests = {adapter.name: adapter.digest for adapter in loaded}

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
        self._pending[rid] = PendingUpdate(api, update, {})
        return update._replace(rid=rid)

    def pending_updates(self, scheduler: Place) -> list[UpdateAdapter]:
        """The updates that this scheduler has not answered, for one that has just connected."""
        return [one.update._replace(rid=rid) for rid, one in self._pending.items() if scheduler not in one.answers]

    def record_answer(self, scheduler: Place, answer: AdapterUpdated) -> None:
        """A scheduler has answered an update."""
        if (pending := self._pending.get(answer.rid)) is not None:
            pending.answers[scheduler] = answer

    def completed_updates(self, schedulers: set[Place]) -> list[tuple[PeerId, AdapterUpdated]]:
        """Removes the updates that all these schedulers have answered. Returns the apis and the answers for them: an
        error, if one has failed."""
        completed = []
        for rid, (api, update, answers) in list(self._pending.items()):
            if answers and schedulers <= answers.keys():
                del self._pending[rid]
                answer = next((one for one in answers.values() if one.error), next(iter(answers.values())))
                completed.append((api, answer._replace(rid=update.rid)))
        return completed

    def remove_api(self, api: PeerId) -> None:
        """Drops the pending updates of an api that has disconnected."""
        self._pending = {rid: pending for rid, pending in self._pending.items() if pending.api != api}
