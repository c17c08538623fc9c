"""The limits that a restarted worker must meet: some at least, some exactly."""

import logging
from typing import Any

import pytest

from tests.scheduler.simulation import Simulation
from tgi.microkernel.messages.kv_groups import KVGroup
from tgi.microkernel.messages.protocol import EQUAL_LIMITS, limits_out_of_range, limits_shortfall
from tgi.scheduler.peers import MINIMUM_LIMITS, SAME_LIMITS
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

LIMITS = FakeWorkerConfig().limits()


@pytest.mark.parametrize("name", MINIMUM_LIMITS)
def test_a_restarted_worker_may_offer_more_and_not_less(name: str) -> None:
    held = getattr(LIMITS, name)
    assert limits_shortfall(LIMITS, LIMITS._replace(**{name: held + 1}), MINIMUM_LIMITS) == ""
    assert (
        limits_shortfall(LIMITS, LIMITS._replace(**{name: held - 1}), MINIMUM_LIMITS)
        == f"{name} is {held - 1}, at least {held} is needed"
    )


@pytest.mark.parametrize(("name", "other"), [("page_size", 32), ("vocab_size", 50_000), ("dtype", "bfloat16")])
def test_some_limits_must_be_equal(name: str, other: Any) -> None:
    assert name in EQUAL_LIMITS
    found = limits_shortfall(LIMITS, LIMITS._replace(**{name: other}), MINIMUM_LIMITS)
    assert found == f"{name} is {other} instead of {getattr(LIMITS, name)}"


def test_groups_are_the_same_for_a_scheduler_but_for_the_bytes_of_a_page() -> None:
    """Those change with --kv-cache-dtype and with a draft model. Replicas have nothing of each other's groups."""
    states = KVGroup("recurrent", snapshots=5, interval=64)
    groups = [KVGroup(page_bytes=64), KVGroup("sliding", 8, [1], 64), states]
    held = LIMITS._replace(groups=groups)
    wider = held._replace(groups=[group._replace(page_bytes=128) for group in groups])
    assert limits_shortfall(held, wider, MINIMUM_LIMITS, SAME_LIMITS) == ""
    assert limits_shortfall(held, LIMITS, MINIMUM_LIMITS, SAME_LIMITS).startswith("groups is [KVGroup(kind=")
    assert limits_shortfall(held, LIMITS, MINIMUM_LIMITS) == ""
    more, fewer = (held._replace(groups=[*groups[:2], states._replace(snapshots=count)]) for count in (6, 4))
    assert limits_shortfall(held, more, MINIMUM_LIMITS, SAME_LIMITS) == ""
    found = limits_shortfall(held, fewer, MINIMUM_LIMITS, SAME_LIMITS)
    assert found == "a KV group has 4 snapshots, at least 5 are needed"


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        ([], "0 KV groups"),
        ([KVGroup("latent")], "a KV group of kind 'latent'"),
        ([KVGroup("sliding")], "a KV group with a window of 0"),
        ([KVGroup(), KVGroup("recurrent", snapshots=-1, interval=8)], "a KV group with -1 snapshots"),
        ([KVGroup(), KVGroup("recurrent", snapshots=3)], "a KV group with 3 snapshots, one every 0 positions"),
        ([KVGroup("recurrent", interval=8)], "a recurrent KV group that is not the last one"),
        ([KVGroup(), *[KVGroup("recurrent", interval=8)] * 2], "a recurrent KV group that is not the last one"),
    ],
)
def test_groups_that_no_worker_has_are_named(groups: list[KVGroup], fault: str) -> None:
    assert limits_out_of_range(LIMITS._replace(groups=groups)).startswith(fault)


def test_pages_that_hold_no_token_are_named() -> None:
    two_groups = LIMITS._replace(groups=[KVGroup(), KVGroup("sliding", 8)])
    assert limits_out_of_range(two_groups._replace(pages=1)) == "pages is 1, 2 are needed for one token"
    assert limits_out_of_range(two_groups._replace(pages=2)) == ""


def test_a_worker_with_another_page_size_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    """Workers that compute differently have different page sizes: see tests/worker/test_native_models.py."""
    sim = Simulation(FakeWorkerConfig())
    sim.worker_up()
    with caplog.at_level(logging.ERROR):
        sim.worker_up(FakeWorkerConfig(page_size=32))
    assert "page_size is 32 instead of 16" in caplog.text
    sim.add([1, 2, 3])
    assert sim.plan() == 0
