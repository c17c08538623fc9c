"""Prompt logprobs arrive completely, in order and once, through chunks, preemptions and crashes."""

from typing import Any

import pytest

from tests.scheduler.simulated_tokenizers import GREEDY, SubmittedRequest
from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column
from tgi.microkernel.messages.protocol import Add, FinishReason, PromptLogprobs, encode
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

WORKER_CONFIG = FakeWorkerConfig(
    pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=64
)
PROMPT = list(range(1, 22))


def message_lengths(sim: Simulation) -> list[int]:
    """The number of logprobs in each message."""
    return [len(message.logprobs) // 4 for _, message in sim.received if isinstance(message, PromptLogprobs)]


@pytest.mark.parametrize("budget", [128, 9, 4], ids=lambda budget: f"chunks of {budget}")
def test_each_chunk_brings_its_prompt_logprobs(budget: int) -> None:
    worker_config = WORKER_CONFIG._replace(max_batch_prefill_tokens=budget)
    sim = Simulation(worker_config)
    sim.worker_up()
    requests = [sim.add([n, *PROMPT], 3, prompt_top_n=top_n) for n, top_n in enumerate([0, None, 3, 1])]
    sim.run()
    for request in requests:
        assert_as_if_alone(request, worker_config)
    assert sum(message_lengths(sim)) == 3 * len(PROMPT)
    assert (len(message_lengths(sim)) > 3) == (budget < 128)


def test_a_cached_prefix_is_computed_again_for_prompt_logprobs() -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    first = sim.add(PROMPT, 4)
    sim.run()
    with_logprobs, other = sim.add([*PROMPT], 4, prompt_top_n=1), sim.add([*PROMPT, 7], 4)
    sim.run()
    for request in (first, with_logprobs, other):
        assert_as_if_alone(request, WORKER_CONFIG)
    assert with_logprobs.end is not None
    assert with_logprobs.end.cached_tokens == 0
    assert other.end is not None
    assert other.end.cached_tokens == 20
    assert len(with_logprobs.prompt_logprobs) == len(PROMPT) - 1


def test_a_resumed_request_uses_the_cache_for_logprobs_that_it_has() -> None:
    """The request has the first 10 logprobs already: only positions that yield the others are computed."""
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    whole = sim.add(PROMPT, 4, prompt_top_n=2)
    sim.run()
    assert_as_if_alone(whole, WORKER_CONFIG)
    peer = sim.tokenizers[0].peer
    resumed = SubmittedRequest(PROMPT, 4, [], GREEDY, [], 2)
    resumed.prompt_logprobs = whole.prompt_logprobs[:10]
    resumed.prompt_tops = whole.prompt_tops[:20]
    sim.tokenizers[0].requests[99] = resumed
    sim.handle(Add(99, pack_column(INT32, PROMPT), 4, resumed.sampling, prompt_logprobs_from=11, prompt_top_n=2), peer)
    sim.run()
    assert_as_if_alone(resumed, WORKER_CONFIG)
    assert resumed.end is not None
    assert resumed.end.cached_tokens == 8


@pytest.mark.parametrize("caching", [True, False])
def test_nothing_is_sent_twice_after_a_preemption(caching: bool) -> None:
    worker_config = WORKER_CONFIG._replace(pages=12, slots=4, max_total_tokens=48, max_batch_prefill_tokens=8)
    sim = Simulation(worker_config, SchedulerConfig(prefix_caching=caching))
    sim.worker_up()
    requests = [sim.add([n, *PROMPT[:9]], 20, prompt_top_n=n) for n in range(4)]
    sim.run()
    assert sim.scheduler.counters.preemptions > 0
    for request in requests:
        assert_as_if_alone(request, worker_config)
    assert sum(message_lengths(sim)) == 4 * 9


@pytest.mark.parametrize("loss", ["worker_up", "restart_scheduler"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_nothing_is_sent_twice_after_a_crash(loss: str, steps: int) -> None:
    worker_config = WORKER_CONFIG._replace(max_batch_prefill_tokens=8)
    sim = Simulation(worker_config)
    sim.worker_up()
    requests = [sim.add([n, *PROMPT], 6, prompt_top_n=n) for n in range(2)]
    for _ in range(steps):
        sim.step()
    received = [len(request.prompt_logprobs) for request in requests]
    assert any(received)
    getattr(sim, loss)()
    assert [len(request.prompt_logprobs) for request in requests] == received
    sim.run()
    for request in requests:
        assert_as_if_alone(request, worker_config)


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    request = sim.add([5], 3, prompt_top_n=2)
    sim.run()
    assert_as_if_alone(request, WORKER_CONFIG)
    assert message_lengths(sim) == []


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("budget", [64, 9])
def test_a_prompt_only_request_draws_no_token(budget: int, drafts: int) -> None:
    """A prompt may fill the context: no position after it is computed."""
    worker_config = WORKER_CONFIG._replace(max_batch_prefill_tokens=budget, vocab_size=5)
    sim = Simulation(worker_config, SchedulerConfig(max_drafts=drafts))
    sim.worker_up()
    prompt_only = [sim.add([n, *[1] * 63], 0, prompt_top_n=n) for n in range(3)]
    others = [sim.add([1] * (9 + n), 30, prompt_top_n=n or None) for n in range(3)]
    sim.run()
    for request in (*prompt_only, *others):
        assert_as_if_alone(request, worker_config)
    assert [len(request.prompt_logprobs) for request in prompt_only] == [63] * 3
    sim.commit()
    assert sim.scheduler.pages_used == 0


@pytest.mark.parametrize("loss", ["worker_up", "restart_scheduler"])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_prompt_only_request_survives_a_crash(loss: str, steps: int) -> None:
    worker_config = WORKER_CONFIG._replace(max_batch_prefill_tokens=8)
    sim = Simulation(worker_config)
    sim.worker_up()
    prompt_only = [sim.add([n, *PROMPT], 0, prompt_top_n=n) for n in range(2)]
    for _ in range(steps):
        sim.step()
    getattr(sim, loss)()
    sim.run()
    for request in prompt_only:
        assert_as_if_alone(request, worker_config)


def test_without_prompt_logprobs_nothing_changes() -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    sim.add(PROMPT, 4)
    sim.run()
    assert all(not slot.prompt_logprobs_from for step in sim.sent for slot in step.slots)
    assert message_lengths(sim) == []


@pytest.mark.parametrize("fields", [{"prompt_logprobs_from": -1}, {"prompt_top_n": -1}, {"prompt_top_n": 21}], ids=str)
def test_fields_out_of_range_are_rejected(fields: dict[str, int]) -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    peer = sim.tokenizers[0].peer
    sim.scheduler.handle(Add(5, pack_column(INT32, [1]), 1, encode(GREEDY), **fields), peer, 1.0)  # type: ignore[arg-type]
    (end,) = [message for _, message in sim.scheduler.outgoing()]
    assert end.reason == FinishReason.INVALID


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt_logprobs": b""},
        {"prompt_logprobs": pack_column(FLOAT32, [0.0])},
        {"prompt_top_ids": b""},
        {"prompt_top_logprobs": pack_column(FLOAT32, [0.0] * 3)},
    ],
    ids=str,
)
def test_prompt_columns_that_do_not_fit_fail_the_step(columns: dict[str, Any]) -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    with_logprobs = sim.add([1, 2, 3], 2, prompt_top_n=1)
    sim.plan()
    sim.compute()
    sim.results[0] = sim.results[0]._replace(**columns)
    sim.deliver()
    assert not with_logprobs.ids
    assert not with_logprobs.prompt_logprobs
    sim.steps.clear()
    sim.worker_up()
    sim.run()
    assert_as_if_alone(with_logprobs, WORKER_CONFIG)
