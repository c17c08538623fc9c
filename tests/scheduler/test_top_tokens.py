"""Top-n tokens arrive with their tokens and once, through cancels, preemptions and crashes."""

from typing import Any

import pytest

from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tests.tops import split_tops
from tgi.microkernel.messages.codec import INT32, UINT32, pack_column, unpack_uint32
from tgi.microkernel.messages.protocol import FinishReason, Tokens
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

WORKER_CONFIG = FakeWorkerConfig(
    pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=64
)


def tokens_messages(sim: Simulation, tokenizer: int) -> list[Tokens]:
    """The token messages to a tokenizer."""
    peer = sim.tokenizers[tokenizer].peer
    return [message for other, message in sim.received if other == peer and isinstance(message, Tokens)]


def test_each_tokenizer_gets_the_top_tokens_of_its_rows() -> None:
    sim = Simulation(WORKER_CONFIG, tokenizers=3)
    sim.worker_up()
    requests = [sim.add([n, 2, 3], 6 + n, tokenizer=n % 2, seed=n, top_n=n // 2) for n in range(6)]
    requests += [sim.add([n, 2, 3], 6, tokenizer=2) for n in range(2)]
    sim.run()
    for request in requests:
        assert_as_if_alone(request, WORKER_CONFIG)
    lengths = {len(top) for request in requests for top in request.tops}
    assert lengths == {0, 1, 2, 3}  # tokens that share the last rank are included
    mixed = [message for message in tokens_messages(sim, 0) if len(set(unpack_uint32(message.top_counts))) > 1]
    assert any(0 in unpack_uint32(message.top_counts) for message in mixed)
    assert all(message.top_counts for message in tokens_messages(sim, 0) if len(message.rids) > 4)
    assert not any(message.top_counts or message.top_ids or message.top_logprobs for message in tokens_messages(sim, 2))


@pytest.mark.parametrize("kind", ["cancel", "stop"])
def test_the_top_tokens_of_a_dropped_row_are_dropped(kind: str) -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    before, dropped, after = (sim.add([n, 2, 3], 12, top_n=n + 1) for n in range(3))
    for _ in range(4):
        sim.step()
    sim.plan()
    sim.compute()
    getattr(sim, kind)(dropped)
    sim.deliver()
    assert len(before.tops) == len(after.tops) == len(dropped.tops) + 1
    sim.run()
    assert_as_if_alone(before, WORKER_CONFIG)
    assert_as_if_alone(after, WORKER_CONFIG)


@pytest.mark.parametrize("caching", [True, False])
def test_nothing_is_sent_twice_after_a_preemption(caching: bool) -> None:
    """Four requests of 20 tokens need 20 pages; there are 8."""
    worker_config = WORKER_CONFIG._replace(pages=8, slots=4, max_total_tokens=32, max_batch_prefill_tokens=16)
    sim = Simulation(worker_config, SchedulerConfig(prefix_caching=caching))
    sim.worker_up()
    requests = [sim.add([n, 2, 3, 4], 16, seed=n, top_n=n) for n in range(4)]
    sim.run()
    assert sim.scheduler.counters.preemptions > 0
    assert sim.scheduler.counters.recomputed_tokens > 0
    for request in requests:
        assert len(request.tops) == 16
        assert_as_if_alone(request, worker_config)


@pytest.mark.parametrize("loss", ["worker_up", "restart_scheduler"])
def test_nothing_is_sent_twice_after_a_crash(loss: str) -> None:
    sim = Simulation(WORKER_CONFIG, tokenizers=2)
    sim.worker_up()
    requests = [sim.add([n, 2, 3], 12, tokenizer=n % 2, seed=7, top_n=2, choice=n) for n in range(6)]
    for _ in range(5):
        sim.step()
    shown = [len(request.tops) for request in requests]
    assert min(shown) > 0
    getattr(sim, loss)()
    assert [len(request.tops) for request in requests] == shown
    sim.run()
    for request in requests:
        assert len(request.tops) == 12
        assert_as_if_alone(request, WORKER_CONFIG)


def test_choices_of_one_seed_differ() -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    drawn = [sim.add([1, 2, 3], 8, seed=5, choice=choice) for choice in range(4)]
    single = sim.add([1, 2, 3], 8, seed=5)
    sim.run()
    assert single.ids == drawn[0].ids
    assert len({tuple(request.ids) for request in drawn}) == 4


@pytest.mark.parametrize(
    "columns",
    [
        {"top_counts": pack_column(UINT32, [1])},
        {"top_counts": pack_column(UINT32, [1, 0, 0])},
        {"top_counts": pack_column(UINT32, [2, 0])},
        {"top_counts": b"\1\0\0\0\0"},
        {"top_counts": pack_column(UINT32, [1, 1])},
        {"top_counts": b""},
        {"top_logprobs": b""},
        {"top_ids": pack_column(INT32, [1, 2])},
    ],
    ids=str,
)
def test_top_columns_that_do_not_fit_fail_the_step(columns: dict[str, Any]) -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    with_tops, other = sim.add([1, 2, 3], 1, top_n=1), sim.add([4, 5, 6], 4)
    sim.plan()
    sim.compute()
    good = pack_column(UINT32, [1, 0]), pack_column(INT32, [7]), sim.results[0].logprobs[:4]
    result = sim.results[0]._replace(top_counts=good[0], top_ids=good[1], top_logprobs=good[2])
    assert split_tops(result) == [[(7, pytest.approx(-1, abs=5))], []]
    sim.results[0] = result._replace(**columns)
    sim.deliver()
    assert not with_tops.ids
    assert not other.ids
    sim.steps.clear()
    sim.worker_up()
    sim.run()
    assert with_tops.end is not None
    assert with_tops.end.reason == FinishReason.LENGTH
    assert_as_if_alone(other, WORKER_CONFIG)
