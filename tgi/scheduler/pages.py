"""The pages of the KV cache: who holds them, and which prefixes they can be found by."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from struct import iter_unpack

# 128 bits: that two prefixes collide is less likely than any failure of the machine. A copy of the empty hash is
# cheaper than a new one.
EMPTY = blake2b(digest_size=16)
# Instead of a hash: the page cannot be found.
NOT_KNOWN = b""


def chain(hashes: list[bytes], ids: "array[int]", page_size: int, salt: bytes) -> None:
    """Extends `hashes` by the pages that `ids` fill. The hash of a page covers all ids up to its end, and the salt:
    hash(parent, ids of the page), with hash(salt) as the first parent."""
    first, last = len(hashes), len(ids) // page_size
    if first == last:
        return
    parent = hashes[-1] if hashes else blake2b(salt, digest_size=EMPTY.digest_size).digest()
    column = ids[first * page_size : last * page_size].tobytes()
    for (page,) in iter_unpack(f"{page_size * ids.itemsize}s", column):
        state = EMPTY.copy()
        state.update(parent + page)
        parent = state.digest()
        hashes.append(parent)


class PagePool:
    """Every page is in one of three places: free, held by one or more requests, or idle: held by nobody, but
    full of a prefix that may be asked for again. Idle pages are taken last, the longest unused first.

    All operations cost O(1) per page. The idle ones are a ring, linked in both directions: where many come and go, an
    ordered dict is slower, and now and then it stops to copy itself.
    """

    def __init__(self, pages: int, caching: bool = True) -> None:
        self._caching = caching
        self._holders = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        # Of an idle page, the one that went idle before and after it. The ring begins and ends at the entry behind the
        # last page.
        self._before = [pages] * (pages + 1)
        self._after = [pages] * (pages + 1)
        self._idle = 0
        self._by_hash: dict[bytes, int] = {}
        self._hash_of = [NOT_KNOWN] * pages

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + self._idle

    @property
    def used(self) -> int:
        """Pages that are held."""
        return len(self._holders) - self.available

    def take(self, count: int) -> list[int]:
        """Pages with nothing in them that matters, held once. Raises IndexError if fewer are available."""
        if count > self.available:
            raise IndexError(f"{count} pages wanted, {self.available} available")
        rest = max(0, len(self._free) - count)
        taken = self._free[rest:]
        del self._free[rest:]
        if missing := count - len(taken):
            taken += self._evict(missing)
        holders = self._holders
        for page in taken:
            holders[page] = 1
        return taken

    def _evict(self, count: int) -> list[int]:
        """Forgets the prefixes of the pages that are idle longest."""
        after, by_hash, hash_of = self._after, self._by_hash, self._hash_of
        end = len(hash_of)
        evicted = []
        page = after[end]
        for _ in range(count):
            evicted.append(page)
            del by_hash[hash_of[page]]
            hash_of[page] = NOT_KNOWN
            page = after[page]
        after[end] = page
        self._before[page] = end
        self._idle -= count
        return evicted

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix, each held once more."""
        found = []
        holders, before, after = self._holders, self._before, self._after
        for key in hashes:
            page = self._by_hash.get(key)
            if page is None:
                break
            if not holders[page]:
                older, newer = before[page], after[page]
                after[older] = newer
                before[newer] = older
                self._idle -= 1
            holders[page] += 1
            found.append(page)
        return found

    def publish(self, pages: list[int], hashes: list[bytes]) -> None:
        """Held pages are full of these prefixes. Where another page is known by one already, that one stays."""
        if not self._caching:
            return
        by_hash, hash_of = self._by_hash, self._hash_of
        for page, key in zip(pages, hashes, strict=True):
            if key not in by_hash:
                by_hash[key] = page
                hash_of[page] = key

    def release(self, pages: list[int]) -> None:
        """Each is held once less. The end of a prefix goes idle before its beginning, without which it is no use."""
        holders, hash_of, before, after, free = self._holders, self._hash_of, self._before, self._after, self._free
        end = len(hash_of)
        newest = before[end]
        for page in reversed(pages):
            left = holders[page] = holders[page] - 1
            if left:
                continue
            if hash_of[page]:
                after[newest] = page
                before[page] = newest
                newest = page
                self._idle += 1
            else:
                free.append(page)
        after[newest] = end
        before[end] = newest

    def _ring(self) -> list[int]:
        """The idle pages, the longest unused first."""
        pages = [self._after[-1]]
        while pages[-1] != len(self._hash_of):
            pages.append(self._after[pages[-1]])
        return pages[:-1]

    def check(self, tables: Iterable[list[int]] = ()) -> None:
        """Raises AssertionError unless `tables` are all that is held, and every page is in exactly one place."""
        holders = [0] * len(self._holders)
        for table in tables:
            assert len(set(table)) == len(table), f"a page twice in the table {table}"
            for page in table:
                holders[page] += 1
        assert holders == self._holders, "pages are held by nobody, or not held by somebody"
        free, idle = set(self._free), set(self._ring())
        assert len(free) == len(self._free), "a page is free twice"
        assert len(idle) == self._idle, "idle pages are miscounted"
        assert not free & idle, "a page is free and idle"
        assert free | idle == {page for page, count in enumerate(holders) if count == 0}, "a page is lost"
        known = {page: key for page, key in enumerate(self._hash_of) if key}
        assert {page: key for key, page in self._by_hash.items()} == known, "hashes and pages disagree"
        assert idle <= set(known), "an idle page without a hash"
        assert not free & set(known), "a free page with a hash"
