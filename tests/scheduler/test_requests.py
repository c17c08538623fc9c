"""How a request begins and ends: validation, cancels, stops, usage and durations, and what its tokenizers hear."""

import gc
import logging

import pytest

from tests.scheduler.house import House, ok
from tests.scheduler.tokenizers import GREEDY, Asked
from tgi.kernel.messages import Add, Cancel, End, Reason, Stop, Tokens
from tgi.kernel.pack import INT32, pack
from tgi.kernel.presence import Status
from tgi.kernel.states import CHUNK, END, State
from tgi.scheduler.core import Config
from tgi.scheduler.queue import Queue
from tgi.scheduler.request import Client, Request
from tgi.worker.scripted import Script

SCRIPT = Script(pages=64, page_size=4, slots=4, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=64)


@pytest.fixture
def house() -> House:
    house = House(SCRIPT, tokenizers=2)
    house.worker_up()
    return house


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
    ],
)
def test_what_can_never_be_computed_is_refused_at_once(house: House, prompt: list[int], new: int, message: str) -> None:
    asked = house.add(prompt, new)
    assert asked.end is not None
    assert (asked.end.reason, asked.end.message) == (Reason.INVALID, message)
    house.check()


def test_what_fits_exactly_is_computed(house: House) -> None:
    asked = house.add([1] * 60, 4)
    house.run()
    ok(asked, SCRIPT)


def test_those_who_came_before_the_first_worker_are_checked_when_its_limits_are_known() -> None:
    house = House(SCRIPT)
    asked = house.add([1] * 60, 5)
    assert asked.end is None
    house.worker_up()
    assert asked.end is not None
    assert asked.end.reason == Reason.INVALID


@pytest.mark.parametrize("column", ["prompt", "resume", "stop_ids"])
def test_a_malformed_column_is_refused(house: House, column: str) -> None:
    asked = house.tokenizers[0].requests[77] = Asked([], 1, [], GREEDY, [])
    add = Add(77, pack(INT32, [1]), 1, asked.sampling)._replace(**{column: b"\1\2\3"})
    house.handle(add, house.tokenizers[0].peer)
    assert asked.end is not None
    assert asked.end.reason == Reason.INVALID
    house.check()


@pytest.mark.parametrize(("kind", "reason"), [(Cancel, Reason.CANCELLED), (Stop, Reason.STOP)])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_cancel_or_stop_ends_it_at_once(house: House, kind: type, reason: Reason, steps: int) -> None:
    asked = house.add([1, 2, 3], 20)
    mate = house.add([1, 2, 4], 20)
    for _ in range(steps):
        house.step()
    house.cancel(asked, kind)
    assert asked.end is not None
    assert asked.end.reason == reason
    house.check()
    house.run()
    ok(mate, SCRIPT)


def test_crossing_messages_are_ignored(house: House) -> None:
    asked = house.add([1, 2, 3], 2)
    house.run()
    ends = len(house.heard)
    house.cancel(asked)
    house.stop(asked)
    house.handle(Cancel(12345), house.tokenizers[0].peer)
    assert len(house.heard) == ends


def test_a_number_that_is_used_twice_keeps_its_first_request(house: House, caplog: pytest.LogCaptureFixture) -> None:
    asked = house.add([1, 2, 3], 5)
    with caplog.at_level(logging.ERROR):
        house.handle(Add(house.rids, pack(INT32, [9]), 1, asked.sampling), house.tokenizers[0].peer)
    assert "used number 1 twice" in caplog.text
    house.run()
    ok(asked, SCRIPT)


def test_tokenizers_number_their_requests_independently(house: House) -> None:
    both = [Asked([n, 2, 3], 4, [], GREEDY, []) for n in (1, 5)]
    for place, asked in enumerate(both):
        house.tokenizers[place].requests[7] = asked
        house.handle(Add(7, pack(INT32, asked.prompt), 4, asked.sampling), house.tokenizers[place].peer)
    house.run()
    for asked in both:
        ok(asked, SCRIPT)


def test_one_message_for_each_tokenizer_and_step(house: House) -> None:
    for n in range(4):
        house.add([n, 2], 3, place=n % 2)
    house.run()
    for tokenizer in house.tokenizers.values():
        messages = [m for peer, m in house.heard if peer == tokenizer.peer and not isinstance(m, Status)]
        assert [type(m) for m in messages] == [Tokens, Tokens, Tokens, End, End]


def test_usage_and_durations(house: House) -> None:
    asked = house.add([1, 2, 3], 4)
    house.now += 2.0
    house.plan()
    house.now += 3.0
    house.run()
    end = asked.end
    assert end is not None
    assert (end.prompt_tokens, end.generated_tokens, end.cached_tokens) == (3, 4, 0)
    assert 2_000_000 <= end.queue_us < 2_100_000
    assert 3_000_000 <= end.inference_us < 3_100_000


# --- status -----------------------------------------------------------------------------------------------------------


def test_a_tokenizer_hears_the_status_when_it_comes_and_when_it_changes() -> None:
    house = House(SCRIPT)
    (first,) = house.tokenizers[0].statuses
    assert (first.ready, first.healthy, first.stage, first.limits) == (False, True, "waiting for the worker", None)
    house.worker_up()
    last = house.tokenizers[0].statuses[-1]
    assert (last.ready, last.stage, last.percent, last.limits) == (True, "ready", 100, SCRIPT.limits())
    house.worker_down()
    assert not house.tokenizers[0].statuses[-1].ready
    late = house.tokenizer_up(1)
    assert [status.ready for status in late.statuses] == [False]


def test_load_is_told_now_and_then(house: House) -> None:
    heard = house.tokenizers[0].statuses
    house.tick(2.0)
    before = len(heard)
    for _ in range(6):
        house.add([1, 2, 3], 30)
    house.tick()
    assert heard[-1].queued == 6
    house.plan()
    house.tick()
    assert heard[-1].queued == 6
    assert house.core.deadline(house.now) < house.now + 1.1
    house.tick(1.0)
    for _ in range(10):
        house.step()
        house.tick()
    assert (heard[-1].queued, heard[-1].running) == (2, 4)
    assert len(heard) - before <= 2


def test_unhealthy_while_no_step_finishes() -> None:
    house = House(SCRIPT, Config(stall_limit=10.0))
    house.worker_up()
    house.add([1, 2, 3], 5)
    house.tick(100.0)
    house.plan()
    assert house.core.deadline(house.now) <= house.now + 10.0
    house.tick(9.0)
    assert house.tokenizers[0].statuses[-1].healthy
    house.tick(1.5)
    assert not house.tokenizers[0].statuses[-1].healthy
    house.compute()
    house.deliver()
    house.tick()
    assert house.tokenizers[0].statuses[-1].healthy


# --- the line ---------------------------------------------------------------------------------------------------------


def test_the_line_keeps_the_order_of_arrival() -> None:
    house = House(SCRIPT)
    client = Client(house.tokenizers[0].peer)
    made = [Request(client, Add(n, b"", 1, b""), n, 0.0) for n in range(5)]
    queue = Queue()
    for n in (1, 3, 4):
        queue.join(made[n])
    made[1].state = END[made[1].state]
    queue.leave(1)
    queue.come_back(made[0])
    made[2].strikes = 2
    queue.come_back(made[2])  # a suspect goes first
    assert len(queue) == 4
    order = []
    while (head := queue.head()) is not None:
        assert queue.pop() is head
        order.append(head.rid)
    assert order == [2, 0, 3, 4]
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(ValueError, match="illegal transition"):
        CHUNK[made[1].state]
    assert made[1].state is State.ENDED


def test_who_ends_while_waiting_is_not_kept_in_the_line() -> None:
    client, queue = Client(House(SCRIPT).tokenizers[0].peer), Queue()
    first = Request(client, Add(0, b"", 1, b""), 0, 0.0)
    queue.join(first)
    for n in range(1, 10_000):
        request = Request(client, Add(n, b"", 1, b""), n, 0.0)
        queue.join(request)
        request.state = END[request.state]
        queue.leave(1)
    gc.collect()
    kept = [one for one in gc.get_objects() if isinstance(one, Request) and one.client is client]
    assert len(kept) < 200
    assert queue.waiting() == [first]
