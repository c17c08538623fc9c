"""The pages of the KV cache: who holds them, and which prefixes they can be found by.

A page that is full and may be found has a name, a number that is never given again. Its key is its parent's name and
its own ids; a first page has the salt for a parent. So a key stands for all ids up to the end of its page, each of them
compared exactly, and whoever looks for a prefix goes from page to page until one is not known.
"""

from array import array
from collections.abc import Iterable

from tgi.kernel.pack import INT32

ID_BYTES = array(INT32).itemsize
# Names and keys are bytes: of tuples, so many would make the garbage collector slow. All names have one length and
# begin with 0, and the ids in a key have one length, so no two keys are equal by chance.
NAME_BYTES = 8
SALT = b"\xff"
# Of a page that cannot be found.
NO_NAME = b""


class PagePool:
    """Every page is in one of three places: free, held by one or more requests, or idle: held by nobody, but
    full of a prefix that may be asked for again. Idle pages are taken last, the longest unused first.

    Where a parent was taken, those behind it cannot be found any more; they are taken in their turn. That is rare,
    since the end of a prefix goes idle before its beginning.

    All operations cost O(1) per page. The idle ones are a ring, linked in both directions: where many come and go, an
    ordered dict is slower, and now and then it stops to copy itself.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self._page_bytes = page_size * ID_BYTES
        self._holders = [1] * pages  # a free page counts as held by whoever will take it
        self.free = list(range(pages - 1, -1, -1))  # those are taken first
        # Of an idle page, the one that went idle before and after it. The ring begins and ends at the entry behind the
        # last page.
        self._before = [pages] * (pages + 1)
        self._after = [pages] * (pages + 1)
        self._idle = 0
        self._by_key: dict[bytes, int] = {}
        self._key_of = [b""] * pages
        self._name_of = [NO_NAME] * pages
        self._names = 0  # given so far

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self.free) + self._idle

    @property
    def used(self) -> int:
        """Pages that are held."""
        return len(self._holders) - self.available

    def take(self, count: int) -> list[int]:
        """Pages with nothing in them that matters, held once. Raises IndexError if fewer are available."""
        free = self.free
        left = len(free) - count
        if left >= 0:
            taken = free[left:]
            del free[left:]
            return taken
        if -left > self._idle:
            raise IndexError(f"{count} pages wanted, {self.available} available")
        self.free = []
        return free + self._evict(-left)

    def keep_free(self, count: int) -> None:
        """Evicts idle pages, as far as there are any, until so many are free: then to take them is cheap."""
        if (missing := min(count - len(self.free), self._idle)) > 0:
            self.free += reversed(self._evict(missing))

    def _evict(self, count: int) -> list[int]:
        """Forgets the prefixes of the pages that are idle longest."""
        after, by_key, key_of, name_of, holders = self._after, self._by_key, self._key_of, self._name_of, self._holders
        end = len(name_of)
        evicted = []
        page = after[end]
        for _ in range(count):
            evicted.append(page)
            del by_key[key_of[page]]
            key_of[page] = b""
            name_of[page] = NO_NAME
            holders[page] = 1
            page = after[page]
        after[end] = page
        self._before[page] = end
        self._idle -= count
        return evicted

    def find(self, salt: bytes, column: bytes, most: int) -> tuple[list[int], bytes]:
        """The pages of the longest known prefix of the ids in `column`, at most so many, each held once more; and what
        that prefix is called: the name of its last page, or the salt."""
        prefix, size, by_key = SALT + salt, self._page_bytes, self._by_key
        if not most or prefix + column[:size] not in by_key:  # as of nearly every new prompt
            return [], prefix
        found: list[int] = []
        name_of, append, get = self._name_of, found.append, by_key.get
        for at in range(0, most * size, size):
            page = get(prefix + column[at : at + size])
            if page is None:
                break
            append(page)
            prefix = name_of[page]
        self._hold(found)
        return found, prefix

    def _hold(self, pages: list[int]) -> None:
        """Each is held once more. What went idle together is a run of the ring, and leaves it as one."""
        holders, before, after, idle = self._holders, self._before, self._after, self._idle
        end = len(self._name_of)
        older, newer = end, after[end]  # on both sides of the run that leaves: at first nothing, between two neighbours
        for page in pages:
            if page == older:
                holders[page] = 1
                idle -= 1
                older = before[page]
            elif count := holders[page]:
                holders[page] = count + 1
            else:
                holders[page] = 1
                idle -= 1
                after[older], before[newer] = newer, older
                older, newer = before[page], after[page]
        after[older], before[newer] = newer, older
        self._idle = idle

    def publish(self, prefix: bytes, pages: list[int], column: bytes) -> bytes:
        """Held pages without names are full of the ids in `column`, which follow `prefix`. Where another page is known
        by the same, that one stays, and the next ones are known as following it. Returns what the prefix is called
        with them."""
        size, by_key, key_of, name_of = self._page_bytes, self._by_key, self._key_of, self._name_of
        at = 0
        names = self._names
        for page in pages:
            key = prefix + column[at : at + size]
            at += size
            prefix = name_of[by_key.setdefault(key, page)]
            if not prefix:
                names += 1
                name_of[page] = prefix = names.to_bytes(NAME_BYTES)
                key_of[page] = key
        self._names = names
        return prefix

    def release(self, pages: list[int]) -> None:
        """Each is held once less. The end of a prefix goes idle before its beginning, without which it is no use."""
        holders, name_of, before, after, free = self._holders, self._name_of, self._before, self._after, self.free
        end = len(name_of)
        newest = before[end]
        idle = self._idle
        for page in reversed(pages):
            if (left := holders[page] - 1) > 0:
                holders[page] = left
            elif name_of[page]:
                holders[page] = 0
                after[newest] = page
                before[page] = newest
                newest = page
                idle += 1
            else:
                free.append(page)
        after[newest] = end
        before[end] = newest
        self._idle = idle

    def _ring(self) -> list[int]:
        """The idle pages, the longest unused first."""
        pages = [self._after[-1]]
        while pages[-1] != len(self._name_of):
            pages.append(self._after[pages[-1]])
        return pages[:-1]

    def check(self, tables: Iterable[list[int]] = ()) -> None:
        """Raises AssertionError unless `tables` are all that is held, and every page is in exactly one place."""
        holders = [0] * len(self._holders)
        free, idle = set(self.free), set(self._ring())
        for table in tables:
            assert len(set(table)) == len(table), f"a page twice in the table {table}"
            for page in table:
                holders[page] += 1
        counted = [0 if page in free else count for page, count in enumerate(self._holders)]
        assert holders == counted, "pages are held by nobody, or not held by somebody"
        assert all(self._holders[page] == 1 for page in free), "a free page is not ready to be taken"
        assert len(free) == len(self.free), "a page is free twice"
        assert len(idle) == self._idle, "idle pages are miscounted"
        assert not free & idle, "a page is free and idle"
        assert free | idle == {page for page, count in enumerate(holders) if count == 0}, "a page is lost"
        known = {page: key for page, key in enumerate(self._key_of) if key}
        assert {page: key for key, page in self._by_key.items()} == known, "keys and pages disagree"
        names = [name for name in self._name_of if name]
        assert len(set(names)) == len(names), "a name twice"
        assert {page for page, name in enumerate(self._name_of) if name} == set(known), "a name too many"
        assert idle <= set(known), "an idle page that has no name"
        assert not free & set(known), "a free page that has a name"
