"""A pool with several schedulers: where requests go, what a loss moves, and what front ends are told."""

from collections import Counter
from typing import Any

import pytest

from tests.tokenizer.harness import API, LIMITS, PoolHarness, end_messages, hello, ids_of, streamed_output
from tgi.microkernel.links.link import PeerDisconnected, PeerId, PeerResponds, PeerSilent, ReplicaId
from tgi.microkernel.messages.codec import FLOAT32, INT32, UINT32, pack_column
from tgi.microkernel.messages.kv_groups import KVGroup
from tgi.microkernel.messages.protocol import (
    AdapterUpdated,
    Add,
    Beat,
    Cancel,
    End,
    FinishReason,
    Generate,
    LastExit,
    LoadedAdapter,
    RequestContext,
    Status,
    Stop,
    Tokens,
    UpdateAdapter,
)
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.microkernel.recovery.assignments import EXIT_REPORT_SECONDS
from tgi.tokenizer.schedulers import MOVED_PROGRESS, SUSPECT_SECONDS

READY = Status(True, True, "", 100, LIMITS)
LOADING = Status(False, True, "loading weights", 40, LIMITS)
A, B = PeerId("scheduler", 0, b"a"), PeerId("scheduler", 1, b"b")
NAMES = {b"1" * 8: 1, b"2" * 8: 2}


class ReplicaHarness(PoolHarness):
    """A pool with the schedulers A and B, which are ready."""

    def __init__(self, in_progress: bytes | None = b"") -> None:
        super().__init__(scheduler=False)
        self.pool._schedulers.assignments.work_in_progress = lambda peer: in_progress
        for peer in (A, B):
            self.connect(peer)

    def connect(self, peer: PeerId, status: Status = READY, **fields: Any) -> list[Any]:
        """Returns what the scheduler is sent at once. `fields` of its Hello."""
        self.pool.handle(peer, hello(peer)._replace(**fields))
        self.pool.handle(peer, status)
        return self.received_by(peer)

    def send(self, rid: int, inputs: str = "Hello", name: bytes = b"") -> tuple[PeerId, Add]:
        """Sends a Generate. Returns the scheduler that receives it, and the Add."""
        self.pool.handle(
            API, Generate(rid, inputs, SamplingParams(5, temperature=0.5), 20, context=RequestContext(name))
        )
        ((peer, add),) = ((peer, one) for peer in (A, B) for one in self.received_by(peer))
        assert isinstance(add, Add)
        return peer, add

    def tokens(self, peer: PeerId, rid: int, text: str) -> None:
        ids = ids_of(text)
        columns = pack_column(UINT32, [rid]), pack_column(UINT32, [len(ids)]), pack_column(INT32, ids)
        self.pool.handle(peer, Tokens(*columns, pack_column(FLOAT32, [-number / 4 for number in ids])))

    def status(self) -> Status:
        return [one for one in self.received_by(API) if isinstance(one, Status)][-1]


def other(peer: PeerId) -> PeerId:
    return B if peer == A else A


def test_requests_are_shared_and_a_prefix_stays_where_it_was() -> None:
    harness = ReplicaHarness()
    shares = Counter(harness.send(rid, f"{rid} differs")[0] for rid in range(40))
    assert max(shares.values()) <= 1.25 * 20 + 1
    prompt = "What they have in common is longer than one page of the cache. " * 3
    first, _ = harness.send(100, prompt)
    for rid in range(101, 104):
        assert harness.send(rid, prompt + str(rid))[0] == first


def test_tokens_tell_the_load_of_other_tokenizers() -> None:
    harness = ReplicaHarness()
    prompt = "What they have in common is longer than one page of the cache. " * 3
    peer, add = harness.send(1, prompt)
    assert harness.send(2, prompt)[0] == peer  # it has the prompt in its cache
    ids = pack_column(INT32, ids_of("a"))
    columns = pack_column(UINT32, [add.rid]), pack_column(UINT32, [1]), ids, pack_column(FLOAT32, [-1.0])
    harness.pool.handle(peer, Tokens(*columns, load=40))
    assert harness.send(3, prompt)[0] == other(peer)


def test_requests_of_a_lost_scheduler_go_on_at_another() -> None:
    harness = ReplicaHarness()
    peer, add = harness.send(1)
    harness.tokens(peer, add.rid, "abc")
    before = harness.received_by(API)
    harness.pool.handle(peer, PeerDisconnected())
    assert harness.status().ready
    (again,) = harness.received_by(other(peer))
    assert (again.resume_ids, again.prompt_ids) == (pack_column(INT32, ids_of("abc")), add.prompt_ids)
    harness.tokens(other(peer), again.rid, "de")
    harness.pool.handle(other(peer), End(again.rid, FinishReason.LENGTH))
    after = harness.received_by(API)
    assert streamed_output([*before, *after], 1)[1] == "abcde"
    assert [end.text for end in end_messages(after)] == ["abcde"]
    assert harness.connect(peer._replace(boot=b"next")) == []
    assert harness.pool.idle


def test_what_a_scheduler_had_in_progress_waits_for_its_successor() -> None:
    """So a request that crashes schedulers does not end one after the other."""
    name = b"poisoned"
    harness = ReplicaHarness(in_progress=name)
    peer, add = harness.send(1, name=name)
    _, innocent = harness.send(2)
    harness.pool.handle(peer, PeerDisconnected())
    assert [one.rid for one in harness.received_by(other(peer))] in ([], [innocent.rid])
    harness.pool.handle(
        API, Generate(3, "Hello", SamplingParams(5), 20, context=RequestContext(name))
    )  # the same request again
    assert harness.received_by(other(peer)) == []
    assert harness.pool.deadline() is None
    successor = peer._replace(boot=b"next")
    again = harness.connect(successor)
    assert [one.rid for one in again] == [add.rid, add.rid + 2]
    for one in again:
        harness.pool.handle(successor, End(one.rid, FinishReason.LENGTH))
    for number in range(10, 14):  # it has ended well: no suspicion is left
        harness.pool.handle(API, Generate(number, "Hello", SamplingParams(5), 20, context=RequestContext(name)))
    assert all(replica.requests for replica in harness.pool._schedulers)


def test_another_replica_takes_the_suspects_of_one_that_does_not_return() -> None:
    harness = ReplicaHarness(in_progress=b"poisoned")
    peer, add = harness.send(1, name=b"poisoned")
    harness.pool.handle(peer, PeerDisconnected())
    assert harness.received_by(other(peer)) == []
    harness.now += EXIT_REPORT_SECONDS
    assert [one.rid for one in harness.received_by(other(peer))] == [add.rid]


def test_a_scheduler_that_was_told_to_end_leaves_no_suspects() -> None:
    harness = ReplicaHarness(in_progress=b"harmless")
    peer, add = harness.send(1, name=b"harmless")
    harness.pool.handle(peer, PeerDisconnected(planned=True))
    assert [one.rid for one in harness.received_by(other(peer))] == [add.rid]


def test_requests_of_a_silent_scheduler_move_and_what_it_still_sends_is_dropped() -> None:
    harness = ReplicaHarness()
    peer, add = harness.send(1)
    harness.tokens(peer, add.rid, "ab")
    harness.received_by(API)
    harness.pool.handle(peer, PeerSilent())
    assert harness.status().healthy
    assert harness.received_by(peer) == [Cancel(add.rid)]
    (again,) = harness.received_by(other(peer))
    assert again.rid != add.rid
    harness.tokens(peer, add.rid, "xyz")
    harness.pool.handle(peer, PeerResponds())
    harness.pool.handle(peer, End(add.rid, FinishReason.CANCELLED))
    harness.tokens(peer, again.rid, "xyz")
    harness.tokens(other(peer), again.rid, "cd")
    harness.pool.handle(other(peer), End(again.rid, FinishReason.LENGTH))
    (end,) = end_messages(harness.received_by(API))
    assert (end.text, end.reason) == ("abcd", FinishReason.LENGTH)
    assert harness.pool.idle


def test_work_in_progress_of_a_silent_scheduler_stays_there() -> None:
    harness = ReplicaHarness(in_progress=b"poisoned")
    peer, _ = harness.send(1, name=b"poisoned")
    harness.pool.handle(peer, PeerSilent())
    assert harness.received_by(peer) == harness.received_by(other(peer)) == []
    harness.pool.handle(other(peer), PeerSilent())
    assert not harness.status().healthy


def test_cancels_and_stops_reach_the_scheduler_that_has_the_request() -> None:
    harness = ReplicaHarness()
    peer, add = harness.send(1)
    harness.pool.handle(API, Cancel(1))
    assert (harness.received_by(peer), harness.received_by(other(peer))) == ([Cancel(add.rid)], [])
    harness.pool.handle(API, Generate(2, "Hello", SamplingParams(5), 20, stop_strings=["b"]))
    ((peer, add),) = ((peer, one) for peer in (A, B) for one in harness.received_by(peer))
    harness.tokens(peer, add.rid, "ab")
    assert (harness.received_by(peer), harness.received_by(other(peer))) == ([Stop(add.rid)], [])


def test_front_ends_see_one_server() -> None:
    harness = ReplicaHarness()
    harness.pool.handle(A, READY._replace(queued=2, running=3, predicted_wait_ms=50, mean_end_interval_ms=100))
    harness.pool.handle(B, READY._replace(queued=1, running=4, predicted_wait_ms=20, mean_end_interval_ms=100))
    expected = READY._replace(queued=3, running=7, predicted_wait_ms=20, mean_end_interval_ms=50)
    assert harness.status() == expected
    harness.pool.handle(A, LOADING)
    assert harness.status() == READY._replace(queued=1, running=4, predicted_wait_ms=20, mean_end_interval_ms=100)
    assert {harness.send(rid)[0] for rid in range(6)} == {B}
    harness.pool.handle(B, READY._replace(ready=False, stage="waiting for the worker"))
    assert not harness.status().ready
    harness.pool.handle(A, PeerDisconnected())
    harness.pool.handle(B, PeerDisconnected())
    assert (harness.status().ready, harness.pool._schedulers.status.limits) == (False, LIMITS)


def test_a_replica_with_smaller_limits_is_not_used() -> None:
    harness = ReplicaHarness()
    harness.pool.handle(B, READY._replace(limits=LIMITS._replace(max_total_tokens=1024)))
    assert {harness.send(rid)[0] for rid in range(6)} == {A}
    assert harness.status() == READY
    harness.pool.handle(A, PeerDisconnected())
    assert harness.received_by(B) == []
    assert not harness.status().ready
    harness.pool.handle(B, READY._replace(limits=LIMITS._replace(pages=4096)))  # more memory is no fault
    assert len(harness.received_by(B)) == 6


def test_a_replica_keeps_no_more_prompts_than_its_groups_hold() -> None:
    """A token has a page in each KV group."""
    harness = ReplicaHarness()
    groups = [KVGroup(), KVGroup("sliding", 512)]
    harness.pool.handle(B, READY._replace(limits=LIMITS._replace(pages=4096, groups=groups)))
    assert [one.sent.capacity for one in harness.pool._schedulers] == [LIMITS.max_batch_total_tokens] * 2
    assert {harness.send(rid)[0] for rid in range(6)} == {A, B}


def test_a_replica_with_smaller_limits_is_used_when_the_others_were_retired() -> None:
    harness = ReplicaHarness()
    small = LIMITS._replace(max_total_tokens=1024)
    harness.pool.handle(B, READY._replace(limits=small))
    harness.pool.handle(A, PeerDisconnected(planned=True))
    harness.pool.handle(API, Generate(1, "Hello", SamplingParams(5), 20))
    assert harness.received_by(B) == []  # A may come back
    harness.pool.remove_scheduler(ReplicaId("", 0))
    assert [type(one) for one in harness.received_by(B)] == [Add]
    status = harness.status()
    assert (status.ready, status.limits) == (True, small)
    harness.pool.handle(API, Generate(2, "Hello", SamplingParams(5), 2000))
    assert [end.reason for end in end_messages(harness.received_by(API))] == [FinishReason.INVALID]


def test_an_adapter_is_updated_at_all_replicas() -> None:
    harness = ReplicaHarness()
    harness.pool.handle(API, UpdateAdapter(7, "name", "/path"))
    (at_a,), (at_b,) = harness.received_by(A), harness.received_by(B)
    assert at_a == at_b
    harness.received_by(API)
    adapter = LoadedAdapter("name", "/path", b"digest")
    harness.pool.handle(A, READY._replace(adapters=[adapter]))
    harness.pool.handle(A, AdapterUpdated(at_a.rid))
    assert [type(one) for one in harness.received_by(API)] == [Status]
    for rid in range(4):  # only A has it so far
        harness.pool.handle(API, Generate(rid, "Hello", SamplingParams(5, adapter="name"), 20))
    assert (len(harness.received_by(A)), len(harness.received_by(B))) == (4, 0)
    harness.pool.handle(B, PeerDisconnected())
    successor = B._replace(boot=b"next")
    assert harness.connect(successor) == [at_b]
    harness.pool.handle(successor, AdapterUpdated(at_b.rid, "no such directory"))
    assert harness.received_by(API)[-1] == AdapterUpdated(7, "no such directory")
    assert harness.pool._adapters.idle


def test_a_scheduler_that_is_new_is_told_of_changes_of_adapters_once_and_before_its_requests() -> None:
    harness = ReplicaHarness()
    changes = [UpdateAdapter(0, "new", "/new", 5), UpdateAdapter(0, "old", "", 6)]
    harness.pool.handle(A, READY._replace(adapter_changes=changes))
    assert harness.received_by(B) == changes
    assert harness.status().adapter_changes == []
    for _ in range(2):
        harness.pool.handle(B, READY)  # it could not load the first one
    assert harness.received_by(B) == []
    later = UpdateAdapter(0, "new", "/newer", 7)
    harness.pool.handle(B, READY._replace(adapter_changes=[later, changes[1]]))
    assert harness.received_by(A) == [later]
    peer, add = harness.send(1)
    harness.pool.handle(A, PeerDisconnected())
    harness.pool.handle(B, PeerDisconnected())
    told = harness.connect(peer._replace(boot=b"next"))
    assert {one.name: one for one in told[:2]} == {"new": later, "old": changes[1]}
    assert [one.rid for one in told[2:]] == [add.rid]


@pytest.mark.parametrize("leaves", [False, True], ids=["", "its front end has ended"])
@pytest.mark.parametrize("previous", ["", "/before"])
def test_a_change_that_one_replica_cannot_make_is_taken_back_at_the_others(previous: str, leaves: bool) -> None:
    harness = ReplicaHarness()
    before = [LoadedAdapter("name", previous, b"digest")] if previous else []
    for peer in (A, B):
        harness.pool.handle(peer, READY._replace(adapters=before))
    harness.pool.handle(API, UpdateAdapter(7, "name", "/path"))
    (update,), _ = harness.received_by(A), harness.received_by(B)
    carried_out = update._replace(rid=0)
    harness.pool.handle(A, READY._replace(adapter_changes=[carried_out]))
    harness.pool.handle(A, AdapterUpdated(update.rid))
    if leaves:
        harness.pool.handle(API, PeerDisconnected())
        assert harness.pool.idle
    harness.pool.handle(B, AdapterUpdated(update.rid, "no memory"))
    assert (AdapterUpdated(7, "no memory") in harness.received_by(API)) != leaves
    (taken_back,) = harness.received_by(A)
    assert (taken_back.rid, taken_back.name, taken_back.path) == (0, "name", previous)
    assert taken_back.replaces(carried_out)


@pytest.mark.parametrize("order", [1, -1])
def test_taking_a_change_back_leaves_what_other_tokenizers_have_changed(order: int) -> None:
    """A change with an earlier stamp that the pool hears of only when its own is with the schedulers, and one with a
    later stamp that it has not heard of."""
    harness = ReplicaHarness()
    harness.pool.handle(API, UpdateAdapter(7, "name", "/path"))
    (update,) = harness.received_by(A)
    earlier, later = [update._replace(rid=0, path="/other", stamp=update.stamp + one) for one in (-1, 2)]
    statuses = [(A, update._replace(rid=0)), (B, earlier)]
    for peer, change in statuses[::order]:
        harness.pool.handle(peer, READY._replace(adapter_changes=[change]))
    harness.pool.handle(A, AdapterUpdated(update.rid))
    harness.received_by(A)
    harness.pool.handle(B, AdapterUpdated(update.rid, "no memory"))
    (taken_back,) = harness.received_by(A)
    assert (taken_back.rid, taken_back.path) == (0, earlier.path)
    assert taken_back.replaces(update)
    assert later.replaces(taken_back)


def test_requests_may_name_an_adapter_while_it_is_loaded_again() -> None:
    harness = ReplicaHarness()
    adapter = LoadedAdapter("name", "/path", b"digest")
    change = UpdateAdapter(0, "name", "/path", 5)
    for peer in (A, B):
        harness.pool.handle(peer, READY._replace(adapters=[adapter], adapter_changes=[change]))
    for peer in (A, B):  # scheduler and worker have both died
        harness.pool.handle(peer, PeerDisconnected())
        harness.connect(peer._replace(boot=b"next"), LOADING)
    assert harness.status().adapters == [adapter]
    harness.pool.handle(API, Generate(1, "Hello", SamplingParams(5, adapter="name"), 20))
    assert end_messages(harness.received_by(API)) == []


def test_a_retired_replica_is_awaited_no_more() -> None:
    harness = ReplicaHarness()
    harness.pool.handle(API, UpdateAdapter(7, "name", "/path"))
    (update,) = harness.received_by(A)
    harness.pool.handle(A, AdapterUpdated(update.rid))
    harness.pool.handle(B, PeerDisconnected(planned=True))
    harness.received_by(API)
    harness.pool.remove_scheduler(ReplicaId("", 1))
    assert [one for one in harness.received_by(API) if isinstance(one, AdapterUpdated)] == [AdapterUpdated(7)]


def test_progress_of_one_replica_is_progress() -> None:
    harness = ReplicaHarness()
    harness.send(1)
    harness.pool.beat()
    harness.now += 1.0
    harness.pool.handle(A, Beat(5000, 3000, "stuck"))
    harness.pool.handle(B, Beat(100, 2000, "busy"))
    beat = harness.pool.beat()
    assert beat.progress_age_ms is not None
    assert beat.progress_age_ms < 200
    assert beat.limit_ms == 3000


def test_requests_of_a_lost_worker_go_on_at_another_replica() -> None:
    harness = ReplicaHarness()
    peer, add = harness.send(1)
    harness.tokens(peer, add.rid, "abc")
    harness.pool.handle(peer, LOADING)
    assert harness.received_by(peer) == [Cancel(add.rid)]
    (again,) = harness.received_by(other(peer))
    assert again.resume_ids == pack_column(INT32, ids_of("abc"))
    harness.pool.handle(peer, End(add.rid, FinishReason.CANCELLED))
    harness.pool.handle(peer, READY)
    assert harness.received_by(peer) == harness.received_by(other(peer)) == []  # nothing returns


@pytest.mark.parametrize("status", [LOADING, READY._replace(healthy=False)])
def test_suspects_wait_for_the_worker_that_they_may_have_ended(status: Status) -> None:
    name = b"poisoned"
    harness = ReplicaHarness()
    peer, _ = harness.send(1, name=name)
    harness.pool.handle(peer, status._replace(suspects=name))
    assert harness.status().suspects == b""
    assert harness.received_by(peer) == harness.received_by(other(peer)) == []
    harness.pool.handle(
        API, Generate(2, "Hello", SamplingParams(5), 20, context=RequestContext(name))
    )  # the same request again
    assert [one.context.fingerprint for one in harness.received_by(peer)] == [name]
    harness.now += SUSPECT_SECONDS
    harness.pool.beat()
    assert len(harness.received_by(other(peer))) == 2


def test_a_request_is_free_to_go_when_its_scheduler_does_not_suspect_it_any_more() -> None:
    name = b"harmless"
    harness = ReplicaHarness()
    peer, _ = harness.send(1, name=name)
    harness.pool.handle(peer, LOADING._replace(suspects=name))
    assert harness.received_by(other(peer)) == []
    harness.pool.handle(peer, LOADING)
    assert [one.context.fingerprint for one in harness.received_by(other(peer))] == [name]


@pytest.mark.parametrize("tokens", [MOVED_PROGRESS - 1, MOVED_PROGRESS])
def test_a_request_that_was_in_progress_at_two_losses_stays_unless_it_has_progressed(tokens: int) -> None:
    """Deaths from outside quarantine a request that is in progress at all of them: one scheduler has to see them."""
    name = b"doubtful"
    harness = ReplicaHarness()
    peer, _ = harness.send(1, name=name)
    for status in (LOADING._replace(suspects=name), LOADING):
        harness.pool.handle(peer, status)
    (again,) = harness.received_by(other(peer))
    harness.tokens(other(peer), again.rid, "a" * tokens)
    harness.pool.handle(peer, READY)
    harness.received_by(peer)
    for status in (LOADING._replace(suspects=name), LOADING):
        harness.pool.handle(other(peer), status)
    assert bool(harness.received_by(peer)) == (tokens == MOVED_PROGRESS)


def test_requests_stay_where_no_other_replica_computes() -> None:
    harness = ReplicaHarness()
    peer, _ = harness.send(1)
    harness.pool.handle(other(peer), LOADING)
    harness.pool.handle(peer, LOADING)
    assert harness.received_by(peer) == harness.received_by(other(peer)) == []
    harness.pool.handle(other(peer), READY)
    assert len(harness.received_by(other(peer))) == 1


def test_a_request_goes_only_where_its_adapter_is() -> None:
    harness = ReplicaHarness()
    adapter = LoadedAdapter("name", "/path", b"digest")
    harness.pool.handle(A, READY._replace(adapters=[adapter]))
    harness.pool.handle(API, Generate(1, "Hello", SamplingParams(5, adapter="name"), 20))
    (add,) = harness.received_by(A)
    harness.pool.handle(A, LOADING._replace(adapters=[adapter]))
    assert harness.received_by(B) == []
    harness.pool.handle(B, READY._replace(adapters=[adapter]))
    assert [one.sampling for one in harness.received_by(B)] == [add.sampling]


def test_a_draining_replica_finishes_its_requests_and_gets_no_new_ones() -> None:
    harness = ReplicaHarness()
    peer, add = harness.send(1)
    harness.pool.handle(peer, READY._replace(draining=True))
    assert {harness.send(rid)[0] for rid in range(2, 8)} == {other(peer)}
    assert harness.status() == READY
    harness.pool.handle(peer, End(add.rid, FinishReason.LENGTH))
    assert len(end_messages(harness.received_by(API))) == 1
    harness.pool.handle(other(peer), PeerDisconnected())
    assert harness.received_by(peer) == []  # its requests wait for the successor
    assert not harness.status().ready
    assert len(harness.connect(other(peer)._replace(boot=b"next"))) == 6


def test_requests_of_a_draining_replica_without_a_worker_go_on_at_another() -> None:
    harness = ReplicaHarness()
    peer, add = harness.send(1)
    harness.pool.handle(peer, LOADING._replace(draining=True))
    assert harness.received_by(peer) == [Cancel(add.rid)]
    assert len(harness.received_by(other(peer))) == 1


# --- other hosts ------------------------------------------------------------------------------------------------------


def test_schedulers_of_two_hosts_may_have_the_same_number() -> None:
    harness = PoolHarness(scheduler=False)
    peers = [PeerId("scheduler", 0, boot) for boot in (b"1", b"2")]
    for peer, site in zip(peers, ("here", "there"), strict=True):
        harness.pool.handle(peer, hello(peer)._replace(site=site))
        harness.pool.handle(peer, READY)
    for rid in range(20):
        harness.pool.handle(API, Generate(rid, f"{rid} differs", SamplingParams(5), 20))
    shares = [len(harness.received_by(peer)) for peer in peers]
    assert (min(shares) > 5, sum(shares)) == (True, 20)
    harness.pool.handle(peers[0], PeerDisconnected())
    assert len(harness.received_by(peers[1])) == shares[0]
    harness.pool.remove_scheduler(ReplicaId("here", 0))
    assert harness.pool._schedulers.replica_ids == {ReplicaId("there", 0)}
    harness.pool.remove_scheduler(ReplicaId("there", 0))  # it is connected
    assert harness.pool._schedulers.replica_ids == {ReplicaId("there", 0)}


def test_a_scheduler_that_connects_from_elsewhere_takes_its_requests_along() -> None:
    """Its old connection has not been noticed as lost."""
    harness = ReplicaHarness()
    harness.pool.handle(B, PeerDisconnected())
    peer, add = harness.send(1)
    assert [one.rid for one in harness.connect(peer)] == [add.rid]
    assert [one.rid for one in harness.connect(peer._replace(boot=b"next"))] == [add.rid]


def test_a_request_that_ends_remote_schedulers_ends_at_most_two() -> None:
    """What a scheduler of another host had in progress is not known before its successor connects."""
    name, third = b"poisoned", PeerId("scheduler", 2, b"c")
    harness = ReplicaHarness(in_progress=None)
    harness.connect(third)
    harness.pool.handle(API, Generate(1, "Hello", SamplingParams(5), 20, context=RequestContext(name)))
    ((first, _),) = ((peer, one) for peer in (A, B, third) for one in harness.received_by(peer))
    harness.pool.handle(first, PeerDisconnected())
    left = [peer for peer in (A, B, third) if peer != first]
    ((second, _),) = ((peer, one) for peer in left for one in harness.received_by(peer))
    harness.pool.handle(second, PeerDisconnected())
    (last,) = (peer for peer in left if peer != second)
    assert harness.received_by(last) == []
    # The first one's successor tells that it was in progress: it is tried there.
    report = LastExit(first.boot, "was killed by SIGSEGV", False, name, 1000)
    assert len(harness.connect(first._replace(boot=b"next"), last_exit=report)) == 1
    assert harness.received_by(last) == []


def test_innocent_requests_wait_for_the_report_only() -> None:
    name, third = b"innocent", PeerId("scheduler", 2, b"c")
    harness = ReplicaHarness(in_progress=None)
    first, _ = harness.send(1, name=name)
    harness.pool.handle(first, PeerDisconnected())
    second = other(first)
    assert len(harness.received_by(second)) == 1
    harness.connect(third)
    harness.pool.handle(second, PeerDisconnected())
    assert harness.received_by(third) == []
    report = LastExit(second.boot, "was killed by SIGKILL", True, b"", 1000)
    harness.connect(second._replace(boot=b"next"), last_exit=report)
    assert not harness.pool._schedulers.assignments.waiting
