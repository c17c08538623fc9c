"""The loaded LoRA adapters that requests may name, and the pending requests to load or unload adapters."""

from tgi.microkernel.link import PeerId
from tgi.microkernel.protocol import AdapterUpdated, LoadedAdapter, UpdateAdapter
from tgi.tokenizer.request import TokenizerRequestState


class AdapterDirectory:
    """Loaded adapters as the scheduler's Status lists them, and UpdateAdapter messages until they are answered."""

    def __init__(self) -> None:
        self.loaded: list[LoadedAdapter] = []
        self._digests: dict[str, bytes] = {}
        self._pending: dict[int, tuple[PeerId, UpdateAdapter]] = {}  # by the tokenizer's rid: the api and its message

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
        """Records an api's update. Returns it with the tokenizer's rid, for the scheduler."""
        self._pending[rid] = (api, update)
        return update._replace(rid=rid)

    def pending_updates(self) -> list[UpdateAdapter]:
        """All pending updates, for a restarted scheduler."""
        return [update._replace(rid=rid) for rid, (_, update) in self._pending.items()]

    def complete_update(self, answer: AdapterUpdated) -> tuple[PeerId, AdapterUpdated] | None:
        """Removes the update that the scheduler has answered. Returns the api and the answer with the api's rid."""
        if (pending := self._pending.pop(answer.rid, None)) is None:
            return None
        api, update = pending
        return api, answer._replace(rid=update.rid)

    def remove_api(self, api: PeerId) -> None:
        """Drops the pending updates of an api that has disconnected."""
        self._pending = {rid: pending for rid, pending in self._pending.items() if pending[0] != api}
