"""The life of a request: validation, cancel, stop, usage and durations; the status report; the waiting queue."""

import gc
import logging

import pytest

from tests.scheduler.simulated_tokenizers import GREEDY, SubmittedRequest
from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tgi.microkernel.links.link import PeerDisconnected
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.microkernel.messages.protocol import (
    CHUNK,
    END,
    PROTOCOL,
    Add,
    Cancel,
    End,
    FinishReason,
    Hello,
    RequestState,
    Status,
    Stop,
    Tokens,
    encode,
)
from tgi.scheduler.request import Request, TokenizerPeer
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.scheduler.waiting_queue import WaitingQueue
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

WORKER_CONFIG = FakeWorkerConfig(
    pages=64, page_size=4, slots=4, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=64
)


@pytest.fixture
def sim() -> Simulation:
    sim = Simulation(WORKER_CONFIG, tokenizers=2)
    sim.worker_up()
    return sim


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 1, "`inputs` cannot be empty"),
        ([1], 0, "`max_new_tokens` must be strictly positive"),
        (
            [1] * 60,
            5,
            "`inputs` tokens + `max_new_tokens` must be <= 64. Given: 60 `inputs` tokens and 5 `max_new_tokens`",
        ),
        (
            [1] * 64,
            1,
            "`inputs` tokens + `max_new_tokens` must be <= 64. Given: 64 `inputs` tokens and 1 `max_new_tokens`",
        ),
        *[([1, token, 1], 4, "token ids must be below 128, and not negative") for token in (128, -1, -(2**31))],
    ],
)
def test_requests_beyond_the_limits_are_rejected_at_once(
    sim: Simulation, prompt: list[int], new: int, message: str
) -> None:
    request = sim.add(prompt, new)
    assert request.end is not None
    assert (request.end.reason, request.end.message) == (FinishReason.INVALID, message)
    sim.check()


def test_a_request_at_the_limit_is_computed(sim: Simulation) -> None:
    request = sim.add([1] * 60, 4)
    sim.run()
    assert_as_if_alone(request, WORKER_CONFIG)


def test_waiting_requests_are_validated_when_the_first_worker_is_ready() -> None:
    sim = Simulation(WORKER_CONFIG)
    request = sim.add([1] * 60, 5)
    assert request.end is None
    sim.worker_up()
    assert request.end is not None
    assert request.end.reason == FinishReason.INVALID


@pytest.mark.parametrize(
    ("field", "value"),
    [(column, b"\1\2\3") for column in ("prompt_ids", "resume_ids", "stop_ids")]
    + [("sampling", value) for value in (b"", encode(GREEDY)[:-1], encode(GREEDY) + b"\0", encode(Cancel(1)))],
)
def test_a_malformed_field_is_rejected(sim: Simulation, field: str, value: bytes) -> None:
    request = sim.tokenizers[0].requests[77] = SubmittedRequest([], 1, [], GREEDY, [])
    add = Add(77, pack_column(INT32, [1]), 1, request.sampling)._replace(**{field: value})
    sim.handle(add, sim.tokenizers[0].peer)
    assert request.end is not None
    assert request.end.reason == FinishReason.INVALID
    sim.check()


@pytest.mark.parametrize(("kind", "reason"), [(Cancel, FinishReason.CANCELLED), (Stop, FinishReason.STOP)])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_cancel_and_stop_end_a_request_at_once(sim: Simulation, kind: type, reason: FinishReason, steps: int) -> None:
    request = sim.add([1, 2, 3], 20)
    other = sim.add([1, 2, 4], 20)
    for _ in range(steps):
        sim.step()
    sim.cancel(request, kind)
    assert request.end is not None
    assert request.end.reason == reason
    sim.check()
    sim.run()
    assert_as_if_alone(other, WORKER_CONFIG)


def test_crossing_messages_are_ignored(sim: Simulation) -> None:
    request = sim.add([1, 2, 3], 2)
    sim.run()
    ends = len(sim.received)
    sim.cancel(request)
    sim.stop(request)
    sim.handle(Cancel(12345), sim.tokenizers[0].peer)
    assert len(sim.received) == ends


def test_a_duplicate_rid_is_ignored(sim: Simulation, caplog: pytest.LogCaptureFixture) -> None:
    request = sim.add([1, 2, 3], 5)
    with caplog.at_level(logging.ERROR):
        sim.handle(Add(sim.rids, pack_column(INT32, [9]), 1, request.sampling), sim.tokenizers[0].peer)
    assert "used rid 1 twice" in caplog.text
    sim.run()
    assert_as_if_alone(request, WORKER_CONFIG)


def test_rids_of_different_tokenizers_are_independent(sim: Simulation) -> None:
    both = [SubmittedRequest([n, 2, 3], 4, [], GREEDY, []) for n in (1, 5)]
    for tokenizer, request in enumerate(both):
        sim.tokenizers[tokenizer].requests[7] = request
        sim.handle(Add(7, pack_column(INT32, request.prompt), 4, request.sampling), sim.tokenizers[tokenizer].peer)
    sim.run()
    for request in both:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_one_message_per_tokenizer_and_step(sim: Simulation) -> None:
    for n in range(4):
        sim.add([n, 2], 3, tokenizer=n % 2)
    sim.run()
    for tokenizer in sim.tokenizers.values():
        messages = [m for peer, m in sim.received if peer == tokenizer.peer and not isinstance(m, Status)]
        assert [type(m) for m in messages] == [Tokens, Tokens, Tokens, End, End]


def test_usage_and_durations(sim: Simulation) -> None:
    request = sim.add([1, 2, 3], 4)
    sim.now += 2.0
    sim.plan()
    sim.now += 3.0
    sim.run()
    end = request.end
    assert end is not None
    assert (end.prompt_tokens, end.generated_tokens, end.cached_tokens) == (3, 4, 0)
    assert 2_000_000 <= end.queue_us < 2_100_000
    assert 3_000_000 <= end.inference_us < 3_100_000


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_is_reported_on_connection_and_on_change() -> None:
    sim = Simulation(WORKER_CONFIG)
    (first,) = sim.tokenizers[0].statuses
    assert (first.ready, first.healthy, first.stage, first.limits) == (False, True, "waiting for the worker", None)
    sim.worker_up()
    last = sim.tokenizers[0].statuses[-1]
    assert (last.ready, last.stage, last.percent, last.limits) == (True, "ready", 100, WORKER_CONFIG.limits())
    sim.worker_down()
    assert not sim.tokenizers[0].statuses[-1].ready
    late = sim.tokenizer_up(1)
    assert [status.ready for status in late.statuses] == [False]


def test_load_is_reported_at_an_interval(sim: Simulation) -> None:
    statuses = sim.tokenizers[0].statuses
    sim.advance_time(2.0)
    before = len(statuses)
    for _ in range(6):
        sim.add([1, 2, 3], 30)
    sim.advance_time()
    assert statuses[-1].queued == 6
    sim.plan()
    sim.advance_time()
    assert statuses[-1].queued == 6
    assert sim.scheduler.deadline(sim.now) < sim.now + 1.1
    sim.advance_time(1.0)
    for _ in range(10):
        sim.step()
        sim.advance_time()
    assert (statuses[-1].queued, statuses[-1].running) == (2, 4)
    assert len(statuses) - before <= 2


def test_a_stalled_worker_is_unhealthy() -> None:
    sim = Simulation(WORKER_CONFIG, SchedulerConfig(stall_limit=10.0))
    sim.worker_up()
    sim.add([1, 2, 3], 5)
    sim.advance_time(100.0)
    sim.plan()
    assert sim.scheduler.deadline(sim.now) <= sim.now + 10.0
    sim.advance_time(9.0)
    assert sim.tokenizers[0].statuses[-1].healthy
    sim.advance_time(1.5)
    assert not sim.tokenizers[0].statuses[-1].healthy
    sim.compute()
    sim.deliver()
    sim.advance_time()
    assert sim.tokenizers[0].statuses[-1].healthy


# --- waiting queue ----------------------------------------------------------------------------------------------------


def test_the_queue_keeps_the_order_of_arrival() -> None:
    sim = Simulation(WORKER_CONFIG)
    tokenizer = TokenizerPeer(sim.tokenizers[0].peer)
    made = [Request(tokenizer, Add(n, b"", 1, encode(GREEDY)), n, 0.0) for n in range(5)]
    queue = WaitingQueue()
    for n in (1, 3, 4):
        queue.append(made[n])
    made[1].state = END[made[1].state]
    queue.record_ended(made[1])
    made[0].share = made[2].share = made[1].share
    queue.reinsert(made[0])
    queue.reinsert(made[2])
    queue.remove(made[3])
    assert len(queue) == 3
    order = []
    while (head := queue.head()) is not None:
        queue.pop(head)
        order.append(head.rid)
    assert order == [0, 2, 4]
    assert len(queue) == 0
    with pytest.raises(ValueError, match="illegal transition"):
        CHUNK[made[1].state]
    assert made[1].state is RequestState.ENDED


def test_ended_requests_do_not_accumulate_in_the_queue() -> None:
    tokenizer, queue = TokenizerPeer(Simulation(WORKER_CONFIG).tokenizers[0].peer), WaitingQueue()
    first = Request(tokenizer, Add(0, b"", 1, encode(GREEDY)), 0, 0.0)
    queue.append(first)
    for n in range(1, 10_000):
        request = Request(tokenizer, Add(n, b"", 1, encode(GREEDY)), n, 0.0)
        queue.append(request)
        request.state = END[request.state]
        queue.record_ended(request)
    gc.collect()
    kept = [one for one in gc.get_objects() if isinstance(one, Request) and one.tokenizer is tokenizer]
    assert len(kept) < 200
    assert queue.waiting() == [first]


def test_messages_for_a_lost_tokenizer_do_not_reach_its_next_connection(sim: Simulation) -> None:
    """Both events may come in one turn of the loop, before the messages are sent."""
    sim.add([1, 2, 3])
    peer, scheduler = sim.tokenizers[0].peer, sim.scheduler
    scheduler.handle(PeerDisconnected(), peer, sim.now)
    scheduler.handle(Hello(PROTOCOL, *peer), peer, sim.now)
    assert [type(message) for _, message in scheduler.outgoing()] == [Status]
