"""A restarted scheduler finds the pages that the worker has computed for the previous one."""

from tests.scheduler.invariants import check_pool
from tests.scheduler.simulation import Simulation, assert_as_if_alone
from tgi.microkernel.links.link import PeerId
from tgi.microkernel.messages.codec import INT32, pack_column, unpack_int32
from tgi.microkernel.messages.protocol import PROTOCOL, HeldPages, Hello, PageExtra
from tgi.scheduler.kv_cache import KVCacheManager
from tgi.scheduler.page_pool import EXTRA_HEAD, ROOT_HASH
from tgi.scheduler.peers import HELD_MESSAGE_BYTES, MAX_HELD_BYTES
from tgi.worker.fake_worker.fake_worker import FakeWorkerConfig

CONFIG = FakeWorkerConfig(
    pages=64, page_size=4, slots=8, vocab_size=128, max_total_tokens=64, max_batch_prefill_tokens=256
)


def test_resubmitted_requests_compute_their_last_page_only() -> None:
    sim = Simulation(CONFIG, tokenizers=2)
    sim.adapters.preload("a", "one")
    sim.worker_up()
    (adapter,) = sim.adapters.loaded()
    for n in range(6):
        sim.add([n, *range(10, 25)], 30, tokenizer=n % 2, seed=n, adapter=adapter if n < 2 else None)
    for _ in range(15):
        sim.step()
    known = [len(request.prompt) + len(request.ids) for request in sim.requests]
    sim.restart_scheduler()
    sim.plan()
    computed = sum(unpack_int32(sim.sent[0].counts))
    # Tokens of steps whose results were lost are held, too.
    assert computed <= sum(count - (count - 1) // 4 * 4 for count in known)
    assert sim.scheduler.counters.cache_hit_tokens >= sum((count - 1) // 4 * 4 for count in known)
    sim.run()
    for request in sim.requests:
        assert_as_if_alone(request, CONFIG)
    sim.check()


def test_a_restarted_worker_holds_nothing() -> None:
    sim = Simulation(CONFIG)
    sim.worker_up()
    sim.add([*range(16)], 10)
    for _ in range(5):
        sim.step()
    sim.worker_up()
    sim.restart_scheduler()
    sim.run()
    assert sim.scheduler.counters.cache_hit_tokens == 0
    for request in sim.requests:
        assert_as_if_alone(request, CONFIG)


def test_the_reports_of_a_worker_that_never_gets_ready_are_bounded() -> None:
    sim = Simulation(CONFIG)
    worker = PeerId("worker", 0, b"loading")
    sim.handle(Hello(PROTOCOL, *worker), worker)
    for count in (1, 1 << 18):
        for _ in range(200):
            sim.handle(HeldPages(bytes(4 * count), bytes(count)), worker)
    held = sim.scheduler.worker.take_held_pages()
    assert 200 < len(held) < 400
    assert sum(len(one.token_ids) + len(one.page_ids) for one in held) <= MAX_HELD_BYTES
    for _ in range(MAX_HELD_BYTES // HELD_MESSAGE_BYTES + 10):
        sim.scheduler.worker.record_held_pages(HeldPages(b"", b""))
    assert len(sim.scheduler.worker.take_held_pages()) == MAX_HELD_BYTES // HELD_MESSAGE_BYTES


def test_pages_are_adopted_once_and_contradictions_are_dropped() -> None:
    cache = KVCacheManager(CONFIG.limits())

    def prefix(ids: list[int], pages: list[int], salt: bytes = b"") -> HeldPages:
        extras = [PageExtra(0, salt)] if salt else []
        return HeldPages(pack_column(INT32, ids), pack_column(INT32, pages), extras)

    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    adopted = cache.adopt(
        [
            prefix(first + second, [10, 11]),
            prefix(first + second, [10, 11]),  # of another slot with the same prefix
            prefix(first + first, [10, 12]),
            prefix(second, [10]),  # the page has other content
            prefix(first, [20], salt=b"adapter"),
            prefix(first, [64]),  # there is no such page
            prefix(second, [-1]),
            prefix([*first, 9], [30]),  # not whole pages
        ]
    )
    assert adopted == 4
    check_pool(cache.pool)
    assert cache.pool.available == CONFIG.pages
    column = pack_column(INT32, first + second + second)
    found, _ = cache.pool.find_prefix(ROOT_HASH, column, 3)
    assert found == [10, 11]
    cache.pool.release(found)
    found, _ = cache.pool.find_prefix(ROOT_HASH + EXTRA_HEAD.pack(0, 7) + b"adapter", column, 3)
    assert found == [20]
    cache.pool.release(found)
    everything = cache.pool.allocate(CONFIG.pages)
    assert sorted(everything) == list(range(CONFIG.pages))
