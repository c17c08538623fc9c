"""Adapters in the pool: names become digests and salts, and changes are asked for until they are answered."""

import pytest

from tests.tokenizer.house import API, LIMITS, OTHER, READY, House, ids_of
from tgi.kernel.link import Gone
from tgi.kernel.messages import Adapt, Adapted, Generate, Reason, Sampling, decode
from tgi.kernel.pack import INT32, pack
from tgi.kernel.presence import Adapter

POEMS, CODE = Adapter("poems", "/lora/poems", b"\1" * 16), Adapter("code", "/lora/code", b"\2" * 16)
ASKS = Sampling(5, adapter="poems")
STALE = b"\3" * 16


@pytest.fixture
def house() -> House:
    house = House()
    house.pool.handle(house.scheduler, READY._replace(adapters=[POEMS, CODE]))
    house.take()
    house.told.clear()
    return house


def test_a_name_becomes_a_digest_and_a_salt(house: House) -> None:
    house.pool.handle(API, Generate(1, "a", ASKS))
    house.pool.handle(API, Generate(2, "a", ASKS._replace(adapter_digest=STALE)))  # the api's word is older
    house.pool.handle(API, Generate(3, "a", Sampling(5)))
    one, two, plain = house.said(house.scheduler)
    for add in (one, two):
        assert (add.salt, decode(add.sampling)) == (POEMS.digest, ASKS._replace(adapter_digest=POEMS.digest))
    assert (plain.salt, decode(plain.sampling)) == (b"", Sampling(5))


def test_ids_go_on_with_the_adapter_that_drew_them_or_fail_below(house: House) -> None:
    began = ASKS._replace(adapter_digest=STALE)
    house.pool.handle(API, Generate(1, "a", began, resume=pack(INT32, ids_of("b"))))
    (add,) = house.said(house.scheduler)
    assert (add.salt, decode(add.sampling)) == (STALE, began)
    house.scheduler_gone()
    house.scheduler_up()
    assert house.said(house.scheduler) == [add]


def test_an_unknown_name_is_refused_behind_the_limits(house: House) -> None:
    for rid, inputs in ((1, "a"), (2, "a " * 3000)):
        house.pool.handle(API, Generate(rid, inputs, Sampling(5, adapter="none")))
    unknown, long = house.said(API)
    assert (unknown.reason, unknown.message) == (Reason.INVALID, "`adapter_id` none not found")
    assert "must have less than" in long.message or "must be <=" in long.message
    house.pool.handle(house.scheduler, READY._replace(adapters=[CODE]))
    house.said(API)
    house.pool.handle(API, Generate(3, "a", ASKS))
    (end,) = house.said(API)
    assert end.message == "`adapter_id` poems not found"


def test_a_request_waits_until_they_are_known() -> None:
    house = House(scheduler=False)
    house.pool.handle(API, Generate(1, "a", ASKS))
    house.scheduler_up()
    house.pool.handle(house.scheduler, READY._replace(limits=None))
    assert house.said(house.scheduler) == []
    house.pool.handle(house.scheduler, READY._replace(adapters=[POEMS]))
    (add,) = house.said(house.scheduler)
    assert add.salt == POEMS.digest


def test_they_are_known_while_there_is_no_scheduler(house: House) -> None:
    house.scheduler_gone()
    (status,) = house.said(API)
    assert (status.limits, status.adapters) == (LIMITS, [POEMS, CODE])
    house.scheduler_up()
    house.pool.handle(house.scheduler, READY._replace(limits=None))  # it waits for a worker itself
    house.pool.handle(API, Generate(1, "a", ASKS))
    (add,) = house.said(house.scheduler)
    assert add.salt == POEMS.digest


@pytest.mark.parametrize("wanted", [("new", "/lora/new"), ("poems", "")])
def test_a_change_is_asked_for_until_it_is_answered(house: House, wanted: tuple[str, str]) -> None:
    house.pool.handle(API, Adapt(7, *wanted))
    house.pool.handle(OTHER, Adapt(7, "mine", "/lora/mine"))
    house.pool.handle(OTHER, Gone())
    first = house.said(house.scheduler)
    assert [order[1:] for order in first] == [wanted, ("mine", "/lora/mine")]
    assert not house.pool.idle
    house.scheduler_gone()
    house.scheduler_up()
    (again,) = house.said(house.scheduler)
    assert again[1:] == wanted
    house.said(API)
    house.pool.handle(house.scheduler, Adapted(again.rid, "no room"))
    assert house.said(API) == [Adapted(7, "no room")]
    assert house.pool.idle
    house.pool.handle(house.scheduler, Adapted(first[1].rid))  # nobody waits for it
    assert house.said(API) == []


def test_a_change_waits_for_a_scheduler() -> None:
    house = House(scheduler=False)
    house.pool.handle(API, Adapt(7, "new", "/lora/new"))
    house.scheduler_up()
    (order,) = house.said(house.scheduler)
    assert order[1:] == ("new", "/lora/new")
