"""The logprobs of a prompt reach whoever asked for them: all, in order and once, whatever happens on the way."""

from typing import Any

import pytest

from tests.scheduler.house import House, ok
from tests.scheduler.tokenizers import GREEDY, Asked
from tgi.kernel.messages import Add, PromptLogprobs, Reason, encode
from tgi.kernel.pack import FLOAT32, INT32, pack
from tgi.scheduler.core import Config
from tgi.worker.scripted import Script

SCRIPT = Script(pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=64)
PROMPT = list(range(1, 22))


def pieces(house: House) -> list[int]:
    """How many logprobs each message had."""
    return [len(message.logprobs) // 4 for _, message in house.heard if isinstance(message, PromptLogprobs)]


@pytest.mark.parametrize("budget", [128, 9, 4], ids=lambda budget: f"chunks of {budget}")
def test_chunks_tell_in_pieces(budget: int) -> None:
    script = SCRIPT._replace(max_batch_prefill_tokens=budget)
    house = House(script)
    house.worker_up()
    everybody = [house.add([n, *PROMPT], 3, prompt_top_n=top_n) for n, top_n in enumerate([0, None, 3, 1])]
    house.run()
    for asked in everybody:
        ok(asked, script)
    assert sum(pieces(house)) == 3 * len(PROMPT)
    assert (len(pieces(house)) > 3) == (budget < 128)


def test_a_known_prefix_is_computed_again_for_whoever_asks() -> None:
    house = House(SCRIPT)
    house.worker_up()
    first = house.add(PROMPT, 4)
    house.run()
    asking, other = house.add([*PROMPT], 4, prompt_top_n=1), house.add([*PROMPT, 7], 4)
    house.run()
    for asked in (first, asking, other):
        ok(asked, SCRIPT)
    assert asking.end is not None
    assert asking.end.cached_tokens == 0
    assert other.end is not None
    assert other.end.cached_tokens == 20
    assert len(asking.told) == len(PROMPT) - 1


def test_one_that_was_told_before_is_found_in_the_cache() -> None:
    """Whoever resumes has the first 10 logprobs: only what tells the others is computed."""
    house = House(SCRIPT)
    house.worker_up()
    whole = house.add(PROMPT, 4, prompt_top_n=2)
    house.run()
    ok(whole, SCRIPT)
    peer = house.tokenizers[0].peer
    resumed = Asked(PROMPT, 4, [], GREEDY, [], 2)
    resumed.told = whole.told[:10]
    resumed.told_tops = whole.told_tops[:20]
    house.tokenizers[0].requests[99] = resumed
    house.handle(Add(99, pack(INT32, PROMPT), 4, resumed.sampling, prompt_from=11, prompt_top_n=2), peer)
    house.run()
    ok(resumed, SCRIPT)
    assert resumed.end is not None
    assert resumed.end.cached_tokens == 8


@pytest.mark.parametrize("caching", [True, False])
def test_nothing_is_told_again_after_a_preemption(caching: bool) -> None:
    script = SCRIPT._replace(pages=12, slots=4, max_total_tokens=48, max_batch_prefill_tokens=8)
    house = House(script, Config(prefix_caching=caching))
    house.worker_up()
    everybody = [house.add([n, *PROMPT[:9]], 20, prompt_top_n=n) for n in range(4)]
    house.run()
    assert house.core.counters.preemptions > 0
    for asked in everybody:
        ok(asked, script)
    assert sum(pieces(house)) == 4 * 9


@pytest.mark.parametrize("loss", ["worker_up", "new_core"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_nothing_is_told_again_after_a_loss(loss: str, steps: int) -> None:
    script = SCRIPT._replace(max_batch_prefill_tokens=8)
    house = House(script)
    house.worker_up()
    everybody = [house.add([n, *PROMPT], 6, prompt_top_n=n) for n in range(2)]
    for _ in range(steps):
        house.step()
    told = [len(asked.told) for asked in everybody]
    assert any(told)
    getattr(house, loss)()
    assert [len(asked.told) for asked in everybody] == told
    house.run()
    for asked in everybody:
        ok(asked, script)


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    house = House(SCRIPT)
    house.worker_up()
    asked = house.add([5], 3, prompt_top_n=2)
    house.run()
    ok(asked, SCRIPT)
    assert pieces(house) == []


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("budget", [64, 9])
def test_a_prompt_is_scored_without_a_token(budget: int, drafts: int) -> None:
    """A prompt as long as the context has its logprobs, too: no position is computed behind it."""
    script = SCRIPT._replace(max_batch_prefill_tokens=budget, vocab_size=5)
    house = House(script, Config(drafts=drafts))
    house.worker_up()
    scored = [house.add([n, *[1] * 63], 0, prompt_top_n=n) for n in range(3)]
    others = [house.add([1] * (9 + n), 30, prompt_top_n=n or None) for n in range(3)]
    house.run()
    for asked in (*scored, *others):
        ok(asked, script)
    assert [len(asked.told) for asked in scored] == [63] * 3
    house.settle()
    assert house.core.pages_used == 0


@pytest.mark.parametrize("loss", ["worker_up", "new_core"])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_scored_prompt_survives_a_loss(loss: str, steps: int) -> None:
    script = SCRIPT._replace(max_batch_prefill_tokens=8)
    house = House(script)
    house.worker_up()
    scored = [house.add([n, *PROMPT], 0, prompt_top_n=n) for n in range(2)]
    for _ in range(steps):
        house.step()
    getattr(house, loss)()
    house.run()
    for asked in scored:
        ok(asked, script)


def test_whoever_does_not_ask_changes_nothing() -> None:
    house = House(SCRIPT)
    house.worker_up()
    house.add(PROMPT, 4)
    house.run()
    assert all(not slot.prompt_from for step in house.sent for slot in step.slots)
    assert pieces(house) == []


@pytest.mark.parametrize("fields", [{"prompt_from": -1}, {"prompt_top_n": -1}, {"prompt_top_n": 21}], ids=str)
def test_fields_without_a_meaning_are_refused(fields: dict[str, int]) -> None:
    house = House(SCRIPT)
    house.worker_up()
    peer = house.tokenizers[0].peer
    house.core.handle(Add(5, pack(INT32, [1]), 1, encode(GREEDY), **fields), peer, 1.0)  # type: ignore[arg-type]
    (end,) = [message for _, message in house.core.outgoing()]
    assert end.reason == Reason.INVALID


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt_logprobs": b""},
        {"prompt_logprobs": pack(FLOAT32, [0.0])},
        {"prompt_top_ids": b""},
        {"prompt_top_logprobs": pack(FLOAT32, [0.0] * 3)},
    ],
    ids=str,
)
def test_columns_that_do_not_fit_fail_the_step(columns: dict[str, Any]) -> None:
    house = House(SCRIPT)
    house.worker_up()
    asking = house.add([1, 2, 3], 2, prompt_top_n=1)
    house.plan()
    house.compute()
    house.results[0] = house.results[0]._replace(**columns)
    house.deliver()
    assert not asking.ids
    assert not asking.told
    house.steps.clear()
    house.worker_up()
    house.run()
    ok(asking, SCRIPT)
