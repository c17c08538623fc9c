"""The prefix cache: equal prefixes share pages once these are computed, generated tokens included."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.counting import per_item
from tests.scheduler.invariants import check_pool
from tests.scheduler.simulated_tokenizers import SubmittedRequest
from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import Add, HeldPages, PageExtra, SlotAssignment, encode
from tgi.microkernel.messages.sampling_params import SamplingParams
from tgi.scheduler.kv_cache import KVCacheManager
from tgi.scheduler.page_pool import ROOT_HASH, PagePool
from tgi.scheduler.request import Request, TokenizerPeer
from tgi.scheduler.scheduler import SchedulerConfig
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

WORKER_CONFIG = FakeWorkerConfig(
    pages=32, page_size=4, slots=4, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=32
)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # two full pages and a half


@pytest.fixture
def sim() -> Simulation:
    sim = Simulation(WORKER_CONFIG)
    sim.worker_up()
    return sim


def cached(request: SubmittedRequest) -> int:
    assert request.end is not None
    return request.end.cached_tokens


def computed(sim: Simulation, since: int = 0) -> int:
    """Tokens computed by the steps from number `since` on."""
    return sum(sum(unpack_int32(step.counts)) for step in sim.sent[since:])


def test_a_second_request_computes_only_what_is_new(sim: Simulation) -> None:
    first = sim.add(PROMPT)
    sim.run()
    steps = len(sim.sent)
    second = sim.add([*PROMPT[:8], 11])
    sim.run()
    assert (cached(first), cached(second)) == (0, 8)
    assert (unpack_int32(sim.sent[steps].starts), unpack_int32(sim.sent[steps].counts)) == ([8], [1])
    assert_as_if_alone(first, WORKER_CONFIG)
    assert_as_if_alone(second, WORKER_CONFIG)


def test_pages_are_found_while_their_first_request_still_runs(sim: Simulation) -> None:
    first = sim.add(PROMPT, 20)
    sim.step()
    second = sim.add(PROMPT, 3)
    sim.run()
    assert cached(second) == 8
    assert_as_if_alone(first, WORKER_CONFIG)
    assert_as_if_alone(second, WORKER_CONFIG)


def test_equal_prompts_that_arrive_together_are_both_computed(sim: Simulation) -> None:
    both = [sim.add(PROMPT), sim.add(PROMPT)]
    sim.run()
    assert [cached(request) for request in both] == [0, 0]
    for request in both:
        assert_as_if_alone(request, WORKER_CONFIG)


def test_pages_of_generated_tokens_are_found(sim: Simulation) -> None:
    first = sim.add(PROMPT, 7)
    sim.run()
    second = sim.add([*PROMPT, *first.ids, 11])  # 18 ids, of which 16 were computed
    sim.run()
    assert cached(second) == 16
    assert_as_if_alone(second, WORKER_CONFIG)


def test_the_last_id_is_always_computed(sim: Simulation) -> None:
    sim.add(PROMPT[:8])
    sim.run()
    again = sim.add(PROMPT[:8])
    sim.run()
    assert cached(again) == 4
    assert_as_if_alone(again, WORKER_CONFIG)


def test_the_least_recently_used_pages_are_evicted_first(sim: Simulation) -> None:
    old, new = [list(range(n, n + 13)) for n in (20, 60)]
    sim.add(old)
    sim.run()
    sim.add(new)
    sim.run()
    # Takes 24 of the 25 free pages; the rest come from the older prefix, its end first.
    big = sim.add(list(range(100)[:50]), 14)
    sim.run()
    assert_as_if_alone(big, WORKER_CONFIG)
    other = sim.add(list(range(50, 100)), 14)
    sim.run()
    assert_as_if_alone(other, WORKER_CONFIG)
    again = [sim.add(new), sim.add(old)]
    sim.run()
    for request in again:
        assert_as_if_alone(request, WORKER_CONFIG)
    assert cached(again[0]) >= cached(again[1])


def test_it_can_be_switched_off() -> None:
    sim = Simulation(WORKER_CONFIG, SchedulerConfig(prefix_caching=False))
    sim.worker_up()
    for _ in range(2):
        request = sim.add(PROMPT)
        sim.run()
        assert cached(request) == 0
    assert sim.scheduler.counters.cache_hit_tokens == 0


def test_a_new_worker_starts_with_nothing_cached(sim: Simulation) -> None:
    sim.add(PROMPT)
    sim.run()
    sim.worker_up()
    again = sim.add(PROMPT)
    sim.run()
    assert cached(again) == 0


def test_the_worker_is_sent_each_page_and_all_ids_once(sim: Simulation) -> None:
    sim.add(PROMPT, 20)
    sim.run()
    slots: list[SlotAssignment] = [slot for step in sim.sent for slot in step.slots]
    assert [unpack_int32(slot.token_ids) for slot in slots] == [PROMPT]
    pages = [page for step in sim.sent for page in unpack_int32(step.page_ids)]
    assert len(pages) == len(set(pages)) == (10 + 20 - 1 + 3) // 4


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6])
def test_each_turn_of_a_chat_computes_only_what_is_new(sim: Simulation, new: int) -> None:
    """Wherever in a page the previous turn ended. It has computed all tokens but its last."""
    history = PROMPT
    known = 0
    for turn in range(5):
        sent = len(sim.sent)
        request = sim.add(history, new)
        sim.run()
        assert_as_if_alone(request, WORKER_CONFIG)
        found = known // 4 * 4
        assert (turn, cached(request)) == (turn, found)
        assert computed(sim, sent) == len(history) - found + new - 1
        known = len(history) + new - 1
        history = [*history, *request.ids, 100 + turn]


def test_pages_of_a_request_that_ended_early_are_found(sim: Simulation) -> None:
    plain = sim.add(PROMPT, 9)
    sim.run()
    sim.worker_up()  # empties the cache
    ended = sim.add(PROMPT, 30, stop_ids=[plain.ids[6]])
    sim.run()
    stopped = sim.add([50, *PROMPT], 30)
    for _ in range(9):
        sim.step()
    sim.cancel(stopped)
    sim.run()
    for first, prompt in ((ended, PROMPT), (stopped, [50, *PROMPT])):
        assert len(first.ids) >= 6
        again = sim.add([*prompt, *first.ids, 11])
        sim.run()
        assert cached(again) >= (len(prompt) + len(first.ids) - 1) // 4 * 4
        assert_as_if_alone(again, WORKER_CONFIG)


def test_a_preempted_request_finds_its_remaining_pages() -> None:
    """It computes again what was in its incomplete page and in evicted pages."""
    worker_config = WORKER_CONFIG._replace(pages=16)
    sim = Simulation(worker_config)
    sim.worker_up()
    both = [sim.add([n, *range(10)], 31) for n in range(2)]
    sim.run()
    for request in both:
        assert_as_if_alone(request, worker_config)
    counters = sim.scheduler.counters
    assert counters.preemptions > 0
    assert counters.cache_hit_tokens > 0
    once = sum(len(request.prompt) + len(request.ids) - 1 for request in both)
    came_back = sum(len(unpack_int32(slot.token_ids)) for step in sim.sent for slot in step.slots) - 2 * 11
    assert computed(sim) <= once + came_back - counters.cache_hit_tokens


def test_pages_are_shared_up_to_the_first_extra_that_differs() -> None:
    """Whether their request has computed them, or a worker still holds them from before."""
    ids = pack_column(INT32, range(12))  # three pages
    one, other = (PageExtra(5, digest) for digest in (b"one image", b"another"))
    cases = [[], [one], [other], [PageExtra(6, one.digest)], [one, PageExtra(9, b"more")]]

    def found(cache: KVCacheManager, extras: list[PageExtra], salt: bytes = b"") -> int:
        add = Add(1, ids, 4, encode(SamplingParams(0)), cache_salt=salt, extras=extras)
        request = Request(TokenizerPeer(PeerId("tokenizer", 0, b"")), add, 0, 0.0)
        request.shares_pages = True
        assert cache.allocate(request, ids, 3, 0)
        cached, request.planned = request.planned, 12
        cache.free(request)
        check_pool(cache.pool)
        return cached

    cache = KVCacheManager(WORKER_CONFIG.limits())
    assert [found(cache, case) for case in cases] == [0, 4, 4, 4, 8]
    assert [found(cache, case) for case in cases] == [12] * len(cases)
    assert [found(cache, [one], b"adapter") for _ in range(2)] == [0, 12]
    adopting = KVCacheManager(WORKER_CONFIG.limits())
    assert adopting.adopt([HeldPages(ids, pack_column(INT32, [3, 4, 5]), [PageExtra(0, b"adapter"), one])]) == 3
    assert [found(adopting, [one], b"adapter"), found(adopting, [other], b"adapter")] == [12, 4]


@pytest.mark.parametrize("extra", [PageExtra(12, b""), PageExtra(-1, b""), PageExtra(3, bytes(257))])
def test_an_extra_out_of_range_is_refused(extra: PageExtra) -> None:
    add = Add(1, pack_column(INT32, range(12)), 4, encode(SamplingParams(0)), extras=[extra])
    with pytest.raises(ValueError, match="an extra of a page"):
        Request(TokenizerPeer(PeerId("tokenizer", 0, b"")), add, 0, 0.0)


def test_a_long_prompt_is_found_whole() -> None:
    worker_config = WORKER_CONFIG._replace(pages=5000, max_total_tokens=20_000, max_batch_prefill_tokens=4096)
    sim = Simulation(worker_config)
    sim.worker_up()
    history = [n * n % 97 for n in range(12_345)]
    sim.add(history, 1)
    sim.run()
    sent = len(sim.sent)
    again = sim.add([*history, 3, 4, 5], 1)
    sim.run()
    assert cached(again) == 12_344
    assert computed(sim, sent) == 4


def test_instructions_per_page() -> None:
    """Finding a page takes its key, a dictionary lookup and a reference, whether it is held or idle; publishing
    one takes its key, the same lookup and a name."""
    pool = PagePool(2000, 16)
    column = pack_column(INT32, range(16 * 1000))
    prefix = ROOT_HASH
    pages = pool.allocate(1000)
    made = per_item(lambda count: partial(pool.publish, prefix, pages[:count], column), 100, 900)
    pool.publish(prefix, pages, column)
    held = per_item(lambda count: partial(pool.find_prefix, prefix, column, count), 100, 900)
    assert held.instructions <= 48

    def idle(count: int) -> Callable[[], object]:
        pool = PagePool(2000, 16)
        pages = pool.allocate(1000)
        pool.publish(prefix, pages, column)
        pool.release(pages)
        return partial(pool.find_prefix, prefix, column, count)

    assert per_item(idle, 100, 900).instructions <= 51
    assert made.instructions <= 46
