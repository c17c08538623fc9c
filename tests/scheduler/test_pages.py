"""What a page is known by is compared exactly, and what cannot be found any more is still given back."""

import pytest

from tgi.kernel.pack import INT32, pack
from tgi.scheduler.pages import PagePool

A, B, C = pack(INT32, [1, 2]), pack(INT32, [3, 4]), pack(INT32, [5, 6])


@pytest.fixture
def pool() -> PagePool:
    return PagePool(4, 2)


def publish(pool: PagePool, pages: list[int], column: bytes, salt: bytes = b"") -> bytes:
    """As whoever finds nothing does. Returns what the prefix is called."""
    return pool.publish(pool.find(salt, b"", 0)[1], pages, column)


def found(pool: PagePool, column: bytes, salt: bytes = b"") -> list[int]:
    """The pages of a prefix, not held."""
    pages, _ = pool.find(salt, column, len(column) // len(A))
    pool.release(pages)
    return pages


def test_the_same_ids_behind_other_ids_are_another_page(pool: PagePool) -> None:
    pages = pool.take(2)
    publish(pool, pages, A + B)
    assert found(pool, A + B) == pages
    assert found(pool, B) == []
    assert found(pool, B + B) == []
    assert found(pool, A + A) == pages[:1]


def test_the_same_ids_under_another_salt_are_another_page(pool: PagePool) -> None:
    pages = pool.take(2)
    first = publish(pool, pages[:1], A)
    assert found(pool, A, salt=b"tenant") == []
    assert found(pool, A, salt=first) == []
    publish(pool, pages[1:], A, salt=b"tenant")
    assert (found(pool, A), found(pool, A, salt=b"tenant")) == (pages[:1], pages[1:])


def test_a_salt_that_is_a_page_s_name_does_not_lead_behind_it(pool: PagePool) -> None:
    pages = pool.take(2)
    first = publish(pool, pages[:1], A)
    pool.publish(first, pages[1:], B)
    assert found(pool, B, salt=first) == []


def test_what_two_have_computed_goes_on_behind_the_first(pool: PagePool) -> None:
    one, two = pool.take(1), pool.take(2)
    name = publish(pool, one, A)
    assert publish(pool, two[:1], A) == name
    pool.publish(name, two[1:], B)
    assert found(pool, A + B) == [one[0], two[1]]
    pool.check([one, two])
    pool.release(two)
    pool.check([one])
    assert pool.available == 3


def test_a_page_that_is_published_again_keeps_its_name(pool: PagePool) -> None:
    pages = pool.take(1)
    assert publish(pool, pages, A) == publish(pool, pages, A)
    pool.check([pages])


def test_the_longest_unused_is_evicted_first_and_an_end_before_its_beginning(pool: PagePool) -> None:
    old, new = pool.take(2), pool.take(2)
    publish(pool, old, A + B)
    publish(pool, new, C + B)
    pool.release(old)
    pool.release(new)
    assert pool.take(1) == old[1:]
    assert (found(pool, A + B), found(pool, C + B)) == (old[:1], new)
    assert pool.take(1) == old[:1]
    assert (found(pool, A + B), found(pool, C + B)) == ([], new)


def test_what_lies_behind_an_evicted_page_is_not_found_and_not_lost(pool: PagePool) -> None:
    one, two = pool.take(1), pool.take(2)
    name = publish(pool, one, A)
    publish(pool, two[:1], A)
    pool.release(one)
    assert sorted(pool.take(2)) == sorted([one[0], 3])  # its parent is gone while the other request goes on
    pool.publish(name, two[1:], B)
    assert found(pool, A + B) == []
    pool.release(two)
    pool.check([[one[0], 3]])
    # The same ids again: under a new name, behind which the old page is not known.
    again = [one[0]]
    assert publish(pool, again, A) != name
    assert found(pool, A + B) == again
    assert sorted(pool.take(2)) == sorted(two)
    pool.check([[one[0], 3], two])


def test_pages_are_evicted_ahead_up_to_a_number(pool: PagePool) -> None:
    pages = pool.take(4)
    publish(pool, pages, A + B + C + A)
    pool.release(pages)
    pool.keep_free(1)
    assert found(pool, A + B + C + A) == pages[:3]
    pool.keep_free(1)
    assert found(pool, A + B + C + A) == pages[:3]
    pool.keep_free(9)
    assert found(pool, A) == []
    assert pool.available == 4
    pool.check()
