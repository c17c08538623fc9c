"""The page pool: keys of cached pages are compared exactly, and pages that cannot be found any more are not lost."""

import pytest

from tests.scheduler.invariants import check_pool
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.scheduler.page_pool import ROOT_HASH, PagePool

A, B, C = pack_column(INT32, [1, 2]), pack_column(INT32, [3, 4]), pack_column(INT32, [5, 6])


@pytest.fixture
def pool() -> PagePool:
    return PagePool(4, 2)


def publish(pool: PagePool, pages: list[int], column: bytes, salt: bytes = b"") -> bytes:
    """As for a request that finds no cached page. Returns the name of the prefix."""
    return pool.publish(ROOT_HASH + salt, pages, column)


def found(pool: PagePool, column: bytes, salt: bytes = b"") -> list[int]:
    """The cached pages of a prefix, without keeping a reference."""
    pages, _ = pool.find_prefix(ROOT_HASH + salt, column, len(column) // len(A))
    pool.release(pages)
    return pages


def test_the_same_ids_after_another_prefix_are_another_page(pool: PagePool) -> None:
    pages = pool.allocate(2)
    publish(pool, pages, A + B)
    assert found(pool, A + B) == pages
    assert found(pool, B) == []
    assert found(pool, B + B) == []
    assert found(pool, A + A) == pages[:1]


def test_the_same_ids_under_another_salt_are_another_page(pool: PagePool) -> None:
    pages = pool.allocate(2)
    first = publish(pool, pages[:1], A)
    assert found(pool, A, salt=b"tenant") == []
    assert found(pool, A, salt=first) == []
    publish(pool, pages[1:], A, salt=b"tenant")
    assert (found(pool, A), found(pool, A, salt=b"tenant")) == (pages[:1], pages[1:])


def test_a_salt_equal_to_a_page_name_does_not_find_what_follows_that_page(pool: PagePool) -> None:
    pages = pool.allocate(2)
    first = publish(pool, pages[:1], A)
    pool.publish(first, pages[1:], B)
    assert found(pool, B, salt=first) == []


def test_of_two_equal_pages_the_first_is_cached_and_continued(pool: PagePool) -> None:
    one, two = pool.allocate(1), pool.allocate(2)
    name = publish(pool, one, A)
    assert publish(pool, two[:1], A) == name
    pool.publish(name, two[1:], B)
    assert found(pool, A + B) == [one[0], two[1]]
    check_pool(pool, [one, two])
    pool.release(two)
    check_pool(pool, [one])
    assert pool.available == 3


def test_a_page_that_is_published_again_keeps_its_name(pool: PagePool) -> None:
    pages = pool.allocate(1)
    assert publish(pool, pages, A) == publish(pool, pages, A)
    check_pool(pool, [pages])


def test_eviction_is_least_recently_used_first_and_end_of_prefix_first(pool: PagePool) -> None:
    old, new = pool.allocate(2), pool.allocate(2)
    publish(pool, old, A + B)
    publish(pool, new, C + B)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == old[1:]
    assert (found(pool, A + B), found(pool, C + B)) == (old[:1], new)
    assert pool.allocate(1) == old[:1]
    assert (found(pool, A + B), found(pool, C + B)) == ([], new)


def test_pages_after_an_evicted_one_are_not_found_and_not_lost(pool: PagePool) -> None:
    one, two = pool.allocate(1), pool.allocate(2)
    name = publish(pool, one, A)
    publish(pool, two[:1], A)
    pool.release(one)
    assert sorted(pool.allocate(2)) == sorted([one[0], 3])  # the first page is evicted while the other request runs
    pool.publish(name, two[1:], B)
    assert found(pool, A + B) == []
    pool.release(two)
    check_pool(pool, [[one[0], 3]])
    # The same ids are cached again under a new name, so the old page after them is not found.
    again = [one[0]]
    assert publish(pool, again, A) != name
    assert found(pool, A + B) == again
    assert sorted(pool.allocate(2)) == sorted(two)
    check_pool(pool, [[one[0], 3], two])


def test_eviction_ahead_of_time(pool: PagePool) -> None:
    pages = pool.allocate(4)
    publish(pool, pages, A + B + C + A)
    pool.release(pages)
    pool.evict_ahead(1)
    assert found(pool, A + B + C + A) == pages[:3]
    pool.evict_ahead(1)
    assert found(pool, A + B + C + A) == pages[:3]
    pool.evict_ahead(9)
    assert found(pool, A) == []
    assert pool.available == 4
    check_pool(pool)
