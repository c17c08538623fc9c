"""Adapters in the pool: names become digests and cache salts; updates are sent again until they are answered."""

import pytest

from tests.tokenizer.harness import API, LIMITS, OTHER, READY, PoolHarness, ids_of
from tgi.microkernel.links.link import PeerDisconnected
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import (
    AdapterUpdated,
    FinishReason,
    Generate,
    LoadedAdapter,
    UpdateAdapter,
    decode,
)
from tgi.microkernel.messages.sampling_params import SamplingParams

POEMS, CODE = LoadedAdapter("poems", "/lora/poems", b"\1" * 16), LoadedAdapter("code", "/lora/code", b"\2" * 16)
ASKS = SamplingParams(5, adapter="poems")
STALE = b"\3" * 16


@pytest.fixture
def harness() -> PoolHarness:
    harness = PoolHarness()
    harness.pool.handle(harness.scheduler, READY._replace(adapters=[POEMS, CODE]))
    harness.collect_outgoing()
    harness.sent.clear()
    return harness


def test_adapter_name_sets_digest_and_cache_salt(harness: PoolHarness) -> None:
    harness.pool.handle(API, Generate(1, "a", ASKS))
    harness.pool.handle(API, Generate(2, "a", ASKS._replace(adapter_digest=STALE)))  # the api's digest is out of date
    harness.pool.handle(API, Generate(3, "a", SamplingParams(5)))
    one, two, plain = harness.received_by(harness.scheduler)
    for add in (one, two):
        assert (add.cache_salt, decode(add.sampling)) == (POEMS.digest, ASKS._replace(adapter_digest=POEMS.digest))
    assert (plain.cache_salt, decode(plain.sampling)) == (b"", SamplingParams(5))


def test_resumed_request_keeps_its_adapter_digest(harness: PoolHarness) -> None:
    began = ASKS._replace(adapter_digest=STALE)
    harness.pool.handle(API, Generate(1, "a", began, resume_ids=pack_column(INT32, ids_of("b"))))
    (add,) = harness.received_by(harness.scheduler)
    assert (add.cache_salt, decode(add.sampling)) == (STALE, began)
    harness.disconnect_scheduler()
    harness.connect_scheduler()
    (again,) = harness.received_by(harness.scheduler)
    assert again == add._replace(context=again.context)


def test_unknown_adapter_is_rejected_after_token_limits(harness: PoolHarness) -> None:
    for rid, inputs in ((1, "a"), (2, "a " * 3000)):
        harness.pool.handle(API, Generate(rid, inputs, SamplingParams(5, adapter="none")))
    unknown, long = harness.received_by(API)
    assert (unknown.reason, unknown.message) == (FinishReason.INVALID, "`adapter_id` none not found")
    assert "must have less than" in long.message or "must be <=" in long.message
    harness.pool.handle(harness.scheduler, READY._replace(adapters=[CODE]))
    harness.received_by(API)
    harness.pool.handle(API, Generate(3, "a", ASKS))
    (end,) = harness.received_by(API)
    assert end.message == "`adapter_id` poems not found"


def test_request_waits_until_adapters_are_known() -> None:
    harness = PoolHarness(scheduler=False)
    harness.pool.handle(API, Generate(1, "a", ASKS))
    harness.connect_scheduler()
    harness.pool.handle(harness.scheduler, READY._replace(limits=None))
    assert harness.received_by(harness.scheduler) == []
    harness.pool.handle(harness.scheduler, READY._replace(adapters=[POEMS]))
    (add,) = harness.received_by(harness.scheduler)
    assert add.cache_salt == POEMS.digest


def test_adapters_stay_known_without_scheduler(harness: PoolHarness) -> None:
    harness.disconnect_scheduler()
    (status,) = harness.received_by(API)
    assert (status.limits, status.adapters) == (LIMITS, [POEMS, CODE])
    harness.connect_scheduler()
    harness.pool.handle(harness.scheduler, READY._replace(limits=None))  # the scheduler waits for a worker
    harness.pool.handle(API, Generate(1, "a", ASKS))
    (add,) = harness.received_by(harness.scheduler)
    assert add.cache_salt == POEMS.digest


@pytest.mark.parametrize("wanted", [("new", "/lora/new"), ("poems", "")])
def test_update_is_sent_again_until_it_is_answered(harness: PoolHarness, wanted: tuple[str, str]) -> None:
    harness.pool.handle(API, UpdateAdapter(7, *wanted))
    harness.pool.handle(OTHER, UpdateAdapter(7, "mine", "/lora/mine"))
    harness.pool.handle(OTHER, PeerDisconnected())
    harness.pool.handle(API, UpdateAdapter(8, "later", "/lora/later"))
    (first,) = harness.received_by(harness.scheduler)
    assert (first.name, first.path) == wanted
    assert not harness.pool.idle
    harness.disconnect_scheduler()
    harness.connect_scheduler()
    assert harness.received_by(harness.scheduler) == [first]
    harness.received_by(API)
    harness.pool.handle(harness.scheduler, AdapterUpdated(first.rid, "no room"))
    assert harness.received_by(API) == [AdapterUpdated(7, "no room")]
    (second,) = harness.received_by(harness.scheduler)  # that of the front end that has ended is dropped
    assert (second.name, second.path) == ("later", "/lora/later")
    harness.pool.handle(harness.scheduler, AdapterUpdated(first.rid))  # is answered already
    assert harness.received_by(API) == []
    harness.pool.handle(harness.scheduler, AdapterUpdated(second.rid))
    assert harness.received_by(API) == [AdapterUpdated(8)]
    assert harness.pool.idle


def test_update_waits_for_a_scheduler() -> None:
    harness = PoolHarness(scheduler=False)
    harness.pool.handle(API, UpdateAdapter(7, "new", "/lora/new"))
    harness.connect_scheduler()
    (order,) = harness.received_by(harness.scheduler)
    assert (order.name, order.path) == ("new", "/lora/new")


def test_updates_of_front_ends_are_refused_where_tokenizers_do_not_allow_them() -> None:
    """A front end on another host has settings of its own."""
    harness = PoolHarness(allow_adapter_updates=False)
    for update in (UpdateAdapter(7, "mine", "/lora/mine"), UpdateAdapter(8, "mine", "")):
        harness.pool.handle(API, update)
        ((peer, answer),) = harness.pool.drain_outgoing()
        assert (peer, answer.rid) == (API, update.rid)
        assert "--allow-adapter-updates" in answer.error
    assert harness.pool.idle


def test_loaded_adapters_are_read_again_without_permission() -> None:
    """At a SIGHUP of a front end."""
    harness = PoolHarness(allow_adapter_updates=False)
    harness.pool.handle(harness.scheduler, READY._replace(adapters=[POEMS]))
    harness.pool.drain_outgoing()
    harness.pool.handle(API, UpdateAdapter(7, POEMS.name, POEMS.path))
    (order,) = harness.received_by(harness.scheduler)
    assert (order.name, order.path) == (POEMS.name, POEMS.path)
