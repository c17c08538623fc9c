"""The schedulers that a tokenizer sends requests to, one per replica: what is known of each, which of them gets a
request, and what the front ends are told of all together. Sans-IO."""

import logging
from collections.abc import Callable, Iterator

from tgi.microkernel.links.link import PeerId, ReplicaId
from tgi.microkernel.messages.protocol import (
    DeploymentLimits,
    Hello,
    LoadedAdapter,
    Status,
    limits_shortfall,
)
from tgi.microkernel.recovery.assignments import Assignments, Neighbour
from tgi.microkernel.recovery.work_register import among, split_in_progress
from tgi.tokenizer.replica_choice import Candidate, SentPrefixes, best_candidate, lasting_excess, prompt_keys
from tgi.tokenizer.request import TokenizerRequestState

log = logging.getLogger(__name__)

NO_SCHEDULER = Status(False, True, "waiting for the scheduler", 0)
SCHEDULER_SILENT = "the scheduler does not respond"
SCHEDULER_DRAINS = "the scheduler finishes its requests and ends"
LIMITS_DIFFER = Status(False, False, "a replica does not meet the limits of the others", 0)
# How long the suspects of a replica that does not compute stay there: longer than a worker loads.
SUSPECT_SECONDS = 600.0
# A request that was in progress at a worker's loss at one replica, and then at another one before it had got this many
# more tokens, stays at the second: a scheduler quarantines by what it has seen itself.
MOVED_PROGRESS = 8
# What requests were promised. Other limits of replicas may be lower than those of the first one.
MINIMUM_LIMITS = ("max_total_tokens", "max_input_tokens")


class SchedulerReplica(Neighbour[TokenizerRequestState]):
    """One scheduler, with the requests that were sent to it."""

    def __init__(self, replica_id: ReplicaId, tokenizers: int) -> None:
        super().__init__(replica_id)
        self.number = replica_id.number
        self.status = NO_SCHEDULER  # without the last three fields, which follow
        self.worker_suspects: set[bytes] = set()  # may have ended or stopped its worker; tried here
        self.unable_since: float | None = None  # while it does not compute
        self.draining = False
        self.unfit = False  # its limits differ from those of the others
        self.reported = NO_SCHEDULER  # the latest status, also of an unfit one
        self.slots = 1  # requests that it computes at once
        self.sent = SentPrefixes()
        self.lasting_excess = 0.0  # of its load, in prompt tokens that count against it
        self._tokenizers = tokenizers
        self._reported, self._own = 0, 0  # requests of all tokenizers, and of this one, when the status came

    @property
    def can_compute(self) -> bool:
        """Whether a request sent to it now would be computed, by what is known of it."""
        return self.status.ready and self.status.healthy and not self.silent

    @property
    def takes_requests(self) -> bool:
        """Whether it takes new requests, when it is connected."""
        return not self.unfit and not self.draining

    @property
    def shown_status(self) -> Status:
        """The status for front ends: unhealthy while the scheduler is silent, not ready while it takes no requests."""
        if self.draining:
            return self.status._replace(ready=False, stage=SCHEDULER_DRAINS)
        return self.status._replace(healthy=False, stage=SCHEDULER_SILENT) if self.silent else self.status

    @property
    def load(self) -> int:
        """Requests that it has, by its latest report and what was sent since: as much as here by each tokenizer."""
        return max(len(self.requests), self._reported + self._tokenizers * (len(self.requests) - self._own))

    def set_load(self, reported: int) -> None:
        self._reported, self._own = reported, len(self.requests)

    def set_status(self, status: Status) -> None:
        self.set_load(status.queued + status.running)
        self._set_suspects(status.suspects)
        self.draining = status.draining
        if status.limits is not None:
            self.slots = status.limits.max_batch_size
        self.status = status._replace(suspects=b"", draining=False, adapter_changes=[])

    def _set_suspects(self, column: bytes) -> None:
        """Takes the suspects. Notes how far a request has come that has become one."""
        before, self.worker_suspects = self.worker_suspects, set(split_in_progress(column))
        if appeared := self.worker_suspects - before:
            for request in among(self.requests.values(), appeared):
                tokens, last = len(request.generated_ids), request.suspected_at
                request.stays = last is not None and tokens - last < MOVED_PROGRESS
                request.suspected_at = tokens

    def has_adapter(self, digest: bytes) -> bool:
        """Whether it has loaded this adapter; b"": none is needed."""
        return not digest or any(adapter.digest == digest for adapter in self.status.adapters)


class Schedulers:
    """All replicas. The limits of the first one hold: one that offers less than that is not used."""

    def __init__(self, work_in_progress: Callable[[PeerId], bytes | None], tokenizers: int = 1) -> None:
        """`work_in_progress`: what a process has, or had, in progress, as in Assignments. `tokenizers`: how many share
        the replicas."""
        self.limits: DeploymentLimits | None = None
        self._replicas: dict[ReplicaId, SchedulerReplica] = {}
        self._connected: dict[PeerId, SchedulerReplica] = {}
        self._suspecting: set[SchedulerReplica] = set()  # those with `worker_suspects`
        self.assignments: Assignments[SchedulerReplica, TokenizerRequestState]
        self.assignments = Assignments(self._choose_replica, work_in_progress)
        self._tokenizers = tokenizers

    def __getitem__(self, replica_id: ReplicaId) -> SchedulerReplica:
        return self._replicas[replica_id]

    def __iter__(self) -> Iterator[SchedulerReplica]:
        return iter(self._replicas.values())

    @property
    def replica_ids(self) -> set[ReplicaId]:
        return set(self._replicas)

    @property
    def any_connected(self) -> bool:
        """Whether requests can be sent at all."""
        return any(replica.peer is not None for replica in self)

    def at(self, replica_id: ReplicaId) -> SchedulerReplica:
        """The replica of this id, which is a new one if there was none."""
        if replica_id not in self._replicas:
            self._replicas[replica_id] = SchedulerReplica(replica_id, self._tokenizers)
        return self._replicas[replica_id]

    def connect(self, replica: SchedulerReplica, peer: PeerId, hello: Hello, now: float) -> None:
        """The scheduler of this replica has sent its Hello. What its predecessor had in progress at its death, by that
        Hello, is tried there."""
        self._connected[peer] = replica
        self.assignments.connected(replica, peer, hello, now)

    def replica_of(self, peer: PeerId) -> SchedulerReplica | None:
        """The replica of a scheduler that is connected."""
        return self._connected.get(peer)

    def disconnect(self, replica: SchedulerReplica, now: float, planned: bool) -> list[TokenizerRequestState]:
        """The scheduler has ended; another may follow. Returns the requests that it had."""
        if replica.peer is not None:
            del self._connected[replica.peer]
        requests = self.assignments.lost(replica, now, planned=planned)
        replica.unfit, replica.draining = False, False
        replica.set_load(0)
        replica.status = NO_SCHEDULER._replace(limits=self.limits, adapters=replica.status.adapters)
        return requests

    def remove(self, replica_id: ReplicaId) -> None:
        """A replica was retired. Does nothing if it is connected."""
        if replica_id in self._replicas and self._replicas[replica_id].peer is None:
            self.assignments.release(self._replicas.pop(replica_id))
            self._suspecting = {one for one in self._suspecting if one.replica_id != replica_id}
            for replica in self:
                if replica.unfit:  # perhaps no other is left
                    self.set_status(replica, replica.reported)

    def set_status(self, replica: SchedulerReplica, status: Status) -> None:
        """Takes the status of a replica. One that offers less than the others is not used."""
        replica.reported = status
        if status.limits is not None:
            used = (one for one in self if one is not replica and one.peer is not None and not one.unfit)
            if self.limits is None or not any(one.status.limits is not None for one in used):
                self.limits, replica.unfit = status.limits, False
            else:
                fault = limits_shortfall(self.limits, status.limits, MINIMUM_LIMITS)
                if fault and not replica.unfit:
                    log.error("%s is not used: %s. Give all replicas the same memory and devices.", replica.peer, fault)
                replica.unfit = bool(fault)
            # Other tokenizers send it as much as this one.
            replica.sent.capacity = status.limits.max_batch_total_tokens // self._tokenizers
        if not status.ready:  # without a worker there is no prefix cache
            replica.sent.clear()
        replica.set_status(LIMITS_DIFFER if replica.unfit else status)
        if replica.worker_suspects:
            self._suspecting.add(replica)
        else:
            self._suspecting.discard(replica)

    # --- the choice ---------------------------------------------------------------------------------------------------

    def choose(self, request: TokenizerRequestState, now: float) -> SchedulerReplica | None:
        """The replica for a request; None: it has to wait."""
        return self.assignments.choose(request, now)

    def _choose_replica(self, request: TokenizerRequestState, now: float) -> SchedulerReplica | None:
        for replica in self._suspecting:
            if among([request], replica.worker_suspects) and self._tries_suspects(replica, now):
                return replica if replica.peer is not None else None
        if len(self._replicas) == 1:
            (replica,) = self
            return replica if replica.takes_requests and replica.peer is not None else None
        # Perhaps some start, do not respond or lack the adapter. Which are the best?
        digest = request.generate.sampling.adapter_digest
        ranks = {replica: _rank(replica, digest) for replica in self if replica.takes_requests}
        best = min(ranks.values(), default=None)
        usable = [replica for replica, rank in ranks.items() if rank == best and replica.peer is not None]
        if not usable:
            return None
        prompt = prompt_keys(request.prompt.ids, digest)
        candidates = [Candidate(one.number, one.load, one.slots, one.sent, one.lasting_excess) for one in usable]
        chosen = usable[best_candidate(prompt, candidates)]
        chosen.sent.record(prompt)
        if total := sum(one.load for one in candidates):
            # While a request is computed, about as many are sent as there are (Little's law), by all tokenizers. One
            # more per replica keeps still where there are few, which share the load by chance.
            mean, lifetimes = total / len(usable), self._tokenizers / (total + len(usable))
            for replica, one in zip(usable, candidates, strict=True):
                replica.lasting_excess = lasting_excess(one.lasting, one.load - mean, lifetimes)
        return chosen

    def requests_to_move(self, now: float) -> list[tuple[SchedulerReplica, TokenizerRequestState]]:
        """The requests at replicas that do not compute that another replica would compute now, with the replicas where
        they are. What a replica may have been stopped by stays there: the work in progress of a silent scheduler, and
        what a scheduler suspects of its worker's end."""
        able = [replica for replica in self if replica.takes_requests and replica.can_compute]
        found = []
        for replica in self:
            if replica.can_compute:
                replica.unable_since = None
                continue
            if replica.unable_since is None:
                replica.unable_since = now
            if replica.peer is None or not able:
                continue
            requests = [one for one in replica.requests.values() if one.in_progress]
            suspects = self.assignments.suspects(replica) if replica.silent else set()
            if tries := self._tries_suspects(replica, now):
                suspects |= replica.worker_suspects
            staying = set(among(requests, suspects))
            found += [
                (replica, one)
                for one in requests
                if one not in staying
                and not (tries and one.stays)
                and any(other.has_adapter(one.generate.sampling.adapter_digest) for other in able)
            ]
        return found

    def _tries_suspects(self, replica: SchedulerReplica, now: float) -> bool:
        """Whether the suspects of a replica have to wait until it tries them."""
        since = now if replica.unable_since is None else replica.unable_since
        return replica.takes_requests and now < since + SUSPECT_SECONDS

    # --- for the front ends -------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """The adapters that requests may name: those of any replica, by name, those of the first one first."""
        found: dict[str, LoadedAdapter] = {}
        for replica in self:
            for adapter in replica.status.adapters:
                found.setdefault(adapter.name, adapter)
        return list(found.values())

    @property
    def status(self) -> Status:
        """The state of all replicas as one server: it computes if any of them does."""
        statuses = [replica.shown_status for replica in self] or [NO_SCHEDULER]
        if len(statuses) == 1:
            return statuses[0]
        adapters, serving = self.adapters, [status for status in statuses if status.ready and status.healthy]
        if not serving:
            furthest = max(statuses, key=lambda status: (status.ready, status.percent))
            return furthest._replace(limits=self.limits, adapters=adapters)
        ends_per_ms = sum(1 / status.mean_end_interval_ms for status in serving if status.mean_end_interval_ms)
        return serving[0]._replace(
            limits=self.limits,
            queued=sum(status.queued for status in serving),
            running=sum(status.running for status in serving),
            predicted_wait_ms=min(status.predicted_wait_ms for status in serving),
            mean_end_interval_ms=round(1 / ends_per_ms) if ends_per_ms else 0,
            adapters=adapters,
        )


def _rank(replica: SchedulerReplica, adapter_digest: bytes) -> tuple[int, bool, bool, bool]:
    """Replicas of the lowest rank are equally able to compute a request. One that is ready and lacks its adapter would
    let it fail; one that is not ready may still load it."""
    lacks = 0 if replica.has_adapter(adapter_digest) else 2 if replica.status.ready else 1
    return lacks, replica.peer is None, replica.silent, not replica.can_compute
