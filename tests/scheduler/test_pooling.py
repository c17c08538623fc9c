"""Requests that end in a vector: each gets its own, once, through chunks, other requests, cancels and lost workers."""

import pytest

from tests.scheduler.simulated_tokenizers import GREEDY, SubmittedRequest
from tests.scheduler.simulation import Simulation
from tgi.microkernel.messages.codec import FLOAT32, INT32, pack_column
from tgi.microkernel.messages.protocol import Add, Cancel, End, FinishReason, StepResult
from tgi.scheduler.in_flight import vectors_fit
from tgi.worker.fake_worker.fake_tokens import fake_vector
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

# One page for each request, as a model without a KV cache reports.
WORKER = FakeWorkerConfig(pages=16, page_size=64, slots=8, vocab_size=128, max_total_tokens=64)
FIRST_RID = 1000


def prompts(count: int = 12) -> list[list[int]]:
    return [[1 + (index * 7 + at) % 100 for at in range(1 + 5 * index)] for index in range(count)]


def expected(prompt: list[int]) -> bytes:
    chain = 0
    for token in prompt:
        chain = hash((chain, token))
    return pack_column(FLOAT32, fake_vector(chain))


def add(sim: Simulation, rid: int, prompt: list[int], pooling: bool = True) -> None:
    tokenizer = sim.tokenizers[0]
    request = tokenizer.requests[rid] = SubmittedRequest(prompt, 0, [], GREEDY, [])
    sim.handle(Add(rid, pack_column(INT32, prompt), 0, request.sampling, pooling=pooling), tokenizer.peer)


def submit(sim: Simulation, wanted: list[list[int]]) -> None:
    for number, prompt in enumerate(wanted):
        add(sim, FIRST_RID + number, prompt)


def ends(sim: Simulation) -> dict[int, End]:
    found: dict[int, End] = {}
    for _, message in sim.received:
        if isinstance(message, End) and message.rid >= FIRST_RID:
            assert message.rid not in found
            found[message.rid] = message
    return found


@pytest.mark.parametrize("budget", [512, 20, 7], ids=lambda budget: f"chunks of {budget}")
@pytest.mark.parametrize("loses_worker", [False, True])
def test_each_request_gets_its_vector(budget: int, loses_worker: bool) -> None:
    sim = Simulation(WORKER._replace(max_batch_prefill_tokens=budget))
    sim.worker_up()
    submit(sim, prompts())
    if loses_worker:
        sim.step()
        sim.worker_up()  # another one: what the first had computed is lost
    sim.run()
    found = ends(sim)
    assert [found[FIRST_RID + number].vector for number in range(12)] == [expected(one) for one in prompts()]
    assert {end.reason for end in found.values()} == {FinishReason.LENGTH}
    assert [found[FIRST_RID + number].prompt_tokens for number in range(12)] == [*map(len, prompts())]
    assert all(end.cached_tokens == end.generated_tokens == 0 for end in found.values())
    assert sim.scheduler.running == sim.scheduler.queued == 0


def test_a_cancelled_request_gets_no_vector_and_leaves_those_of_others() -> None:
    sim = Simulation(WORKER)
    sim.worker_up()
    submit(sim, prompts())
    sim.handle(Cancel(FIRST_RID + 3), sim.tokenizers[0].peer)
    sim.run()
    found = ends(sim)
    assert (found[FIRST_RID + 3].reason, found[FIRST_RID + 3].vector) == (FinishReason.CANCELLED, b"")
    assert found[FIRST_RID + 4].vector == expected(prompts()[4])


def test_nothing_to_compute_is_refused() -> None:
    sim = Simulation(WORKER)
    sim.worker_up()
    add(sim, FIRST_RID, [])
    add(sim, FIRST_RID + 1, [1], pooling=False)
    sim.run()
    assert {end.reason for end in ends(sim).values()} == {FinishReason.INVALID}


@pytest.mark.parametrize(
    ("size", "rows", "fits"),
    [(0, 0, True), (8, 0, False), (0, 2, False), (16, 2, True), (12, 2, False), (8, 3, False)],
)
def test_vectors_have_to_fit_the_rows(size: int, rows: int, fits: bool) -> None:
    assert vectors_fit(StepResult(1, 1, b"", b"", b"", vectors=bytes(size)), rows) == fits
