"""Which LoRA adapters the worker has loaded, and the pending requests to change that."""

import logging
from typing import NamedTuple

from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.protocol import (
    MAX_ADAPTER_CHANGES,
    AdapterUpdated,
    LoadedAdapter,
    UpdateAdapter,
    record_change,
)

log = logging.getLogger(__name__)

# An update that no tokenizer waits for and that fails is tried again after the first time, which doubles up to the
# second.
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class PostponedUpdate(NamedTuple):
    """An update that the worker will be sent later."""

    update: UpdateAdapter
    interval: float  # seconds between its latest failure and the next attempt; 0: it was not tried yet
    due_at: float


class WorkerAdapters:
    """Keeps each requested update until a worker has answered it.

    A restarted worker loads the adapters that the settings name. It is then sent the updates that restore the adapters
    of its predecessor, and the changes that tokenizers know from the scheduler before this one or from other replicas
    (`restoring` is true until all are answered), and the updates that were not answered yet. Of the former, those that
    fail are tried again while the worker computes without them.

    Updates are sent while no step is in flight, and no step is sent before them. So the worker has the adapters that it
    was known to have when a step was planned until that step is computed.
    """

    def __init__(self) -> None:
        self.loaded: list[LoadedAdapter] = []  # what tokenizers are told: as the worker has it, or is to have it again
        self.changes: dict[str, UpdateAdapter] = {}  # by name: the latest that a worker has carried out
        # By name, of those that no tokenizer has requested: those that came before a worker was ready, or while a later
        # one was pending, and those that have failed, until they succeed.
        self._postponed: dict[str, PostponedUpdate] = {}
        self._reported: list[LoadedAdapter] = []  # as the worker reported them
        # By our rid: the tokenizer that requested it, None if that is gone, and the update.
        self._requested: dict[int, tuple[PeerId | None, UpdateAdapter]] = {}
        self._restoring: dict[int, UpdateAdapter] = {}  # by our rid: those that no tokenizer has requested
        self._last_rid = 0
        self._changing: dict[int, str] = {}  # adapter names in updates that this worker has not answered, by our rid
        self._unsent: list[UpdateAdapter] = []  # to be sent once no step is in flight
        self._known = False  # whether any worker has ever reported its adapters
        self._worker_ready = False  # whether this worker has reported its adapters

    @property
    def restoring(self) -> bool:
        """Whether the worker has not tried yet to get all adapters of its predecessor."""
        return bool(self._restoring) and any(one.name not in self._postponed for one in self._restoring.values())

    @property
    def known_changes(self) -> list[UpdateAdapter]:
        """By name the latest change that a worker has carried out, or that is to be carried out since a tokenizer has
        told it: a tokenizer that starts while no worker is ready learns them so."""
        if not self._restoring and not self._postponed:
            return [*self.changes.values()]
        known = dict(self.changes)
        for update in (*self._restoring.values(), *(one.update for one in self._postponed.values())):
            if update.stamp:
                record_change(known, update)
        return [*known.values()]

    @property
    def changing(self) -> bool:
        """Whether updates are pending."""
        return bool(self._changing)

    @property
    def settled(self) -> bool:
        """Whether `loaded` and `changes` say all: nothing is requested, or to be tried again."""
        return not (self._requested or self._restoring or self._postponed or self._changing)

    @property
    def has_unsent_updates(self) -> bool:
        """Whether updates must be sent before another step."""
        return bool(self._unsent)

    def take_unsent_updates(self) -> list[UpdateAdapter]:
        """Returns the updates to send now that no step is in flight, and clears them."""
        updates, self._unsent = self._unsent, []
        return updates

    def request_update(self, tokenizer: PeerId, update: UpdateAdapter) -> None:
        """Stores an update that a tokenizer requests, and queues it for the worker."""
        if not update.rid:
            self._restore(update)
            return
        untried = (one.update for one in self._postponed.values() if not one.interval)
        for other in (*self.changes.values(), *untried, *self._pending()):
            if other.name == update.name and other.replaces(update):
                update = update._replace(path=other.path, stamp=other.stamp)  # it came late: this changes nothing
        rid = self._next_rid()
        self._requested[rid] = (tokenizer, update)
        if self._worker_ready:
            self._add_unsent({rid: update})

    def _restore(self, change: UpdateAdapter) -> None:
        """Carries out a change that this scheduler may not know."""
        pending, postponed = self._pending(), self._postponed.get(change.name)
        if (
            any(change._replace(rid=one.rid) == one for one in pending)
            or not change.replaces(self.changes.get(change.name))
            or not change.replaces(postponed.update if postponed is not None else None)
        ):
            return
        if not self._worker_ready or any(one.name == change.name and one.replaces(change) for one in pending):
            self._postpone(change)
            return
        updates = {self._next_rid(): change}
        self._restoring |= updates
        self._add_unsent(updates)

    def _postpone(self, update: UpdateAdapter, interval: float = 0.0, due_at: float = 0.0) -> None:
        """Keeps an update until it is due, unless a later one of its name is kept."""
        known = self._postponed.get(update.name)
        if known is None or not known.update.replaces(update):
            self._postponed[update.name] = PostponedUpdate(update, interval, due_at)
            if len(self._postponed) > MAX_ADAPTER_CHANGES:
                del self._postponed[min(self._postponed, key=lambda name: self._postponed[name].update.stamp)]

    def _pending(self) -> list[UpdateAdapter]:
        """The updates that no worker has answered."""
        return [*self._restoring.values(), *(update for _, update in self._requested.values())]

    def _next_rid(self) -> int:
        self._last_rid += 1
        return self._last_rid

    def worker_reported(self, loaded: list[LoadedAdapter]) -> None:
        """Compares the adapters of a worker that is ready with those wanted, and queues the difference."""
        updates: dict[int, UpdateAdapter] = {}
        if not self._worker_ready:
            self._worker_ready = True
            restored = _updates_between(loaded, self.loaded) if self._known else []
            restored = [one for one in restored if one.name not in self._postponed]
            restored += [one.update for one in self._postponed.values()]
            self._restoring = {self._next_rid(): update for update in restored}
            self._postponed = {}
            if not self._known:
                self.loaded = loaded
            updates = self._restoring | {rid: update for rid, (_, update) in self._requested.items()}
            updates = dict(sorted(updates.items(), key=lambda item: _order(item[1])))
        for adapter in loaded:
            if adapter.stamp:
                record_change(self.changes, UpdateAdapter(0, adapter.name, adapter.path, adapter.stamp))
        self._reported, self._known = loaded, True
        self._refresh_loaded()
        self._add_unsent(updates)

    def _add_unsent(self, updates: dict[int, UpdateAdapter]) -> None:
        self._changing |= {rid: update.name for rid, update in updates.items()}
        self._unsent += [update._replace(rid=rid) for rid, update in updates.items()]

    def is_loaded(self, digest: bytes) -> bool:
        """Whether the worker certainly has the adapter with this digest: it reported it, and no update of that name is
        pending."""
        changing = self._changing.values()
        return any(adapter.digest == digest and adapter.name not in changing for adapter in self._reported)

    @property
    def next_due_at(self) -> float | None:
        """When `queue_postponed` is to be called; None: nothing is postponed, or it waits until all updates that are
        pending are answered, so that it does not undo a later change."""
        if not self._postponed or self._changing or not self._worker_ready:
            return None
        return min(one.due_at for one in self._postponed.values())

    def queue_postponed(self, now: float) -> None:
        """Queues the postponed updates whose time has come."""
        updates = {self._next_rid(): one.update for one in self._postponed.values() if one.due_at <= now}
        self._restoring |= updates
        self._add_unsent(updates)

    def take_answer(self, answer: AdapterUpdated, now: float) -> tuple[PeerId, AdapterUpdated] | None:
        """Handles the worker's answer. Returns the tokenizer that requested the update and the answer for it, or None
        if no tokenizer waits for it."""
        self._changing.pop(answer.rid, None)
        if (update := self._restoring.pop(answer.rid, None)) is not None:
            if answer.error:
                self._retry_later(update, answer.error, now)
            else:
                self._record(update)
            self._refresh_loaded()
            return None
        if (requested := self._requested.pop(answer.rid, None)) is None:
            log.debug("dropped the answer to an unknown adapter update")
            return None
        tokenizer, update = requested
        if not answer.error:
            self._record(update)
        if tokenizer is None:
            log.debug("dropped the answer to an adapter update: the tokenizer that requested it is gone")
            return None
        return tokenizer, answer._replace(rid=update.rid)

    def _record(self, update: UpdateAdapter) -> None:
        """The worker has carried out an update: it does not need an earlier one of this name any more."""
        if update.stamp:
            record_change(self.changes, update)
        postponed = self._postponed.get(update.name)
        if postponed is not None and not postponed.update.replaces(update):
            del self._postponed[update.name]
            if postponed.interval and postponed.update.path == update.path:
                log.info("Adapter %s is loaded now", update.name)

    def _retry_later(self, update: UpdateAdapter, error: str, now: float) -> None:
        postponed = self._postponed.get(update.name)
        if postponed is not None and postponed.update == update and postponed.interval:
            log.debug("adapter %s still cannot be loaded: %s", update.name, error)
            interval = min(2 * postponed.interval, MAX_RETRY_SECONDS)
        else:
            log.error(
                "The worker could not load adapter %s from %s: %s. It tries again after %g s, then at intervals that "
                "grow to %g s. Until then other replicas get the requests with this adapter; where none has it, they "
                "fail.",
                update.name,
                update.path,
                error.rstrip("."),
                FIRST_RETRY_SECONDS,
                MAX_RETRY_SECONDS,
            )
            interval = FIRST_RETRY_SECONDS
        self._postpone(update, interval, now + interval)

    def _refresh_loaded(self) -> None:
        if not self.restoring:
            self.loaded = self._reported

    def worker_lost(self) -> None:
        """Updates that the worker has not answered, or could not carry out, are sent to the next one."""
        self._worker_ready = False
        for update in self._restoring.values():
            self._postpone(update)
        self._restoring = {}
        self._changing = {}
        self._unsent = []

    def tokenizer_lost(self, tokenizer: PeerId) -> None:
        """Drops the tokenizer's requests. Updates that were queued for the worker already are still carried out, and
        recorded: other schedulers may not have got them."""
        for rid, (requester, update) in list(self._requested.items()):
            if requester == tokenizer:
                if rid in self._changing:
                    self._requested[rid] = None, update
                else:
                    del self._requested[rid]


def _order(update: UpdateAdapter) -> tuple[int, str]:
    """The order in which a worker carries out updates: those without a stamp as they come, of the others the latest
    change last."""
    return update.stamp, update.path if update.stamp else ""


def _updates_between(loaded: list[LoadedAdapter], wanted: list[LoadedAdapter]) -> list[UpdateAdapter]:
    """The updates, without rids, that turn the loaded adapters into the wanted ones."""
    loaded_paths = {adapter.name: adapter.path for adapter in loaded}
    wanted_names = {adapter.name for adapter in wanted}
    unloads = [UpdateAdapter(rid=0, name=name, path="") for name in loaded_paths if name not in wanted_names]
    return unloads + [
        UpdateAdapter(rid=0, name=adapter.name, path=adapter.path, stamp=adapter.stamp)
        for adapter in wanted
        if loaded_paths.get(adapter.name) != adapter.path
    ]
