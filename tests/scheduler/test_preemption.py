"""Preemption: when pages run out, the latest arrival returns to the queue with all its ids."""

import pytest

from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tgi.microkernel.messages.codec import unpack_int32
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

# Four requests of 20 tokens need 20 pages; there are 8.
WORKER_CONFIG = FakeWorkerConfig(
    pages=8, page_size=4, slots=4, vocab_size=128, max_total_tokens=32, max_batch_prefill_tokens=16
)


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_does_not_change_tokens(caching: bool) -> None:
    sim = Simulation(WORKER_CONFIG, SchedulerConfig(prefix_caching=caching))
    sim.worker_up()
    requests = [sim.add([n, 2, 3, 4], 16) for n in range(4)]
    sim.run()
    assert sim.scheduler.counters.preemptions > 0
    for request in requests:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_the_latest_arrival_is_preempted_and_the_first_never() -> None:
    sim = Simulation(WORKER_CONFIG, SchedulerConfig(prefix_caching=False))
    sim.worker_up()
    requests = [sim.add([n, 2, 3, 4], 16) for n in range(4)]
    sim.run()
    admitted = [unpack_int32(slot.token_ids)[0] for step in sim.sent for slot in step.slots]
    assert admitted.count(0) == 1
    assert admitted.count(3) > 1
    ends = [peer_message[1].rid for peer_message in sim.received if type(peer_message[1]).__name__ == "End"]
    assert ends == sorted(ends)
    assert all(request.end is not None for request in requests)


def test_a_preempted_request_is_prefilled_with_its_generated_ids() -> None:
    sim = Simulation(WORKER_CONFIG, SchedulerConfig(prefix_caching=False))
    sim.worker_up()
    sim.add([0, 2, 3, 4], 16)
    second_request = sim.add([1, 2, 3, 4], 16)
    sim.run()
    _, second = [slot for step in sim.sent for slot in step.slots if unpack_int32(slot.token_ids)[0] == 1]
    generated = len(unpack_int32(second.token_ids)) - second.prompt_tokens
    assert generated > 0
    assert sim.scheduler.counters.recomputed_tokens == generated
    assert unpack_int32(second.token_ids) == [*second_request.prompt, *second_request.ids[:generated]]
    assert_as_if_alone(second_request, WORKER_CONFIG)


def test_admission_preempts_no_request() -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    sim.add(list(range(20)), 5)  # five pages, later six
    sim.step()
    late = sim.add(list(range(50, 70)), 1)
    while sim.scheduler.queued:
        sim.step()
    assert sim.scheduler.counters.preemptions == 0
    sim.run()
    assert_as_if_alone(late, WORKER_CONFIG)


def test_a_request_that_needs_every_page_is_served() -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    small = sim.add([1], 20)
    big = sim.add(list(range(31)), 1)
    sim.run()
    assert_as_if_alone(small, WORKER_CONFIG)
    assert_as_if_alone(big, WORKER_CONFIG)


def test_the_latest_arrival_is_preempted_first() -> None:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    requests = [sim.add([n, 2, 3, 4], 16) for n in range(4)]
    while not sim.scheduler.counters.preemptions:
        sim.step()
    shown = len(requests[3].ids)
    while len(requests[0].ids) < shown + 2:
        sim.step()
    assert len(requests[3].ids) == shown
    assert min(len(request.ids) for request in requests[:3]) > shown


def test_spare_pages_do_not_block_a_request_that_needs_every_page_forever() -> None:
    worker_config = WORKER_CONFIG._replace(pages=200, max_total_tokens=800, max_batch_prefill_tokens=800)
    sim = Simulation(worker_config)
    sim.worker_up()
    small = sim.add([1], 8)
    sim.step()
    large = sim.add([5] * 799, 1)
    sim.run()
    assert_as_if_alone(small, worker_config)
    assert_as_if_alone(large, worker_config)


def test_a_request_that_gets_a_page_and_is_preempted_in_the_same_step_leaves_the_page() -> None:
    """All pages are held, and all three requests need one. The light client is first in line, so a request of the heavy
    one is preempted for its page. Then both clients hold one slot, and the other request of the heavy client, which
    came first, preempts that of the light one. No step may send the page that it has just got."""
    worker_config = WORKER_CONFIG._replace(pages=5, max_total_tokens=20, max_batch_prefill_tokens=32)
    sim = Simulation(worker_config, SchedulerConfig(prefix_caching=False))
    sim.worker_up()
    clients = ("heavy", "heavy", "light")
    requests = [sim.add([n, 2, 3, 4], 11, client=client) for n, client in enumerate(clients)]
    sim.run()
    for request in requests:
        assert_as_if_alone(request, worker_config)
