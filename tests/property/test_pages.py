"""Random operations on the page pool: no page is lost or allocated twice, and found pages have the right content."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.scheduler.invariants import check_pool
from tgi.microkernel.messages.codec import INT32, pack_column
from tgi.scheduler.page_pool import ROOT_HASH, PagePool

pytestmark = pytest.mark.fuzz

PAGES, SIZE = 6, 2
# The last one looks like the hash of a page.
SALTS = st.sampled_from([b"", b"a", bytes(7) + b"\1"])
IDS = st.lists(st.sampled_from([0, 1]), max_size=5 * SIZE).map(lambda ids: ids[: len(ids) // SIZE * SIZE])


class Table:
    """The pages of one request, of which the first `published` are cached under `prefix`."""

    def __init__(self, salt: bytes, ids: list[int], pages: list[int], found: int, prefix: bytes) -> None:
        self.salt = salt
        self.ids = ids
        self.pages = pages
        self.found = found
        self.published = found
        self.prefix = prefix


class Pages(RuleBasedStateMachine):
    """Page tables find, allocate, publish and release pages. `contents` models the cache's memory: for each page, all
    that its keys and values depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, SIZE)
        self.tables: list[Table] = []
        self.contents: dict[int, tuple[bytes, list[int]]] = {}

    def find(self, salt: bytes, ids: list[int]) -> tuple[list[int], bytes]:
        found, prefix = self.pool.find_prefix(ROOT_HASH + salt, pack_column(INT32, ids), len(ids) // SIZE)
        assert len(found) <= len(ids) // SIZE
        for number, page in enumerate(found):
            assert self.contents[page] == (salt, ids[: (number + 1) * SIZE])
        return found, prefix

    @rule(salt=SALTS, ids=IDS)
    def admit(self, salt: bytes, ids: list[int]) -> None:
        found, prefix = self.find(salt, ids)
        missing = len(ids) // SIZE - len(found)
        if missing > self.pool.available:
            with pytest.raises(IndexError, match="pages wanted"):
                self.pool.allocate(missing)
            self.pool.release(found)
            return
        taken = self.pool.allocate(missing)
        assert len(taken) == len(set(taken)) == missing
        assert not any(page in table.pages for table in self.tables for page in taken)
        for page in taken:
            self.contents.pop(page, None)
        self.tables.append(Table(salt, ids, found + taken, len(found), prefix))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), most=st.integers(1, 5))
    def compute_and_publish(self, data: st.DataObject, most: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        first, last = table.published, min(table.published + most, len(table.pages))
        for number in range(first, last):
            self.contents[table.pages[number]] = (table.salt, table.ids[: (number + 1) * SIZE])
        column = pack_column(INT32, table.ids[first * SIZE : last * SIZE])
        table.prefix = self.pool.publish(table.prefix, table.pages[first:last], column)
        table.published = last
        if first == table.found:
            # The pages before these were found and are held, so no other page was cached in between.
            found, prefix = self.find(table.salt, table.ids[: last * SIZE])
            assert len(found) == last
            assert last == 0 or prefix == table.prefix
            self.pool.release(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.pool.release(table.pages)

    @rule(count=st.integers(0, PAGES))
    def keep_free(self, count: int) -> None:
        available = self.pool.available
        self.pool.evict_ahead(count)
        assert self.pool.available == available

    @rule()
    def all_available_pages_can_be_allocated(self) -> None:
        taken = self.pool.allocate(self.pool.available)
        for page in taken:
            self.contents.pop(page, None)
        assert self.pool.available == 0
        self.pool.release(taken)

    @invariant()
    def no_page_is_lost(self) -> None:
        check_pool(self.pool, [table.pages for table in self.tables])
        assert self.pool.used + self.pool.available == PAGES


TestPages = Pages.TestCase


@given(
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    other=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40),
    salts=st.tuples(SALTS, SALTS),
    size=st.sampled_from([1, 3, 16]),
    split=st.integers(0, 40),
    common=st.integers(0, 40),
)
def test_exactly_the_common_pages_are_found(
    ids: list[int], other: list[int], salts: tuple[bytes, bytes], size: int, split: int, common: int
) -> None:
    """Whether the prefix was published at once or in two parts."""
    pool = PagePool(40, size)
    full = len(ids) // size
    split = min(split, full)
    pages = pool.allocate(full)
    prefix = pool.publish(ROOT_HASH + salts[0], pages[:split], pack_column(INT32, ids[: split * size]))
    pool.publish(prefix, pages[split:], pack_column(INT32, ids[split * size : full * size]))
    wanted = ids[:common] + other
    same = 0
    while (same + 1) * size <= min(len(ids), len(wanted)) and salts[0] == salts[1]:
        if ids[: (same + 1) * size] != wanted[: (same + 1) * size]:
            break
        same += 1
    found, _ = pool.find_prefix(ROOT_HASH + salts[1], pack_column(INT32, wanted), len(wanted) // size)
    assert found == pages[:same]
