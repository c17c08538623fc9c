"""The likeliest tokens reach whoever asked for them, beside their tokens and once, whatever happens on the way."""

from typing import Any

import pytest

from tests.scheduler.house import House, ok
from tests.tops import split_tops
from tgi.kernel.messages import Reason, Tokens
from tgi.kernel.pack import INT32, UINT32, pack, uints
from tgi.scheduler.core import Config
from tgi.worker.scripted import Script

SCRIPT = Script(pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=64)


def heard(house: House, place: int) -> list[Tokens]:
    """The tokens that a tokenizer was sent."""
    peer = house.tokenizers[place].peer
    return [message for other, message in house.heard if other == peer and isinstance(message, Tokens)]


def test_every_tokenizer_gets_those_of_its_own_rows() -> None:
    house = House(SCRIPT, tokenizers=3)
    house.worker_up()
    everybody = [house.add([n, 2, 3], 6 + n, place=n % 2, seed=n, top_n=n // 2) for n in range(6)]
    everybody += [house.add([n, 2, 3], 6, place=2) for n in range(2)]
    house.run()
    for asked in everybody:
        ok(asked, SCRIPT)
    lengths = {len(top) for asked in everybody for top in asked.tops}
    assert lengths == {0, 1, 2, 3}  # some are longer than asked for
    mixed = [message for message in heard(house, 0) if len(set(uints(message.top_counts))) > 1]
    assert any(0 in uints(message.top_counts) for message in mixed)
    assert all(message.top_counts for message in heard(house, 0) if len(message.rids) > 4)
    assert not any(message.top_counts or message.top_ids or message.top_logprobs for message in heard(house, 2))


@pytest.mark.parametrize("kind", ["cancel", "stop"])
def test_a_dropped_row_takes_its_own_away(kind: str) -> None:
    house = House(SCRIPT)
    house.worker_up()
    before, dropped, behind = (house.add([n, 2, 3], 12, top_n=n + 1) for n in range(3))
    for _ in range(4):
        house.step()
    house.plan()
    house.compute()
    getattr(house, kind)(dropped)
    house.deliver()
    assert len(before.tops) == len(behind.tops) == len(dropped.tops) + 1
    house.run()
    ok(before, SCRIPT)
    ok(behind, SCRIPT)


@pytest.mark.parametrize("caching", [True, False])
def test_nothing_is_sent_again_after_a_preemption(caching: bool) -> None:
    """Four requests of 20 tokens want 20 pages; there are 8."""
    script = SCRIPT._replace(pages=8, slots=4, max_total_tokens=32, max_batch_prefill_tokens=16)
    house = House(script, Config(prefix_caching=caching))
    house.worker_up()
    everybody = [house.add([n, 2, 3, 4], 16, seed=n, top_n=n) for n in range(4)]
    house.run()
    assert house.core.counters.preemptions > 0
    assert house.core.counters.resumed_tokens > 0
    for asked in everybody:
        assert len(asked.tops) == 16
        ok(asked, script)


@pytest.mark.parametrize("loss", ["worker_up", "new_core"])
def test_nothing_is_sent_again_after_a_loss(loss: str) -> None:
    house = House(SCRIPT, tokenizers=2)
    house.worker_up()
    everybody = [house.add([n, 2, 3], 12, place=n % 2, seed=7, top_n=2, choice=n) for n in range(6)]
    for _ in range(5):
        house.step()
    shown = [len(asked.tops) for asked in everybody]
    assert min(shown) > 0
    getattr(house, loss)()
    assert [len(asked.tops) for asked in everybody] == shown
    house.run()
    for asked in everybody:
        assert len(asked.tops) == 12
        ok(asked, SCRIPT)


def test_choices_of_one_seed_get_answers_of_their_own() -> None:
    house = House(SCRIPT)
    house.worker_up()
    drawn = [house.add([1, 2, 3], 8, seed=5, choice=choice) for choice in range(4)]
    single = house.add([1, 2, 3], 8, seed=5)
    house.run()
    assert single.ids == drawn[0].ids
    assert len({tuple(asked.ids) for asked in drawn}) == 4


@pytest.mark.parametrize(
    "columns",
    [
        {"top_counts": pack(UINT32, [1])},
        {"top_counts": pack(UINT32, [1, 0, 0])},
        {"top_counts": pack(UINT32, [2, 0])},
        {"top_counts": b"\1\0\0\0\0"},
        {"top_counts": pack(UINT32, [1, 1])},
        {"top_counts": b""},
        {"top_logprobs": b""},
        {"top_ids": pack(INT32, [1, 2])},
    ],
    ids=str,
)
def test_columns_that_do_not_fit_fail_the_step(columns: dict[str, Any]) -> None:
    house = House(SCRIPT)
    house.worker_up()
    asking, other = house.add([1, 2, 3], 1, top_n=1), house.add([4, 5, 6], 4)
    house.plan()
    house.compute()
    good = pack(UINT32, [1, 0]), pack(INT32, [7]), house.results[0].logprobs[:4]
    result = house.results[0]._replace(top_counts=good[0], top_ids=good[1], top_logprobs=good[2])
    assert split_tops(result) == [[(7, pytest.approx(-1, abs=5))], []]
    house.results[0] = result._replace(**columns)
    house.deliver()
    assert not asking.ids
    assert not other.ids
    house.steps.clear()
    house.worker_up()
    house.run()
    assert asking.end is not None
    assert asking.end.reason == Reason.LENGTH
    ok(other, SCRIPT)
