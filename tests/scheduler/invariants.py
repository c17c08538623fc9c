"""What holds of a scheduler between any two calls, whatever was asked of it: slots, pages, queue and requests agree."""

from collections.abc import Iterable

from tgi.microkernel.messages.protocol import DECODE, PREFILL
from tgi.scheduler.kv_cache import KVCacheManager
from tgi.scheduler.page_index import PageIndex
from tgi.scheduler.page_pool import NO_PAGE, ROOT_HASH, PagePool
from tgi.scheduler.request import Request
from tgi.scheduler.scheduler import Scheduler
from tgi.scheduler.state_snapshots import StateSnapshots


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises AssertionError if slots, pages, queue and requests contradict each other."""
    known, planner = scheduler._tokenizers.requests, scheduler._planner
    waiting = scheduler._queue.waiting()
    assert len(waiting) == len(set(waiting)) == len(scheduler._queue), "the queue's length is wrong"
    waiting += planner.trial_queue if planner else []
    waiting += scheduler._images.waiting
    batch = list(planner.batch) if planner else []
    assert set(known) == set(waiting) | set(batch), "a request is lost, or held after its end"
    assert all(request.state in (PREFILL, DECODE) for request in batch), "a request with a slot is not running"
    if planner:
        check_cache(planner.kv_cache, batch)
        for partition in planner.batch.partitions.values():
            assert partition.starts_sum == sum(partition.starts), "the sum of a partition's positions is wrong"


def check_cache(cache: KVCacheManager, batch: list[Request]) -> None:
    """Raises AssertionError if pages and requests contradict each other."""
    held = [*batch, *cache._ended]
    for request in held:
        assert request.capacity == min(map(len, request.tables)) * cache._page_size, "capacity and tables disagree"
    tables = [[page for page in table if page != NO_PAGE] for request in held for table in request.tables]
    check_pool(cache.pool, tables + (held_by_transfers(cache.index, cache.pool) if cache.index is not None else []))
    if cache.snapshots is not None:
        check_snapshots(cache.snapshots)


def check_pool(pool: PagePool, tables: Iterable[list[int]] = ()) -> None:
    """Raises AssertionError unless the page tables `tables` hold all references, and every page is in one state."""
    references = [0] * len(pool._references)
    free, idle = set(pool.free), set(pool._idle)
    for table in tables:
        assert len(set(table)) == len(table), f"a page is twice in the table {table}"
        for page in table:
            references[page] += 1
    counted = [0 if page in free else count for page, count in enumerate(pool._references)]
    assert references == counted, "the reference counts do not match the page tables"
    assert all(pool._references[page] == 1 for page in free), "a free page has not one reference"
    assert len(free) == len(pool.free), "a page is free twice"
    assert not free & idle, "a page is free and idle"
    assert free | idle == {page for page, count in enumerate(references) if count == 0}, "a page is lost"
    keys = {page: key for page, key in enumerate(pool._key_of) if key}
    assert {page: key for key, page in pool._by_key.items()} == keys, "keys and pages disagree"
    hashes = [one for one in pool._hash_of if one]
    assert len(set(hashes)) == len(hashes), "a block hash is given twice"
    lead = {page for page, key in keys.items() if key[0] in (0, ROOT_HASH[0])}
    assert {page for page, one in enumerate(pool._hash_of) if one} == lead, "a page has a block hash and no key"
    assert idle <= set(keys), "an idle page is not cached"
    assert not free & set(keys), "a free page is cached"


def held_by_transfers(index: PageIndex, pool: PagePool) -> list[list[int]]:
    """The pages that are held in a pool while they are written to files, or read."""
    transfers = index._transfers.values()
    return [one.pages for one in transfers] + [one.prefix for one in transfers if one.pool is pool]


def check_snapshots(snapshots: StateSnapshots) -> None:
    """Raises AssertionError unless each snapshot is free or found under one block hash."""
    numbers = sorted([*snapshots._free, *snapshots._number_of.values()])
    assert numbers == [*range(snapshots._count)], "a snapshot is lost, or twice"
