"""Which LoRA adapters the worker has loaded, and the updates that bring it to those wanted."""

import logging
from typing import NamedTuple

from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.protocol import AdapterUpdated, LoadedAdapter, UpdateAdapter, record_change

log = logging.getLogger(__name__)

# A wanted change that the worker cannot make is tried again after the first time, which doubles up to the second.
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class PendingUpdate(NamedTuple):
    """An update that the worker has not answered."""

    update: UpdateAdapter  # with the rid of the tokenizer that requests it; 0: it is one of those wanted
    tokenizer: PeerId | None = None  # that waits for the answer
    sent: bool = False


class FailedUpdate(NamedTuple):
    """A wanted change that the worker could not make."""

    update: UpdateAdapter
    interval: float  # seconds until the next attempt
    due_at: float


class WorkerAdapters:
    """Reconciles the worker's adapters with those wanted: the ones that the settings name, with `wanted`.

    A change is wanted when a worker has carried it out, or when a tokenizer tells of it. The scheduler keeps `wanted`
    in a file for its successor. Each worker is sent what it lacks of them before its first step (`restoring` is true
    until all is answered), then the requested updates that no worker has answered.

    Updates are sent while no step is in flight, and no step is sent before them. So the worker has the adapters that it
    was known to have when a step was planned until that step is computed.
    """

    def __init__(self) -> None:
        self.loaded: list[LoadedAdapter] = []  # what tokenizers are told: as the worker has it, or is to have it again
        self.known = False  # whether `loaded` is known, which it is once a worker has tried to get all that are wanted
        self.wanted: dict[str, UpdateAdapter] = {}  # by name: the latest change
        self.wanted_changes = 0  # counts up when `wanted` changes
        self._reported: list[LoadedAdapter] | None = None  # by the worker; None: none is ready
        self._pending: dict[int, PendingUpdate] = {}  # by our rid
        self._failed: dict[str, FailedUpdate] = {}  # by name
        self._last_rid = 0

    @property
    def restoring(self) -> bool:
        """Whether the worker has not yet tried to make all changes that are wanted."""
        pending = self._pending
        return bool(pending) and any(
            not one.update.rid and one.update.name not in self._failed for one in pending.values()
        )

    @property
    def changing(self) -> bool:
        """Whether the worker has updates to answer."""
        return any(one.sent for one in self._pending.values())

    @property
    def settled(self) -> bool:
        """Whether `loaded` and `wanted` say all: nothing is requested, or to be tried again."""
        return not (self._pending or self._failed)

    @property
    def has_unsent_updates(self) -> bool:
        """Whether updates must be sent before another step."""
        if not self._pending:  # nearly always, and each step asks twice
            return False
        return self._reported is not None and any(not one.sent for one in self._pending.values())

    def take_unsent_updates(self) -> list[UpdateAdapter]:
        """Returns the updates to send now that no step is in flight."""
        unsent = {rid: one for rid, one in self._pending.items() if not one.sent}
        self._pending |= {rid: one._replace(sent=True) for rid, one in unsent.items()}
        return [one.update._replace(rid=rid) for rid, one in unsent.items()]

    def is_loaded(self, digest: bytes) -> bool:
        """Whether the worker certainly has the adapter with this digest: it reported it, and no update of that name is
        pending."""
        changing = {one.update.name for one in self._pending.values()}
        return any(one.digest == digest and one.name not in changing for one in self._reported or ())

    def request_update(self, tokenizer: PeerId, update: UpdateAdapter) -> None:
        """Takes an update that a tokenizer requests, or, with rid 0, a change that it tells of."""
        if not update.rid:
            self._want(update)
            self._reconcile()
            return
        for other in (*self.wanted.values(), *(one.update for one in self._pending.values())):
            if other.name == update.name and other.replaces(update):
                update = update._replace(path=other.path, stamp=other.stamp)  # it came late: this changes nothing
        self._add(PendingUpdate(update, tokenizer))

    def take_over(self, changes: list[UpdateAdapter]) -> None:
        """Takes what the scheduler before this one wanted."""
        for change in changes:
            self._want(change)

    def worker_reported(self, loaded: list[LoadedAdapter]) -> None:
        """Takes the adapters of a worker that is ready, and queues the difference to those wanted."""
        requested = {} if self._reported is not None else self._pending
        self._reported = loaded
        if requested:
            self._pending = {}  # first what the worker lacks, then what is requested
            self._reconcile()
            self._pending |= dict(sorted(requested.items(), key=lambda item: item[1].update.stamp))
        else:
            self._reconcile()
        self._refresh_loaded()

    @property
    def next_due_at(self) -> float | None:
        """When `retry` is to be called; None: nothing has failed, or it waits until all updates that are pending are
        answered, so that it does not undo a later change."""
        if not self._failed or self._pending or self._reported is None:
            return None
        return min(one.due_at for one in self._failed.values())

    def retry(self, now: float) -> None:
        """Queues the changes that have failed and whose time has come."""
        for failed in self._failed.values():
            if failed.due_at <= now:
                self._add(PendingUpdate(failed.update))

    def take_answer(self, answer: AdapterUpdated, now: float) -> tuple[PeerId, AdapterUpdated] | None:
        """Handles the worker's answer. Returns the tokenizer that requested the update and the answer for it, or None
        if no tokenizer waits for it."""
        if (pending := self._pending.pop(answer.rid, None)) is None or not pending.sent:
            log.debug("dropped the answer to an unknown adapter update")
            return None
        update = pending.update
        if update.rid and not answer.error and update.stamp:
            self._want(update)
        elif not update.rid and self.wanted.get(update.name) == update:
            self._try_later(update, answer.error or ("" if self._has(update) else "the worker does not list it"), now)
        self._reconcile()
        self._refresh_loaded()
        return (pending.tokenizer, answer._replace(rid=update.rid)) if pending.tokenizer is not None else None

    def worker_lost(self) -> None:
        """Requested updates that the worker has not answered are sent to the next one."""
        self._reported = None
        self._pending = {rid: one._replace(sent=False) for rid, one in self._pending.items() if one.update.rid}
        self._failed = {}

    def tokenizer_lost(self, tokenizer: PeerId) -> None:
        """Drops the tokenizer's requests. Updates that were sent to the worker already are still carried out, and
        wanted: other schedulers may not have got them."""
        for rid, one in list(self._pending.items()):
            if one.tokenizer == tokenizer:
                if one.sent:
                    self._pending[rid] = one._replace(tokenizer=None)
                else:
                    del self._pending[rid]

    def _want(self, change: UpdateAdapter) -> None:
        if record_change(self.wanted, change):
            self.wanted_changes += 1
            self._failed = {name: one for name, one in self._failed.items() if self.wanted.get(name) == one.update}

    def _add(self, pending: PendingUpdate) -> None:
        self._last_rid += 1
        self._pending[self._last_rid] = pending

    def _has(self, change: UpdateAdapter) -> bool:
        """Whether the worker reports what this change brings about."""
        found = (one.path for one in self._reported or () if one.name == change.name)
        return next(found, "") == change.path

    def _reconcile(self) -> None:
        """Queues the wanted changes that the worker lacks, unless an update of that name is pending or has failed."""
        if self._reported is None:
            return
        handled = {one.update.name for one in self._pending.values()} | self._failed.keys()
        lacking = [one for one in self.wanted.values() if one.name not in handled and not self._has(one)]
        for change in sorted(lacking, key=lambda one: (one.path != "", one.stamp)):  # unload first, to make room
            self._add(PendingUpdate(change))

    def _try_later(self, update: UpdateAdapter, error: str, now: float) -> None:
        """Takes the outcome of a wanted change. `error`: "" if it was carried out."""
        failed = self._failed.get(update.name)
        if not error:
            if failed is not None:
                del self._failed[update.name]
                log.info("Adapter %s is loaded now", update.name)
            return
        interval = FIRST_RETRY_SECONDS if failed is None else min(2 * failed.interval, MAX_RETRY_SECONDS)
        self._failed[update.name] = FailedUpdate(update, interval, now + interval)
        if failed is not None:
            log.debug("adapter %s still cannot be loaded: %s", update.name, error)
            return
        log.error(
            "The worker could not load adapter %s from %s: %s. It tries again after %g s, then at intervals that grow "
            "to %g s. Until then other replicas get the requests with this adapter; where none has it, they fail.",
            update.name, update.path, error.rstrip("."), FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS,
        )  # fmt: skip

    def _refresh_loaded(self) -> None:
        if self._reported is not None and not self.restoring:
            self.loaded, self.known = self._reported, True
