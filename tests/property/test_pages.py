"""Whatever is done to the pages: none is lost or given away twice, and a prefix is found only where it lies."""

from array import array
from hashlib import blake2b

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tgi.scheduler.pages import PagePool, chain

PAGES = 6


class Pages(RuleBasedStateMachine):
    """Tables take, find, fill and give back pages; `contents` is what a cache's memory would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}

    @rule(count=st.integers(1, PAGES + 1))
    def take(self, count: int) -> None:
        if count > self.pool.available:
            with pytest.raises(IndexError, match="pages wanted"):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(taken) == len(set(taken)) == count
        assert not any(page in table for table in self.tables for page in taken)
        self.contents |= dict.fromkeys(taken, b"")
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def fill_and_publish(self, data: st.DataObject, key: bytes) -> None:
        table = data.draw(st.sampled_from(self.tables))
        page = table[-1]
        if not self.contents[page]:
            self.contents[page] = key
            self.pool.publish([page], [key])

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), unique=True, max_size=3))
    def find(self, keys: list[bytes]) -> None:
        found = self.pool.find(keys)
        assert [self.contents[page] for page in found] == keys[: len(found)]
        if found:
            self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.pool.release(table)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.used + self.pool.available == PAGES


TestPages = Pages.TestCase


@given(
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=40),
    salt=st.binary(max_size=4),
    size=st.sampled_from([1, 3, 16]),
    split=st.integers(0, 40),
)
def test_a_chain_does_not_depend_on_how_it_grew(ids: list[int], salt: bytes, size: int, split: int) -> None:
    whole: list[bytes] = []
    chain(whole, array("i", ids), size, salt)
    grown: list[bytes] = []
    chain(grown, array("i", ids[:split]), size, salt)
    chain(grown, array("i", ids), size, salt)
    assert grown == whole
    parent = blake2b(salt, digest_size=16).digest()
    for page, key in enumerate(whole):
        parent = blake2b(parent + array("i", ids[page * size : (page + 1) * size]).tobytes(), digest_size=16).digest()
        assert key == parent
    assert len(whole) == len(ids) // size
